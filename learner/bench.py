"""Speed of the dreamer's update on this device, compared with a plain matrix product.

The batch is random and already on the device, so this measures only the update; it needs neither
environments nor replay, and so none of their libraries.
"""

import dataclasses
import functools
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from hephaestus.agents import experience
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import dream
from hephaestus.learner import config as learner_config
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import dreamer_update, process

_MIN_ROUNDS = 3
_EPISODE_STEPS = 32  # mean length of an episode in a random batch
_MATMUL_SECONDS = 1e-3  # least duration of a product, so that the overhead of calling it is small
_DIGITS = {
  's': 3, 'us': 1, '%': 1, 'cores': 2, 'updates/s': 2, 'updates': 1, 'replayed/step': 1,
}  # fmt: skip


class Figure(NamedTuple):
  """A measurement.

  Attributes:
    name: such as 'env/catch/256_envs'.
    value: the measured value; for times and rates from the median over rounds.
    unit: unit of value and limit.
    limit: largest value that the machine allows; None where nothing sets one.
  """

  name: str
  value: float
  unit: str
  limit: float | None = None

  @property
  def ratio(self) -> float | None:
    """The value as a share of its limit; None without a limit."""
    return None if self.limit is None else self.value / self.limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """Sizes of an update to measure.

  Attributes:
    name: part of the names of its figures.
    agent: config of the agent, with the sizes of its model and imagination rollouts.
    learner: config of the learner, with the batch size and optimizers.
    observation_spec: tree of `dm_env.specs.Array`.
    action_spec: spec of actions, see `distributions.Actions`.
    sequence_length: T, time steps of a sequence.
  """

  name: str
  agent: dreamer_config.DreamerConfig
  learner: learner_config.LearnerConfig
  observation_spec: Any
  action_spec: Any
  sequence_length: int

  @classmethod
  def of_size(cls, size: str) -> 'Work':
    """The update of a size of `dreamer_config.SIZES`, with specs as of the size's environment.

    Raises:
      ValueError: there is no such size.
    """
    if size not in dreamer_config.SIZES:
      raise ValueError(f'--size {size}: choose one of {", ".join(dreamer_config.SIZES)}')
    batch, sequence_length = {'laptop': (16, 32), '1m': (16, 64), 'full': (256, 50)}[size]
    small = size == 'laptop'
    return cls(
      name=size,
      agent=dreamer_config.SIZES[size],
      learner=learner_config.LearnerConfig(batch_size=batch),
      observation_spec=(
        specs.BoundedArray((50,), np.float32, 0, 1) if small else specs.Array((266,), np.float32)
      ),
      action_spec=specs.DiscreteArray(3 if small else 5),
      sequence_length=sequence_length,
    )

  def changed(
    self,
    *,
    ensemble: int | None = None,
    horizon: int | None = None,
    batch: int | None = None,
    length: int | None = None,
  ) -> 'Work':
    """A copy in which the arguments that are not None replace settings.

    Args:
      ensemble: number of members of the ensemble.
      horizon: number of steps of the longest imagination rollout.
      batch: number of sequences in a batch.
      length: T, time steps of a sequence.

    Raises:
      ValueError: a value is out of range; the message names it.
    """
    agent: dict[str, Any] = {}
    if ensemble is not None:
      agent['ensemble_size'] = ensemble
    if horizon is not None:
      if horizon < 1:
        raise ValueError(f'--horizon {horizon}: must be at least 1')
      agent |= {'horizon_max': horizon, 'horizon_min': min(horizon, self.agent.horizon_min)}
    learner: dict[str, Any] = {} if batch is None else {'batch_size': batch}
    if length is not None and length < 2:
      raise ValueError(f'--length {length}: must be at least 2')
    return dataclasses.replace(
      self,
      agent=dataclasses.replace(self.agent, **agent),
      learner=dataclasses.replace(self.learner, **learner),
      sequence_length=length or self.sequence_length,
    )


class _Program(NamedTuple):
  """An update on one device, not compiled yet.

  Attributes:
    dreamer: the agent.
    init_state: the train state before the first update, not replicated.
    batch: the batch, [B, T, ...], not replicated.
    sequence: the batch replicated, [1, B, T, ...].
    update: (train state, sequence), both replicated -> (next train state, metrics).
    at_boredom: boredom of the next update -> a replicated train state after warm-up.
  """

  dreamer: dreamer_agent.Dreamer
  init_state: dreamer_update.TrainState
  batch: experience.Sequence
  sequence: experience.Sequence
  update: Any
  at_boredom: Callable[[float], dreamer_update.TrainState]


