"""`--cognition`: the parts of docs/cognition.md, as far as they suit a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hephaestus.launch import config as launch_config


def switch_on(
  is_set: Callable[[str], bool],
  config: launch_config.ExperimentConfig,
  assignments: Sequence[str],
  content: Mapping[str, Any],
) -> launch_config.ExperimentConfig:
  """Switches on the parts of an agent's `cognition` that suit the environment, and prints a line about them.

  Each part is tried with the parts before it and all that the user gives: what refuses it says why.

  Args:
    is_set: key -> whether the user gives its value, which then stays as it is.
    config: config without the parts, before all that the user gives.
    assignments, content: what the user gives, as for `config.override`.

  Returns:
    `config` with the parts, but still without what the user gives.
  """
  parts = config.record.cognition
  if not parts:
    raise ValueError(
      f'--cognition: is of the dreamer, and this is {config.agent_name}; leave it out, or give --agent dreamer'
    )
  ours = lambda key: key.split('=')[0].split('.')[0] == 'environment'
  environment = launch_config.override(
    config, list(filter(ours, assignments)), {key: x for key, x in content.items() if ours(key)}
  ).make_environment()
  on: dict[str, list[str]] = {}
  off: dict[str, str] = {}
  for name, settings in parts.items():
    added = [f'{key}={value}' for key, value in settings.items() if not is_set(key)]
    try:
      # All of them, since later parts need earlier ones before what the user gives replaces their values.
      tried = launch_config.override(config, [f'{key}={x}' for key, x in settings.items()])
      whole = launch_config.override(tried, assignments, content)
      _check(whole, environment)
    except ValueError as error:
      off[name] = str(error).partition(': ')[2].partition('; ')[0]
      continue
    size = next(iter(settings))
    if launch_config.flatten(launch_config.to_tree(whole))[size]:
      config, on[name] = tried, added
    else:
      off[name] = f'{size}=0 is given'
  named = {name: f'{name} ({" ".join(added)})' if added else name for name, added in on.items()}
  reasons = [f'{name} ({reason})' for name, reason in off.items()]
  print(
    f'--cognition switches on {", ".join(named.values()) or "nothing"}'
    f'{", and leaves off " * bool(reasons)}{", ".join(reasons)}; see docs/cognition.md',
    flush=True,
  )
  return config


def _check(config: launch_config.ExperimentConfig, environment: Any) -> None:
  """Raises ValueError if the agent of a config does not suit an environment."""
  import jax

  def make() -> tuple[()]:
    config.record.make(config.agent, environment.observation_spec, environment.action_spec)
    return ()

  jax.eval_shape(make)  # arrays would start JAX before the processes of a run are forked
