"""A steered dream: its steps, branches and what is shown of each. It knows neither HTTP nor a browser."""

import base64
import dataclasses
import io
import math
import pathlib
import threading
from typing import Any

import jax
import numpy as np
from PIL import Image

from hephaestus.actors import videos
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import comparison
from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import dreamer as dreamer_record
from hephaestus.launch.dream import reality as reality_lib
from hephaestus.launch.interface import policy as policy_lib

MOST_STEPS = 20_000  # of a session, whose states and pictures stay in memory
MOST_NUMBERS = 4096  # of a leaf of an observation that are shown as numbers
DIGITS = 4  # significant digits of a number that is shown
DIFFERENT = 48  # least difference of a colour, of 255, that is marked
LINE = 3  # pixels of the line around what differs, on its inner side
# Colours of disagreement, which no environment uses, and of what differs.
HEAT, MARK = (150, 60, 255), (230, 60, 110)
REAL, DREAM = 'real', 'dream'
"""The two sides, either of which the policy may read."""


def check(path: pathlib.Path, config: launch_config.ExperimentConfig) -> None:
  """Raises ValueError if the agent of a run or policy has no world model; names its path."""
  if not isinstance(config.record, dreamer_record.Dreamer):
    raise ValueError(
      f'{path}: its agent, {config.agent_name}, has no world model that dreams; give a run of the dreamer'
    )


