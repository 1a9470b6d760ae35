"""Plays whole episodes: averages their scores, yields the steps of one, records one with a prediction."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from hephaestus.actors import rollout, videos
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, wrappers
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import observation as observation_lib

# Time steps of one unroll: few enough for memory, and to stop soon after all episodes have ended.
UNROLL_LENGTH = 257
HOST_UNROLL_LENGTH = 65  # for an environment that is stepped on the host, where a step is slow
MOST_STEPS = 32_768  # of an episode, which then counts unfinished; Atari's have at most 27,000
DREAM_LENGTH = 65  # time steps of an episode that the model reconstructs or predicts
CONTEXT = 5  # steps observed before the prediction, as in Hafner et al. (2019); at most a quarter


class Evaluation(NamedTuple):
  """Means over the episodes of an evaluation."""

  episode_return: float  # mean undiscounted return
  episode_length: float  # mean number of steps
  # 0 for the random, 1 for the scripted policy, see `wrappers.normalised_score`; None without
  # reference returns of these two policies
  normalised_score: float | None
  # means of the environment's own metrics by name, see `rollout.Episodes`
  metrics: Mapping[str, float] = {}

  def row(self) -> dict[str, float | None]:
    """All means by name, as metrics of a run."""
    means: dict[str, Any] = self._asdict()
    return means | dict(means.pop('metrics'))


class Remembered(NamedTuple):
  """An entry of the agent's episodic memory that is similar to the current observation."""

  similarity: float  # cosine similarity of the entry's observation and the current one, at most 1
  action: str  # action that was taken there: name of the choice, or numbers
  return_: float  # return that followed


class PlayedStep(NamedTuple):
  """One time step of an episode, with the action that led to it, and the policy at it.

  The last five fields are None at LAST, and for an agent that does not report them.
  """

  step: int  # number of the time step, 0 at FIRST
  observation: Any  # tree of host arrays
  frame: np.ndarray | None  # rendered state, [H, W, 3] uint8; None if the environment renders none
  # previous action: [] int32, [M] int32 for M choices at once, or [A] float32 for a continuous
  # one; None at FIRST
  action: np.ndarray | None
  # probability of the previous action under the policy; None at FIRST, for continuous actions, and
  # for an agent that does not report it
  probability: float | None
  reward: float  # reward of the previous action; 0 at FIRST
  episode_return: float  # undiscounted return so far
  last: bool  # whether the episode ends at this time step
  # the environment's own metrics of the episode so far by name, see `Environment.metrics`
  metrics: Mapping[str, float] = {}
  # observed vitals by name, see `environment.VitalsSpec`; None if the environment has none
  vitals: dict[str, float] | None = None
  # probabilities of the legal choices at this time step by name, the likeliest first
  policy: dict[str, float] | None = None
  # choice -> value and evidence (0 to 1) in episodic memory; see `memory.Recall`
  recalled: dict[str, tuple[float, float]] | None = None
  # most similar entries of episodic memory, the nearest first
  nearest: list[Remembered] | None = None
  # numbers by name that intrinsic rewards show of this time step, see `Agent.explain`
  intrinsic: dict[str, float] | None = None
  # for an agent with a workspace (see `dreamer.workspace`), name of a leaf of the observation, or
  # 'recall' for what episodic memory gives -> whether its gate is open, so that the policy reads
  # it
  gates: dict[str, bool] | None = None


class Recording(NamedTuple):
  """The T time steps of one episode, or of its beginning."""

  # T rendered states, [H, W, 3] uint8 each; None if the environment renders none
  frames: list[np.ndarray] | None
  observation: Any  # [T, ...] tree of host arrays
  action: np.ndarray  # [T - 1, ...], the action chosen at each time step but the last


