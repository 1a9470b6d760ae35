"""All intrinsic rewards by name."""

from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import rssm as rssm_lib
from hephaestus.agents.dreamer.rewards import competence, empowerment, novelty, reward, survival

REWARDS: dict[str, type[reward.Reward]] = {
  novelty.NAME: novelty.Novelty,
  survival.NAME: survival.Survival,
  empowerment.NAME: empowerment.Empowerment,
  competence.NAME: competence.Competence,
}
"""Classes by the names of the rewards, in the order of the critic's heads."""


def names(config: dreamer_config.DreamerConfig) -> tuple[str, ...]:
  """Names of the rewards that are on in a config."""
  return tuple(name for name, kind in REWARDS.items() if kind.weight(config) > 0)


def make_rewards(rssm: rssm_lib.RSSM) -> dict[str, reward.Reward]:
  """The rewards that are on in the config of a model, by name.

  Raises:
    ValueError: the environment's specs do not fit one of them.
  """
  return {name: REWARDS[name](rssm) for name in names(rssm.networks.config)}
