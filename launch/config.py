"""ExperimentConfig: the configs of all folders, overrides by path, and config.yaml of a run."""

import dataclasses
import difflib
import io
import math
import pathlib
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf import errors as omegaconf_errors

from hephaestus.actors import actor, environments, evaluator
from hephaestus.agents import masked_ppo
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.learner import config as learner_config
from hephaestus.learner import ppo_update
from hephaestus.learner.sources import stale_filter
from hephaestus.replay import tables

AGENTS: dict[str, tuple[type, type]] = {
  'dreamer': (dreamer_config.DreamerConfig, learner_config.LearnerConfig),
  'ppo': (masked_ppo.PPOConfig, learner_config.PPOLearnerConfig),
}
"""The agents by name: the config of the agent, and that of its learner."""

BASIC = {
  'agent.gamma': 'discount factor of rewards',
  'agent.entropy_scale': "weight of the policy's entropy: more explores more",
  'agent.novelty_scale': 'weight of novelty beside a reward that is found; 0: no novelty',
  'agent.ensemble_size': 'prior networks whose disagreement is the novelty',
  'agent.horizon_max': 'imagined steps of the longest rollout',
  'replay.replay_ratio': 'times that each collected step is learned from, on average',
  'learner.batch_size': 'sequences of an update, over all devices',
  'learner.model_learning_rate': 'learning rate of the world model',
  'actor.num_envs': 'parallel environments of each actor process',
  'actor.num_actors': 'actor processes',
  'actor.sequence_length': 'time steps of a stored sequence',
  'evaluator.period': 'seconds between two evaluations',
  'max_environment_steps': 'environment steps after which the run ends (--steps)',
}
"""The keys that most users change, by their path; the help of `train` prints them."""

if TYPE_CHECKING:
  AgentConfig = dreamer_config.DreamerConfig | masked_ppo.PPOConfig
  LearnerConfig = learner_config.LearnerConfig | learner_config.PPOLearnerConfig
