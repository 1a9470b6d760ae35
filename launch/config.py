"""ExperimentConfig, the config of a whole run: overrides of its values by path, and files of it."""

import dataclasses
import difflib
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf import errors as omegaconf_errors

from hephaestus.actors import config as actors_config
from hephaestus.actors import environments
from hephaestus.actors.environments import names
from hephaestus.launch import comments, records, safe_yaml
from hephaestus.replay import parameters, tables

AGENT, PRESET, WANDB, LOGGER = 'agent_name', 'preset', 'wandb', 'logger'
LARGEST = 2**63 - 1  # absolute value of a whole number
_plain: Callable[..., Any] = OmegaConf.to_container


def of_preset(agent: str, preset: str, environment: str) -> 'ExperimentConfig':
  """Makes the config of a preset, by names as given to `--agent`, `--preset` and `--env`.

  ValueError if there is no such agent, it has no such preset, or the preset is of another agent;
  ImportError if an import within the agent's module fails.
  """
  record = records.find_record(agent)
  if preset not in record.presets:
    raise ValueError(f'--preset {preset}: choose one of {", ".join(record.presets)}')
  config = record.presets[preset](environment)
  if config.agent_name != record.name:
    raise ValueError(
      f'agent_name={agent!r}: its preset {preset} is of {config.agent_name!r}; give {record.name!r} there'
    )
  return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbConfig:
  """Settings of reports to Weights & Biases (W&B); each node that logs metrics has a W&B run."""

  enabled: bool = False  # whether to report (--set wandb=true); needs the extra `wandb`
  project: str = 'hephaestus'  # name of the W&B project
  entity: str | None = None  # user or team that owns the project; null for the account's default
  name: str | None = None  # prefix of each W&B run's name, before the node's; null for none
  group: str | None = None  # W&B group of all nodes' runs; null for the name of the run's folder
  tags: tuple[str, ...] = ()  # labels of each W&B run, to filter by
  artifacts: bool = False  # whether to upload each checkpoint and video, too

  def __post_init__(self):
    object.__setattr__(self, 'tags', tuple(self.tags))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
  """Config of a whole run.

  Raises:
    ValueError: a value is impossible, or values contradict each other; names the key and a remedy.

  Attributes:
    agent_name: name of the agent, as given to `--agent`; see `records.find_record`.
    environment: key `name`: name of the environment; other keys: its options.
    agent: sizes and constants of the agent, of the class `config_class` of its record.
    replay: strata, replay ratio and servers of replay.
    learner: optimizers and periods of the learner, of the class `learner_class` of the agent's record.
    actor: number of actors, their environments and the length of their sequences.
    evaluator: when the agent is evaluated, and over how many episodes.
    seed: seed from which all random keys of the run derive.
    max_environment_steps: environment steps after which the run ends (--steps).
    max_minutes: minutes of training of this start, after which the run ends as well: a resumed run has them
      again; null for no limit.
    accelerator: whether the learner may use a GPU or TPU; all other nodes use the CPU.
    tensorboard: whether to write TensorBoard files, too.
    wandb: reports to Weights & Biases; off by default.
    logger: 'package.module:function' that makes a logger of your own for each node; null for none.
  """

  agent_name: str = records.DREAMER
  environment: dict[str, Any]
  agent: Any
  replay: tables.ReplayConfig
  learner: Any
  actor: actors_config.ActorConfig
  evaluator: actors_config.EvaluatorConfig
  seed: int = 0
  max_environment_steps: int = 1_000_000
  max_minutes: float | None = None
  accelerator: bool = True
  tensorboard: bool = True
  wandb: WandbConfig = WandbConfig()
  logger: str | None = None

  def __post_init__(self):
    for key, value in flatten(dataclasses.asdict(self)).items():
      # NaN passes every comparison below, and JSON has no infinities.
      if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
          f'{key}={value}: must be a finite number, such as 1e9 for a period that never ends'
        )
      if isinstance(value, int) and abs(value) > LARGEST:  # of which float or JAX may fail
        raise ValueError(f'{key}={str(value)[:24]}...: must be at most {LARGEST}')
    if not 0 <= self.seed < 2**32:  # JAX's keys would be those of the lower 32 bits
      raise ValueError(f'seed={self.seed}: must be at least 0, and below 2^32')
    if not 1 <= self.max_environment_steps <= parameters.MOST_STEPS:
      raise ValueError(
        f'max_environment_steps={self.max_environment_steps}: must be at least 1, and at most '
        f'{parameters.MOST_STEPS}'
      )
    if self.max_minutes is not None and self.max_minutes <= 0:
      raise ValueError(f'max_minutes={self.max_minutes}: must be positive, or null for no limit')
    name = self.environment.get('name')
    if not isinstance(name, str) or not name:
      raise ValueError(
        f'environment.name={name}: must be the name of an environment, such as catch'
      )
    record = self.record
    kinds = (self.agent, record.config_class), (self.learner, record.learner_class)
    if not all(isinstance(each, kind) for each, kind in kinds):
      given = f'{type(self.agent).__name__} and {type(self.learner).__name__}'
      raise ValueError(f'agent, learner: {given} do not belong together, or not to {record.name}')
    if getattr(self.learner, 'fused', False):
      if not record.can_fuse:
        raise ValueError(
          f'learner.fused=True: {self.agent_name} runs with actors of its own; use false'
        )
      if self.learner.num_processes > 1:
        raise ValueError(
          f'learner.num_processes={self.learner.num_processes}: a fused run is one process; use 1, or '
          'add --no-fused'
        )
    if not record.on_policy:
      tables.check(self.replay, self.learner.batch_per_process, self.actor.num_envs)
    elif not self.fused:
      self._check_queue()
    record.check(self)

  def _check_queue(self):
    stratum, batch_size = self.replay.limiting_stratum, self.batch_size
    count = self.learner.num_processes
    if batch_size % count:
      near = next(less for less in range(count, 0, -1) if batch_size % less == 0)
      raise ValueError(
        f'learner.num_processes={count}: the {batch_size} sequences of an update (actor.num_envs times '
        f'actor.num_actors) do not divide over so many; use {near}, or other numbers of those'
      )
    ahead = count * self.learner.in_flight(self.replay.max_in_flight, batch_size)
    # The greatest age of a sequence is 1 + (max_size + ahead) // batch_size updates.
    most = batch_size * self.learner.max_staleness - ahead - 1
    if stratum.max_size > most:
      raise ValueError(
        f'replay.strata.{stratum.name}.max_size={stratum.max_size}: sampled sequences would be older than '
        f'learner.max_staleness={self.learner.max_staleness} updates; for batches of {batch_size} '
        f'sequences use at most {most} ({max(1, batch_size // 2)} keeps it to one update)'
      )
    if not stratum.read_once:
      raise ValueError(
        f'replay.strata.{stratum.name}.read_once=False: an on-policy agent learns from each sequence '
        'once; use true'
      )

  @property
  def record(self) -> records.AgentRecord:
    """The agent's record: its classes, presets and update, found by `agent_name`."""
    return records.find_record(self.agent_name)

  @property
  def fused(self) -> bool:
    """Whether the run is one process, which compiles update, any replay and environments in JAX together."""
    return self.record.can_fuse and self.learner.fused

  @property
  def batch_size(self) -> int:
    """Number of sequences in a batch, over all devices; on-policy, one of each environment of the run."""
    if not self.record.on_policy:
      return self.learner.batch_size
    return self.actor.num_envs * (1 if self.fused else self.actor.num_actors)

  @property
  def steps_per_sequence(self) -> int:
    """Environment steps that a sequence of T time steps adds, T - 1: adjacent ones share a time step."""
    return self.actor.sequence_length - 1

  def make_environment(self):
    """Makes the run's environment; ValueError if its name, an option or a value is unknown.

    One that is stepped on the host is asked for its specs by the first call only, since an instance of
    it may be a program that starts slowly; the answers travel to the nodes with this config.
    """
    from hephaestus.actors.environments import host  # which imports JAX

    known = vars(self).get('_on_host')
    if known is not None:
      return known
    options = dict(self.environment)
    environment = environments.make(options.pop('name'), **options)
    if isinstance(environment, host.HostEnvironment):
      object.__setattr__(self, '_on_host', environment)
    return environment


