"""`--cognition`: the parts of docs/cognition.md, as far as they suit a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hephaestus.launch import config as launch_config


def assignments(
  is_set: Callable[[str], bool],
  config: launch_config.ExperimentConfig,
  given: Sequence[str],
  content: Mapping[str, Any],
) -> list[str]:
  """Assignments that switch on the parts of an agent's `cognition` that suit the environment; prints a line.

  Each part is tried with the parts before it and all that the user gives: what refuses it says why.

  Args:
    is_set: key -> whether the user gives its value, which then stays as it is.
    config: config before all that the user gives.
    given, content: what the user gives, as for `config.override`.
  """
  parts = config.record.cognition
  if not parts:
    raise ValueError(
      f'--cognition: is of the dreamer, and this is {config.agent_name}; leave it out, or give --agent dreamer'
    )
  ours = lambda key: key.split('=')[0].split('.')[0] == 'environment'
  environment = launch_config.override(
    config, list(filter(ours, given)), {key: x for key, x in content.items() if ours(key)}
  ).make_environment()
  on: list[str] = []
  named, reasons = [], []
  for name, settings in parts.items():
    added = [f'{key}={value}' for key, value in settings.items() if not is_set(key)]
    size = next(iter(settings))
    try:
      tried = launch_config.override(config, [*on, *added, *given], content)
      _check(tried, environment)
      if not launch_config.values_of(tried)[size]:
        raise ValueError(f'{size}: {size}=0 is given')
    except ValueError as error:
      reasons.append(f'{name} ({str(error).partition(": ")[2].partition("; ")[0]})')
    else:
      on += added
      named.append(f'{name} ({" ".join(added)})' if added else name)
  print(
    f'--cognition switches on {", ".join(named) or "nothing"}'
    f'{", and leaves off " * bool(reasons)}{", ".join(reasons)}; see docs/cognition.md',
    flush=True,
  )
  return on


def _check(config: launch_config.ExperimentConfig, environment: Any) -> None:
  """Raises ValueError if the agent of a config does not suit an environment."""
  import jax

  def make() -> tuple[()]:
    config.record.make(config.agent, environment.observation_spec, environment.action_spec)
    return ()

  jax.eval_shape(make)  # arrays would start JAX before the processes of a run are forked
