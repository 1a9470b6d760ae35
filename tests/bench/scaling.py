"""Counts collectives and dtypes of an update in the text of its compiled program.

    python tests/bench/scaling.py --size full --devices 2

Nothing is run: the update is compiled for devices that this machine only simulates.
`tpu.py` compiles for TPUs, and reads those programs here, too.
"""

import argparse
import collections
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from hephaestus.launch import config as launch_config
from hephaestus.launch.bench import speed
from hephaestus.launch.bench.speed import Figure
from hephaestus.launch.run import fused
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import devices as devices_lib

# Operands below this size, such as the operands of a head of few outputs, do not make a product large.
_LARGE = 2**16
_ARRAY = re.compile(r'(?P<dtype>[a-z]+)(?P<bits>\d*)\[(?P<dims>[\d,]*)\]')
_DEFINITION = re.compile(r'(?P<name>[\w.-]+)(?: =|:) (?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]')
_SHAPE = r' = (?P<shape>\((?:[^()]|\([^()]*\))*\)|\S+) '
_COLLECTIVE = re.compile(
  _SHAPE + r'(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)'
  r'(?P<start>-start)?\('
)
_PRODUCT = re.compile(_SHAPE + r'(?:convolution|dot)\(%?(?P<left>[\w.-]+), %?(?P<right>[\w.-]+)\)')
_LOGARITHM = re.compile(
  r' = (?P<dtype>[a-z]+\d*)\[\S* (?:exponential|exponential-minus-one|log|log-plus-one)\('
)
_OUTPUTS = re.compile(r'entry_computation_layout=.*?->(?P<shapes>.*)')


class Compiled(NamedTuple):
  """Figures of an update compiled for several devices.

  Attributes:
    reduced: bytes that each device contributes to all-reduces in one update.
    gathered: bytes that each device contributes to all-gathers; it receives the bytes of all devices.
    other_collectives: number of collectives of other kinds.
    instructions: number of instructions of the compiled program.
    products: number of large matrix products and convolutions by the dtypes of their operands, such
      as 'bf16' or 'bf16*f32'.
    logarithms: number of logarithms and exponentials, of which losses and distributions are made, by
      dtype.
  """

  reduced: int
  gathered: int
  other_collectives: int
  instructions: int
  products: dict[str, int]
  logarithms: dict[str, int]


def scaling(config: launch_config.ExperimentConfig, num_devices: Sequence[int]) -> list[Figure]:
  """Compiles an update for several numbers of devices, each with the whole batch of `config`.

  Args:
    config: config of a run of the dreamer.
    num_devices: numbers of devices to compile for, each at most the number that JAX has here.

  Returns:
    Figures: bytes of the gradients; and for each number of devices the bytes that a device gives to
    all-reduces and to all-gathers, and the number of instructions of the program.

  Raises:
    ValueError: a number of devices is below 1 or more than JAX has here.
  """
  here = jax.local_device_count()
  if not 1 <= min(num_devices) <= max(num_devices) <= here:
    raise ValueError(f'--devices {" ".join(map(str, num_devices))}: each must lie in 1 to {here}')
  made = config.record.make_update(config, parts_lib.make_parts(config).trained, num_devices=1)
  params = jax.eval_shape(made.init, jax.eval_shape(lambda: jax.random.key(0))).params
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
  figures = [Figure('scaling/gradients', size, 'bytes')]
  for count in num_devices:
    program = compile_for(config, count)
    what = f'scaling/{count}_devices'
    figures += [
      Figure(f'{what}/reduced', program.reduced, 'bytes'),
      Figure(f'{what}/gathered', program.gathered, 'bytes'),
      Figure(f'{what}/instructions', program.instructions, ''),
    ]
  return figures


def compile_for(config: launch_config.ExperimentConfig, num_devices: int) -> Compiled:
  """Figures of the update, compiled for `num_devices` devices, each with the batch of `config`."""
  of_all = launch_config.override(config, [f'learner.batch_size={config.batch_size * num_devices}'])
  lowered = lower(of_all, jax.local_devices()[:num_devices])
  return read_program(lowered.compile().as_text(), num_devices)