# Keys that may change when a run resumes; others would not fit the checkpoints in its folder.
FREE = (
  'max_environment_steps', 'max_minutes', 'accelerator', 'tensorboard', 'wandb', 'logger',
  'evaluator',
  'replay.port', 'replay.timeout_seconds',
  'learner.publish_period', 'learner.log_period', 'learner.max_staleness',
  'learner.checkpoint_period', 'learner.checkpoint_updates', 'learner.keep', 'learner.num_processes',
  'learner.stuck_seconds',
  'actor.num_actors', 'actor.log_period',
)  # fmt: skip


def override(
  config: ExperimentConfig,
  assignments: Sequence[str],
  content: Mapping[str, Any] = MappingProxyType({}),
) -> ExperimentConfig:
  """Returns a copy of a config with some values replaced.

  All values are replaced before they are checked against each other.

  Args:
    assignments: texts 'key=value', such as 'agent.ensemble_size=3', 'replay.strata[0].max_size=256' or
      'replay.strata=[{name: episodic, max_size: 50000, share: 1.0}]'.
    content: values of a configuration file, nested or by path, without `agent_name`; they are
      applied before `assignments`.

  Raises:
    ValueError: a key is unknown (the message has the nearest known ones), or a value is invalid.
  """
  values = values_of(config)
  texts = {key: each for key, each in values.items() if isinstance(each, str) and '${' in each}
  given = [
    (key, str(value), lambda value=value: value)
    for key, value in (texts | _leaves(content)).items()
  ]
  for assignment in assignments:
    key, separator, text = assignment.partition('=')
    if not separator or not key:
      raise ValueError(f'{assignment!r}: write it as key=value, such as learner.batch_size=32')
    if key == AGENT:
      raise ValueError(
        f'{assignment}: cannot be set, since all other values depend on it; use --agent'
      )
    given.append((key, text, functools.partial(safe_yaml.parse_value, text)))
  tree: Any = OmegaConf.structured(config)
  for key, text, value in given:
    try:
      tree = _assign(tree, key, safe_yaml.literal(value()))
    except (
      omegaconf_errors.OmegaConfBaseException, yaml.YAMLError, RecursionError, TypeError
    ) as error:  # fmt: skip
      raise ValueError(_explain(config, key, text, error)) from None
  try:
    changed: Any = OmegaConf.to_object(tree)
  except omegaconf_errors.OmegaConfBaseException as error:  # some are ValueErrors, of several lines
    key = getattr(error, 'full_key', None) or 'the config'
    values = {name: f'{name}={text}' for name, text, _ in given}
    reason = str(error).split('\n')[0].rpartition("': ")[2]  # of what follows the escaped text
    raise ValueError(f'{values.get(key, key)}: {reason}') from None
  return changed