def _prepare(work: Work) -> _Program:
  process.prepare()
  dreamer = dreamer_agent.make_dreamer(work.agent, work.observation_spec, work.action_spec)
  made = dreamer_update.make_update(dreamer, work.learner)
  batch = random_batch(dreamer, work)
  init_state = devices_lib.jit_once(made.init)(jax.random.key(0))
  device = jax.local_devices()[:1]
  on_device = functools.partial(devices_lib.replicate, devices=device)

  def at_boredom(boredom: float) -> dreamer_update.TrainState:
    # By the first update of the averages there is no progress, so boredom rises to the value.
    before = jnp.float32(boredom - dreamer_config.BOREDOM_RISE)
    intrinsic = init_state.intrinsic._replace(boredom=before)
    step = jnp.int32(work.agent.warm_up_updates)
    return on_device(init_state._replace(step=step, intrinsic=intrinsic))

  update = devices_lib.mapped(made.update, device)
  return _Program(dreamer, init_state, batch, on_device(batch), update, at_boredom)


def _run(
  compiled: Any, sequence: Any, intrinsic: Any, state: dreamer_update.TrainState
) -> dreamer_update.TrainState:
  """The state after an update that begins with the statistics `intrinsic`; it donates the state."""
  return compiled(state._replace(intrinsic=jax.tree.map(jnp.copy, intrinsic)), sequence)[0]


def update(
  work: Work, boredom: Sequence[float] = (0.0,), *, seconds: float = 5.0, phases: bool = False
) -> list[Figure]:
  """Measures one update on one device, its batch already there, at several boredoms.

  All are the same program: boredom is data, and sets the imagination horizon.

  Args:
    work: sizes of the update.
    boredom: values in [0, 1], one measurement for each.
    seconds: duration of each measurement, after a warm-up.
    phases: whether world model and imagination are also measured by themselves.

  Returns:
    Figures: seconds to trace and compile, number of parameters, peak bytes, and the rate of a plain
    matrix product; and for each boredom the horizon, the seconds of an update, updates, replayed and
    imagined steps per second, and the rate of the update's matrix products, whose limit is the rate
    of the plain one. `phases` adds the seconds of the world model's gradient, dream, and the rest.

  Raises:
    ValueError: there is no boredom, one lies outside [0, 1], or `seconds` is not positive and finite.
  """
  _check(boredom, seconds)
  program = _prepare(work)
  agent_config, at_boredom, sequence = program.dreamer.config, program.at_boredom, program.sequence
  began = time.perf_counter()
  # The result of `pmap` has `lower` in every version of JAX, and no `trace` from JAX 0.11 on.
  compiled = program.update.lower(at_boredom(0.0), sequence).compile()
  compile_seconds = time.perf_counter() - began
  traced = jax.make_jaxpr(program.update)(at_boredom(0.0), sequence)
  always, *by_loop = matmul_flops(traced.jaxpr)
  limit = _matmul_rate(agent_config.dtype, seconds)
  name = f'learner/{work.name}'
  size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  figures = [
    Figure(f'{name}/compile', compile_seconds, 's'),
    Figure(f'{name}/parameters', size(program.init_state.params), ''),
    Figure(f'{name}/memory', _peak_bytes(compiled), 'bytes'),
    Figure(f'matmul/{agent_config.compute_dtype}', limit, 'FLOP/s'),
  ]
  for each in boredom:
    state, metrics = compiled(at_boredom(each), sequence)
    horizon = float(metrics['dream/horizon'][0])
    run = functools.partial(_run, compiled, sequence, at_boredom(each).intrinsic)
    duration = median_duration(run, state, seconds)
    chunks = math.ceil(horizon / agent_config.steps_per_chunk)
    trips = (horizon, chunks, chunks)  # imagined steps; chunks of their values and of the gradient
    flops = always + sum(each * count for each, count in zip(by_loop, trips, strict=True))
    what = f'{name}/boredom_{each:g}'
    figures += [
      *_speeds(work, what, horizon, duration),
      Figure(f'{what}/matmul', flops / duration, 'FLOP/s', limit),
    ]
    if phases:
      parts = _phases(program, int(horizon), seconds)
      parts['rest'] = duration - sum(parts.values())
      figures += [Figure(f'{what}/phase/{part}', value, 's') for part, value in parts.items()]
  return figures