def lower(config: launch_config.ExperimentConfig, devices: list[jax.Device]) -> Any:
  """Lowers the update of a run from the shapes of its arguments.

  Raises:
    ValueError: the batch does not divide over the devices, or a fused run has several hosts.
  """
  here = [device for device in devices if device.process_index == 0]
  if config.fused:
    if len(here) < len(devices):
      raise ValueError(
        f'a fused run is one process on one host, whose share of the slice is {len(here)} of '
        f'{len(devices)} devices; give --set learner.fused=false, or another of --programs'
      )
    return fused.build(config, parts_lib.make_parts(config), devices).lower()
  parts, count = parts_lib.make_parts(config), len(devices)
  update = config.record.make_update(config, parts.trained, num_devices=count)
  state = jax.eval_shape(update.init, jax.eval_shape(lambda: jax.random.key(0)))
  stack = lambda tree, *lead: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), tree
  )
  # `pmap` takes the arrays of one host.
  batch = stack(parts.sequence_schema, len(here), config.batch_size // count)
  return devices_lib.mapped(update.update, devices).lower(stack(state, len(here)), batch)


def read_program(text: str, num_devices: int) -> Compiled:
  """Counts in the optimised HLO text of a program that was compiled for `num_devices` devices."""
  reduced = gathered = others = 0
  for found in _COLLECTIVE.finditer(text):
    num_bytes = sum(map(_num_bytes, _ARRAY.finditer(found['shape'])))
    if found['kind'] == 'all-reduce':
      reduced += num_bytes
    elif found['kind'] == 'all-gather':
      # The result has the parts of all devices; an asynchronous one is written after its operand.
      gathered += num_bytes // (num_devices + bool(found['start']))
    else:
      others += 1
  return Compiled(
    reduced=reduced,
    gathered=gathered,
    other_collectives=others,
    instructions=text.count(' = '),
    products=_products(text),
    logarithms=dict(collections.Counter(found['dtype'] for found in _LOGARITHM.finditer(text))),
  )


def _num_bytes(array: re.Match[str]) -> int:
  bits = 8 if array['dtype'] == 'pred' else int(array['bits'])
  return bits // 8 * _size(array['dims'])


def _size(dims: str) -> int:
  return math.prod(map(int, filter(None, dims.split(','))))


def _products(text: str) -> dict[str, int]:
  """Number of products of two large arrays, by the dtypes of both."""
  arrays = {
    found['name']: (found['dtype'], _size(found['dims'])) for found in _DEFINITION.finditer(text)
  }
  counts: collections.Counter[str] = collections.Counter()
  for found in _PRODUCT.finditer(text):
    (left, left_size), (right, right_size) = arrays[found['left']], arrays[found['right']]
    if min(left_size, right_size) >= _LARGE:
      counts['*'.join(sorted({left, right}))] += 1
  return dict(counts)


def output_dtypes(text: str) -> list[str]:
  """Dtypes of the outputs, such as 'f32', of a compiled program's HLO text, in their tree's order."""
  found = _OUTPUTS.search(text)
  assert found is not None
  # One array, or a tuple in parentheses; further attributes of the program follow.
  shapes = re.match(r'\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\S+', found['shapes'])
  assert shapes is not None
  return [array['dtype'] + array['bits'] for array in _ARRAY.finditer(shapes[0])]


def show(program: str, measure: Callable[[], list[Figure]], *, as_json: bool) -> int:
  """Measures and prints figures; returns 0, or 2 after naming bad input in one line."""
  try:
    figures = measure()
  except ValueError as error:
    print(f'{program}: {error}', file=sys.stderr)
    return 2
  speed.show(figures, as_json=as_json)
  return 0


def main(arguments: Sequence[str]) -> int:
  """Runs this script; returns its exit code, see `show`."""
  parser = argparse.ArgumentParser('scaling', description=__doc__, allow_abbrev=False)
  parser.add_argument('--size', default='laptop', help='laptop, 1m or full (default: laptop)')
  parser.add_argument(
    '--devices', type=int, nargs='+', default=[1, 2, 4, 8], help='simulated (default: 1 2 4 8)'
  )
  parser.add_argument('--json', action='store_true')
  given = parser.parse_args(arguments)
  # JAX reads it when it initializes its devices.
  simulated = f'--xla_force_host_platform_device_count={max(given.devices)}'
  os.environ.setdefault('XLA_FLAGS', simulated)
  jax.config.update('jax_platforms', 'cpu')
  measure = lambda: scaling(speed.of_size(given.size), given.devices)
  return show('scaling', measure, as_json=given.json)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
