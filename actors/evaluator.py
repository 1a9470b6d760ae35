"""The Evaluator node: full episodes, scored between random and scripted play."""

import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from acme.utils.loggers import base as loggers
from dm_env import specs

from hephaestus.actors import actor, rollout, videos
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import host, wrappers
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience, networks
from hephaestus.replay import parameters

# Of one unroll: so its rows fit the memory, and nobody plays on once all episodes have ended.
ROWS = 257
HOST_ROWS = 65  # of an environment that is stepped on the host, where a step is dear
VIDEO_STEPS = 513  # of a video that nobody asked for, about a minute
DREAM_ROWS = 65  # of an episode, that are dreamt
CONTEXT = 5  # rows that are seen before it is dreamt, as in Hafner et al. (2019); a quarter of few


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
  """How often, and how many episodes.

  Raises:
    ValueError: a number that cannot work, named with its field.
  """

  period: float = 20.0  # seconds between the starts of two evaluations
  num_episodes: int = 64
  final_episodes: int = 256  # of the finished agent
  greedy: bool = True  # by the mode of the policy, else by chance, as PPO's policy is trained to be
  video_period: float = 300.0  # seconds between two videos, and one is made at the end

  def __post_init__(self):
    for name in ('period', 'num_episodes', 'final_episodes', 'video_period'):
      if getattr(self, name) <= 0:
        raise ValueError(f'evaluator.{name}={getattr(self, name)!r}: must be positive')


class Evaluation(NamedTuple):
  """Means over episodes.

  Attributes:
    episode_return: undiscounted.
    episode_length: steps.
    normalised_score: 0 as random, 1 as scripted play; None in an environment without a script.
  """

  episode_return: float
  episode_length: float
  normalised_score: float | None


class Moment(NamedTuple):
  """One step of an episode, as it is played.

  Attributes:
    step: 0 where it begins.
    observation: tree of host arrays.
    frame: [H, W, 3] uint8; None in an environment that shows nothing.
    action: that led here, [] int32 or [A] float32; None where it begins.
    probability: that the policy gave it; None where it begins, of continuous actions, and of an
      agent that does not say.
    reward: for it.
    episode_return: undiscounted, so far.
    last: whether the episode ends here.
    policy: probabilities of the legal choices from which the next action is made, by name, the
      likeliest first; None where the episode ends, and of an agent that does not say.
  """

  step: int
  observation: Any
  frame: np.ndarray | None
  action: np.ndarray | None
  probability: float | None
  reward: float
  episode_return: float
  last: bool
  policy: dict[str, float] | None = None


class Recording(NamedTuple):
  """An episode as it was played.

  Attributes:
    frames: T of [H, W, 3] uint8; None in an environment that shows nothing.
    observation: [T, ...] host arrays.
    action: [T - 1, ...], that followed on each.
  """

  frames: list[np.ndarray] | None
  observation: Any
  action: np.ndarray


