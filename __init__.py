"""World-model reinforcement learning in JAX: in one compiled process, or distributed over Reverb.

This folder is the package: setuptools installs it as `hephaestus` and each folder next to this file
as a sub-package, so `agents/dreamer/dream.py` is `hephaestus.agents.dreamer.dream`.

The names below are the Python interface (docs/python.md); each is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from hephaestus.launch.interface.policy import Policy as Policy
  from hephaestus.launch.interface.policy import export as export
  from hephaestus.launch.interface.policy import load as load
  from hephaestus.launch.interface.training import Run as Run
  from hephaestus.launch.interface.training import train as train

  __version__: str

_MODULES = {
  'Policy': 'policy', 'Run': 'training', 'export': 'policy', 'load': 'policy', 'train': 'training',
}  # fmt: skip


def __getattr__(name: str) -> Any:
  if name == '__version__':
    from importlib import metadata

    return metadata.version('hephaestus-rl')
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'hephaestus.launch.interface.{_MODULES[name]}'), name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_MODULES, '__version__'])
