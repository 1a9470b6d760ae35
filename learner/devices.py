"""Programs over several devices: `pmap` with a named axis, and trees replicated or split along it."""

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
  """Maps a function of trees over devices: `jax.pmap` with the axis name DEVICES and a donated first argument.

  The function is traced for the platform of the devices, which may be devices of a topology that
  this machine does not have. The result takes trees [D, ...], by `in_axes` as in `jax.pmap`.
  """

  @functools.wraps(function)  # whose name the program has in a profile
  def traced(*arguments: Any) -> Any:
    with kernels.compiled_for(devices[0].platform):
      return function(*arguments)

  return jax.pmap(traced, axis_name=DEVICES, in_axes=in_axes, donate_argnums=0, devices=devices)


def over_devices(tree: Tree, reduce: Callable[..., Tree] = jax.lax.pmean) -> Tree:
  """Reduces each leaf of this device over the axis DEVICES, inside of `mapped`; by default to the mean.

  A single device returns the input: XLA's CPU backend would still run a collective with itself, 258
  times in an update of PPO. `reduce` may be another collective with the arguments of `jax.lax.pmean`.
  """
  return tree if jax.lax.axis_size(DEVICES) == 1 else reduce(tree, DEVICES)


def mean_total(x: jax.Array) -> jax.Array:
  """The sum of an array on each device, averaged over DEVICES; []."""
  return over_devices(jnp.sum(x))


def replicate(tree: Tree, devices: list[jax.Device]) -> Tree:
  """Copies a tree to each device: leaves [D, ...], as `pmap` over the devices takes them."""
  copies: Tree = jax.pmap(lambda _, tree: tree, in_axes=(0, None), devices=devices)(
    jnp.arange(len(devices)), tree
  )
  return copies


def split(tree: Tree, devices: list[jax.Device]) -> Tree:
  """Splits leaves [B, ...] into equal contiguous slices, [D, B / D, ...], each on its device."""
  count = len(devices)
  tree = jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), tree)
  return put(tree, devices)


def put(tree: Tree, devices: list[jax.Device]) -> Tree:
  """Puts leaves [D, ...] on D devices, one slice on each."""
  return jax.tree.map(lambda x: jax.device_put(x, _sharding(x.shape, devices)), tree)


def _sharding(shape: tuple[int, ...], devices: list[jax.Device]) -> jax.sharding.Sharding:
  """The sharding of the arrays that `pmap` takes and returns, which had its own type before JAX 0.8."""
  if jax.__version_info__ < (0, 8):
    return jax.sharding.PmapSharding.default(shape, 0, devices)
  mesh = jax.sharding.Mesh(np.asarray(devices), (DEVICES,))
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(DEVICES))


@jax.jit
def first_replica(tree: Tree) -> Tree:
  """Copies the first of D replicas, leaves [D, ...] to [...]; `tree` may be donated afterwards."""
  return jax.tree.map(lambda x: jnp.copy(x[0]), tree)


def jit_once(function: Callable[..., Tree]) -> Callable[..., Tree]:
  """`jax.jit` for a function that runs once; on a CPU without optimising, which would outlast the run."""
  options = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None
  return jax.jit(function, compiler_options=options)


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a function that must be compiled once: tracing it a second time is a RuntimeError.

  So shapes must be static. (`chex.assert_max_traces` counts by source line, over all learners of a process.)
  """
  traces = 0

  @functools.wraps(function)  # whose name the program has in a profile
  def traced(*arguments: Any) -> Any:
    nonlocal traces
    traces += 1
    if traces > 1:
      raise RuntimeError('The update was traced twice: a batch or the state changed its shape.')
    return function(*arguments)

  return traced
