"""How fast the parts of a run are on this machine, each beside what limits it."""

import functools
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from actors import rollout
from actors.environments import environment as environment_lib
from actors.environments import wrappers
from agents.dreamer import agent as dreamer_agent
from launch import config as launch_config
from learner import dreamer_update

_STEPS_PER_ROUND = 1 << 16  # of all worlds together, though each takes 16 to 256
_MIN_ROUNDS = 3
_COPIED_BYTES = 1 << 27  # more than caches hold


class Figure(NamedTuple):
  """What was measured.

  Attributes:
    name: what of, such as 'env/catch/256_worlds'.
    value: the median over rounds.
    unit: of value and limit.
    limit: the most that this machine could do; None where nothing sets one.
    ratio: value / limit, or None.
    machine: that it was measured on.
  """

  name: str
  value: float
  unit: str
  limit: float | None
  ratio: float | None
  machine: str


def environment(
  name: str,
  environment: environment_lib.Environment,
  num_worlds: Sequence[int],
  seconds: float,
) -> list[Figure]:
  """Steps a world under vmap, with auto-reset and uniformly random legal actions.

  The limit is the rate at which observations could be written if they were only copied: the
  bandwidth of copying on the device, measured here too, over the bytes of one observation.

  Args:
    name: of the world.
    environment: without auto-reset.
    num_worlds: to step side by side, one measurement for each.
    seconds: of each measurement, after a warm-up.

  Returns:
    For each number of worlds the steps per second, and the seconds to trace and compile; and the
    bandwidth of copying.

  Raises:
    ValueError: no number of worlds, one below 1, or no time.
  """
  if not num_worlds or min(num_worlds) < 1:
    raise ValueError(f'--worlds {" ".join(map(str, num_worlds))}: each must be at least 1')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')
  figure = functools.partial(Figure, machine=_machine())
  bandwidth = _copy_bandwidth(seconds)
  size = sum(
    int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
    for spec in jax.tree.leaves(environment.observation_spec)
  )
  limit = bandwidth / size
  figures = []
  for n in num_worlds:
    steps_per_second, compile_seconds = _step_rate(environment, n, seconds)
    what = f'env/{name}/{n}_worlds'
    figures += [
      figure(what, steps_per_second, 'steps/s', limit, steps_per_second / limit),
      figure(f'{what}/compile', compile_seconds, 's', None, None),
    ]
  return [*figures, figure('copy', bandwidth, 'bytes/s', None, None)]


def learner(
  config: launch_config.ExperimentConfig, boredom: Sequence[float], seconds: float
) -> list[Figure]:
  """The dreamer's update alone on one device, its batch already there, at several boredoms.

  All are the same program: boredom is data, and decides how many rows are dreamt.

  Args:
    config: of a run of the dreamer, whose world is played once for a batch.
    boredom: each in [0, 1], one measurement for each.
    seconds: of each measurement, after a warm-up.

  Returns:
    The seconds to trace and compile; for each boredom the horizon, the seconds of an update and the
    steps replayed per second.

  Raises:
    ValueError: no boredom, one outside [0, 1], no time, or a run of another agent.
  """
  if not boredom or not all(0 <= each <= 1 for each in boredom):
    raise ValueError(f'--boredom {" ".join(map(str, boredom))}: each must lie in [0, 1]')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')
  agent_config, learner_config = config.dreamer()
  world = config.make_environment()
  dreamer = dreamer_agent.make_dreamer(agent_config, world.observation_spec, world.action_spec)
  made = dreamer_update.make_update(dreamer, learner_config)
  batch_size = learner_config.batch_per_device(1)
  unroll = rollout.make_unroll(
    world, dreamer.agent, num_worlds=batch_size, num_rows=config.actor.sequence_length
  )
  init_key, reset_key, unroll_key = jax.random.split(jax.random.key(config.seed), 3)
  state = jax.jit(made.init)(init_key)
  _, batch, _ = unroll.unroll(
    dreamer.agent.acting_params(state.params), unroll_key, unroll.init(reset_key), 0, 0
  )

  def at(boredom: float) -> dreamer_update.TrainState:
    """Awake, and about to be as bored: without competence, an update adds to boredom."""
    before = jnp.float32(boredom - agent_config.boredom_rise)
    return state._replace(
      step=jnp.int32(agent_config.warm_up_updates),
      intrinsic=state.intrinsic._replace(boredom=before),
    )

  device = jax.local_devices()[:1]
  on_device = functools.partial(jax.device_put_replicated, devices=device)
  update = jax.pmap(made.update, axis_name=dreamer_update.DEVICES, devices=device)
  sequence = on_device(batch)
  began = time.perf_counter()
  compiled = update.lower(on_device(at(0.0)), sequence).compile()
  compile_seconds = time.perf_counter() - began
  figure = functools.partial(Figure, limit=None, ratio=None, machine=_machine())
  name = f'learner/{config.environment["name"]}'
  figures = [figure(f'{name}/compile', compile_seconds, 's')]
  for each in boredom:
    train_state = on_device(at(each))
    metrics = compiled(train_state, sequence)[1]
    again = functools.partial(lambda state, _: compiled(state, sequence), train_state)
    duration = _median_duration(again, None, seconds)
    what = f'{name}/boredom_{each:g}'
    figures += [
      figure(f'{what}/horizon', float(metrics['dream/horizon'][0]), 'rows'),
      figure(what, duration, 's'),
      figure(f'{what}/replayed', batch_size * config.steps_per_sequence / duration, 'steps/s'),
    ]
  return figures