else:
  AgentConfig = LearnerConfig = Any  # OmegaConf knows no union of dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
  """A whole run.

  Attributes:
    environment: `name`, and options of that environment.
    agent: of the kind of the agent.
    replay: how experience is kept.
    learner: optimizers and periods of the learner, of the kind that the agent needs.
    actor: how experience is made.
    evaluator: how the agent is scored.
    seed: all random keys of the run derive from it.
    max_environment_steps: that all actors collect before the run ends.
    max_minutes: of training, after which the run ends as well; None for no limit.
    accelerator: whether the learner may take one; every other node keeps to the CPU.
    tensorboard: also write TensorBoard files.
    wandb: also report to Weights & Biases; needs the extra of that name.
  """

  environment: dict[str, Any]
  agent: AgentConfig
  replay: tables.ReplayConfig
  learner: LearnerConfig
  actor: actor.ActorConfig
  evaluator: evaluator.EvaluatorConfig
  seed: int = 0
  max_environment_steps: int = 1_000_000
  max_minutes: float | None = None
  accelerator: bool = True
  tensorboard: bool = True
  wandb: bool = False

  def __post_init__(self):
    for key, value in flatten(dataclasses.asdict(self)).items():
      if isinstance(value, float) and math.isnan(value):  # which passes every comparison below
        raise ValueError(f'{key}={value}: must be a number')
    if self.max_environment_steps < 1:
      raise ValueError(f'max_environment_steps={self.max_environment_steps}: must be at least 1')
    if self.max_minutes is not None and self.max_minutes <= 0:
      raise ValueError(f'max_minutes={self.max_minutes}: must be positive, or null for no limit')
    if 'name' not in self.environment:
      raise ValueError('environment.name: is missing; give the name of an environment')
    self._check_ppo() if self.agent_name == 'ppo' else self._check_dreamer()

  def _check_dreamer(self):
    agent, learner = self.dreamer()
    tables.check(self.replay, learner.batch_per_process, self.actor.num_envs)
    starts = agent.starts_per_sequence
    if starts is not None and starts > self.actor.sequence_length:
      raise ValueError(
        f'agent.starts_per_sequence={starts}: must be at most actor.sequence_length='
        f'{self.actor.sequence_length}'
      )

  def _check_ppo(self):
    agent, learner = self.ppo()
    ppo_update.auto_scale(
      learner,
      num_envs=self.batch_size,
      num_steps=self.steps_per_sequence,
      recurrent=bool(agent.recurrent_size),
    )
    if self.fused:
      return
    stratum = self.replay.limiting_stratum
    ahead = stale_filter.sequences_in_flight(self.replay.max_in_flight, self.batch_size)
    most = self.batch_size * learner.max_staleness - ahead - 1
    if (
      stale_filter.updates_behind(stratum.max_size, ahead, self.batch_size) > learner.max_staleness
    ):
      raise ValueError(
        f'replay.strata.{stratum.name}.max_size={stratum.max_size}: sampled sequences would be older than '
        f'learner.max_staleness={learner.max_staleness} updates; for batches of {self.batch_size} '
        f'sequences use at most {most} ({max(1, self.batch_size // 2)} keeps it to one update)'
      )
    if not stratum.read_once:
      raise ValueError(
        f'replay.strata.{stratum.name}.read_once=False: PPO learns from each sequence once; use true'
      )

  @property
  def agent_name(self) -> str:
    """The name of the agent, as of `--agent`."""
    for name, kinds in AGENTS.items():
      if isinstance(self.agent, kinds[0]) and isinstance(self.learner, kinds[1]):
        return name
    given = f'{type(self.agent).__name__} and {type(self.learner).__name__}'
    raise ValueError(f'agent, learner: {given} do not belong together')

  def dreamer(self) -> tuple[dreamer_config.DreamerConfig, learner_config.LearnerConfig]:
    """Configs of agent and learner of the dreamer; ValueError for a run of another agent."""
    if isinstance(self.agent, dreamer_config.DreamerConfig) and isinstance(
      self.learner, learner_config.LearnerConfig
    ):
      return self.agent, self.learner
    raise ValueError(f'agent: this needs the dreamer, but the run has {self.agent_name}')

  def ppo(self) -> tuple[masked_ppo.PPOConfig, learner_config.PPOLearnerConfig]:
    """Configs of agent and learner of PPO; ValueError for a run of another agent."""
    if isinstance(self.agent, masked_ppo.PPOConfig) and isinstance(
      self.learner, learner_config.PPOLearnerConfig
    ):
      return self.agent, self.learner
    raise ValueError(f'agent: this needs PPO, but the run has {self.agent_name}')

  @property
  def fused(self) -> bool:
    """Whether environment and update are one compiled program of one process, without replay."""
    return self.agent_name == 'ppo' and self.ppo()[1].fused

  @property
  def batch_size(self) -> int:
    """Sequences of an update; for PPO, those of one unroll of all environments."""
    if self.agent_name == 'dreamer':
      return self.dreamer()[1].batch_size
    return self.actor.num_envs * (1 if self.fused else self.actor.num_actors)

  @property
  def steps_per_sequence(self) -> int:
    """Environment steps of a stored sequence: adjacent sequences share one time step."""
    return self.actor.sequence_length - 1

  def make_environment(self):
    """The environment; ValueError for an unknown name, option or impossible value."""
    options = dict(self.environment)
    return environments.make(options.pop('name'), **options)


# Keys that may change when a run resumes; others would not fit the checkpoints in its folder.
FREE = (
  'max_environment_steps', 'max_minutes', 'accelerator', 'tensorboard', 'wandb', 'evaluator',
  'replay.port', 'replay.timeout_seconds',
  'learner.publish_period', 'learner.log_period', 'learner.max_staleness',
  'learner.checkpoint_period', 'learner.checkpoint_updates', 'learner.num_processes',
  'learner.stuck_seconds',
  'actor.num_actors', 'actor.log_period',
)  # fmt: skip
# Keys without state in the checkpoints of PPO.
FREE_OF_PPO = ('actor.num_envs',)


