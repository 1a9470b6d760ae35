"""AgentRecord: all that a run must know of its agent; the records of today, and how one is found."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hephaestus.learner import config as learner_config

ExperimentConfig = Any  # of launch/config.py, which refers to records

# A new agent gets its name by a line here; its module is imported when it is asked for.
AGENTS = {
  'dreamer': 'hephaestus.launch.agents.dreamer:Dreamer',
  'plain': 'hephaestus.launch.agents.dreamer:Plain',
  'ppo': 'hephaestus.launch.agents.masked_ppo:MaskedPPO',
}
DREAMER = 'dreamer'  # the agent where config.yaml does not say


class AgentRecord(abc.ABC):
  """All that a run must know of its agent; everything else follows from its config.

  A sub-class is made without arguments, has no state, and is found by `find_record` in every process
  of a run. It sets the first three attributes.

  Attributes:
    config_class: frozen dataclass, section `agent` of a config.
    learner_class: likewise section `learner`. One that derives from `OnPolicyConfig` reads each
      sequence once, from a queue; one from `OffPolicyConfig` samples batches from replay.
    presets: machine -> function of an environment's name that returns the config.
    can_fuse: whether the learner has a field `fused`: environment, update and the replay of an
      off-policy agent in one program. An on-policy update then also needs `footprint`, see
      `ppo_update.Update`.
    free_keys: paths that may change when a run resumes, beside `FREE`.
    indifferent_keys: paths on which a learning curve does not depend, beside those of all agents.
    shown: label -> metric of the learner, for the progress line.
  """

  config_class: ClassVar[type]
  learner_class: ClassVar[type[learner_config.LoopConfig]]
  presets: ClassVar[Mapping[str, Callable[[str], ExperimentConfig]]]
  can_fuse: ClassVar[bool] = False
  free_keys: ClassVar[Sequence[str]] = ()
  indifferent_keys: ClassVar[Sequence[str]] = ()
  shown: ClassVar[Mapping[str, str]] = {}

  @property
  def name(self) -> str:
    """As of `--agent`, and in config.yaml."""
    return f'{type(self).__module__}:{type(self).__qualname__}'

  @property
  def on_policy(self) -> bool:
    """Whether each sequence is read once, from a queue."""
    return issubclass(self.learner_class, learner_config.OnPolicyConfig)

  @abc.abstractmethod
  def make(self, config: Any, observation_spec: Any, action_spec: Any) -> Any:
    """The agent for one environment's specs, without any array.

    Args:
      config: of `config_class`.
      observation_spec: tree of specs, see `environment.Environment`.
      action_spec: BoundedArray or DiscreteArray.

    Returns:
      All that `make_update` needs, with a field `agent`: an `agents.agent.Agent`.

    Raises:
      ValueError: the agent does not support these specs.
    """

  @abc.abstractmethod
  def make_update(self, config: ExperimentConfig, trained: Any, *, num_devices: int) -> Any:
    """The update of parameters by a batch.

    Args:
      config: of the run, an `ExperimentConfig`.
      trained: as of `make`.
      num_devices: of all processes of the learner; each has an equal part of every batch.

    Returns:
      A `loop.Update`: `init` of the state, and `update`.

    Raises:
      ValueError: a batch does not divide over the devices.
    """

  def check(self, config: ExperimentConfig) -> None:
    """Raises ValueError for values that do not fit together, named with a remedy."""
    del config

  def warnings(self, trained: Any) -> Sequence[str]:
    """Lines on what the agent treats in another way in this environment, printed as a run starts."""
    del trained
    return ()

  def check_memory(self, config: ExperimentConfig, trained: Any, available: int | None) -> None:
    """Refuses sizes of the agent that do not fit into the memory of the learner's device.

    Args:
      config: of the run.
      trained: the agent, as `make` makes it.
      available: bytes of the device; None where unknown.

    Raises:
      ValueError: naming the field and what would fit.
    """
    del config, trained, available

  def describe_update(self, config: ExperimentConfig, update: Any) -> str:
    """The updates of a fused run for the terminal, as its program is compiled."""
    del update
    per_unroll = config.replay.replay_ratio * config.actor.num_envs / config.batch_size
    return f'{per_unroll:g} updates of {config.batch_size} sequences after each'

  def make_advice(self, config: ExperimentConfig, warn: Callable[[str], None]) -> Any:
    """An `advice.Advice`, which warns of runs that will not learn, or None."""
    del config, warn
    return None


@functools.cache
def find_record(name: str) -> AgentRecord:
  """The record of an agent.

  Args:
    name: a key of `AGENTS`, or 'package.module:Class'.

  Raises:
    ValueError: there is no such record, or it is incomplete.
  """
  from hephaestus.actors.environments import names  # here, since its package imports JAX

  kind = names.resolve(name, AGENTS, field='agent_name', kind='agent')
  field = f'agent_name={name!r}'
  if not (inspect.isclass(kind) and issubclass(kind, AgentRecord)):
    raise ValueError(
      f'{field}: {name.rpartition(":")[2]} is no record of an agent; derive it from '
      'hephaestus.launch.records.AgentRecord'
    )
  lacking = [
    *(each for each in ('config_class', 'learner_class', 'presets') if not hasattr(kind, each)),
    *sorted(kind.__abstractmethods__),
  ]
  if lacking:
    raise ValueError(f'{field}: {kind.__name__} lacks {", ".join(lacking)}; see docs/agents.md')
  for each in ('config_class', 'learner_class'):
    if not dataclasses.is_dataclass(getattr(kind, each)):
      raise ValueError(f'{field}: {kind.__name__}.{each} must be a dataclass')
  kinds = (learner_config.OnPolicyConfig, learner_config.OffPolicyConfig)
  if not issubclass(kind.learner_class, kinds):
    raise ValueError(
      f'{field}: {kind.__name__}.learner_class must derive from OnPolicyConfig or OffPolicyConfig of '
      'hephaestus.learner.config'
    )
  return kind()