def _check(boredom: Sequence[float], seconds: float) -> None:
  if not boredom or not all(0 <= each <= 1 for each in boredom):
    raise ValueError(f'--boredom {" ".join(map(str, boredom))}: each must lie in [0, 1]')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')


def _speeds(work: Work, name: str, horizon: float, duration: float) -> list[Figure]:
  """Figures of an update that imagines `horizon` steps and takes `duration` seconds."""
  batch = work.learner.batch_size
  num_starts = batch * min(
    work.agent.starts_per_sequence or work.sequence_length, work.sequence_length
  )
  return [
    Figure(f'{name}/horizon', horizon, 'steps'),
    Figure(name, duration, 's'),
    Figure(f'{name}/updates', 1 / duration, 'updates/s'),
    Figure(f'{name}/replayed', batch * (work.sequence_length - 1) / duration, 'steps/s'),
    Figure(f'{name}/imagined', num_starts * horizon / duration, 'steps/s'),
  ]


def _phases(program: _Program, horizon: int, seconds: float) -> dict[str, float]:
  """Seconds of the world model's gradient and of the imagination, each a program of its own."""
  dreamer, state, batch = program.dreamer, program.init_state, program.batch
  agent_config, model = dreamer.config, dreamer.model
  keys = jax.random.split(jax.random.key(1), (3, len(batch.identity)))
  sequence = experience.time_major(batch)

  @jax.jit
  def world_model(params):
    return jax.value_and_grad(model.loss, has_aux=True)(params, keys[0], sequence)

  @jax.jit
  def start(posterior):
    last = sequence.step_type == dreamer_update.LAST
    novelty = jnp.zeros(last.shape)
    read = dreamer.actor_critic.along(state.params['actor_critic'], posterior, novelty)
    return dream.starts(
      read, posterior.latent, last, novelty, keys[1],
      num_steps=agent_config.starts_per_sequence, even=dreamer.actor_critic.explores,
    )  # fmt: skip

  @jax.jit
  def dreamt(params, start, horizon):
    return dream.rollout(
      model, dreamer.actor_critic, params, dreamer.actor_critic.critics(params['actor_critic']),
      start, horizon,
      explore=True,
    )  # fmt: skip

  params = state.params
  (_, (posterior, *_)), _ = world_model(params['world_model'])
  begin = start(posterior)
  num_steps = jnp.int32(horizon)
  return {
    'world_model': median_duration(lambda _: world_model(params['world_model']), None, seconds),
    'dream': median_duration(lambda _: dreamt(params, begin, num_steps), None, seconds),
  }


def random_batch(dreamer: dreamer_agent.Dreamer, work: Work) -> experience.Sequence:
  """Random sequences [B, T, ...] as an environment might give them, with episodes of about 32 steps."""
  rng = np.random.default_rng(0)
  batch = work.learner.batch_per_device(1)
  lead = (batch, work.sequence_length)

  def draw(spec: Any) -> np.ndarray:
    if not isinstance(spec, specs.BoundedArray):
      return rng.normal(size=(*lead, *spec.shape)).astype(spec.dtype)
    if spec.dtype == bool:
      return np.ones((*lead, *spec.shape), bool)  # as a mask: all is legal
    low, high = (np.clip(bound, -10, 255) for bound in (spec.minimum, spec.maximum))
    whole = np.issubdtype(spec.dtype, np.integer)
    values = rng.uniform(low, high + whole, (*lead, *spec.shape))
    return (np.floor(values) if whole else values).astype(spec.dtype)

  ends = rng.uniform(size=lead) < 1 / _EPISODE_STEPS
  first = np.roll(ends, 1, axis=1)
  last = ends & ~first
  step_type = np.where(last, int(dm_env.StepType.LAST), int(dm_env.StepType.MID))
  step_type = np.where(np.roll(last, 1, axis=1), int(dm_env.StepType.FIRST), step_type)
  reward = np.where(step_type == int(dm_env.StepType.FIRST), 0, rng.normal(size=lead))
  return experience.Sequence(
    observation=jax.tree.map(lambda spec: jnp.asarray(draw(spec)), work.observation_spec),
    action=jnp.asarray(draw(work.action_spec)),
    reward=jnp.asarray(reward, jnp.float32),
    discount=jnp.asarray(~last, jnp.float32),
    step_type=jnp.asarray(step_type, jnp.int32),
    extras={},
    initial_state=dreamer.model.rssm.initial(batch),
    identity=jnp.asarray(rng.integers(0, 2**32, batch, np.uint32)),
    version=jnp.zeros(batch, jnp.int32),
    actor_id=jnp.zeros(batch, jnp.int32),
  )


