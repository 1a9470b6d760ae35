"""Compiles the dreamer's update for an H100 that this machine does not have, and counts what it starts there.

    python tests/bench/gpu.py --env catch

Small programs ("kernels") one after the other set the speed of an update on a GPU. It needs JAX's CUDA plugin
(`pip install 'jax[cuda13]'`, measured with 0.11.2 on Python 3.12), and no GPU.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence

import jax
import scaling
from jax.experimental import topologies

from hephaestus.launch import config as launch_config
from hephaestus.launch.bench.speed import Figure
from hephaestus.launch.run import parts as parts_lib

PRESET = 'gpu'
# XLA compiles for this device; the numbers are of the data sheet of an H100 with 80 GB.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_STARTED = re.compile(r' (fusion|custom-call|copy|sort|reduce|convolution|rng-bit-generator)\(')
_COMPUTATION = re.compile(r'^(ENTRY )?%(\S+) \(')
_LOOP = re.compile(r' while\(.*body=%([\w.\-]+)')
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def started(text: str, turns: Sequence[int]) -> dict[str, int]:
  """Counts the programs that a GPU starts in one run of a compiled program.

  Args:
    text: its HLO text.
    turns: number of iterations of each loop of the entry computation where it is data, in their order.

  Returns:
    By computation, the entry's and the body's of each of its loops, the programs that it starts in all
    iterations, inner loops included.
  """
  computations: dict[str, list[str]] = {}
  entry, lines = '', []
  for line in text.splitlines():
    if found := _COMPUTATION.match(line):
      lines = computations[found[2]] = []
      entry = found[2] if found[1] else entry
    lines.append(line)
  unknown = iter(turns)

  def count(name: str) -> tuple[int, dict[str, int]]:
    own, loops = 0, {}
    for line in computations[name]:
      if loop := _LOOP.search(line):
        known = _TURNS.search(line)
        repeated = int(known[1]) if known else next(unknown)
        once, inner = count(loop[1])
        loops[loop[1]] = repeated * (once + sum(inner.values()))
      else:
        own += bool(_STARTED.search(line))
    return own, loops

  own, loops = count(entry)
  return {entry: own} | loops


def gpu(environment: str, overrides: list[str]) -> list[Figure]:
  """Compiles the update of PRESET with its longest dreams, and counts the programs that it starts.

  Args:
    environment: name of the environment.
    overrides: assignments to the config, see `launch_config.override`.

  Returns:
    The number of programs of one update: outside of loops, in each loop, and all.

  Raises:
    ValueError: an argument is invalid, or JAX's CUDA plugin is missing.
  """
  config = launch_config.override(
    launch_config.of_preset('dreamer', PRESET, environment), overrides
  )
  jax.config.update('jax_platforms', 'cpu')
  parts_lib.make_parts(config)  # names what is wrong with the environment
  os.environ['XLA_FLAGS'] = '--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false'
  try:
    devices = topologies.get_topology_desc(
      'h100', platform='cuda', topology='1x1x1', target_config=_H100
    ).devices
  except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as error:
    raise ValueError(f"needs JAX's CUDA plugin, pip install 'jax[cuda13]' ({error})") from None
  lowered = scaling.lower(config, list(devices))
  chunks = config.agent.horizon_max // config.agent.steps_per_chunk
  found = started(lowered.compile().as_text(), (config.agent.horizon_max, chunks, chunks))
  name = f'gpu/{environment}'
  return [
    *(Figure(f'{name}/{part}', count, 'programs') for part, count in found.items()),
    Figure(f'{name}/all', sum(found.values()), 'programs'),
  ]


def main(arguments: Sequence[str]) -> int:
  """Runs this script; returns its exit code, see `scaling.show`."""
  parser = argparse.ArgumentParser('gpu', description=__doc__, allow_abbrev=False)
  parser.add_argument('--env', default='catch', help='as of train (default: catch)')
  parser.add_argument('--set', nargs='+', action='extend', default=[], metavar='KEY=VALUE')
  parser.add_argument('--json', action='store_true')
  given = parser.parse_args(arguments)
  return scaling.show('gpu', lambda: gpu(given.env, given.set), as_json=given.json)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
