"""Groups of runs that form one curve, such as several seeds of one config, and their labels."""

import collections
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hephaestus.launch.files import history

# Config keys that may differ between the runs of one curve. They do not change learning, but only when
# and where metrics are written.
INDIFFERENT = (
  'seed', 'max_minutes', 'tensorboard', 'wandb', 'logger', 'replay.port', 'replay.timeout_seconds',
  'learner.log_period', 'learner.checkpoint_period', 'learner.checkpoint_updates',
  'actor.log_period', 'evaluator.period', 'evaluator.period_steps', 'evaluator.video_period',
)  # fmt: skip
INDIFFERENT_OF_FUSED = (
  'learner.max_staleness', 'learner.publish_period', 'replay.max_in_flight', 'replay.num_shards',
)  # fmt: skip
MAX_KEYS = 3  # most config keys in a label that is not the user's


class Group(NamedTuple):
  """Runs that form one curve."""

  label: str  # what sets it apart from the others, unique in its environment
  environment: str  # name, of all its runs
  runs: list[history.History]


def read(given: Iterable[pathlib.Path], *, whole: bool = False) -> tuple[list[Group], list[str]]:
  """Opens runs, finished or running, and groups them into curves.

  Within an environment, runs form a group that differ only in their seed, or in other config keys that do
  not change learning, and that began with the same parameters.

  Args:
    given: folder of each run, once or repeated.
    whole: whether to read all their metrics, and to leave out runs without any.

  Returns:
    The groups in the order of their first runs, groups of one environment adjacent; and a line for each
    folder that is left out. ValueError if there is no run.
  """
  known: dict[pathlib.Path, pathlib.Path] = {}
  for folder in given:
    known.setdefault(folder.resolve(), folder)
  runs, left_out = [], []
  for folder in known.values():
    try:
      run = history.History(folder)
      if whole:
        run.read()
        if not any(map(run.names, history.NODES)):
          raise ValueError(f'{folder}: has no metrics yet; {run.damage or "wait for its nodes"}')
      runs.append(run)
    except ValueError as error:
      left_out.append(f'left out: {error}')
  if not runs:
    raise ValueError('; '.join(left_out) or 'no runs are given; name their folders')
  return _grouped(runs), left_out


def _grouped(runs: Sequence[history.History]) -> list[Group]:
  found: list[Group] = []
  for environment in dict.fromkeys(run.config.environment['name'] for run in runs):
    members: dict[Any, list[history.History]] = collections.defaultdict(list)
    for run in runs:
      if run.config.environment['name'] == environment:
        key = run.config.agent_name, run.origin, json.dumps(_values(run), sort_keys=True)
        members[key].append(run)
    labels = _labels([each[0] for each in members.values()])
    found += map(Group, labels, [environment] * len(members), members.values())
  return found


def differences(runs: Sequence[history.History]) -> dict[str, list[Any]]:
  """Config values in which runs differ: {PATH: [the value of each run, None where it has none]}.

  For runs of several agents these are the values that all of them have, and options of environments.
  """
  flat = [each.config_values for each in runs]
  one_agent = len({each.config.agent_name for each in runs}) == 1
  found = {}
  for key in dict.fromkeys(key for each in flat for key in each):
    if one_agent or key.startswith('environment.') or all(key in each for each in flat):
      values = [each.get(key) for each in flat]
      if any(value != values[0] for value in values):
        found[key] = values
  return found


def _values(run: history.History) -> dict[str, Any]:
  """Config values that a run's curve depends on, by path, and the run with which it began: `--from`."""
  names = [*INDIFFERENT, *run.config.record.indifferent_keys]
  if run.config.fused:
    names += INDIFFERENT_OF_FUSED
    names += ['replay'] * run.config.record.on_policy
  starts = tuple(f'{name}.' for name in names)
  values = {
    key: value for key, value in run.config_values.items() if not f'{key}.'.startswith(starts)
  }
  return values | {'from': 'nothing' if run.origin is None else pathlib.Path(run.origin).name}


def _labels(runs: Sequence[history.History]) -> list[str]:
  """A label for each run that tells it apart: the agent, `key=value` of a few differences, or a number."""
  labels: list[str] = []
  for run in runs:
    own = _values(run)
    rivals = [_values(each) for each in runs if each.config.agent_name == run.config.agent_name]
    keys = [  # that all of them have
      key
      for key, value in own.items()
      if all(key in each for each in rivals) and any(each[key] != value for each in rivals)
    ]
    lasts = [key.rpartition('.')[2] for key in keys]
    parts = [
      f'{key if lasts.count(last) > 1 else last}='
      + (own[key] if isinstance(own[key], str) else json.dumps(own[key]))
      for key, last in zip(keys[:MAX_KEYS], lasts, strict=False)
    ]
    words = [run.config.agent_name] if len(rivals) < len(runs) or not parts else []
    label = ' '.join([*words, ', '.join(parts + ['…'] * (len(keys) > MAX_KEYS))]).strip()
    count = sum(each.partition(' (')[0] == label for each in labels)
    labels.append(f'{label} ({count + 1})' if count else label)
  return labels
