"""The Actor node: fetches parameters, unrolls environments, writes sequences to replay."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from absl import logging

from hephaestus.actors import config as actors_config
from hephaestus.actors import rollout
from hephaestus.replay import inspector, parameters
from hephaestus.replay import writer as writer_lib


class Profiler(Protocol):
  """A profiler that traces some unrolls."""

  def reach(self, step: int) -> None:
    """Begins the trace at the first step (version of the params) to trace, or ends it after the last."""

  def close(self, step: int) -> None:
    """Ends the trace if one has begun."""


class Identity(NamedTuple):
  """Which actor of which run this is."""

  actor_id: int  # number of this actor, stored with its sequences
  seed: int  # seed of the run, for the actor's PRNG key
  # ID of this launch of the run; each launch of a resumed run has another. The actor ends at the
  # final parameters of this launch, not at the parameters of an older one.
  launch_id: int


class ReplayConnections(NamedTuple):
  """An actor's connections to replay."""

  source: parameters.Subscription  # fetches acting parameters
  writer: writer_lib.Writer  # inserts sequences
  # returns the number of environment steps that all actors have collected; None while replay does
  # not answer
  environment_step: Callable[[], int | None]


class Logger(Protocol):
  """A writer of metrics."""

  def write(self, data: Mapping[str, Any]) -> None:
    """Writes one record of metrics: name -> number, string, or a tree of them."""

  def close(self) -> None:
    """Frees its resources; no other call follows."""


class Actor:
  """Steps parallel environments with the newest parameters, and writes the sequences to replay.

  It has no checkpoint: after a crash, the restarted actor begins new episodes. It closes its logger.
  """

  def __init__(
    self,
    *,
    unroll: rollout.Unroll,
    replay: ReplayConnections,
    identity: Identity,
    config: actors_config.ActorConfig,
    logger: Logger,
    should_stop: Callable[[], bool],
    profiler: Profiler | None = None,
  ):
    self._unroll = unroll
    self._replay = replay
    self._identity = identity
    self._config = config
    self._logger = logger
    self._should_stop = should_stop
    self._profiler = profiler
    self._newest: parameters.Snapshot | None = None

  def run(self) -> None:
    """Acts until the learner has published its final parameters, or the node is asked to stop."""
    try:
      self._act()
    except rollout.StoppedError:
      logging.info('Stopped within a sequence.')
    finally:
      self._unroll.close()
    self._replay.writer.close()
    self._logger.close()

  def _act(self) -> None:
    snapshot = self._newest = wait_for_parameters(self._replay.source, self._should_stop)
    if snapshot is None:
      return
    # The version and the environment steps are folded in, so that a restarted actor does not repeat its
    # episodes, even if no newer parameters were published since its start.
    key = jax.random.key(self._identity.seed)
    steps = (self._replay.environment_step() or 0) % (1 << 32)
    for number in (self._identity.actor_id, snapshot.version, steps):
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
        params, unroll_key, state, version, np.int32(self._identity.actor_id)
      )
      host_sequence, episodes = jax.device_get((sequence, episodes))
      unrolled = time.monotonic()
      with jax.profiler.TraceAnnotation('write to replay'):
        throttled = self._replay.writer.write(host_sequence, self._is_over)
      window.unrolled += unrolled - began
      window.throttled += throttled
      window.inserted += max(0.0, time.monotonic() - unrolled - throttled)
      window.add(episodes, self._config)
      if time.monotonic() - window.start > self._config.log_period:
        self._logger.write(window.report(self._replay.environment_step(), snapshot.version))
        window = _Window()
    if self._profiler is not None:
      self._profiler.close(snapshot.version)

  def _is_over(self) -> bool:
    """Whether to stop.

    Also fetches new parameters: a writer whose inserts the rate limiter blocks must see the final
    ones too.
    """
    if self._should_stop():
      return True
    self._newest = self._replay.source.newest(timeout_seconds=1.0) or self._newest
    return self._newest is not None and self._newest.ended_launch == self._identity.launch_id


def wait_for_parameters(
  source: parameters.Subscription, should_stop: Callable[[], bool]
) -> parameters.Snapshot | None:
  """Waits for the first published acting parameters; None if the node is asked to stop before."""
  logging.info('Waiting for parameters.')
  while not should_stop():
    snapshot = source.newest(timeout_seconds=1.0)
    if snapshot is not None:
      return snapshot
    time.sleep(0.2)
  return None


class _Window:
  """Measurements since `start`, in monotonic seconds; what is `inserted` is without what is `throttled`."""

  def __init__(self):
    self.start = time.monotonic()
    self.unrolled = self.throttled = self.inserted = 0.0
    self._steps = self._ended = 0
    self._returns: list[np.ndarray] = []
    self._lengths: list[np.ndarray] = []
    self._explored: list[np.ndarray] = []
    self._metrics: list[dict[str, np.ndarray]] = []

  def add(self, episodes: rollout.Episodes, config: actors_config.ActorConfig) -> None:
    """Counts the steps and the finished episodes of one unroll.

    Means are over episodes that `Episodes.reported` names, and over all in which the explorer acted; the
    rate is of both.
    """
    self._steps += config.num_envs * (config.sequence_length - 1)
    ended, explored = np.asarray(episodes.ended), np.asarray(episodes.explored)
    counts = np.asarray(episodes.reported)
    self._ended += int(ended.sum())
    self._returns.append(np.asarray(episodes.episode_return)[counts])
    self._lengths.append(np.asarray(episodes.episode_length)[counts])
    self._explored.append(np.asarray(episodes.episode_return)[ended & explored])
    self._metrics.append(
      {name: np.asarray(each)[counts] for name, each in episodes.metrics.items()}
    )

  def report(self, environment_step: int | None, version: int) -> dict[str, Any]:
    """Metrics of the window by name: means and quantiles over episodes, rates, and fractions of time."""
    elapsed = time.monotonic() - self.start
    returns, lengths = np.concatenate(self._returns), np.concatenate(self._lengths)
    explored = np.concatenate(self._explored)
    own = {
      name: np.concatenate([each[name] for each in self._metrics]) for name in self._metrics[0]
    }
    fraction = lambda seconds: min(1.0, seconds / elapsed)
    return {
      'environment_step': environment_step,
      'episode_return': float(returns.mean()) if returns.size else None,
      'episode_length': float(lengths.mean()) if lengths.size else None,
      **{
        f'episode_return/{quantile}': value
        for quantile, value in (inspector.quantiles(returns) or {}).items()
      },
      **{name: float(each.mean()) if each.size else None for name, each in own.items()},
      'episodes': int(returns.size),
      **({'explorer_return': float(explored.mean())} if explored.size else {}),
      'parameter_version': version,
      'steps_per_second': self._steps / elapsed,
      'episodes_per_minute': 60 * self._ended / elapsed,
      'unrolled_fraction': fraction(self.unrolled),
      'throttled_fraction': fraction(self.throttled),
      'inserted_fraction': fraction(self.inserted),
    }
