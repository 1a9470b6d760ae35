"""ExperimentConfig: one config per room, overrides by path, and the file that a run keeps of it."""

import dataclasses
import difflib
import pathlib
from typing import Any

from omegaconf import OmegaConf
from omegaconf import errors as omegaconf_errors

from actors import actor, environments, evaluator
from agents.dreamer import config as dreamer_config
from learner import config as learner_config
from replay import tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
  """A whole run.

  Attributes:
    environment: `name`, and options of that world.
    agent: the agent.
    replay: how experience is kept.
    learner: the learner's loop and optimizers.
    actor: how experience is made.
    evaluator: how the agent is scored.
    seed: every key of the run comes from it.
    max_environment_steps: the run ends when so many have been collected by all actors.
    max_minutes: of learning, after which the run ends as well; None for no limit.
    accelerator: whether the learner may take one; every other node keeps to the CPU.
    tensorboard: also write TensorBoard files.
    wandb: also report to Weights & Biases; needs the extra of that name.
  """

  environment: dict[str, Any]
  agent: dreamer_config.DreamerConfig
  replay: tables.ReplayConfig
  learner: learner_config.LearnerConfig
  actor: actor.ActorConfig
  evaluator: evaluator.EvaluatorConfig
  seed: int = 0
  max_environment_steps: int = 1_000_000
  max_minutes: float | None = None
  accelerator: bool = True
  tensorboard: bool = True
  wandb: bool = False

  def __post_init__(self):
    if self.max_environment_steps < 1:
      raise ValueError(f'max_environment_steps={self.max_environment_steps}: must be at least 1')
    if self.max_minutes is not None and self.max_minutes <= 0:
      raise ValueError(f'max_minutes={self.max_minutes}: must be positive, or null for no limit')
    if 'name' not in self.environment:
      raise ValueError('environment.name: is missing; give the name of a world')
    tables.check(self.replay, self.learner.batch_size, self.actor.num_worlds)
    rows = self.agent.dream_rows
    if rows is not None and rows > self.actor.sequence_length:
      raise ValueError(
        f'agent.dream_rows={rows}: must be at most actor.sequence_length='
        f'{self.actor.sequence_length}'
      )

  @property
  def steps_per_sequence(self) -> int:
    """Steps of a world that one stored sequence stands for: adjacent ones share a row."""
    return self.actor.sequence_length - 1

  def make_environment(self):
    """The world; ValueError for an unknown name, option or impossible value."""
    options = dict(self.environment)
    return environments.make(options.pop('name'), **options)


# What may change between two runs on one folder; all else would not fit what the folder holds.
FREE = (
  'max_environment_steps', 'max_minutes', 'accelerator', 'tensorboard', 'wandb', 'evaluator',
  'replay.port', 'replay.timeout_seconds',
  'learner.publish_period', 'learner.log_period', 'learner.checkpoint_period',
  'actor.num_actors', 'actor.log_period',
)  # fmt: skip


def override(config: ExperimentConfig, assignments: list[str]) -> ExperimentConfig:
  """A config with some values replaced.

  Args:
    config: to begin with.
    assignments: such as 'agent.ensemble_size=3', 'environment.size=8' or
      'replay.strata[0].max_size=256'.

  Raises:
    ValueError: an unknown key, with the nearest known ones, or a value that cannot be.
  """
  for assignment in assignments:
    key, separator, value = assignment.partition('=')
    if not separator or not key:
      raise ValueError(f'{assignment!r}: write it as key=value, such as learner.batch_size=32')
    try:
      config = _assign(config, key, OmegaConf.from_dotlist([f'value={value}']).value)
    except omegaconf_errors.OmegaConfBaseException as error:
      raise ValueError(_explain(config, key, value, error)) from None
  return config


def _assign(config: ExperimentConfig, key: str, value: Any) -> ExperimentConfig:
  tree: Any = OmegaConf.structured(config)
  if '[' not in key:
    nested = OmegaConf.create()
    OmegaConf.update(nested, key, value)
    merged: Any = OmegaConf.to_object(OmegaConf.merge(tree, nested))
    return merged
  # One element of a list, which merging could only replace as a whole.
  plain: Any = OmegaConf.create(_plain(tree))
  if OmegaConf.select(plain, key, default=_MISSING) is _MISSING:
    raise omegaconf_errors.ConfigKeyError(f"Key '{key}' not in it")
  OmegaConf.update(plain, key, value)
  return _from_tree(_plain(plain))


def _plain(tree: Any) -> Any:
  return OmegaConf.to_container(tree)


_MISSING = object()


def _explain(config: ExperimentConfig, key: str, value: str, error: Exception) -> str:
  first_line = str(error).split('\n')[0]
  if isinstance(error, omegaconf_errors.ConfigKeyError):
    known = sorted(flatten(_plain(OmegaConf.structured(config))))
    near = difflib.get_close_matches(key, known, n=3) or [
      name for name in known if name.rsplit('.', 1)[-1] == key.rsplit('.', 1)[-1]
    ]
    hint = f'did you mean {" or ".join(near)}?' if near else 'see config.yaml of a run for all keys'
    return f'{key}={value}: unknown key; {hint}'
  return f'{key}={value}: {first_line}'


def _from_tree(content: dict[str, Any]) -> ExperimentConfig:
  """A config from plain dictionaries; every key must be known, and every value must work."""
  rooms = {
    'agent': dreamer_config.DreamerConfig,
    'learner': learner_config.LearnerConfig,
    'actor': actor.ActorConfig,
    'evaluator': evaluator.EvaluatorConfig,
  }
  values = dict(content)
  for room, kind in rooms.items():
    values[room] = kind(**values[room])
  replay = dict(values['replay'])
  replay['strata'] = tuple(tables.Stratum(**stratum) for stratum in replay['strata'])
  values['replay'] = tables.ReplayConfig(**replay)
  return ExperimentConfig(**values)


def save(config: ExperimentConfig, path: pathlib.Path) -> None:
  """Writes config.yaml."""
  temporary = path.with_suffix('.tmp')
  temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
  temporary.replace(path)


def load(path: pathlib.Path) -> ExperimentConfig:
  """Reads config.yaml.

  Raises:
    ValueError: it is not one.
  """
  try:
    return _from_tree(_plain(OmegaConf.load(path)))
  except Exception as error:  # whatever a broken or foreign file makes a reader raise
    first_line = str(error).split('\n')[0]
    raise ValueError(f'{path}: is no configuration of this version ({first_line})') from None


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
  """The keys in which a run may not differ from what its folder was made by, as 'key: old, new'."""
  before, after = (flatten(_plain(OmegaConf.structured(config))) for config in (old, new))
  free = lambda key: any(key == name or key.startswith(f'{name}.') for name in FREE)
  return [
    f'{key}: the folder has {before.get(key)!r}, you gave {after.get(key)!r}'
    for key in sorted(before | after)
    if before.get(key) != after.get(key) and not free(key)
  ]
