"""How fast worlds are on this machine, beside what limits them; `learner.bench` has the update."""

import functools
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from actors.environments import environment as environment_lib
from actors.environments import wrappers
from learner import bench

_STEPS_PER_ROUND = 1 << 16  # of all worlds together, though each takes 16 to 256
_STEPS_APART = (
  1 << 20
)  # of all worlds together, at most, until their episodes end at different times
_COPIED_BYTES = 1 << 27  # more than caches hold


def environments(
  worlds: Mapping[str, environment_lib.Environment], num_worlds: Sequence[int], seconds: float
) -> list[bench.Figure]:
  """Steps worlds under vmap, with auto-reset and uniformly random legal actions.

  The limit is the rate at which observations could be written if they were only copied: the
  bandwidth of copying on the device, measured here too, over the bytes of one observation.

  Args:
    worlds: by their names, each without auto-reset.
    num_worlds: to step side by side, one measurement for each.
    seconds: of each measurement, after a warm-up.

  Returns:
    For each world and number the steps per second, and the seconds to trace and compile; and the
    bandwidth of copying.

  Raises:
    ValueError: no number of worlds, one below 1, or no time.
  """
  if not num_worlds or min(num_worlds) < 1:
    raise ValueError(f'--worlds {" ".join(map(str, num_worlds))}: each must be at least 1')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')
  figure = functools.partial(bench.Figure, machine=bench.machine())
  bandwidth = _copy_bandwidth(seconds)
  figures = []
  for name, world in worlds.items():
    size = sum(
      int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
      for spec in jax.tree.leaves(world.observation_spec)
    )
    limit = bandwidth / size
    for n in num_worlds:
      steps_per_second, compile_seconds = _step_rate(world, n, seconds)
      what = f'env/{name}/{n}_worlds'
      figures += [
        figure(what, steps_per_second, 'steps/s', limit, steps_per_second / limit),
        figure(f'{what}/compile', compile_seconds, 's', None, None),
      ]
  return [*figures, figure('copy', bandwidth, 'bytes/s', None, None)]


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

  # Episodes that began together would also end together, in a round that a median leaves out.
  num_apart = max(1, min(environment.max_steps, _STEPS_APART // num_worlds))

  def draw_apart(key, carry):
    when_key, steps_key = jax.random.split(key)
    when = jax.random.randint(when_key, (num_worlds,), 0, num_apart)

    def cut_and_step(carry, now):
      env_state, timestep = carry
      env_state = env_state._replace(is_over=env_state.is_over | (when == now[0]))
      return step((env_state, timestep), now[1])

    steps = jnp.arange(num_apart), jax.random.split(steps_key, num_apart)
    return jax.lax.scan(cut_and_step, carry, steps)[0]

  key, reset_key, apart_key = jax.random.split(jax.random.key(0), 3)
  carry = jax.jit(jax.vmap(environment.reset))(jax.random.split(reset_key, num_worlds))
  carry = jax.jit(draw_apart)(apart_key, carry)
  began = time.perf_counter()
  compiled = jax.jit(unroll, donate_argnums=(0, 1)).lower(key, carry).compile()
  compile_seconds = time.perf_counter() - began
  duration = bench.median_duration(lambda state: compiled(*state), (key, carry), seconds)
  return num_worlds * num_steps / duration, compile_seconds


def _copy_bandwidth(seconds: float) -> float:
  """Bytes per second that the device copies from one place of its memory to another."""
  source = jnp.zeros(_COPIED_BYTES // 4, jnp.int32)

  @functools.partial(jax.jit, donate_argnums=1)
  def copy(source, target):
    return jax.lax.dynamic_update_slice(target, source, (0,))

  duration = bench.median_duration(functools.partial(copy, source), source + 1, seconds)
  return _COPIED_BYTES / duration
