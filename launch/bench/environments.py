"""Throughput of environments on this machine, compared with its limit."""

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import wrappers
from hephaestus.learner import bench

MakeEnvironment = Callable[[], environment_lib.Environment]

# Environment steps of a timed call, summed over environments; each takes 16 to 256.
_STEPS_PER_ROUND = 1 << 16
# Most steps, summed over environments, after which their episodes end at different times.
_STEPS_APART = 1 << 20
_COPIED_BYTES = 1 << 27  # more than caches hold


def environments(
  makers: Mapping[str, MakeEnvironment],
  num_envs: Sequence[int],
  seconds: float,
  *,
  of_actors: Mapping[str, str],
) -> list[bench.Figure]:
  """Measures the throughput of environments under vmap, with auto-reset and random legal actions.

  On a CPU the environments are divided over one process per core, each like an actor of a run. On
  an accelerator one process steps all environments.

  The limit is the rate at which observations could be copied: the bandwidth of copying on the
  device, measured here, too, divided by the bytes of one observation.

  Args:
    makers: for the name of each environment, a picklable function that makes it, without auto-reset.
    num_envs: numbers of parallel environments, each of which is measured.
    seconds: length of each measurement, after a warm-up.
    of_actors: environment variables that an actor process has.

  Returns:
    For each environment and number: steps per second over all processes, the number of processes,
    and the longest time to trace and compile. Last, the bandwidth of copying.

  Raises:
    ValueError: a number of environments is below 1 or there is none, `seconds` is not positive, or
      an environment cannot be made.
  """
  if not num_envs or min(num_envs) < 1:
    raise ValueError(f'--num-envs {" ".join(map(str, num_envs))}: each must be at least 1')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')
  made = {name: make() for name, make in makers.items()}
  figures = []
  with contextlib.ExitStack() as stack:
    processes = _processes(stack, max(num_envs), of_actors)
    bandwidth = sum(_together(processes, _copy_rate, [(seconds,)] * len(processes)))
    for name, environment in made.items():
      size = sum(
        int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
        for spec in jax.tree.leaves(environment.observation_spec)
      )
      limit = bandwidth / size
      for n in num_envs:
        count = min(n, len(processes))
        shares = [len(share) for share in np.array_split(np.arange(n), count)]
        arguments = [(makers[name], share, n, seed) for seed, share in enumerate(shares)]
        compile_seconds = max(_together(processes, _prepare, arguments))
        rate = sum(_together(processes, _step_rate, [(seconds,)] * count))
        label = f'env/{name}/{n}_envs'
        figures += [
          bench.Figure(label, rate, 'steps/s', limit),
          bench.Figure(f'{label}/processes', count, ''),
          bench.Figure(f'{label}/compile', compile_seconds, 's'),
        ]
  return [*figures, bench.Figure('copy', bandwidth, 'bytes/s')]


def _processes(
  stack: contextlib.ExitStack, most: int, variables: Mapping[str, str]
) -> list[futures.Executor]:
  """Executors: a process for each core, at most `most`; with an accelerator, one thread of this process."""
  if jax.default_backend() != 'cpu':
    return [stack.enter_context(futures.ThreadPoolExecutor(1))]
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload([__name__])  # so JAX is imported once
  start = functools.partial(
    futures.ProcessPoolExecutor, 1, context, initializer=_set, initargs=(variables,)
  )
  return [stack.enter_context(start()) for _ in range(min(bench.num_cores(), most))]


def _set(variables: Mapping[str, str]) -> None:
  """Sets variables in a new process, before JAX initializes its devices and reads them."""
  os.environ.update(variables)


def _together(
  processes: Sequence[futures.Executor], function: Callable[..., float], arguments: Sequence[Any]
) -> list[float]:
  """Calls a function at the same time in as many processes as there are `arguments`; returns the results."""
  calls = [
    process.submit(function, *each) for process, each in zip(processes, arguments, strict=False)
  ]
  return [call.result() for call in calls]


# This process's compiled function (key, states) -> (key, states), its arguments, and the steps of one call.
_share: tuple[Callable[..., Any], Any, int] | None = None


def _prepare(make: MakeEnvironment, size: int, num_envs: int, seed: int) -> float:
  """Compiles the steps of a share and resets its environments; returns the seconds of compiling.

  The share has `size` of `num_envs` parallel environments, and a seed of its own.
  """
  global _share
  environment = wrappers.AutoReset(make())

  def step(carry, key):
    env_state, timestep = carry
    action_key, step_key = jax.random.split(key)
    action = jax.vmap(wrappers.random_action, (0, None, 0))(
      jax.random.split(action_key, size), environment.action_spec, timestep.observation
    )
    return jax.vmap(environment.step)(jax.random.split(step_key, size), env_state, action), None

  num_steps = min(max(_STEPS_PER_ROUND // num_envs, 16), 256)

  def unroll(key, carry):
    # Carrying the observation makes every step write it.
    key, steps_key = jax.random.split(key)
    return key, jax.lax.scan(step, carry, jax.random.split(steps_key, num_steps))[0]

  # Episodes that start together end together, in a round that the median would leave out.
  num_apart = max(1, min(environment.max_steps, _STEPS_APART // num_envs))

  def draw_apart(key, carry):
    end_key, steps_key = jax.random.split(key)
    end = jax.random.randint(end_key, (size,), 0, num_apart)

    def end_and_step(carry, now):
      env_state, timestep = carry
      env_state = env_state._replace(is_over=env_state.is_over | (end == now[0]))
      return step((env_state, timestep), now[1])

    steps = jnp.arange(num_apart), jax.random.split(steps_key, num_apart)
    return jax.lax.scan(end_and_step, carry, steps)[0]

  key, reset_key, apart_key = jax.random.split(jax.random.key(seed), 3)
  reset, reset_keys = jax.vmap(environment.reset), jax.random.split(reset_key, size)
  # Before anything else traces the environment, since JAX caches traces.
  began = time.perf_counter()
  shapes = jax.eval_shape(reset, reset_keys)
  compiled = jax.jit(unroll, donate_argnums=(0, 1)).lower(key, shapes).compile()
  compile_seconds = time.perf_counter() - began
  carry = jax.jit(draw_apart)(apart_key, jax.jit(reset)(reset_keys))
  _share = compiled, (key, carry), size * num_steps
  return compile_seconds


def _step_rate(seconds: float) -> float:
  """Steps per second of the prepared share, which cannot be measured again."""
  global _share
  assert _share is not None
  (unroll, state, num_steps), _share = _share, None
  return num_steps / bench.median_duration(lambda state: unroll(*state), state, seconds)


def _copy_rate(seconds: float) -> float:
  """Bytes per second that the device copies within its memory."""
  source = jnp.zeros(_COPIED_BYTES // 4, jnp.int32)

  @functools.partial(jax.jit, donate_argnums=1)
  def copy(source, target):
    return jax.lax.dynamic_update_slice(target, source, (0,))

  duration = bench.median_duration(functools.partial(copy, source), source + 1, seconds)
  return _COPIED_BYTES / duration
