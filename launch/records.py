"""AgentRecord, the interface between a run and its agent; the built-in agents; look-up by name."""

import abc
import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from hephaestus.actors.environments import names as names_lib
from hephaestus.learner import config as learner_config

ExperimentConfig = Any  # the class of launch/config.py, which imports this module

# Names of the built-in agents; a module is imported when its agent is asked for.
AGENTS = {
  'dreamer': 'hephaestus.launch.agents.dreamer:Dreamer',
  'plain': 'hephaestus.launch.agents.dreamer:Plain',
  'ppo': 'hephaestus.launch.agents.masked_ppo:MaskedPPO',
}
DREAMER = 'dreamer'  # the agent of a config.yaml without `agent_name`

_trusts_files = contextvars.ContextVar('trusts_files', default=False)


@contextlib.contextmanager
def trusting(trust: bool) -> Iterator[None]:
  """Within the context, import paths of agents, environments and loggers in files are trusted, if `trust` (--trust)."""
  token = _trusts_files.set(trust or _trusts_files.get())
  try:
    yield
  finally:
    _trusts_files.reset(token)


def read_names(names: Sequence[Any], file: str) -> None:
  """Notes names of agents, environments or loggers that a file gives; see `trusting` for those that import a module."""
  for name in names:
    if isinstance(name, str):
      names_lib.trust(name) if _trusts_files.get() else names_lib.read(name, file)


def given_names(*names: str | None) -> None:
  """Trusts names of agents or environments that the user gives, also where a file gives them, too."""
  for name in names:
    if name is not None:
      names_lib.trust(name)


class AgentRecord(abc.ABC):
  """Interface by which a run makes its agent and the update of its parameters.

  A new agent is a sub-class, which sets the first three attributes. It is made without arguments, has
  no state, and is found by `find_record` in every process of a run.

  Attributes:
    config_class: frozen dataclass of the section `agent` of a config.
    learner_class: frozen dataclass of the section `learner`. If it derives from `OnPolicyConfig`,
      the agent reads each sequence once, from a queue; if from `OffPolicyConfig`, it samples
      batches from replay.
    presets: name of a machine, such as 'laptop' -> function from an environment's name to a config.
    can_fuse: whether the agent can train in one process (`--fused`), with environments in JAX, update and
      the replay of an off-policy agent in one compiled program. `learner_class` then needs a field
      `fused`, and the update of an on-policy agent is a `loop.FusedUpdate`.
    free_keys: config keys, by path, that may change when a run resumes, in addition to `config.FREE`.
    indifferent_keys: config keys, by path, that do not influence a learning curve, in addition to
      those that all agents have; `report` shows runs that differ only in these and the seed as one
      curve.
    shown: label -> name of a metric of the learner, shown on the progress line.
    cognition: part of the agent -> values by config key that switch it on for --cognition, in an order in
      which each part can be added. The first key of a part is 0 where it is off.
  """

  config_class: ClassVar[type]
  learner_class: ClassVar[type[learner_config.LoopConfig]]
  presets: ClassVar[Mapping[str, Callable[[str], ExperimentConfig]]]
  can_fuse: ClassVar[bool] = False
  free_keys: ClassVar[Sequence[str]] = ()
  indifferent_keys: ClassVar[Sequence[str]] = ()
  shown: ClassVar[Mapping[str, str]] = {}
  cognition: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

  @property
  def name(self) -> str:
    """Name of the agent for `--agent` and config.yaml; by default its import path, 'module:Class'."""
    return f'{type(self).__module__}:{type(self).__qualname__}'

  @property
  def on_policy(self) -> bool:
    """Whether the agent is on-policy: it reads each sequence once, from a queue."""
    return issubclass(self.learner_class, learner_config.OnPolicyConfig)

  @abc.abstractmethod
  def make(self, config: Any, observation_spec: Any, action_spec: Any) -> Any:
    """Makes the agent for one environment's specs; makes no array.

    Args:
      config: settings of the agent, an instance of `config_class`.
      observation_spec: tree of `dm_env.specs`, see `environment.Environment`.
      action_spec: `dm_env.specs.BoundedArray` or `DiscreteArray`.

    Returns:
      The agent with its losses: a record of the sub-class's own, handed to `make_update` as
      `trained`, with a field `agent`: an `agents.agent.Agent`, which acts.

    Raises:
      ValueError: the agent does not support these specs.
    """

  @abc.abstractmethod
  def make_update(self, config: ExperimentConfig, trained: Any, *, num_devices: int) -> Any:
    """Makes the functions that initialise the train state and update it by a batch.

    Args:
      config: config of the run, an `ExperimentConfig`.
      trained: result of `make`.
      num_devices: number of devices of all processes of the learner; each gets an equal part of
        every batch.

    Returns:
      A `loop.Update`; of an on-policy agent with `can_fuse`, a `loop.FusedUpdate`.

    Raises:
      ValueError: a batch does not divide over the devices.
    """

  def check(self, config: ExperimentConfig) -> None:
    """Raises ValueError, with a remedy, if values contradict each other; the default accepts all."""
    del config

  def warnings(self, trained: Any) -> Sequence[str]:
    """Lines printed when a run starts: limits of the agent that this environment exceeds; none by default.

    Args:
      trained: result of `make` for the environment.
    """
    del trained
    return ()

  def describe_update(self, config: ExperimentConfig, update: Any) -> str:
    """Describes the updates after each unroll of a fused run, as '2 updates of 16 sequences after each'."""
    del update
    per_unroll = config.replay.replay_ratio * config.actor.num_envs / config.batch_size
    return f'{per_unroll:g} updates of {config.batch_size} sequences after each'

  def advise(
    self, config: ExperimentConfig, rows: Sequence[Mapping[str, Any]], score: float | None
  ) -> Mapping[str, str]:
    """Judges the metrics of the learner while it trains, and afterwards; see `learner/advice.py`.

    Args:
      config: config of the run.
      rows: metrics of the first report, and of the newest ones, the oldest first.
      score: newest normalised score; None if unknown.

    Returns:
      A text for each warning, with the setting to change, by the name of its kind; none by default.
    """
    del config, rows, score
    return {}


@functools.cache
def find_record(name: str) -> AgentRecord:
  """Imports an agent's record.

  Args:
    name: a key of `AGENTS`, or the import path of a sub-class, 'package.module:Class'.

  Returns:
    An instance of the sub-class, the same at each call in a process.

  Raises:
    ValueError: there is no such sub-class of `AgentRecord`, or it is incomplete.
    ImportError: an import within its module fails.
  """
  kind = names_lib.resolve(name, AGENTS, field='agent_name', kind='agent')
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
  if not dataclasses.is_dataclass(kind.config_class):
    raise ValueError(f'{field}: {kind.__name__}.config_class must be a dataclass')
  kinds = (learner_config.OnPolicyConfig, learner_config.OffPolicyConfig)
  if not issubclass(kind.learner_class, kinds):
    raise ValueError(
      f'{field}: {kind.__name__}.learner_class must derive from OnPolicyConfig or OffPolicyConfig of '
      'hephaestus.learner.config'
    )
  return kind()