class Programs:
  """The compiled steps of a policy and of its environment, shared by all sessions.

  ValueError if the policy has no world model, or lacks its decoder; or its environment cannot be made.
  """

  def __init__(self, policy: policy_lib.Policy):
    config = policy.config
    check(policy.path, config)
    if policy.all_params is None:
      raise ValueError(
        f'{policy.path}: is exported, without the decoder of its model; give the folder of a run'
      )
    self.policy = policy
    self.environment = policy.environment
    self.params = jax.device_put(policy.all_params)
    dreamer: dreamer_agent.Dreamer = config.record.make(
      config.agent, policy.observation_spec, policy.action_spec
    )
    self.has_numbers = dreamer.model.networks.numbers.size > 0
    self._steering = comparison.Steering(dreamer, greedy=config.evaluator.greedy)
    self.initial = self._steering.initial()
    self.observe = jax.jit(self._steering.observe)
    self.imagine = jax.jit(self._steering.imagine)
    self.fold_in = jax.jit(jax.random.fold_in)  # ten times as fast as one that is not compiled
    spec = observation_lib.without_mask(self.environment.observation_spec)
    self._leaves = [
      (jax.tree_util.keystr(path, simple=True, separator='/') or 'observation', leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(spec)
    ]
    self.about = {
      'path': str(policy.path),
      'environment': config.environment['name'],
      'learner_step': policy.learner_step,
      'max_steps': self.environment.max_steps,
      'members': dreamer.config.ensemble_size,
      'greedy': config.evaluator.greedy,
      'has_mask': observation_lib.action_mask(self.environment.observation_spec) is not None,
      'actions': _describe_actions(self.environment),
      'leaves': [
        {'name': name, 'shape': list(leaf.shape)} for name, leaf in self._leaves if _is_listed(leaf)
      ],
      'vitals': _describe_vitals(spec),
    }

  def numbers(self, observation: Any) -> list[float | None]:
    """The numbers of all leaves that `about` lists, one after another."""
    leaves = zip(jax.tree.leaves(observation), self._leaves, strict=True)
    return [x for leaf, (_, spec) in leaves if _is_listed(spec) for x in _rounded(leaf)]


def _is_listed(spec: Any) -> bool:
  is_picture = len(spec.shape) == 3 and min(spec.shape[:2]) >= observation_lib.SMALLEST_IMAGE
  return not is_picture and math.prod(spec.shape) <= MOST_NUMBERS


def _describe_vitals(spec: Any) -> list[dict[str, Any]]:
  """[{'name', 'position': among the numbers, 'set_point', 'most': the full length of a bar}]."""
  vitals = observation_lib.vitals(spec)
  if vitals is None:
    return []
  listed = observation_lib.of_numbers(spec, _is_listed).astype(bool)
  position = np.cumsum(listed) - 1
  highest = observation_lib.of_numbers(spec, lambda leaf: getattr(leaf, 'maximum', np.inf))
  return [
    {
      'name': name,
      'position': int(position[index]),
      'set_point': float(point),
      'most': float(highest[index] if np.isfinite(highest[index]) else 2 * point),
    }
    for name, index, point in zip(vitals.names, vitals.indices, vitals.set_points, strict=True)
    if listed[index]
  ]


def _describe_actions(environment: environment_lib.Environment) -> dict[str, Any]:
  """{'parts': names of the choices of each part} or {'low', 'high': bounds [A]}; and 'single'."""
  spec = environment.action_spec
  counts = environment_lib.num_choices(spec)
  if not counts:
    bounds = (np.broadcast_to(x, spec.shape).tolist() for x in (spec.minimum, spec.maximum))
    return dict(zip(('low', 'high'), bounds, strict=True))
  names = list(environment.action_names) or [str(choice) for n in counts for choice in range(n)]
  ends = np.cumsum(counts).tolist()
  parts = [names[end - n : end] for n, end in zip(counts, ends, strict=True)]
  return {'parts': parts, 'single': spec.shape == ()}


@dataclasses.dataclass(frozen=True)
class Node:
  """One step of a session: a real time step, and the dream at the same step."""

  shown: dict[str, Any]  # JSON values for a page, see `Session.show`
  action: np.ndarray | None  # that led to it, as in the action spec; None at the beginning
  real: reality_lib.Moment | None  # None beyond the end of the real episode
  belief: comparison.Belief | None  # of the agent at the real time step; None likewise
  dream: comparison.Belief  # of the agent in the dream
  # Undiscounted return so far of both sides; the dream takes over the real one where it begins.
  returns: dict[str, float]
  choices: dict[str, np.ndarray]  # the policy's next action on each side, by REAL and DREAM
  # Index of each step after it, by how it was made: action, member, sampled.
  children: dict[tuple[Any, ...], int] = dataclasses.field(default_factory=dict)


class Session:
  """One user's episode and the dreams of it, as a tree of steps. Its methods may be called by any thread.

  All random numbers follow from the seed, the episode's number and the step, so the same actions repeat
  the same dream, and branches differ by what was chosen only. In an environment that is stepped on the
  host, a step after a rewind repeats the episode from its seed.

  A step is addressed by its index in `nodes`, all steps of the present episode.
  """

  def __init__(self, programs: Programs, seed: int = 0):
    self._programs = programs
    self._seed = jax.random.key(seed)
    self._reality = reality_lib.make(programs.environment)
    self._lock = threading.RLock()
    self._episode = -1
    self.nodes: list[Node] = []
    self.begin()

  def close(self) -> None:
    """Closes the environment."""
    with self._lock:
      self._reality.close()

  def begin(self) -> int:
    """Begins the next episode, whose dream begins at its first step; returns that step, 0."""
    with self._lock:
      self._episode += 1
      key = jax.random.fold_in(self._seed, self._episode)
      # Keys of the environment, of the policy on the real side, and of the dream.
      self._keys = list(jax.random.split(key, 3))
      self.nodes, self._branches = [], 0
      real = self._reality.begin(self._keys[0])
      observation = observation_lib.without_mask(real.timestep.observation)
      self._picture = videos.picture(
        self._programs.environment.draw, jax.tree.map(lambda x: np.asarray(x)[None], observation)
      )
      return self._add(None, None, real, dreams=None)

  def act(
    self,
    at: int,
    action: Any = None,
    *,
    reads: str = REAL,
    member: int | None = 0,
    sampled: bool = True,
  ) -> int:
    """Acts at a step, in the environment and in the dream.

    An action that was taken there in the same way leads to the same step again. Any other one, at a step
    that has a child, begins a branch.

    Args:
      at: the step.
      action: JSON value of an action; None lets the policy choose.
      reads: the side that the policy reads; beyond the end of the real episode it reads the dream.
      member: the member of the ensemble that predicts; None for the mean.
      sampled: whether the imagined step is sampled; else it is the most likely one.

    Returns:
      The next step. ValueError if there is no such step, member or side, the action is not valid or not
      legal, or the session is full.
    """
    with self._lock:
      node = self._node(at)
      members = self._programs.about['members']
      if member is not None and not (_is_int(member) and 0 <= member < members):
        raise ValueError(f'member={member!r}: there are members 0 to {members - 1}')
      if reads not in (REAL, DREAM):
        raise ValueError(f'reads={reads!r}: choose {REAL} or {DREAM}')
      if action is None:
        chosen = node.choices.get(reads, node.choices[DREAM])
      else:
        chosen = self._checked(action)
        self._check_legal(node, chosen)
      how = (chosen.tobytes(), member, bool(sampled))
      if how not in node.children:
        step = node.shown['step'] + 1
        real = node.real
        if real is not None and not real.timestep.last():
          real = self._reality.step(self._programs.fold_in(self._keys[0], step), real, chosen)
        else:
          real = None
        dreams = self._programs.imagine(
          self._programs.params, self._programs.fold_in(self._keys[2], step), node.dream, chosen,
          np.int32(-1 if member is None else member), np.bool_(sampled),
        )  # fmt: skip
        node.children[how] = self._add(node, chosen, real, dreams)
      return node.children[how]

  def begin_dream(self, at: int) -> int:
    """Begins the dream again at a step, from what the agent believes after all real observations.

    Returns a step with the same parent, action and real time step; `at` if its dream begins there already.
    ValueError if there is no such step, the real episode has ended before it, or the session is full.
    """
    with self._lock:
      node = self._node(at)
      if node.shown['begins'] == node.shown['step']:
        return at
      if node.real is None or node.action is None:
        raise ValueError(f'at={at}: the real episode has ended before, so no dream can begin here')
      parent, how = self.nodes[node.shown['parent']], (node.action.tobytes(), None, None)
      if how not in parent.children:
        parent.children[how] = self._add(parent, node.action, node.real, dreams=None)
      return parent.children[how]

  def show(self, at: int) -> dict[str, Any]:
    """JSON values of a step: what a page shows.

    'index' and 'parent' are numbers of steps in the session, 'branch' is the parent's, or a new one if the
    parent had a child already, 'step' counts actions since the beginning of the episode, 'begins' is the
    step at which the dream began, and 'action' led to the step. For each of the sides 'real' (None beyond
    the end) and 'dream': 'reward', 'return', 'continues' (probability, on the real side 0 or 1), 'values' by
    head, 'novelty', 'mask', 'policy' (probabilities of all choices; for continuous actions the action),
    'numbers', 'frame', a PNG, and 'slots', another of the frame tinted by the masks of its slots. 'real' has
    'recalled', what the episodic memory read: {'value', 'evidence'} of all choices, or None. 'dream' has
    'disagreement', of its numbers, and 'heat', the same as a PNG over its frame; 'difference' is a PNG
    around what differs, and 'last' whether the real episode ends. PNGs are in base64; each is None where
    there is nothing to draw.
    """
    return self._node(at).shown

  @property
  def repeats(self) -> bool:
    """See `reality.Traced.repeats`."""
    return self._reality.repeats

  def _node(self, at: Any) -> Node:
    if not (_is_int(at) and 0 <= at < len(self.nodes)):
      raise ValueError(f'at={at!r}: there are steps 0 to {len(self.nodes) - 1}')
    return self.nodes[at]

  def _checked(self, action: Any) -> np.ndarray:
    """An action as in the spec, from its JSON value."""
    spec = self._programs.environment.action_spec
    try:
      given = np.asarray(action, np.float64)
      value = given.astype(spec.dtype)
      spec.validate(value)
      if not (np.isfinite(given) & ((spec.dtype.kind == 'f') | (value == given))).all():
        raise ValueError
    except (ValueError, TypeError, OverflowError):
      bounds = environment_lib.describe_bounds(spec)
      count = f'{spec.shape[0]} numbers' if spec.shape else 'a whole number'
      raise ValueError(f'action={action!r}: {count} from {bounds} should be given') from None
    return value

  def _check_legal(self, node: Node, action: np.ndarray) -> None:
    mask = node.shown[REAL]['mask'] if node.real is not None else None
    if mask is None:
      return
    begin = 0
    counts = environment_lib.num_choices(self._programs.environment.action_spec)
    for choice, count in zip(np.ravel(action).tolist(), counts, strict=True):
      legal = mask[begin : begin + count]
      if any(legal) and not legal[choice]:
        raise ValueError(f'action={action.tolist()}: is not legal at this step')
      begin += count

  def _add(
    self,
    parent: Node | None,
    action: np.ndarray | None,
    real: reality_lib.Moment | None,
    dreams: tuple[comparison.Belief, comparison.Prediction] | None,
  ) -> int:
    """Adds a step; without `dreams`, the belief and prediction of an imagined step, a dream begins there."""
    if len(self.nodes) >= MOST_STEPS:
      raise ValueError(f'the session has {MOST_STEPS:,} steps; begin a new episode')
    programs, index, step = self._programs, len(self.nodes), 0
    belief, returns, sides = None, {REAL: 0.0, DREAM: 0.0}, {}
    before: Any = programs.initial
    spec = programs.environment.action_spec
    taken = np.zeros(spec.shape, spec.dtype)
    if parent is not None and action is not None:
      step, returns = parent.shown['step'] + 1, dict(parent.returns)
      before, taken = parent.belief, action
    if real is not None:
      key = programs.fold_in(self._keys[1], step)
      belief, prediction = programs.observe(
        programs.params, key, before, taken, real.timestep.observation, np.bool_(step == 0)
      )
      sides[REAL] = jax.device_get(prediction)
      returns[REAL] += float(real.timestep.reward)
      dream, sides[DREAM] = belief, sides[REAL]
    if dreams is None:
      returns[DREAM] = returns[REAL]
    else:
      dream, sides[DREAM] = dreams[0], jax.device_get(dreams[1])
      returns[DREAM] += float(sides[DREAM].reward)
    if parent is None or parent.children:
      branch, self._branches = self._branches, self._branches + 1
    else:
      branch = parent.shown['branch']
    shown = {
      'index': index,
      'parent': None if parent is None else parent.shown['index'],
      'branch': branch,
      'step': step,
      'begins': step if dreams is None or parent is None else parent.shown['begins'],
      'action': None if action is None else action.tolist(),
      'last': real is not None and bool(real.timestep.last()),
      **self._show(real, sides, returns),
    }
    if step == 0:
      shown[REAL]['reward'] = shown[DREAM]['reward'] = None
    choices = {name: np.asarray(side.action) for name, side in sides.items()}
    self.nodes.append(Node(shown, action, real, belief, dream, returns, choices))
    return index

  def _show(
    self,
    real: reality_lib.Moment | None,
    sides: dict[str, comparison.Prediction],
    returns: dict[str, float],
  ) -> dict[str, Any]:
    """The values of both sides, and the picture of what differs."""
    dream, numbers = sides[DREAM], self._programs.numbers
    frame = None if self._picture is None else self._picture(dream.observation)
    of_dream = {
      **_show_side(dream, dream.reward, dream.discount, returns[DREAM]),
      'mask': dream.mask.tolist(),
      'numbers': numbers(dream.observation),
      'disagreement': numbers(dream.disagreement),
      'frame': _png(frame),
      'slots': _show_slots(frame, dream),
      'heat': _png(self._heat(dream.members)),
    }
    if real is None:
      return {REAL: None, DREAM: of_dream, 'difference': None}
    side, time_step = sides[REAL], real.timestep
    observation = observation_lib.without_mask(time_step.observation)
    mask = observation_lib.action_mask(time_step.observation)
    observed = real.render() if self._picture is None else self._picture(observation)
    of_real = {
      **_show_side(side, time_step.reward, time_step.discount, returns[REAL]),
      'mask': None if mask is None else np.asarray(mask).tolist(),
      'numbers': numbers(observation),
      'frame': _png(observed),
      # The environment's own picture need not be of the image that slots hold.
      'slots': None if frame is None else _show_slots(observed, side),
      'recalled': None
      if side.recalled is None
      else dict(zip(('value', 'evidence'), map(_rounded, side.recalled), strict=True)),
    }
    difference = None if frame is None else _png(_outline(observed, frame))
    return {REAL: of_real, DREAM: of_dream, 'difference': difference}

  def _heat(self, members: Any) -> np.ndarray | None:
    """[H, W, 4] uint8, opaque where the pictures of the members' predictions differ; None without a picture."""
    if self._picture is None:
      return None
    count = self._programs.about['members']
    each = np.stack(
      [self._picture(jax.tree.map(lambda x, k=k: x[k], members)) for k in range(count)]
    )
    if (each == each[0]).all():
      return None
    spread = np.std(each.astype(np.float32), axis=0).max(axis=-1)
    return _tinted(HEAT, np.minimum(2 * spread, 230))  # half of the members apart: opaque


def _show_side(
  side: comparison.Prediction, reward: Any, discount: Any, return_: float
) -> dict[str, Any]:
  """The values that both sides have."""
  scalars = {'reward': reward, 'continues': discount, 'return': return_, 'novelty': side.novelty}
  return {
    **{name: _rounded(value)[0] for name, value in scalars.items()},
    'values': {name: _rounded(value)[0] for name, value in side.values.items()},
    'policy': _rounded(side.action if side.chances is None else side.chances),
  }


def _show_slots(frame: np.ndarray | None, side: comparison.Prediction) -> str | None:
  if frame is None or side.masks is None:
    return None
  return _png(videos.with_masks(frame, np.asarray(side.masks)))


def _tinted(colour: tuple[int, int, int], alpha: np.ndarray) -> np.ndarray:
  """One colour, [H, W, 4] uint8, with an alpha channel [H, W] from 0 to 255."""
  pixels = np.empty((*alpha.shape, 4), np.uint8)
  pixels[..., :3], pixels[..., 3] = colour, alpha
  return pixels


def _outline(one: np.ndarray | None, other: np.ndarray) -> np.ndarray | None:
  """[H, W, 4] uint8, lines around what differs between two frames; None for frames of different sizes."""
  if one is None or one.shape != other.shape:
    return None
  differs = (np.abs(one.astype(np.int16) - other) > DIFFERENT).any(axis=-1)
  # So that the edges of the picture are edges of what differs, too.
  inner = np.pad(differs, LINE)
  for axis in (0, 1):
    inner = np.lib.stride_tricks.sliding_window_view(inner, 2 * LINE + 1, axis).all(axis=-1)
  return _tinted(MARK, np.where(differs & ~inner, 255, 0))


def _png(frame: np.ndarray | None) -> str | None:
  """A frame in base64; None without one, and for one that is transparent."""
  if frame is None or (frame.shape[-1] == 4 and not frame[..., 3].any()):
    return None
  with io.BytesIO() as file:
    Image.fromarray(frame).save(file, 'PNG', compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _rounded(values: Any) -> list[float | None]:
  """Numbers with DIGITS significant digits, since a page shows no more; None for those not finite."""
  return [
    float(f'{value:.{DIGITS}g}') if math.isfinite(value) else None
    for value in np.ravel(values).astype(np.float64).tolist()
  ]


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)