def _assign(tree: Any, key: str, value: Any) -> Any:
  """Returns a tree of OmegaConf with another value, which must fit the type of its key."""
  if key == WANDB and isinstance(value, bool):
    key = f'{WANDB}.enabled'
  if value == {} and '.' not in key:  # which would change nothing
    raise TypeError('is empty')
  whole, bracket, element = key.partition('[')
  if bracket:  # of a tuple, which is replaced as a whole
    listed = OmegaConf.create({'list': _plain(OmegaConf.select(tree, whole))})
    OmegaConf.update(listed, f'list[{element}', value)
    key, value = whole, _plain(listed)['list']
  if key == 'replay.strata' and isinstance(value, list | tuple):
    value = _strata(value)
  nested = OmegaConf.create()
  OmegaConf.update(nested, key, value)
  return OmegaConf.merge(tree, nested)


def _strata(values: Sequence[Any]) -> tuple[tables.Stratum, ...]:
  """Strata of replay by their values; ValueError, with an example, for other keys."""
  try:
    return tuple(tables.Stratum(**each) for each in values)
  except TypeError as error:
    remedy = 'give a list such as [{name: episodic, max_size: 50000, share: 1.0}]'
    raise ValueError(f'replay.strata={values}: {remedy} ({error})') from None


def _explain(config: ExperimentConfig, key: str, value: str, error: Exception) -> str:
  first_line = str(error).split('\n')[0]
  if isinstance(error, omegaconf_errors.ConfigKeyError):
    known = sorted(values_of(config))
    near = difflib.get_close_matches(key, known, n=3) or [
      name for name in known if name.rsplit('.', 1)[-1] == key.rsplit('.', 1)[-1]
    ]
    hint = f'did you mean {" or ".join(near)}?' if near else '`hephaestus config` prints all keys'
    return f'{key}={value}: unknown key; {hint}'
  try:
    known = OmegaConf.select(OmegaConf.create(_plain(OmegaConf.structured(config))), key)
  except omegaconf_errors.OmegaConfBaseException:  # such as strata[x]
    return (
      f'{key}={value}: no such key; an element of a list is written as replay.strata[0].max_size'
    )
  if OmegaConf.is_dict(known) and known:
    return f'{key}={value}: is a section; give its values, such as {key}.{next(iter(known))}'
  return f'{key}={value}: {first_line}'


