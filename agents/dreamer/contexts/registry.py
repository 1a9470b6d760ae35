"""All context modules by name."""

from hephaestus.agents.dreamer import modules
from hephaestus.agents.dreamer.contexts import context, salience, workspace

CONTEXTS: dict[str, type[context.Context]] = {
  salience.NAME: salience.Salience,
  workspace.NAME: workspace.Workspace,
}
"""Classes by the names of the modules."""


def make_context(networks: modules.Networks) -> context.Context:
  """The context module that is on in the config of a model; without one the empty context.

  Raises:
    ValueError: several are on, or the environment's specs do not fit the module.
  """
  config = networks.config
  kinds = {name: kind for name, kind in CONTEXTS.items() if kind.is_on(config)}
  if len(kinds) > 1:
    raise ValueError(f'agent: {" and ".join(kinds)} are both on; switch all but one of them off')
  (kind,) = kinds.values() or (context.Context,)
  return kind(networks)