class Play:
  """Plays whole episodes of one environment with one agent.

  Args:
    environment: the environment, without auto-reset.
    agent: whose acting parameters are given later.
    num_envs: episodes played side by side.
    greedy: by the mode of its policy, else by chance.
  """

  def __init__(
    self,
    environment: environment_lib.Environment,
    agent: agent_lib.Agent,
    num_envs: int,
    *,
    greedy: bool = True,
  ):
    self._greedy = greedy
    self._environment = environment
    self._agent = agent
    self._num_worlds = num_envs
    # One row more than steps, and the first step of each environment is the first of its episode.
    most = HOST_ROWS if isinstance(environment, host.HostEnvironment) else ROWS
    num_rows = min(environment.max_steps + 1, most)
    self._num_parts = -(-environment.max_steps // (num_rows - 1))
    self._unroll = rollout.make_unroll(
      environment, agent, num_envs=num_envs, num_rows=num_rows, greedy=greedy
    )

  @functools.cached_property
  def reference(self) -> wrappers.ReferenceReturns | None:
    """Returns of random and of scripted play; None in an environment without a script."""
    return wrappers.reference_returns(self._environment)

  def evaluate(
    self, params: Any, key: jax.Array, num_episodes: int, on_part: Callable[[], Any] = lambda: None
  ) -> Evaluation:
    """Plays at least `num_episodes`, each environment's first episode only: short ones are not favoured.

    Args:
      params: the agent's, for acting.
      key: of the episodes.
      num_episodes: see above.
      on_part: called after every few rows of play.
    """
    returns: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    zero = np.int32(0)
    for round_key in jax.random.split(key, -(-num_episodes // self._num_worlds)):
      init_key, *unroll_keys = jax.random.split(round_key, 1 + self._num_parts)
      state = self._unroll.init(init_key)
      world = np.arange(self._num_worlds)
      is_over = np.zeros(self._num_worlds, bool)
      for unroll_key in unroll_keys:
        state, _, episodes = self._unroll.unroll(params, unroll_key, state, zero, zero)
        episodes = jax.device_get(episodes)
        on_part()
        ends = episodes.ended.any(axis=0) & ~is_over
        end = episodes.ended.argmax(axis=0)[ends]
        returns.append(episodes.episode_return[end, world[ends]])
        lengths.append(episodes.episode_length[end, world[ends]])
        is_over |= ends
        if is_over.all():
          break
    episode_return = float(np.concatenate(returns).mean())
    score = None
    if self.reference is not None:
      score = float(wrappers.normalised_score(episode_return, self.reference))
    return Evaluation(episode_return, float(np.concatenate(lengths).mean()), score)

  @functools.cached_property
  def _one_world(self) -> rollout.Unroll:
    agent = self._agent
    if agent.explain is not None:
      agent = agent._replace(act=agent.explain)
    return rollout.make_unroll(
      self._environment, agent, num_envs=1, num_rows=2, greedy=self._greedy
    )

  @functools.cached_property
  def _choices(self) -> list[str]:
    """What the choices are called; where they have no names, their numbers in each part."""
    counts = environment_lib.num_choices(self._environment.action_spec)
    part = lambda index: '' if len(counts) == 1 else f'{index}: '
    numbers = [f'{part(i)}{choice}' for i, count in enumerate(counts) for choice in range(count)]
    return list(self._environment.action_names) or numbers

  def moments(self, params: Any, key: jax.Array) -> Iterator[Moment]:
    """One episode, played as far as it is asked for."""
    show = wrappers.AutoReset(self._environment).render
    discrete = bool(environment_lib.num_choices(self._environment.action_spec))
    key, init_key = jax.random.split(key)
    state = self._one_world.init(init_key)
    action = probability = None
    zero = np.int32(0)
    for step in itertools.count():
      first = lambda tree: jax.tree.map(lambda x: x[0], jax.device_get(tree))
      timestep = first(state.timestep)
      moment = Moment(
        step=step,
        observation=timestep.observation,
        frame=show(first(state.env_state)),
        action=action,
        probability=probability,
        reward=float(timestep.reward),
        episode_return=float(state.episode_return[0]),
        last=bool(timestep.last()),
      )
      if moment.last:
        yield moment
        return
      step_key = jax.random.fold_in(key, step)
      state, sequence, _ = self._one_world.unroll(params, step_key, state, zero, zero)
      action, extras = jax.tree.map(lambda x: x[0], first((sequence.action, sequence.extras)))
      probability = float(np.exp(extras['log_prob'])) if discrete and 'log_prob' in extras else None
      yield moment._replace(policy=self._policy(extras))

  def _policy(self, extras: dict[str, np.ndarray]) -> dict[str, float] | None:
    if 'log_probs' not in extras:
      return None
    chances = zip(self._choices, np.exp(extras['log_probs']).tolist(), strict=True)
    legal = [(name, chance) for name, chance in chances if chance > 0]
    return dict(sorted(legal, key=lambda pair: -pair[1]))

  def record(self, params: Any, key: jax.Array, num_rows: int | None = None) -> Recording:
    """One episode, or its first `num_rows` rows."""
    moments = list(itertools.islice(self.moments(params, key), num_rows))
    actions = [moment.action for moment in moments[1:] if moment.action is not None]
    spec = self._environment.action_spec
    frames = [moment.frame for moment in moments if moment.frame is not None]
    return Recording(
      frames=frames or None,
      observation=jax.tree.map(lambda *rows: np.stack(rows), *[m.observation for m in moments]),
      action=np.stack(actions) if actions else np.zeros((0, *spec.shape), spec.dtype),
    )

  @functools.cached_property
  def _foresee(self) -> Callable[..., agent_lib.Foresight] | None:
    return None if self._agent.foresee is None else jax.jit(self._agent.foresee)

  def dream(self, params: Any, key: jax.Array) -> list[np.ndarray] | None:
    """Frames of an episode's beginning beside what the agent's model dreams of it.

    Args:
      params: all of the agent's, not those alone by which it acts.
      key: of the episode and of the dream.

    Returns:
      See `videos.beside`; None for an agent without a model.
    """
    if self._foresee is None:
      return None
    play_key, dream_key = jax.random.split(key)
    num_rows = min(DREAM_ROWS, self._environment.max_steps + 1)  # one shape for all episodes
    recording = self.record(self._agent.acting_params(params), play_key, num_rows)
    played = len(recording.action) + 1
    context = min(CONTEXT, -(-played // 4))

    def fit(x: np.ndarray) -> np.ndarray:
      return np.concatenate([x, np.zeros((num_rows - len(x), *x.shape[1:]), x.dtype)])

    observation, action = jax.tree.map(fit, (recording.observation, recording.action))
    foresight = self._foresee(params, dream_key, observation, action, np.int32(context))
    rows = (networks.without_mask(observation), *jax.device_get(foresight))
    observation, expected, salience = jax.tree.map(lambda x: np.asarray(x)[:played], rows)
    return videos.beside(self._environment.draw, observation, expected, salience, context)


class Camera:
  """Videos the agent now and then: an episode, and one beside what its model dreams of it.

  Args:
    play: the environment and the agent.
    videos: folder for VERSION.gif and VERSION-dream.gif.
    period: seconds between two looks at it.
    newest: the learner step and all parameters of the newest checkpoint, which dream; None where
      there is none.
  """

  def __init__(
    self,
    play: Play,
    videos: pathlib.Path,
    period: float,
    newest: Callable[[], tuple[int, Any] | None] = lambda: None,
  ):
    self._play = play
    self._videos = videos
    self._period = period
    self._newest = newest
    self._videoed = time.monotonic()

  def video(self, version: int, params: Any, key: jax.Array, *, final: bool) -> None:
    """Videos one version when it is time, and the `final` one; not where there is no room."""
    if not final and time.monotonic() - self._videoed < self._period:
      return
    self._videoed = time.monotonic()
    play_key, dream_key = jax.random.split(key)
    self._write(f'{version}', self._play.record(params, play_key, VIDEO_STEPS).frames)
    saved = self._newest()
    if saved is not None:
      step, all_params = saved
      self._write(f'{step}-dream', self._play.dream(all_params, dream_key))

  def _write(self, name: str, frames: list[np.ndarray] | None) -> None:
    video = self._videos / f'{name}.gif'
    try:
      if frames:
        videos.write(frames, video)
    except OSError as error:  # such as a full disk
      video.unlink(missing_ok=True)
      logging.warning('There is no video %s: %s', video, error)


def random_agent(action_spec: specs.BoundedArray) -> agent_lib.Agent:
  """Draws uniformly among the legal actions; has neither parameters nor a memory."""

  def act(params, key, policy_state, timestep, *, greedy=False):
    del params, greedy
    keys = jax.random.split(key, timestep.reward.shape[0])
    draw = lambda key, observation: wrappers.random_action(key, action_spec, observation)
    action = jax.vmap(draw)(keys, timestep.observation)
    return policy_state, experience.Decision(action, extras={})

  return agent_lib.Agent(
    init_params=lambda key: (),
    acting_params=lambda params: params,
    initial_policy_state=lambda num_envs: (),
    stored_state=lambda policy_state: (),
    act=act,
  )


def score(
  play: Play,
  snapshot: parameters.Snapshot,
  *,
  final: bool,
  config: EvaluatorConfig,
  logger: loggers.Logger,
  camera: Camera,
  seed: int,
  on_part: Callable[[], Any] = lambda: None,
) -> Evaluation:
  """Scores one snapshot, writes the score down, and records a video when one is due.

  `on_part` is called now and then meanwhile.
  """
  key = jax.random.fold_in(jax.random.key(seed), snapshot.version)
  play_key, video_key = jax.random.split(key)
  params = jax.device_put(snapshot.params)
  num_episodes = config.final_episodes if final else config.num_episodes
  result = play.evaluate(params, play_key, num_episodes, on_part)
  logger.write(
    {
      'environment_step': snapshot.environment_step,
      'learner_step': snapshot.version,
      'final': final,
      **result._asdict(),
    }
  )
  logging.info('Version %d: %s', snapshot.version, result)
  camera.video(snapshot.version, params, video_key, final=final)
  return result


class Evaluator:
  """Scores the newest parameters now and then, and the final ones for good.

  Args:
    play: the environment and the agent.
    source: of acting parameters.
    logger: of this node's numbers.
    should_stop: whether the node was asked to stop.
    config: numbers of the node.
    camera: records the videos.
    seed: of the run.
    launch_id: of this launch; final parameters of an older one do not end this one.
  """

  def __init__(
    self,
    *,
    play: Play,
    source: parameters.Source,
    logger: loggers.Logger,
    should_stop: Callable[[], bool],
    config: EvaluatorConfig,
    camera: Camera,
    seed: int,
    launch_id: int,
  ):
    self._launch_id = launch_id
    self._play = play
    self._source = source
    self._logger = logger
    self._should_stop = should_stop
    self._config = config
    self._camera = camera
    self._seed = seed

  def run(self) -> None:
    """Evaluates until the learner's final parameters are scored, or the node is asked to stop."""
    next_time = 0.0
    snapshot = actor.wait_for_parameters(self._source, self._should_stop)
    while snapshot is not None:
      if self._final(snapshot) or time.monotonic() >= next_time:
        next_time = time.monotonic() + self._config.period
        self._score(snapshot)
        if self._final(snapshot):
          break
      snapshot = self._newer(next_time)
    self._logger.close()

  def _final(self, snapshot: parameters.Snapshot) -> bool:
    return snapshot.ended_launch == self._launch_id

  def _newer(self, not_before: float) -> parameters.Snapshot | None:
    """The newest snapshot once it is time, or at once when it is the last; None to stop."""
    newest = None
    while not self._should_stop():
      newest = self._source.newest(timeout_seconds=1.0) or newest
      if newest is not None and (self._final(newest) or time.monotonic() >= not_before):
        return newest
      time.sleep(0.2)
    return None

  def _score(self, snapshot: parameters.Snapshot) -> None:
    score(
      self._play,
      snapshot,
      final=self._final(snapshot),
      config=self._config,
      logger=self._logger,
      camera=self._camera,
      seed=self._seed,
      on_part=self._should_stop,
    )
