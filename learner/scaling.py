"""Bytes that an update exchanges between devices, and the predicted time of that on more chips.

Nothing is run: the update is compiled for devices that this machine only simulates, and the bytes of
its collectives are read from the compiled program. The time on many chips is predicted from them and
from the rate of a link, never measured.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.learner import bench, dreamer_update
from hephaestus.learner import devices as devices_lib

# A chip of TPU v4, by Jouppi et al. (2023), "TPU v4: An Optically Reconfigurable Supercomputer":
# six links of 50 GB/s each, and 275 TFLOP/s in bfloat16.
_LINK_BYTES = 50e9
_CHIP_FLOPS = 275e12
_SLICES = (8, 16, 32, 64, 128, 256, 512)  # v4-N has N cores, two in a chip; a chip is one device

_COLLECTIVE = re.compile(r' = (?P<shape>[^=]*?) (?P<kind>all-reduce|all-gather)\(')
_ARRAY = re.compile(r'(?P<dtype>[a-z]+)(?P<bits>\d*)\[(?P<dims>[\d,]*)\]')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """An update compiled for several devices.

  Attributes:
    reduced: bytes that each device contributes to all-reduces in one update.
    gathered: bytes that each device contributes to all-gathers; it receives those of all.
    instructions: of the compiled program.
  """

  reduced: int
  gathered: int
  instructions: int


def scaling(work: bench.Work, num_devices: Sequence[int]) -> list[bench.Figure]:
  """Compiles the update for several numbers of devices, each with the whole batch of `work`.

  The prediction sends all bytes around one ring over one link of each chip, after the update without
  overlap, and runs the update at the peak rate of the chip: links and chips as in TPU v4. A real
  update takes longer and loses a smaller share, but for the latency of the ring, which is left out.

  Args:
    work: the share of each device.
    num_devices: to compile for, of those that JAX has here.

  Returns:
    Bytes of the gradients; for each number of devices the bytes each gives to all-reduces and to
    all-gathers, and the instructions of the program; and for slices of TPU v4 the predicted time of
    the exchange, and the predicted share of the rate that remains.

  Raises:
    ValueError: no number of devices, or more than JAX has here.
  """
  here = jax.local_device_count()
  if not num_devices or not 1 <= min(num_devices) <= max(num_devices) <= here:
    raise ValueError(f'--devices {" ".join(map(str, num_devices))}: each must lie in 1 to {here}')
  figure = functools.partial(bench.Figure, limit=None, ratio=None, machine=bench.machine())
  name = f'scaling/{work.name}'
  gradients, flops = _size(work)
  figures = [figure(f'{name}/gradients', gradients, 'bytes')]
  most = Program(reduced=gradients, gathered=0, instructions=0)
  for count in num_devices:
    most = compile_for(work, count)
    what = f'{name}/{count}_devices'
    figures += [
      figure(f'{what}/reduced', most.reduced, 'bytes'),
      figure(f'{what}/gathered', most.gathered, 'bytes'),
      figure(f'{what}/instructions', most.instructions, ''),
    ]
  for cores in _SLICES if max(num_devices) > 1 else ():
    exchange = predicted_exchange(most, cores // 2)
    share = 100 / (1 + exchange * _CHIP_FLOPS / flops)
    figures += [
      figure(f'{name}/v4-{cores}/predicted_exchange', 1e6 * exchange, 'us'),
      figure(f'{name}/v4-{cores}/predicted_efficiency_at_peak', share, '%'),
    ]
  return figures


def predicted_exchange(program: Program, num_devices: int) -> float:
  """Seconds that a ring of chips needs, each by one link in one direction.

  Every chip sends 2 (n - 1) / n of the reduced bytes, and n - 1 times the gathered ones.
  """
  others = num_devices - 1
  return others * (2 * program.reduced / num_devices + program.gathered) / _LINK_BYTES


def compile_for(work: bench.Work, num_devices: int) -> Program:
  """The update of `num_devices` devices, each with the batch of `work`."""
  made, state, sequence = _shapes(work, num_devices)
  each: Any = functools.partial(
    jax.tree.map, lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype)
  )
  mapped = devices_lib.mapped(made.update, jax.local_devices()[:num_devices])
  return read_program(mapped.lower(each(state), each(sequence)).compile().as_text(), num_devices)


def _shapes(work: bench.Work, num_devices: int) -> tuple[dreamer_update.Update, Any, Any]:
  """The update, and shapes of one replica's state and batch."""
  dreamer = dreamer_agent.make_dreamer(work.agent, work.observation_spec, work.action_spec)
  share = work.learner.batch_per_device(1)
  of_all = dataclasses.replace(work.learner, batch_size=share * num_devices)
  made = dreamer_update.make_update(dreamer, of_all)
  state = jax.eval_shape(lambda: made.init(jax.random.key(0)))
  return made, state, jax.eval_shape(lambda: bench.random_batch(dreamer, work))


def _size(work: bench.Work) -> tuple[int, float]:
  """Bytes of the gradients, and operations of the matrix products of the longest update."""
  made, state, sequence = _shapes(work, 1)
  gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
  jaxpr = jax.make_jaxpr(made.update, axis_env=[(devices_lib.DEVICES, 1)])(state, sequence)
  horizon = work.agent.horizon_max
  trips = (horizon, math.ceil(horizon / work.agent.steps_per_chunk))
  always, *by_row = bench.matmul_flops(jaxpr.jaxpr)
  return gradients, always + sum(x * count for x, count in zip(by_row, trips, strict=True))


def read_program(text: str, num_devices: int) -> Program:
  """Counts collectives and instructions in the text of a compiled program."""
  sizes = {'all-reduce': 0, 'all-gather': 0}
  for found in _COLLECTIVE.finditer(text):
    for array in _ARRAY.finditer(found['shape']):
      bits = 8 if array['dtype'] == 'pred' else int(array['bits'])
      sizes[found['kind']] += (
        bits // 8 * math.prod(map(int, filter(None, array['dims'].split(','))))
      )
  return Program(
    reduced=sizes['all-reduce'],
    gathered=sizes['all-gather'] // num_devices,  # what it writes is that of all
    instructions=text.count(' = '),
  )