def _from_tree(content: dict[str, Any]) -> ExperimentConfig:
  """Makes a config from the content of a config.yaml, see `to_tree`; any error if it is not one."""
  values = dict(content)
  record = records.find_record(values.get(AGENT, records.DREAMER))
  sections = {
    'agent': record.config_class,
    'learner': record.learner_class,
    'actor': actors_config.ActorConfig,
    'evaluator': actors_config.EvaluatorConfig,
    WANDB: WandbConfig,
  }
  if isinstance(values.get(WANDB, False), bool):  # by one word, as with --set wandb=true
    values[WANDB] = {'enabled': values.get(WANDB, False)}
  for section, kind in sections.items():
    values[section] = kind(**values[section])
  replay = values['replay'] | {'strata': _strata(values['replay']['strata'])}
  values['replay'] = tables.ReplayConfig(**replay)
  # It checks and converts the types of all values.
  return override(ExperimentConfig(**values), [])


def to_tree(config: ExperimentConfig) -> dict[str, Any]:
  """Converts a config to the content of config.yaml: nested dictionaries and lists of plain types."""
  content: dict[str, Any] = _plain(OmegaConf.structured(config))
  if config.agent_name == records.DREAMER:
    del content[AGENT]
  return content


def to_yaml(config: ExperimentConfig) -> str:
  """Converts a config to the text of config.yaml."""
  return OmegaConf.to_yaml(OmegaConf.create(to_tree(config)))


def save(config: ExperimentConfig, path: pathlib.Path) -> None:
  """Writes a config to `path`, usually config.yaml of a run, atomically."""
  temporary = path.with_suffix('.tmp')
  temporary.write_text(to_yaml(config))
  temporary.replace(path)


def load(path: pathlib.Path) -> ExperimentConfig:
  """Reads a config.yaml; imports an agent of its own only if trusted, see `records.trusting`.

  ValueError if it is no config of this version, or not trusted.
  """
  return _from_content(safe_yaml.read(path, str(path)), str(path))


def from_yaml(text: str, name: str) -> ExperimentConfig:
  """Does the same as `load` for a text; messages begin with `name`."""
  return _from_content(safe_yaml.parse(text, name), name)


def _from_content(content: Any, name: str) -> ExperimentConfig:
  try:
    environment = content.get('environment')
    given = environment.get('name') if isinstance(environment, dict) else None
    records.read_names((content.get(AGENT), given, content.get(LOGGER)), name)
    return _from_tree(content)
  except names.UntrustedError:
    raise
  except Exception as error:  # parsers raise many types for a broken file
    key, first_line = getattr(error, 'full_key', None), str(error).split('\n')[0]
    reason = f'{key}: {first_line}' if key else first_line
    raise ValueError(f'{name}: is not a config of this version ({reason})') from None


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
  """Flattens nested dictionaries and lists by path: {'a': {'b': [1]}} becomes {'a.b[0]': 1}."""
  found: dict[str, Any] = {}
  for name, value in _leaves(tree, prefix).items():
    if isinstance(value, list | tuple):
      for index, each in enumerate(value):
        found |= flatten(each, f'{name}[{index}]')
    else:
      found[name] = value
  return found