class Play:
  """Plays whole episodes of one environment, without auto-reset, with one agent.

  Each method takes the agent's parameters; `evaluate` has `num_envs` parallel environments. For `greedy`
  and `should_stop` see `rollout.make_unroll`.
  """

  def __init__(
    self,
    environment: environment_lib.Environment,
    agent: agent_lib.Agent,
    num_envs: int,
    *,
    greedy: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    self._should_stop = should_stop
    self._greedy = greedy
    self._environment = environment
    self._agent = agent
    self._num_envs = num_envs
    # An episode of n steps has n + 1 time steps, the first of which comes from the reset.
    most = HOST_UNROLL_LENGTH if isinstance(environment, host.HostEnvironment) else UNROLL_LENGTH
    length = min(environment.max_steps + 1, most)
    self._num_unrolls = -(-min(environment.max_steps, MOST_STEPS) // (length - 1))
    self._unroll = rollout.make_unroll(
      environment, agent, num_envs=num_envs, sequence_length=length, greedy=greedy,
      should_stop=should_stop,
    )  # fmt: skip

  def close(self) -> None:
    """Closes the instances of an environment that is stepped on the host; a later call makes new ones."""
    self._unroll.close()
    if '_single_unroll' in vars(self):
      self._single_unroll.close()

  @functools.cached_property
  def reference(self) -> wrappers.ReferenceReturns | None:
    """Result of `wrappers.reference_returns`, by which returns are normalised, or None."""
    return wrappers.reference_returns(self._environment)

  def evaluate(
    self,
    params: Any,
    key: jax.Array,
    num_episodes: int,
    should_stop: Callable[[], bool] = lambda: False,
  ) -> Evaluation | None:
    """Mean return, length and score of at least `num_episodes` episodes.

    Each round resets all parallel environments and counts only the first episode of each, so short ones
    are not favoured, and the number is rounded up. One not ended after `MOST_STEPS` counts as it stands,
    with a warning. `should_stop` is called after each unroll.

    Returns:
      The means; None if `should_stop` ended the evaluation.

    Raises:
      ValueError: as `wrappers.reference_returns`, which is computed once, after the episodes.
    """
    returns: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    metrics: dict[str, list[np.ndarray]] = {name: [] for name in self._unroll.metrics}
    zero = np.int32(0)
    for round_key in jax.random.split(key, -(-num_episodes // self._num_envs)):
      init_key, unrolls_key = jax.random.split(round_key)
      state = self._unroll.init(init_key)
      index = np.arange(self._num_envs)
      is_over = np.zeros(self._num_envs, bool)
      for number in range(self._num_unrolls):
        unroll_key = jax.random.fold_in(unrolls_key, number)
        state, _, episodes = self._unroll.unroll(params, unroll_key, state, zero, zero)
        episodes = jax.device_get(episodes)
        if should_stop():
          return None
        ends = episodes.ended.any(axis=0) & ~is_over
        end = episodes.ended.argmax(axis=0)[ends]
        returns.append(episodes.episode_return[end, index[ends]])
        lengths.append(episodes.episode_length[end, index[ends]])
        for name, values in episodes.metrics.items():
          metrics[name].append(values[end, index[ends]])
        is_over |= ends
        if is_over.all():
          break
      if not is_over.all():
        returns.append(np.asarray(state.episode_return)[~is_over])
        lengths.append(np.asarray(state.episode_length)[~is_over])
        for name, values in state.metrics.items():
          metrics[name].append(np.asarray(values)[~is_over])
        logging.log_first_n(
          logging.WARNING,
          '%d of %d episodes had not ended after %s steps and count as they stood; give the '
          'environment a time limit (max_steps)',
          1, (~is_over).sum(), self._num_envs, f'{lengths[-1].max():,}',
        )  # fmt: skip
    mean = lambda parts: float(np.concatenate(parts).mean())
    episode_return, episode_length = mean(returns), mean(lengths)
    own = {name: mean(parts) for name, parts in metrics.items()}
    score = None
    if self.reference is not None:
      compared = {'return': episode_return, 'length': episode_length}
      by = self._environment.scored_by
      scored = compared[by] if by in compared else own[rollout.METRICS + by]
      score = float(wrappers.normalised_score(scored, self.reference))
    return Evaluation(episode_return, episode_length, score, own)

  @functools.cached_property
  def _single_unroll(self) -> rollout.Unroll:
    agent = self._agent
    if agent.explain is not None:
      agent = agent._replace(act=agent.explain)
    return rollout.make_unroll(
      self._environment, agent, num_envs=1, sequence_length=2, greedy=self._greedy,
      should_stop=self._should_stop, is_rendered=True,
    )  # fmt: skip

  @functools.cached_property
  def _choices(self) -> list[str]:
    """Names of all choices; without names, numbers such as '2', or '0: 2' for 2 in the first of several."""
    counts = environment_lib.num_choices(self._environment.action_spec)
    part = lambda index: '' if len(counts) == 1 else f'{index}: '
    numbers = [f'{part(i)}{choice}' for i, count in enumerate(counts) for choice in range(count)]
    return list(self._environment.action_names) or numbers

  def steps(self, params: Any, key: jax.Array) -> Iterator[PlayedStep]:
    """Yields the time steps of one episode, FIRST to LAST; each is played when the caller asks for it."""
    show = wrappers.AutoReset(self._environment).render
    discrete = bool(environment_lib.num_choices(self._environment.action_spec))
    key, init_key = jax.random.split(key)
    state = self._single_unroll.init(init_key)
    action = probability = None
    zero = np.int32(0)
    for step in itertools.count():
      first = lambda tree: jax.tree.map(lambda x: x[0], jax.device_get(tree))
      timestep = first(state.timestep)
      played = PlayedStep(
        step=step,
        observation=timestep.observation,
        frame=show(first(state.env_state)),
        action=action,
        probability=probability,
        reward=float(timestep.reward),
        episode_return=float(state.episode_return[0]),
        last=bool(timestep.last()),
        metrics={
          name.removeprefix(rollout.METRICS): float(value[0])
          for name, value in state.metrics.items()
        },
        vitals=self._vitals(timestep.observation),
      )
      if played.last:
        yield played
        return
      step_key = jax.random.fold_in(key, step)
      state, sequence, _ = self._single_unroll.unroll(params, step_key, state, zero, zero)
      action, extras = jax.tree.map(lambda x: x[0], first((sequence.action, sequence.extras)))
      probability = float(np.exp(extras['log_prob'])) if discrete and 'log_prob' in extras else None
      yield played._replace(
        policy=self._policy(extras),
        recalled=self._recalled(extras),
        nearest=self._nearest(extras),
        intrinsic={name: float(shown) for name, shown in extras.get('intrinsic', {}).items()},
        gates=self._gates(extras),
      )

  def _vitals(self, observation: Any) -> dict[str, float] | None:
    leaves = map(jax.tree.leaves, (self._environment.observation_spec, observation))
    found = {
      vital.name: float(leaf[vital.position])
      for spec, leaf in zip(*leaves, strict=True)
      for vital in getattr(spec, 'vitals', ())
    }
    return found or None

  def _policy(self, extras: dict[str, np.ndarray]) -> dict[str, float] | None:
    if 'log_probs' not in extras:
      return None
    probabilities = zip(self._choices, np.exp(extras['log_probs']).tolist(), strict=True)
    legal = [(name, each) for name, each in probabilities if each > 0]
    return dict(sorted(legal, key=lambda pair: -pair[1]))

  def _gates(self, extras: dict[str, Any]) -> dict[str, bool] | None:
    if 'open' not in extras:
      return None
    return {name: bool(gate) for name, gate in extras['open'].items()}

  def _recalled(self, extras: dict[str, np.ndarray]) -> dict[str, tuple[float, float]] | None:
    if 'recalled_value' not in extras:
      return None
    pairs = zip(
      extras['recalled_value'].tolist(), extras['recalled_evidence'].tolist(), strict=True
    )
    return dict(zip(self._choices, pairs, strict=True))

  def _nearest(self, extras: dict[str, np.ndarray]) -> list[Remembered] | None:
    if 'nearest_weight' not in extras:
      return None

    def name(action: np.ndarray) -> str:
      if not environment_lib.num_choices(self._environment.action_spec):
        return np.array2string(action, precision=2)
      return ' '.join(self._choices[index] for index in np.flatnonzero(action > 0.5))

    entries = zip(
      extras['nearest_similarity'].tolist(),
      extras['nearest_action'],
      extras['nearest_return'].tolist(),
      extras['nearest_weight'] > 0,
      strict=True,
    )
    return [
      Remembered(near, name(action), value) for near, action, value, is_there in entries if is_there
    ]

  def record(self, params: Any, key: jax.Array, most_steps: int | None = None) -> Recording:
    """Plays and records one episode, or its first `most_steps` time steps (`MOST_STEPS` for None)."""
    steps = list(itertools.islice(self.steps(params, key), most_steps or MOST_STEPS))
    actions = [played.action for played in steps[1:] if played.action is not None]
    spec = self._environment.action_spec
    frames = [played.frame for played in steps if played.frame is not None]
    return Recording(
      frames=frames or None,
      observation=jax.tree.map(
        lambda *steps: np.stack(steps), *[played.observation for played in steps]
      ),
      action=np.stack(actions) if actions else np.zeros((0, *spec.shape), spec.dtype),
    )

  @functools.cached_property
  def _foresee(self) -> Callable[..., agent_lib.Foresight] | None:
    return None if self._agent.foresee is None else jax.jit(self._agent.foresee)

  def dream(self, params: Any, key: jax.Array) -> list[np.ndarray] | None:
    """Plays the beginning of an episode, and shows it next to the world model's open-loop prediction.

    `params` are all parameters of the agent, not only those for acting.

    Returns:
      At most `DREAM_LENGTH` frames, [H, W, 3] uint8 each, see `videos.comparison`; None for an agent without
      a world model.
    """
    if self._foresee is None:
      return None
    play_key, dream_key = jax.random.split(key)
    length = min(DREAM_LENGTH, self._environment.max_steps + 1)  # one shape for all episodes
    recording = self.record(self._agent.acting_params(params), play_key, length)
    num_steps = len(recording.action) + 1
    context = min(CONTEXT, -(-num_steps // 4))

    def pad(x: np.ndarray) -> np.ndarray:
      return np.concatenate([x, np.zeros((length - len(x), *x.shape[1:]), x.dtype)])

    observation, action = jax.tree.map(pad, (recording.observation, recording.action))
    foresight = self._foresee(params, dream_key, observation, action, np.int32(context))
    padded = (observation_lib.without_mask(observation), *jax.device_get(foresight))
    cut = jax.tree.map(lambda x: np.asarray(x)[:num_steps], padded)
    observation, predicted, salience, masks = cut
    draw = self._environment.draw
    return videos.comparison(draw, observation, predicted, salience, context, masks)
