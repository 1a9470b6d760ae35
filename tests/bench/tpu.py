"""Compiles updates for TPUs that this machine does not have; runs nothing.

    python tests/bench/tpu.py v4:2x2x1

libtpu, of the extra `tpu`, compiles for a topology on any Linux machine with an x86-64 CPU.
"""

import argparse
import collections
import contextlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import scaling
from jax.experimental import topologies

from hephaestus.actors.environments import packages
from hephaestus.launch import config as launch_config
from hephaestus.launch import records
from hephaestus.launch.bench.speed import Figure

PRESET = 'tpu-v4-8'
FUSED = 'dreamer-fused'
PROGRAMS = (records.DREAMER, FUSED, 'ppo')
"""The dreamer's update; the dreamer's fused run, with environments and replay; and PPO's run."""

# GiB of one JAX device, which is one chip, by Google's pages on each version of Cloud TPU. JAX joins
# the two cores of a v4 chip.
_MEMORY = {'v4': 32, 'v5e': 16, 'v5p': 95, 'v6e': 32}
_OPTIONS = {'v4': {'chip_config_name': 'megacore'}}
_TOPOLOGY = re.compile(r'(?P<version>v4|v5p):\d+x\d+x\d+|(?P<flat>v5e|v6e):\d+x\d+')
_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',  # for all that runs on this machine
  'TPU_SKIP_MDS_QUERY': '1',  # no TPU VM is asked what it is
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # another process may compile, too
}


def tpu(
  names: Sequence[str], programs: Sequence[str], environment: str, overrides: list[str]
) -> list[Figure]:
  """Compiles programs for TPU topologies, and reads their figures from the compiled code.

  Args:
    names: topologies, such as 'v4:2x2x1' or 'v5e:4x4'.
    programs: programs to compile, of PROGRAMS, with PRESET, whose batch is divided over all devices.
    environment: name of the environment.
    overrides: assignments to each config, see `launch_config.override`.

  Returns:
    For each topology and program: the devices; seconds to lower and to compile; bytes of arguments,
    outputs, temporaries, code and all together on one device, and its memory; bytes that a device
    gives to all-reduces and all-gathers, and the number of other collectives; the number of large
    products by the dtypes of their operands, of logarithms and exponentials by dtype, and of losses
    among the outputs by dtype.

  Raises:
    ValueError: libtpu is missing, a topology does not exist, an argument is invalid, or no program could
      be compiled; if some could, the others are named on stderr.
  """
  for name in names:
    if not _TOPOLOGY.fullmatch(name):
      raise ValueError(
        f'{name}: give a version and its chips along each axis, such as v4:2x2x1, v5p:2x2x1, '
        'v5e:2x2 or v6e:4x4'
      )
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError(f'{names[0]}: needs libtpu, of the extra `tpu`; {packages.install("tpu")}')
  configs = {name: _config(name, environment, overrides) for name in programs}
  # Before libtpu is loaded, which reads them.
  os.environ.update(_ENVIRONMENT)
  jax.config.update('jax_platforms', 'cpu')
  figures, refusals = [], []
  for name in names:
    version = name.partition(':')[0]
    options: Any = _OPTIONS.get(version, {})
    with _named(name):
      devices = list(topologies.get_topology_desc(name, platform='tpu', **options).devices)
    for program, config in configs.items():
      try:
        figures += _figures(f'tpu/{name}/{program}', config, devices, _MEMORY[version] * 2**30)
      except ValueError as error:
        refusals.append(str(error))
  if refusals and not figures:
    raise ValueError('; '.join(refusals))
  for refusal in refusals:
    print(f'left out: {refusal}', file=sys.stderr)
  return figures


def _config(program: str, environment: str, overrides: list[str]) -> launch_config.ExperimentConfig:
  agent = records.DREAMER if program == FUSED else program
  config = launch_config.of_preset(agent, PRESET, environment)
  fusing = ['actor.num_actors=1', 'learner.fused=true'] if program == FUSED else []
  return launch_config.override(config, [*fusing, *overrides])


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
  """Turns a refusal of XLA or of a config into a ValueError of one line with a name."""
  try:
    yield
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    raise ValueError(f'{name}: {str(error).strip().splitlines()[0]}') from None


def _figures(
  name: str, config: launch_config.ExperimentConfig, devices: list[jax.Device], limit: int
) -> list[Figure]:
  """Compiles one program for devices of `limit` bytes of memory, and returns its figures.

  Raises:
    ValueError: the config does not suit the devices, or XLA refuses the program.
  """
  with _named(name):
    began = time.perf_counter()
    lowered = scaling.lower(config, devices)
    lower_seconds = time.perf_counter() - began
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - began - lower_seconds
  text, memory = compiled.as_text(), compiled.memory_analysis()
  program = scaling.read_program(text, len(devices))
  counts = {
    **{f'products/{dtypes}': count for dtypes, count in program.products.items()},
    **{f'logarithms/{dtype}': count for dtype, count in program.logarithms.items()},
    **{f'losses/{dtype}': count for dtype, count in losses(text, lowered.out_tree).items()},
  }
  parts = {
    'arguments': memory.argument_size_in_bytes,
    # Outputs that reuse the memory of arguments do not count.
    'outputs': memory.output_size_in_bytes - memory.alias_size_in_bytes,
    'temporaries': memory.temp_size_in_bytes,
    'code': memory.generated_code_size_in_bytes,
  }
  parts['memory'] = sum(parts.values())
  return [
    Figure(f'{name}/devices', len(devices), ''),
    Figure(f'{name}/lower', lower_seconds, 's'),
    Figure(f'{name}/compile', compile_seconds, 's'),
    *(Figure(f'{name}/{part}', value, 'bytes', limit) for part, value in parts.items()),
    Figure(f'{name}/reduced', program.reduced, 'bytes'),
    Figure(f'{name}/gathered', program.gathered, 'bytes'),
    Figure(f'{name}/other_collectives', program.other_collectives, ''),
    *(Figure(f'{name}/{what}', count, '') for what, count in sorted(counts.items())),
  ]


def losses(text: str, outputs: Any) -> dict[str, int]:
  """Counts the losses among a program's outputs, by their dtype in the HLO text of the compiled program.

  `outputs` is the structure of the tree that it returns; a leaf is a loss if its path contains 'loss'.
  """
  dtypes = jax.tree.unflatten(outputs, scaling.output_dtypes(text))
  named = jax.tree_util.tree_leaves_with_path(dtypes)
  found = (dtype for path, dtype in named if 'loss' in jax.tree_util.keystr(path))
  return dict(collections.Counter(found))


def main(arguments: Sequence[str]) -> int:
  """Runs this script; returns its exit code, see `scaling.show`."""
  parser = argparse.ArgumentParser('tpu', description=__doc__, allow_abbrev=False)
  parser.add_argument('topologies', nargs='+', help='such as v4:2x2x1, v5e:2x2 or v6e:4x4')
  parser.add_argument('--programs', nargs='+', choices=PROGRAMS, default=PROGRAMS)
  parser.add_argument('--env', default='catch', help='as of train (default: catch)')
  parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  parser.add_argument('--json', action='store_true')
  given = parser.parse_args(arguments)
  measure = lambda: tpu(given.topologies, given.programs, given.env, given.set)
  return scaling.show('tpu', measure, as_json=given.json)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