def matmul_flops(jaxpr: Any) -> list[float]:
  """Counts floating-point operations in the matrix products and convolutions of a program.

  A multiplication and an addition count as two. XLA's own analysis counts the body of a loop once,
  so they are counted in the traced program.

  Args:
    jaxpr: the traced program, a `jax.core.Jaxpr`.

  Returns:
    Operations that are always done, then operations of one iteration of each `while` loop, whose number
    of iterations is data.
  """
  always, loops = 0.0, []
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      operand, output = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
      always += 2.0 * math.prod(output) * math.prod(operand[axis] for axis in contracted)
    elif name == 'conv_general_dilated':
      output_axis = equation.params['dimension_numbers'].rhs_spec[0]
      kernel, output = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
      always += 2.0 * math.prod(output) * math.prod(kernel) / kernel[output_axis]
    inner = [
      matmul_flops(getattr(each, 'jaxpr', each))
      for value in equation.params.values()
      for each in (value if isinstance(value, tuple) else (value,))
      if hasattr(each, 'jaxpr') or hasattr(each, 'eqns')
    ]
    if name == 'while':
      loops += [once for once, *_ in inner if once]
      continue
    turns = equation.params.get('length', 1) if name == 'scan' else 1
    for once, *more in inner:
      always += turns * once
      loops += more
  return [always, *loops]


def _matmul_rate(dtype: Any, seconds: float) -> float:
  """Floating-point operations per second of a large square matrix product in `dtype`."""
  product = jax.jit(jnp.matmul)
  for size in (1024, 2048, 4096, 8192, 16384):
    matrix = jnp.ones((size, size), dtype)
    run = functools.partial(lambda matrix, _: product(matrix, matrix), matrix)
    if median_duration(run, None, _MATMUL_SECONDS) > _MATMUL_SECONDS:
      break
  return 2 * size**3 / median_duration(run, None, seconds)


def _peak_bytes(compiled: Any) -> float:
  """Peak memory of a program: state, batch and temporaries."""
  memory = compiled.memory_analysis()
  return float(
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )


def median_duration(run: Callable[[Any], Any], state: Any, seconds: float) -> float:
  """Median duration of a round in seconds, over at least 3 rounds after a warm-up round.

  Args:
    run: does one round: takes the result of the round before, and returns its own.
    state: argument of the first round.
    seconds: time to spend on rounds.
  """
  state = jax.block_until_ready(run(state))
  durations: list[float] = []
  while len(durations) < _MIN_ROUNDS or sum(durations) < seconds:
    began = time.perf_counter()
    state = jax.block_until_ready(run(state))
    durations.append(time.perf_counter() - began)
  return statistics.median(durations)


def machine() -> str:
  """Describes this machine: processor or accelerator, and number of CPU cores for this process."""
  device = jax.devices()[0]
  kind = device.device_kind
  if device.platform == 'cpu':
    kind = platform.machine()
    lines = pathlib.Path('/proc/cpuinfo')
    for line in lines.read_text().splitlines() if lines.exists() else []:
      if line.startswith('model name'):
        kind = line.partition(':')[2].strip()
        break
  return f'{kind}, {num_cores()} CPU cores'


def num_cores() -> int:
  """Number of CPU cores that this process may use."""
  has_affinity = hasattr(os, 'sched_getaffinity')
  return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def show(figures: list[Figure]) -> None:
  """Prints figures as a table to stdout."""
  print(f'on {machine()}')
  width = max(len(figure.name) for figure in figures)
  for figure in figures:
    name, value, unit, limit = figure
    bound = '' if limit is None else f'  {figure.ratio:.1%} of {limit:,.0f} {unit}'
    digits = _DIGITS.get(unit, 0)
    print(f'{name:<{width}}  {value:>18,.{digits}f} {unit:<9}{bound}'.rstrip())


def to_rows(figures: list[Figure]) -> list[dict[str, Any]]:
  """Converts figures to dicts for JSON: their fields, `ratio`, and `machine`, see `machine`."""
  here = machine()
  return [each._asdict() | {'ratio': each.ratio, 'machine': here} for each in figures]
