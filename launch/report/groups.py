"""Groups runs into curves, and labels each curve by the config keys that tell it from the others."""

import collections
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf

from hephaestus.launch import config as launch_config
from hephaestus.launch.files import history

Numbers = TypeVar('Numbers')
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
INDIFFERENT_OF_FUSED_ON_POLICY = (*INDIFFERENT_OF_FUSED, 'replay')
MAX_KEYS = 3  # most config keys in a label that is not the user's


def _is_indifferent(key: str, run: history.History) -> bool:
  """Whether a run's curve does not depend on the config key at this path."""
  names = [*INDIFFERENT, *run.config.record.indifferent_keys]
  if run.config.fused:
    on_policy = run.config.record.on_policy
    names += INDIFFERENT_OF_FUSED_ON_POLICY if on_policy else INDIFFERENT_OF_FUSED
  return any(key == name or key.startswith(f'{name}.') for name in names)


def config_values(run: history.History) -> dict[str, Any]:
  """Config values that a run's curve depends on, by path."""
  values = launch_config.flatten(OmegaConf.to_container(OmegaConf.structured(run.config)))
  return {key: value for key, value in values.items() if not _is_indifferent(key, run)}


def _kinds(values: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
  """Number of different configs, compared by `keys` alone."""
  return len({tuple(str(each.get(key)) for key in keys) for each in values})


def differing(runs: Sequence[history.History]) -> list[str]:
  """Paths of the config keys that differ between runs and change their curves."""
  values = [config_values(run) for run in runs]
  known = dict.fromkeys(key for each in values for key in each)
  keys = [key for key in known if _kinds(values, [key]) > 1]
  # A key that one run does not use is no difference, unless it is needed to tell runs apart.
  of_all = [key for key in keys if not any(_is_indifferent(key, run) for run in runs)]
  return of_all if _kinds(values, of_all) == _kinds(values, keys) else keys


def grouped(
  found: Sequence[tuple[str | None, history.History, Numbers]],
) -> list[tuple[str, list[tuple[history.History, Numbers]]]]:
  """Groups the runs of one environment into curves.

  Runs with the same label from the user form a group, and so do runs without a label that differ in
  their seed alone.

  Args:
    found: each run with the user's label or None, and any data of it.

  Returns:
    The label of each group, with its runs and their data, in the order of their first runs.

  Raises:
    ValueError: two curves have the same label.
  """
  groups: dict[Any, list[tuple[history.History, Numbers]]] = collections.defaultdict(list)
  for label, run, numbers in found:
    key = label or (run.config.agent_name, json.dumps(config_values(run), sort_keys=True))
    groups[key].append((run, numbers))
  unlabelled = {key: group[0][0] for key, group in groups.items() if not isinstance(key, str)}
  made = _labels(list(unlabelled.values()))
  labels = {key: key if isinstance(key, str) else '' for key in groups}
  labels.update(zip(unlabelled, made, strict=True))
  for label in labels.values():
    if list(labels.values()).count(label) > 1:
      raise ValueError(f'--label {label}: is the name of another curve, too; give another')
  return [(labels[key], group) for key, group in groups.items()]


def _labels(runs: Sequence[history.History]) -> list[str]:
  """A label for each run that tells it apart: the agent, and a few `key=value`."""
  labels = []
  for run in runs:
    rivals = of_agent(runs, run.config.agent_name)
    keys = differing(rivals)
    shown = (
      keys
      if len(keys) <= MAX_KEYS
      else _separating_keys([config_values(each) for each in rivals], keys)
    )
    parts = [f'{_short(key, keys)}={plain(config_values(run).get(key))}' for key in shown]
    if len(shown) < len(keys):
      parts.append('…')
    words = [run.config.agent_name] if len(rivals) < len(runs) or not parts else []
    labels.append(' '.join([*words, ', '.join(parts)]).strip())
  return labels


def of_agent(runs: Sequence[history.History], name: str) -> list[history.History]:
  """The runs of the agent of this name."""
  return [run for run in runs if run.config.agent_name == name]


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


def plain(value: Any) -> str:
  """A config value as text: JSON, but text without quotes."""
  return value if isinstance(value, str) else json.dumps(value)