def values_of(config: ExperimentConfig) -> dict[str, Any]:
  """All values of a config by path."""
  return flatten(_plain(OmegaConf.structured(config)))


def _leaves(tree: Any, path: str = '') -> dict[str, Any]:
  """Flattens nested dictionaries by path; a list is a leaf."""
  if not isinstance(tree, Mapping):
    return {path: tree}
  items = [(f'{path}.{key}' if path else f'{key}', value) for key, value in tree.items()]
  return {key: leaf for name, value in items for key, leaf in _leaves(value, name).items()}


def conflicts(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
  """A line for each key that differs but may not change when a run resumes, see `FREE`; with both values."""
  if old.agent_name != new.agent_name:  # most keys would differ, which explains nothing
    return [f'--agent: the folder has {old.agent_name}, you gave {new.agent_name}']
  before, after = values_of(old), values_of(new)
  names = (*FREE, *new.record.free_keys)
  free = lambda key: any(key == name or key.startswith(f'{name}.') for name in names)
  return [
    f'{key}: the folder has {before.get(key)!r}, you gave {after.get(key)!r}'
    for key in sorted(before | after)
    if before.get(key) != after.get(key) and not free(key)
  ]


class ConfigFile(NamedTuple):
  """Content of a file of `--config`: names as of --preset, --agent and --env, and all other values by path."""

  preset: str | None = None
  agent: str | None = None
  env: str | None = None
  values: Mapping[str, Any] = {}


def read_partial(path: pathlib.Path) -> ConfigFile:
  """Reads a file of `--config`, which may be config.yaml of a run; ValueError if it is none."""
  content: Any = safe_yaml.read(path, f'--config {path}')
  if not isinstance(content, dict):
    raise ValueError(f'--config {path}: must be a mapping, as `hephaestus config` prints one')
  given = {key: content.pop(key, None) for key in (PRESET, AGENT)}
  for key, name in given.items():
    if not isinstance(name, str | None):
      raise ValueError(f'--config {path}: {key}={name}: must be a name')
  values = _leaves(content)
  env = values.pop('environment.name', None)
  records.read_names((given[AGENT], env, values.get(LOGGER)), f'--config {path}')
  return ConfigFile(given[PRESET], given[AGENT], env, values)


def to_commented_yaml(config: ExperimentConfig) -> str:
  """Converts a config to the text of a file for `--config`, with a comment on each key."""
  tree = {AGENT: config.agent_name, **to_tree(config)}
  text = OmegaConf.to_yaml(OmegaConf.create(tree))
  lines = text.splitlines()
  known = meanings(config)
  for key, line in _lines_of_keys(yaml.compose(text)):
    if key in known:
      lines[line] += f'  # {known[key]}'
  return '\n'.join(lines) + '\n'


def _lines_of_keys(node: yaml.Node, path: str = '') -> Iterator[tuple[str, int]]:
  """Yields (path, index of its line) of each key below a node."""
  if isinstance(node, yaml.MappingNode):
    for key, value in node.value:
      name = f'{path}.{key.value}' if path else key.value
      yield name, key.start_mark.line
      yield from _lines_of_keys(value, name)
  elif isinstance(node, yaml.SequenceNode):
    for index, value in enumerate(node.value):
      yield from _lines_of_keys(value, f'{path}[{index}]')


def meanings(config: Any, path: str = '') -> dict[str, str]:
  """Path of each field of a dataclass, which may hold others, also in lists -> its comment, see `comments.of`."""
  found, known = {}, comments.of(type(config))
  for field in dataclasses.fields(config):
    name = f'{path}.{field.name}' if path else field.name
    if field.name in known:
      found[name] = known[field.name]
    value = getattr(config, field.name)
    several = isinstance(value, list | tuple)
    for index, each in enumerate(value if several else [value]):
      if dataclasses.is_dataclass(each):
        found |= meanings(each, f'{name}[{index}]' if several else name)
  return found
