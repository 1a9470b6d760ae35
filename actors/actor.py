"""The Actor node: fetch parameters, unroll, write."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from absl import logging
from acme.utils.loggers import base as loggers

from hephaestus.actors import rollout
from hephaestus.replay import inspector, parameters
from hephaestus.replay import writer as writer_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
  """How many act, and how long.

  Raises:
    ValueError: a number that cannot work, named with its field.
  """

  num_actors: int = 1  # processes
  num_envs: int = 16  # of each actor
  sequence_length: int = 32  # rows T; a sequence takes T - 1 steps of its environment
  log_period: float = 5.0  # seconds

  def __post_init__(self):
    for name, least in (('num_actors', 1), ('num_envs', 1), ('sequence_length', 2)):
      if getattr(self, name) < least:
        raise ValueError(f'actor.{name}={getattr(self, name)!r}: must be at least {least}')
    if self.sequence_length > 1024:
      raise ValueError(
        f'actor.sequence_length={self.sequence_length}: must be at most 1024; a longer one is '
        'differentiated through as a whole and would not fit'
      )
    if self.log_period <= 0:
      raise ValueError(f'actor.log_period={self.log_period!r}: must be positive seconds')


class Profiler(Protocol):
  """Traces some unrolls."""

  def reach(self, step: int) -> None:
    """Is told the version of the parameters before each unroll."""

  def close(self, step: int) -> None:
    """Ends the trace."""


class Actor:
  """Plays N environments with the newest parameters, and writes what happened.

  Owns nothing that cannot be lost: killed, it begins new episodes.

  Args:
    unroll: the compiled play.
    source: of acting parameters.
    writer: of sequences.
    logger: of this node's numbers.
    environment_step: steps collected so far by all actors, None while replay does not answer.
    should_stop: whether the node was asked to stop.
    config: numbers of the node.
    actor_id: which actor this is.
    seed: of the run.
    launch_id: of this launch; final parameters of an older one do not end this one.
    profiler: traces some of it; None for nothing.
  """

  def __init__(
    self,
    *,
    unroll: rollout.Unroll,
    source: parameters.Source,
    writer: writer_lib.Writer,
    logger: loggers.Logger,
    environment_step: Callable[[], int | None],
    should_stop: Callable[[], bool],
    config: ActorConfig,
    actor_id: int,
    seed: int,
    launch_id: int,
    profiler: Profiler | None = None,
  ):
    self._unroll = unroll
    self._source = source
    self._writer = writer
    self._logger = logger
    self._environment_step = environment_step
    self._should_stop = should_stop
    self._config = config
    self._actor_id = actor_id
    self._seed = seed
    self._launch_id = launch_id
    self._profiler = profiler
    self._newest: parameters.Snapshot | None = None

  def run(self) -> None:
    """Acts until the learner has ended, or the node is asked to stop."""
    snapshot = self._newest = wait_for_parameters(self._source, self._should_stop)
    if snapshot is None:
      return
    # With the version in it, an actor that is started again does not repeat what it did.
    key = jax.random.key(self._seed)
    for number in (self._actor_id, snapshot.version):
      key = jax.random.fold_in(key, number)
    key, init_key = jax.random.split(key)
    state = self._unroll.init(init_key)
    params = jax.device_put(snapshot.params)
    window = _Window()
    while not self._is_over():
      newest = self._newest
      if newest is not None and newest is not snapshot:
        snapshot, params = newest, jax.device_put(newest.params)
      key, unroll_key = jax.random.split(key)
      if self._profiler is not None:
        self._profiler.reach(snapshot.version)
      version = np.int32(snapshot.version)
      began = time.monotonic()
      state, sequence, episodes = self._unroll.unroll(
        params, unroll_key, state, version, np.int32(self._actor_id)
      )
      host_sequence, episodes = jax.device_get((sequence, episodes))
      unrolled = time.monotonic()
      with jax.profiler.TraceAnnotation('write to replay'):
        throttled = self._writer.write(host_sequence, self._is_over)
      window.unrolled += unrolled - began
      window.throttled += throttled
      window.inserted += max(0.0, time.monotonic() - unrolled - throttled)
      window.add(episodes, self._config)
      if time.monotonic() - window.start > self._config.log_period:
        self._logger.write(window.report(self._environment_step(), snapshot.version))
        window = _Window()
    if self._profiler is not None:
      self._profiler.close(snapshot.version)
    self._writer.close()
    self._logger.close()

  def _is_over(self) -> bool:
    """Whether to stop; looks for parameters, so that whoever is held back also sees the last."""
    if self._should_stop():
      return True
    self._newest = self._source.newest(timeout_seconds=1.0) or self._newest
    return self._newest is not None and self._newest.ended_launch == self._launch_id


def wait_for_parameters(
  source: parameters.Source, should_stop: Callable[[], bool]
) -> parameters.Snapshot | None:
  """The first snapshot, or None when the node was asked to stop before."""
  logging.info('Waiting for parameters.')
  while not should_stop():
    snapshot = source.newest(timeout_seconds=1.0)
    if snapshot is not None:
      return snapshot
    time.sleep(0.2)
  return None


class _Window:
  """What is measured between two reports."""

  def __init__(self):
    self.start = time.monotonic()
    self.unrolled = self.throttled = self.inserted = 0.0  # seconds
    self._steps = 0
    self._returns: list[np.ndarray] = []
    self._lengths: list[np.ndarray] = []

  def add(self, episodes: rollout.Episodes, config: ActorConfig) -> None:
    self._steps += config.num_envs * (config.sequence_length - 1)
    ended = np.asarray(episodes.ended)
    self._returns.append(np.asarray(episodes.episode_return)[ended])
    self._lengths.append(np.asarray(episodes.episode_length)[ended])

  def report(self, environment_step: int | None, version: int) -> dict[str, Any]:
    elapsed = time.monotonic() - self.start
    returns, lengths = np.concatenate(self._returns), np.concatenate(self._lengths)
    share = lambda seconds: min(1.0, seconds / elapsed)
    return {
      'environment_step': environment_step,
      'episode_return': float(returns.mean()) if returns.size else None,
      'episode_length': float(lengths.mean()) if lengths.size else None,
      **{
        f'episode_return/{quantile}': value
        for quantile, value in (inspector.quantiles(returns) or {}).items()
      },
      'episodes': int(returns.size),
      'parameter_version': version,
      'steps_per_second': self._steps / elapsed,
      'unrolled_fraction': share(self.unrolled),
      'throttled_fraction': share(self.throttled),
      'inserted_fraction': share(self.inserted),
    }
