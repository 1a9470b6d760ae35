"""How fast environments are on this machine, beside what limits them; `learner.bench` has the update."""

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.actors.environments import environment as environment_lib
from hephaestus.actors.environments import wrappers
from hephaestus.learner import bench

MakeWorld = Callable[[], environment_lib.Environment]

_STEPS_PER_ROUND = 1 << 16  # of all environments together, though each takes 16 to 256
_STEPS_APART = (
  1 << 20
)  # of all environments together, at most, until their episodes end at different times
_COPIED_BYTES = 1 << 27  # more than caches hold


def environments(
  worlds: Mapping[str, MakeWorld],
  num_envs: Sequence[int],
  seconds: float,
  *,
  of_actors: Mapping[str, str],
) -> list[bench.Figure]:
  """Steps environments under vmap, with auto-reset and uniformly random legal actions.

  On a CPU the environments are shared out to as many processes as there are cores, all at work at the same
  time and each like an actor of a run; an accelerator has all environments in one.

  The limit is the rate at which observations could be written if they were only copied: the
  bandwidth of copying on the device, measured here too, over the bytes of one observation.

  Args:
    environments: by their names, what makes one without auto-reset; other processes call it, too.
    num_envs: to step side by side, one measurement for each.
    seconds: of each measurement, after a warm-up.
    of_actors: environment variables of an actor.

  Returns:
    For each environment and number the steps per second of all processes together, how many these are, and
    the most seconds that one takes to trace and compile; and the bandwidth of copying.

  Raises:
    ValueError: no number of environments, one below 1, no time, or an environment that cannot be made.
  """
  if not num_envs or min(num_envs) < 1:
    raise ValueError(f'--environments {" ".join(map(str, num_envs))}: each must be at least 1')
  if not 0 < seconds < float('inf'):
    raise ValueError(f'--seconds {seconds}: must be positive')
  made = {name: make() for name, make in worlds.items()}
  figure = functools.partial(bench.Figure, machine=bench.machine())
  figures = []
  with contextlib.ExitStack() as stack:
    processes = _processes(stack, max(num_envs), of_actors)
    bandwidth = sum(_together(processes, _copy_rate, [(seconds,)] * len(processes)))
    for name, world in made.items():
      size = sum(
        int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
        for spec in jax.tree.leaves(world.observation_spec)
      )
      limit = bandwidth / size
      for n in num_envs:
        count = min(n, len(processes))
        shares = [len(share) for share in np.array_split(np.arange(n), count)]
        arguments = [(worlds[name], share, n, seed) for seed, share in enumerate(shares)]
        compile_seconds = max(_together(processes, _prepare, arguments))
        rate = sum(_together(processes, _step_rate, [(seconds,)] * count))
        what = f'env/{name}/{n}_worlds'
        figures += [
          figure(what, rate, 'steps/s', limit, rate / limit),
          figure(f'{what}/processes', count, '', None, None),
          figure(f'{what}/compile', compile_seconds, 's', None, None),
        ]
  return [*figures, figure('copy', bandwidth, 'bytes/s', None, None)]


def _processes(
  stack: contextlib.ExitStack, most: int, variables: Mapping[str, str]
) -> list[futures.Executor]:
  """One for each core, but no more than are of use; this one alone where there is an accelerator."""
  if jax.default_backend() != 'cpu':
    return [stack.enter_context(futures.ThreadPoolExecutor(1))]
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload([__name__])  # so JAX is imported once
  start = functools.partial(
    futures.ProcessPoolExecutor, 1, context, initializer=_set, initargs=(variables,)
  )
  return [stack.enter_context(start()) for _ in range(min(bench.num_cores(), most))]


def _set(variables: Mapping[str, str]) -> None:
  """In a new process, before JAX looks for devices: it reads there how many cores to make use of."""
  os.environ.update(variables)


def _together(
  processes: Sequence[futures.Executor], function: Callable[..., float], arguments: Sequence[Any]
) -> list[float]:
  """What a function gives in each process, called in all of them at the same time."""
  calls = [
    process.submit(function, *each) for process, each in zip(processes, arguments, strict=False)
  ]
  return [call.result() for call in calls]


class _Share(NamedTuple):
  """Of the environments, what one process has, ready to go on.

  Attributes:
    unroll: compiled, (key, environments) -> (key, environments).
    state: key and environments.
    num_steps: of all its environments in one call.
  """

  unroll: Callable[..., Any]
  state: Any
  num_steps: int


_share: _Share | None = None  # of this process


def _prepare(make: MakeWorld, size: int, num_envs: int, seed: int) -> float:
  """Compiles the steps of a share and starts its environments; the seconds to trace and compile.

  Args:
    make: the environment.
    size: of the share.
    num_envs: of all shares.
    seed: of the share, another for each.
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
    # The observation is carried, so every step must write it.
    key, steps_key = jax.random.split(key)
    return key, jax.lax.scan(step, carry, jax.random.split(steps_key, num_steps))[0]

  # Episodes that began together would also end together, in a round that a median leaves out.
  num_apart = max(1, min(environment.max_steps, _STEPS_APART // num_envs))

  def draw_apart(key, carry):
    when_key, steps_key = jax.random.split(key)
    when = jax.random.randint(when_key, (size,), 0, num_apart)

    def cut_and_step(carry, now):
      env_state, timestep = carry
      env_state = env_state._replace(is_over=env_state.is_over | (when == now[0]))
      return step((env_state, timestep), now[1])

    steps = jnp.arange(num_apart), jax.random.split(steps_key, num_apart)
    return jax.lax.scan(cut_and_step, carry, steps)[0]

  key, reset_key, apart_key = jax.random.split(jax.random.key(seed), 3)
  reset, reset_keys = jax.vmap(environment.reset), jax.random.split(reset_key, size)
  # Before anything else traces the environment, since what is traced once is not traced again.
  began = time.perf_counter()
  shapes = jax.eval_shape(reset, reset_keys)
  compiled = jax.jit(unroll, donate_argnums=(0, 1)).lower(key, shapes).compile()
  compile_seconds = time.perf_counter() - began
  carry = jax.jit(draw_apart)(apart_key, jax.jit(reset)(reset_keys))
  _share = _Share(compiled, (key, carry), size * num_steps)
  return compile_seconds


def _step_rate(seconds: float) -> float:
  """Steps per second of the share that was prepared, which is then used up."""
  global _share
  assert _share is not None
  (unroll, state, num_steps), _share = _share, None
  return num_steps / bench.median_duration(lambda state: unroll(*state), state, seconds)


def _copy_rate(seconds: float) -> float:
  """Bytes per second that the device copies from one place of its memory to another."""
  source = jnp.zeros(_COPIED_BYTES // 4, jnp.int32)

  @functools.partial(jax.jit, donate_argnums=1)
  def copy(source, target):
    return jax.lax.dynamic_update_slice(target, source, (0,))

  duration = bench.median_duration(functools.partial(copy, source), source + 1, seconds)
  return _COPIED_BYTES / duration
