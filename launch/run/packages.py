"""Whether the packages that a run of several processes needs are installed; imports none of them."""

import importlib.util

# The packages of several processes, for a refusal.
DISTRIBUTED = "the extra `distributed` (pip install 'hephaestus[distributed]', only for Python 3.10 on Linux x86-64)"


def has_distributed() -> bool:
  """Whether the packages that a run of several processes needs are installed; imports none of them."""
  return all(importlib.util.find_spec(name) for name in ('launchpad', 'portpicker', 'reverb'))


def check_distributed(name: str, remedy: str) -> None:
  """Raises ValueError where the packages that several processes need are not installed.

  Its message begins with `name`, what needs them, and ends with the `remedy`, how to do without.
  """
  if not has_distributed():
    raise ValueError(f'{name}: needs {DISTRIBUTED}; {remedy}')
