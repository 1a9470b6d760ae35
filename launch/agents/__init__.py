"""Agents: `find` imports the record of one, by its name or by the import path of a user's own."""

import difflib
import importlib
import inspect
import sys

# A new agent gets its name by a line here; its module is imported when it is asked for.
AGENTS = {
  'dreamer': 'hephaestus.launch.agents.dreamer:Dreamer',
  'plain': 'hephaestus.launch.agents.dreamer:Plain',
  'ppo': 'hephaestus.launch.agents.masked_ppo:MaskedPPO',
}


def find(name: str) -> type:
  """The class of an agent's record.

  Args:
    name: a key of `AGENTS`, or 'package.module:Class' for a user's agent.

  Raises:
    ValueError: there is no such agent, module or class; says which, and names the nearest.
  """
  field = f'agent_name={name!r}'
  module_name, colon, attribute = AGENTS.get(name, name).partition(':')
  if not (module_name and colon and attribute):
    raise ValueError(
      f'{field}: no such agent; {_nearest(name, AGENTS)}known are: {", ".join(AGENTS)}; an agent of '
      "your own is named by its import path, 'package.module:Class'"
    )
  if (
    module_name.partition('.')[0] in sys.stdlib_module_names
  ):  # which must not run by a config file
    raise ValueError(f"{field}: {module_name} is Python's own and has no agent")
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    # A missing import within the user's module is reported as it is.
    if error.name is None or not f'{module_name}.'.startswith(f'{error.name}.'):
      raise
    raise ValueError(
      f'{field}: there is no module {error.name!r}; is the folder that holds it on PYTHONPATH?'
    ) from error
  found = getattr(module, attribute, None)
  if not inspect.isclass(found):
    classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
    raise ValueError(
      f'{field}: {module_name} has no class {attribute!r}; {_nearest(attribute, classes)}'
      f'its classes are: {", ".join(classes) or "none"}'
    )
  return found


def _nearest(given: str, known: list[str] | dict[str, str]) -> str:
  names = ' or '.join(difflib.get_close_matches(given, known))
  return f'did you mean {names}? ' if names else ''
