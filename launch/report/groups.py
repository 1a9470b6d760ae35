"""Groups of runs that form one curve, such as several seeds of one config, and their labels."""

import collections
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from hephaestus.launch.files import history

# Config keys that may differ between the runs of one curve. They do not change learning, but only when
# and where metrics are written.
INDIFFERENT = (
  'seed', 'max_minutes', 'tensorboard', 'wandb', 'replay.port', 'replay.timeout_seconds',
  'learner.log_period', 'learner.checkpoint_period', 'learner.checkpoint_updates',
  'actor.log_period', 'evaluator.period', 'evaluator.period_steps', 'evaluator.video_period',
)  # fmt: skip
INDIFFERENT_OF_FUSED = (
  'learner.max_staleness', 'learner.publish_period', 'replay.max_in_flight', 'replay.num_shards',
)  # fmt: skip
MAX_KEYS = 3  # most config keys in a label that is not the user's


class Group(NamedTuple):
  """Runs that form one curve.

  Attributes:
    label: name of the group, unique in its environment.
    environment: name of the environment of all its runs.
    runs: its runs.
  """

  label: str
  environment: str
  runs: list[history.History]


def make(
  histories: Sequence[history.History], labels: Sequence[str | None] | None = None
) -> list[Group]:
  """Groups runs into curves.

  Within an environment, runs with the same label from the user form a group, and so do runs without a
  label that differ only in their seed, or in other config keys that do not change learning.

  Args:
    histories: the runs.
    labels: the user's label of each run, or None; None for no labels at all.

  Returns:
    The groups in the order of their first runs; groups of one environment are adjacent.

  Raises:
    ValueError: two groups of an environment have the same label.
  """
  given = labels or [None] * len(histories)
  found: list[Group] = []
  for environment in dict.fromkeys(run.environment for run in histories):
    members: dict[Any, list[history.History]] = collections.defaultdict(list)
    for label, run in zip(given, histories, strict=True):
      if run.environment == environment:
        key = label or (run.config.agent_name, json.dumps(_values(run), sort_keys=True))
        members[key].append(run)
    unlabelled = [key for key in members if not isinstance(key, str)]
    names = dict(zip(unlabelled, _labels([members[key][0] for key in unlabelled]), strict=True))
    all_names = [names.get(key, key) for key in members]
    for name in all_names:
      if all_names.count(name) > 1:
        raise ValueError(f'--label {name}: is the name of another curve, too; give another')
    found += map(Group, all_names, [environment] * len(members), members.values())
  return found


def differences(histories: Sequence[history.History]) -> dict[str, list[Any]]:
  """Config values in which runs differ: {PATH: [the value of each run, None where it has none]}.

  For runs of several agents these are the values that all of them have, and options of environments.
  """
  flat = [each.config_values for each in histories]
  keys = dict.fromkeys(key for each in flat for key in each)
  if len({each.config.agent_name for each in histories}) > 1:
    keys = {
      key: None
      for key in keys
      if key.startswith('environment.') or all(key in each for each in flat)
    }
  values = {key: [each.get(key) for each in flat] for key in keys}
  return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _is_indifferent(key: str, run: history.History) -> bool:
  """Whether a run's curve does not depend on the config key at this path."""
  names = [*INDIFFERENT, *run.config.record.indifferent_keys]
  if run.config.fused:
    names += INDIFFERENT_OF_FUSED
    names += ['replay'] * run.config.record.on_policy
  return any(key == name or key.startswith(f'{name}.') for name in names)


def _values(run: history.History) -> dict[str, Any]:
  """Config values that a run's curve depends on, by path."""
  return {key: value for key, value in run.config_values.items() if not _is_indifferent(key, run)}


def _kinds(values: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
  """Number of different configs, compared only by `keys`."""
  return len({tuple(str(each.get(key)) for key in keys) for each in values})


def _differing(runs: Sequence[history.History]) -> list[str]:
  """Paths of the config keys that differ between runs and change their curves."""
  values = [_values(run) for run in runs]
  known = dict.fromkeys(key for each in values for key in each)
  keys = [key for key in known if _kinds(values, [key]) > 1]
  # A key that one run does not use is no difference, unless it is needed to tell runs apart.
  of_all = [key for key in keys if not any(_is_indifferent(key, run) for run in runs)]
  return of_all if _kinds(values, of_all) == _kinds(values, keys) else keys


def _labels(runs: Sequence[history.History]) -> list[str]:
  """A label for each run that tells it apart: the agent, and a few `key=value`."""
  labels = []
  for run in runs:
    rivals = [each for each in runs if each.config.agent_name == run.config.agent_name]
    keys = _differing(rivals)
    shown = keys
    if len(keys) > MAX_KEYS:
      shown = _separating_keys([_values(each) for each in rivals], keys)
    parts = [f'{_short(key, keys)}={_plain(_values(run).get(key))}' for key in shown]
    parts += ['…'] * (len(shown) < len(keys))
    words = [run.config.agent_name] if len(rivals) < len(runs) or not parts else []
    labels.append(' '.join([*words, ', '.join(parts)]).strip())
  return labels


def _separating_keys(values: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
  """A few keys that tell all configs apart, chosen greedily by the number of different ones."""
  chosen: list[str] = []
  while _kinds(values, chosen) < _kinds(values, keys):
    chosen.append(max(keys, key=lambda key: _kinds(values, [*chosen, key])))
  return chosen


def _short(key: str, keys: Sequence[str]) -> str:
  """The last part of a path, or the whole path if another one ends with the same part."""
  last = key.rsplit('.', 1)[-1]
  return key if [other.rsplit('.', 1)[-1] for other in keys].count(last) > 1 else last


def _plain(value: Any) -> str:
  """A config value as text: JSON, but text without quotes."""
  return value if isinstance(value, str) else json.dumps(value)
