"""Detects the accelerator of this machine, and whether JAX can use it, without starting it."""

import importlib.util
import os
import pathlib
from importlib import metadata
from typing import NamedTuple

from hephaestus.actors.environments import packages
from hephaestus.launch import config as launch_config

PCI = pathlib.Path('/sys/bus/pci/devices')
NAMES = {'gpu': 'an NVIDIA GPU', 'tpu': 'TPUs'}
EXTRAS = {'gpu': 'cuda', 'tpu': 'tpu'}
PRESETS = {'gpu': 'gpu', 'tpu': 'tpu-v4-8'}


class Machine(NamedTuple):
  """The accelerator of a machine, as its drivers show it."""

  accelerator: str | None  # 'gpu' for an NVIDIA GPU, or 'tpu'; None if neither is found
  is_usable: bool  # whether a JAX package that drives an accelerator is installed

  @property
  def preset(self) -> str:
    """Name of the preset for the device that JAX will use: 'laptop', 'gpu' or 'tpu-v4-8'."""
    return PRESETS[self.accelerator] if self.accelerator and self.is_usable else 'laptop'

  @property
  def lack(self) -> str | None:
    """Message that names the missing JAX package and how to install it; None if none is missing."""
    if self.accelerator is None or self.is_usable:
      return None
    extra = EXTRAS[self.accelerator]
    return (
      f'this machine has {NAMES[self.accelerator]}, which the installed JAX cannot use; install the extra '
      f'`{extra}`: {packages.install(extra)}'
    )


def find(root: pathlib.Path = pathlib.Path('/')) -> Machine:
  """Finds the accelerator of this machine by its drivers in `root`/dev, and whether JAX's package is installed."""
  devices = root / 'dev'
  if any(devices.glob('accel[0-9]*')) or _tpu_chips():
    return Machine('tpu', importlib.util.find_spec('libtpu') is not None)
  # The plugin of CUDA registers itself there, as do plugins for devices that are not detected above.
  has_plugin = any(metadata.entry_points(group='jax_plugins'))
  return Machine('gpu' if (devices / 'nvidiactl').exists() else None, has_plugin)


def _tpu_chips() -> int:
  """Number of TPU chips by their PCI IDs, as JAX counts them: newer ones have no /dev/accel*."""
  try:
    vendors = (path.read_text().strip() for path in PCI.glob('*/vendor'))
    if '0x1ae0' not in vendors:  # the ID of Google; spares the import of JAX, which takes seconds
      return 0
    from jax._src import hardware_utils

    return hardware_utils.num_available_tpu_chips_and_device_id()[0]
  except (ImportError, AttributeError, OSError):  # JAX may rename a private function
    return 0


def check(config: launch_config.ExperimentConfig, machine: Machine) -> None:
  """Raises ValueError if a run needs an accelerator where JAX would fall back to the much slower CPU.

  Checks nothing if the environment variable JAX_PLATFORMS is set.
  """
  is_chosen = 'JAX_PLATFORMS' in os.environ  # the user has chosen JAX's platform
  if not config.accelerator or machine.is_usable or is_chosen:
    return
  lack = machine.lack or 'this machine has no accelerator that is known'
  raise ValueError(
    f'accelerator=true: {lack}; or train on the CPU, by --set accelerator=false, a new run by --preset '
    'laptop. If the environment variable JAX_PLATFORMS is set, this check is skipped'
  )