def show(figures: list[Figure]) -> None:
  """Prints a table for people."""
  print(f'on {figures[0].machine}')
  width = max(len(figure.name) for figure in figures)
  for name, value, unit, limit, ratio, _ in figures:
    bound = '' if limit is None else f'  {ratio:.1%} of {limit:,.0f} {unit}'
    print(f'{name:<{width}}  {value:>18,.{3 if unit == "s" else 0}f} {unit:<8}{bound}'.rstrip())


def _step_rate(
  environment: environment_lib.Environment, num_worlds: int, seconds: float
) -> tuple[float, float]:
  """Steps of all worlds per second, and the seconds to trace and compile."""
  environment = wrappers.AutoReset(environment)

  def step(carry, key):
    env_state, timestep = carry
    action_key, step_key = jax.random.split(key)
    action = jax.vmap(wrappers.random_action, (0, None, 0))(
      jax.random.split(action_key, num_worlds), environment.action_spec, timestep.observation
    )
    step_keys = jax.random.split(step_key, num_worlds)
    return jax.vmap(environment.step)(step_keys, env_state, action), None

  num_steps = min(max(_STEPS_PER_ROUND // num_worlds, 16), 256)

  def unroll(key, carry):
    # The observation is carried, so every step must write it.
    key, steps_key = jax.random.split(key)
    return key, jax.lax.scan(step, carry, jax.random.split(steps_key, num_steps))[0]

  key, reset_key = jax.random.split(jax.random.key(0))
  carry = jax.jit(jax.vmap(environment.reset))(jax.random.split(reset_key, num_worlds))
  began = time.perf_counter()
  compiled = jax.jit(unroll, donate_argnums=(0, 1)).lower(key, carry).compile()
  compile_seconds = time.perf_counter() - began
  duration = _median_duration(lambda state: compiled(*state), (key, carry), seconds)
  return num_worlds * num_steps / duration, compile_seconds


def _copy_bandwidth(seconds: float) -> float:
  """Bytes per second that the device copies from one place of its memory to another."""
  source = jnp.zeros(_COPIED_BYTES // 4, jnp.int32)

  @functools.partial(jax.jit, donate_argnums=1)
  def copy(source, target):
    return jax.lax.dynamic_update_slice(target, source, (0,))

  duration = _median_duration(functools.partial(copy, source), source + 1, seconds)
  return _COPIED_BYTES / duration


def _median_duration(run: Callable[[Any], Any], state: Any, seconds: float) -> float:
  """The median time of rounds, in seconds, after one that does not count.

  Args:
    run: one round, from the state that the last one left.
    state: to begin with.
    seconds: to spend on rounds.
  """
  state = jax.block_until_ready(run(state))
  durations: list[float] = []
  while len(durations) < _MIN_ROUNDS or sum(durations) < seconds:
    began = time.perf_counter()
    state = jax.block_until_ready(run(state))
    durations.append(time.perf_counter() - began)
  return statistics.median(durations)


def _machine() -> str:
  """The processor, or the accelerator, and how many cores this process may use."""
  device = jax.devices()[0]
  kind = device.device_kind
  if device.platform == 'cpu':
    kind = platform.machine()
    lines = pathlib.Path('/proc/cpuinfo')
    for line in lines.read_text().splitlines() if lines.exists() else []:
      if line.startswith('model name'):
        kind = line.partition(':')[2].strip()
        break
  has_affinity = hasattr(os, 'sched_getaffinity')
  cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
  return f'{kind}, {cores} CPU cores'
