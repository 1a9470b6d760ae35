"""The last known statistics of the replay of a run that is not running, from its newest checkpoints."""

import pathlib
from collections.abc import Mapping
from typing import Any

from hephaestus.launch import config as launch_config
from hephaestus.launch.run import parts as parts_lib
from hephaestus.replay import inspector, tables


def of_replay(folder: pathlib.Path, config: launch_config.ExperimentConfig) -> dict[str, Any]:
  """Reads the counters of a run's replay from the newest checkpoint of each shard.

  Args:
    folder: folder of the run.
    config: config of the run.

  Returns:
    The keys of `inspector.Inspector.poll`, where rates, the limiter's state and memory are None; and
    'saved', unix seconds of the oldest of these checkpoints. 'tables' is empty and 'saved' is None
    without a checkpoint on this machine, and for an on-policy queue, which has none.
  """
  from hephaestus.replay import contents  # TensorFlow and Reverb

  folders = parts_lib.replay_folders(folder, config.replay.num_shards)
  found = [] if config.record.on_policy else [contents.counts(each) for each in folders]
  saved = [each for each in found if each is not None]
  shards = [{} if each is None else _tables(each.tables) for each in found]
  total = inspector.summed([each for each in shards if each])
  return {
    'tables': total,
    'replay_ratio': _ratio(config.replay, total),
    'limiter': None,
    'memory': {'sequences': None, 'server': None},
    'shards': [{'address': '-', 'alive': False, 'tables': each} for each in shards],
    'seconds': None,
    'saved': min((each.saved for each in saved), default=None),
  }


def _tables(counts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Entries of 'tables' as of `inspector.Inspector.poll`, without rates."""
  unknown = {'bytes': None, 'inserts_per_second': None, 'samples_per_second': None}
  return {
    name: each._asdict()
    | {
      'fill': each.size / each.max_size,
      'unique_share': each.unique_sampled / each.inserted if each.inserted else None,
      'worker_time': dict.fromkeys(inspector.WORKER_STATES, 0.0),
      **unknown,
    }
    for name, each in counts.items()
  }


def _ratio(
  config: tables.ReplayConfig, total: Mapping[str, Mapping[str, Any]]
) -> dict[str, float | None]:
  sampled = sum(row['sampled'] for name, row in total.items() if name != tables.PARAMS)
  limiting = total.get(config.limiting_stratum.name)
  inserted = 0 if limiting is None else limiting['inserted']
  return {
    'configured': config.replay_ratio,
    'achieved': sampled / max(1, inserted - config.warm_up),
    'recent': None,
  }
