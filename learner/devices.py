"""Programs over several devices: the axis that `pmap` names, and what is equal or split along it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hephaestus.agents import kernels

Tree = Any
DEVICES = 'devices'
"""The name of the axis over devices, within and between hosts."""


def mapped(
  function: Callable[..., Any], devices: list[jax.Device], in_axes: int | tuple[int | None, ...] = 0
) -> Any:
  """`pmap` over DEVICES, with a donated first argument, traced for the platform of the devices.

  The devices may be those of a topology that this machine does not have.
  """

  @functools.wraps(function)  # whose name is that of the program, in a profile
  def traced(*arguments: Any) -> Any:
    with kernels.compiled_for(devices[0].platform):
      return function(*arguments)

  return jax.pmap(traced, axis_name=DEVICES, in_axes=in_axes, donate_argnums=0, devices=devices)


def over_devices(tree: Tree, reduce: Callable[..., Tree] = jax.lax.pmean) -> Tree:
  """Means over DEVICES, or sums by `jax.lax.psum`.

  On a single device they are the input: XLA's CPU backend would still run a collective with itself,
  258 times in an update of PPO.
  """
  return tree if jax.lax.axis_size(DEVICES) == 1 else reduce(tree, DEVICES)


def mean_total(x: jax.Array) -> jax.Array:
  """The sum of an array on each device, averaged over DEVICES."""
  return over_devices(jnp.sum(x))


def replicate(tree: Tree, devices: list[jax.Device]) -> Tree:
  """A copy for each device, [D, ...], as `pmap` over them takes it."""
  copies: Tree = jax.pmap(lambda _, tree: tree, in_axes=(0, None), devices=devices)(
    jnp.arange(len(devices)), tree
  )
  return copies


def split(tree: Tree, devices: list[jax.Device]) -> Tree:
  """Equal contiguous slices of the leading axis, [D, B / D, ...], each on its device."""
  count = len(devices)
  tree = jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), tree)
  return put(tree, devices)


def put(tree: Tree, devices: list[jax.Device]) -> Tree:
  """Leaves [D, ...] with each slice on its device."""
  return jax.tree.map(lambda x: jax.device_put(x, _sharding(x.shape, devices)), tree)


def _sharding(shape: tuple[int, ...], devices: list[jax.Device]) -> jax.sharding.Sharding:
  """The sharding of what `pmap` takes and returns: of a type of its own before JAX 0.8."""
  if jax.__version_info__ < (0, 8):
    return jax.sharding.PmapSharding.default(shape, 0, devices)
  mesh = jax.sharding.Mesh(np.asarray(devices), (DEVICES,))
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(DEVICES))


@jax.jit
def first_replica(tree: Tree) -> Tree:
  """A copy of one replica, [...] of [D, ...]; the replicas themselves may be donated."""
  return jax.tree.map(lambda x: jnp.copy(x[0]), tree)


def jit_once(function: Callable[..., Tree]) -> Callable[..., Tree]:
  """`jax.jit` of what runs once: a CPU's compiler would optimise it for longer than it takes."""
  options = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None
  return jax.jit(function, compiler_options=options)


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
  """The red line of static shapes: tracing a second time, and so compiling anew, raises.

  (`chex.assert_max_traces` counts by source line, over all learners of a process.)

  Raises:
    RuntimeError: when it is traced for the second time.
  """
  traces = 0

  @functools.wraps(function)  # whose name is that of the program, in a profile
  def traced(*arguments: Any) -> Any:
    nonlocal traces
    traces += 1
    if traces > 1:
      raise RuntimeError('The update was traced twice: a batch or the state changed its shape.')
    return function(*arguments)

  return traced