# Keys of config.yaml by their names in folders of older versions.
RENAMED = {
  'actor.num_worlds': 'actor.num_envs',
  'agent.dream_rows': 'agent.starts_per_sequence',
  'agent.memory_rows': 'agent.memory_steps',
  'agent.rows_per_chunk': 'agent.steps_per_chunk',
  'evaluator.film_period': 'evaluator.video_period',
}
# Keys that became constants, each with the only value that may stand in older folders.
REMOVED: dict[str, Any] = {
  'agent.competence_fast': 0.1,
  'agent.competence_slow': 0.005,
  'agent.return_rate': 0.01,
  'agent.slow_critic_rate': 0.02,
  'agent.slow_critic_scale': 1.0,
  'learner.model_max_gradient': 100.0,
  'learner.policy_max_gradient': 10.0,
}
# Keys of an older network of the dreamer, whose checkpoints this version cannot restore.
OLDER_NETWORK = ('agent.levels',)


def override(config: ExperimentConfig, assignments: list[str]) -> ExperimentConfig:
  """A config with some values replaced.

  Args:
    config: the one to change.
    assignments: such as 'agent.ensemble_size=3', 'environment.size=8',
      'replay.strata[0].max_size=256' or
      'replay.strata=[{name: episodic, max_size: 50000, share: 1.0}]'.

  Raises:
    ValueError: an unknown key, with the nearest known ones, or an invalid value.
  """
  for assignment in assignments:
    key, separator, value = assignment.partition('=')
    if not separator or not key:
      raise ValueError(f'{assignment!r}: write it as key=value, such as learner.batch_size=32')
    try:
      config = _assign(config, key, OmegaConf.from_dotlist([f'value={value}']).value)
    except (omegaconf_errors.OmegaConfBaseException, yaml.YAMLError, RecursionError) as error:
      raise ValueError(_explain(config, key, value, error)) from None
  return config


def _assign(config: ExperimentConfig, key: str, value: Any) -> ExperimentConfig:
  tree: Any = OmegaConf.structured(config)
  plain: Any = OmegaConf.create(_plain(tree))
  known = OmegaConf.select(plain, key, default=_MISSING)
  is_list = OmegaConf.is_config(known) and not OmegaConf.is_dict(known)
  if '[' not in key and not (is_list and OmegaConf.is_list(value)):
    nested = OmegaConf.create()
    OmegaConf.update(nested, key, value)
    merged: Any = OmegaConf.to_object(OmegaConf.merge(tree, nested))
    return merged
  # A list, whose element type is unknown to `merge`, or one element of it.
  if known is _MISSING:
    raise omegaconf_errors.ConfigKeyError(f"Key '{key}' is unknown")
  OmegaConf.update(plain, key, value)
  return _from_tree(_plain(plain) | {AGENT: config.agent_name})


def _plain(tree: Any) -> Any:
  return OmegaConf.to_container(tree)


_MISSING = object()
AGENT = 'agent_name'  # in config.yaml, beside the fields


def _explain(config: ExperimentConfig, key: str, value: str, error: Exception) -> str:
  first_line = str(error).split('\n')[0]
  if isinstance(error, omegaconf_errors.ConfigKeyError):
    if key in RENAMED:
      return f'{key}={value}: was renamed to {RENAMED[key]}'
    if key in REMOVED:
      return f'{key}={value}: is always {REMOVED[key]} now'
    if key in OLDER_NETWORK:
      return f'{key}={value}: was removed with the network that it belonged to; leave it out'
    known = sorted(flatten(_plain(OmegaConf.structured(config))))
    near = difflib.get_close_matches(key, known, n=3) or [
      name for name in known if name.rsplit('.', 1)[-1] == key.rsplit('.', 1)[-1]
    ]
    hint = f'did you mean {" or ".join(near)}?' if near else 'see config.yaml of a run for all keys'
    return f'{key}={value}: unknown key; {hint}'
  return f'{key}={value}: {first_line}'


def _from_tree(content: dict[str, Any]) -> ExperimentConfig:
  """A config from plain dictionaries; ValueError or TypeError for unknown keys and bad values."""
  values = dict(content)
  agent_kind, learner_kind = AGENTS[values.pop(AGENT, 'dreamer')]
  sections = {
    'agent': agent_kind,
    'learner': learner_kind,
    'actor': actor.ActorConfig,
    'evaluator': evaluator.EvaluatorConfig,
  }
  for section, kind in sections.items():
    values[section] = kind(**values[section])
  replay = dict(values['replay'])
  try:
    replay['strata'] = tuple(tables.Stratum(**stratum) for stratum in replay['strata'])
  except TypeError as error:  # not a mapping, or with other keys
    remedy = 'give a list such as [{name: episodic, max_size: 50000, share: 1.0}]'
    raise ValueError(f'replay.strata={replay["strata"]}: {remedy} ({error})') from None
  values['replay'] = tables.ReplayConfig(**replay)
  return ExperimentConfig(**values)


