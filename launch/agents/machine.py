"""The accelerator of a machine, and whether the installed JAX can use it; starts no device."""

import importlib.util
import os
import pathlib
import subprocess
from importlib import metadata
from typing import NamedTuple

from hephaestus.launch import config as launch_config

# Prints the MiB of each, one a line.
GPU_MEMORY = ('nvidia-smi', '--query-gpu=memory.total', '--format=csv,noheader,nounits')
NAMES = {'gpu': 'an NVIDIA GPU', 'tpu': 'TPUs'}
EXTRAS = {'gpu': 'cuda', 'tpu': 'tpu'}
PRESETS = {'gpu': 'gpu', 'tpu': 'tpu-v4-8'}


class Machine(NamedTuple):
  """Accelerator of a machine, as its drivers show it.

  Attributes:
    accelerator: 'gpu' or 'tpu'; None: its CPU, or what is not known here.
    is_usable: whether JAX has a package that drives an accelerator.
  """

  accelerator: str | None
  is_usable: bool

  @property
  def preset(self) -> str:
    """The preset of the machine as JAX sees it."""
    return PRESETS[self.accelerator] if self.accelerator and self.is_usable else 'laptop'

  @property
  def lack(self) -> str | None:
    """Sentence on the package that JAX lacks, and the command that installs it; None if none."""
    if self.accelerator is None or self.is_usable:
      return None
    extra = EXTRAS[self.accelerator]
    return (
      f'this machine has {NAMES[self.accelerator]}, which the installed JAX cannot use; install the extra '
      f"`{extra}`: make train EXTRAS={extra}, or pip install 'hephaestus[{extra}]'"
    )


def find(root: pathlib.Path = pathlib.Path('/')) -> Machine:
  """Looks for drivers, and for JAX's packages for them.

  Args:
    root: of the file system.
  """
  devices = root / 'dev'
  if any(devices.glob('accel[0-9]*')) or _tpu_chips():
    return Machine('tpu', importlib.util.find_spec('libtpu') is not None)
  # CUDA's plugin registers itself there, as those of other makers do, whose devices look otherwise.
  has_plugin = any(metadata.entry_points(group='jax_plugins'))
  return Machine('gpu' if (devices / 'nvidiactl').exists() else None, has_plugin)


def _tpu_chips() -> int:
  """TPU chips by their PCI numbers, as JAX looks for them: newer ones have no /dev/accel*."""
  try:
    from jax._src import hardware_utils

    return hardware_utils.num_available_tpu_chips_and_device_id()[0]
  except (ImportError, AttributeError, OSError):  # a private function, and files of the kernel
    return 0


def check(config: launch_config.ExperimentConfig, machine: Machine) -> None:
  """Refuses a run for an accelerator where JAX would fall back to the CPU, where it takes for ever.

  Args:
    config: of the run.
    machine: that it is to run on.

  Raises:
    ValueError: there is no accelerator, or JAX cannot use it.
  """
  is_chosen = 'JAX_PLATFORMS' in os.environ  # somebody knows what JAX has
  if not config.accelerator or machine.is_usable or is_chosen:
    return
  lack = machine.lack or 'this machine has no accelerator that is known'
  raise ValueError(
    f'accelerator=true: {lack}; or train on the CPU, by --set accelerator=false, a new run by --preset '
    'laptop. With JAX_PLATFORMS in the environment nothing is looked for'
  )


def gpu_gibibytes() -> float | None:
  """Memory of the smallest GPU, from the driver, so that JAX need not start; None if unknown."""
  try:
    output = subprocess.run(
      GPU_MEMORY, capture_output=True, text=True, timeout=10.0, check=True
    ).stdout
    return min(float(line) for line in output.split('\n') if line.strip()) / 1024
  except (OSError, subprocess.SubprocessError, ValueError):
    return None
