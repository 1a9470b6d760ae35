"""Counts the environment steps that a run has taken, also those that replay lost when it was killed."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging

from hephaestus.replay import connection


class StepCounts(NamedTuple):
  """Environment steps of a run."""

  taken: int  # steps of all actors that replay has confirmed; never decreases
  lost: int  # the steps among them that replay no longer had when it was restarted


class Collected:
  """Counts environment steps by the sequences inserted into each shard, and those lost by restarts.

    taken = inserted now + lost        lost += inserted before − inserted now, where that is positive

  summed over the shards, in sequences of T - 1 environment steps each. A shard that does not answer
  counts as in its last answer.
  """

  def __init__(
    self,
    address: str | Sequence[str],
    name: str,
    *,
    stratum: str,
    steps_per_sequence: int,
    timeout_seconds: float = 5.0,
    file: pathlib.Path | None = None,
  ):
    """Sets up the connections and reads `file`; sends no request yet.

    Args:
      address: HOST:PORT of the replay server, or of each shard.
      name: name of the caller in log lines.
      stratum: name of the stratum whose inserts are counted.
      file: JSON file that keeps the counts over restarts of this process; None to keep none. ValueError
        if it holds something else.
    """
    self._links = connection.connect(address, name, timeout_seconds=timeout_seconds)
    self._stratum = stratum
    self._steps_per_sequence = steps_per_sequence
    self._file = file
    self._inserted = [0] * len(self._links)  # sequences, since each shard was restored
    self._lost = 0
    if file is not None and file.exists():
      try:
        saved = json.loads(file.read_text())
        self._inserted = [int(count) for count in saved['inserted']]
        self._lost = int(saved['lost'])
      except (ValueError, TypeError, KeyError):
        raise ValueError(f'{file}: does not hold counts of sequences; remove it') from None

  def __call__(self) -> StepCounts | None:
    """Asks all shards; returns the steps by now, or None if no shard answers."""
    inserted = list(self._inserted)
    answered = False
    lost = 0
    for shard, link in enumerate(self._links):
      infos = link.probe(1.0)
      if infos is None or self._stratum not in infos:
        continue
      answered = True
      inserted[shard] = infos[self._stratum].rate_limiter_info.insert_stats.completed
      lost += max(0, self._inserted[shard] - inserted[shard])
    if lost:
      logging.warning(
        'replay was restarted without %d environment steps', lost * self._steps_per_sequence
      )
    if inserted != self._inserted:
      self._inserted, self._lost = inserted, self._lost + lost
      self._save()
    return self.steps if answered else None

  @property
  def steps(self) -> StepCounts:
    """The steps of all shards as of their last answers; sends no request."""
    taken = (sum(self._inserted) + self._lost) * self._steps_per_sequence
    return StepCounts(taken, self._lost * self._steps_per_sequence)

  def _save(self) -> None:
    """Replaces the file; on a full disk the last one stays."""
    if self._file is None:
      return
    partial = self._file.with_name(f'.{self._file.name}.tmp')
    try:
      partial.write_text(json.dumps({'inserted': self._inserted, 'lost': self._lost}) + '\n')
      os.replace(partial, self._file)
    except OSError as error:
      logging.warning('%s: was not written (%s)', self._file, error)