def to_yaml(config: ExperimentConfig) -> str:
  """The text of config.yaml."""
  content = _plain(OmegaConf.structured(config))
  if config.agent_name != 'dreamer':  # which is the default, for files of older versions
    content = {AGENT: config.agent_name} | content
  return OmegaConf.to_yaml(OmegaConf.create(content))


def save(config: ExperimentConfig, path: pathlib.Path) -> None:
  """Writes config.yaml."""
  temporary = path.with_suffix('.tmp')
  temporary.write_text(to_yaml(config))
  temporary.replace(path)


def load(path: pathlib.Path, *, to_inspect: bool = False) -> ExperimentConfig:
  """Reads config.yaml.

  Args:
    path: of the file.
    to_inspect: also accepts a run whose network is of an older version; its checkpoints do not fit.

  Raises:
    ValueError: it is not one.
  """
  return _load(path, str(path), to_inspect=to_inspect)


def from_yaml(text: str, name: str) -> ExperimentConfig:
  """The config in the text of a config.yaml; ValueError, with the name, when it is invalid."""
  return _load(io.StringIO(text), name)


def _load(
  file: pathlib.Path | io.StringIO, name: str, *, to_inspect: bool = False
) -> ExperimentConfig:
  try:
    content, outdated = _upgrade(_plain(OmegaConf.load(file)))
    config = _from_tree(content)
  except Exception as error:  # parsers raise many types for a broken file
    first_line = str(error).split('\n')[0]
    raise ValueError(f'{name}: is not a config of this version ({first_line})') from None
  if outdated and not to_inspect:
    raise ValueError(
      f'{name}: was made by an older version whose network differs ({outdated[0]}), so it can '
      'neither be resumed nor evaluated; it can still be inspected, with `hephaestus report` and '
      '`hephaestus inspect --sample N`'
    )
  return config


def _upgrade(content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
  """The content of a config.yaml under the keys of this version, and its keys in OLDER_NETWORK."""
  upgraded = {
    section: dict(values) if isinstance(values, dict) else values
    for section, values in content.items()
  }
  for old, new in RENAMED.items():
    section, name = old.split('.')
    if name in upgraded.get(section, {}):
      upgraded[section][new.split('.')[1]] = upgraded[section].pop(name)
  for old, only in REMOVED.items():
    section, name = old.split('.')
    value = upgraded.get(section, {}).pop(name, only)
    if value != only:
      raise ValueError(f'{old}={value!r}: is always {only!r} in this version')
  outdated = []
  for old in OLDER_NETWORK if upgraded.get(AGENT, 'dreamer') == 'dreamer' else ():
    section, name = old.split('.')
    if name in upgraded.get(section, {}):
      outdated.append(f'{old}={upgraded[section].pop(name)}')
  return upgraded, outdated


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
  """{'a': {'b': [1]}} to {'a.b[0]': 1}."""
  if isinstance(tree, dict):
    items = [(f'{prefix}.{key}' if prefix else key, value) for key, value in tree.items()]
  elif isinstance(tree, (list, tuple)):
    items = [(f'{prefix}[{index}]', value) for index, value in enumerate(tree)]
  else:
    return {prefix: tree}
  return {key: leaf for name, value in items for key, leaf in flatten(value, name).items()}


def conflicts(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
  """The keys that may not change when a run resumes but do, as 'key: old, new'."""
  if old.agent_name != new.agent_name:  # most keys would differ, which explains nothing
    return [f'--agent: the folder has {old.agent_name}, you gave {new.agent_name}']
  before, after = (flatten(_plain(OmegaConf.structured(config))) for config in (old, new))
  names = FREE + (FREE_OF_PPO if new.agent_name == 'ppo' else ())
  free = lambda key: any(key == name or key.startswith(f'{name}.') for name in names)
  return [
    f'{key}: the folder has {before.get(key)!r}, you gave {after.get(key)!r}'
    for key in sorted(before | after)
    if before.get(key) != after.get(key) and not free(key)
  ]
