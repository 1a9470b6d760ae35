"""The Evaluator node: plays full episodes with published parameters, and logs returns and scores."""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from hephaestus.actors import actor, episodes, rollout, videos
from hephaestus.actors import config as actors_config
from hephaestus.replay import parameters

VIDEO_LENGTH = 513  # time steps of a periodic video, about a minute
POINTS = 30  # evaluations of a fast run


class Schedule:
  """When an evaluation is due: the first at once, others after a period of steps, or of seconds.

  In a run that is fast compared with the period of seconds, they are also due after each 1 / `POINTS` of its
  steps, if they are at least `period` / 40 seconds apart and take at most a tenth of the time.
  """

  def __init__(self, config: actors_config.EvaluatorConfig, num_steps: int):
    self._period, self._is_by_steps = config.period, config.period_steps is not None
    self._period_steps = config.period_steps or -(-num_steps // POINTS)
    self._next_time, self._next_step, self._rests_until = 0.0, 0, 0.0
    self._began: float | None = None

  def is_due(self, environment_step: int) -> bool:
    """Whether an evaluation of parameters that were published at this environment step is due."""
    is_next, now = environment_step >= self._next_step, time.monotonic()
    if self._is_by_steps:
      return is_next
    return now >= self._next_time or (is_next and now >= self._rests_until)

  def wait(self, seconds: float) -> None:
    """Lets at least so many seconds pass before the next evaluation that is due by time."""
    self._next_time = max(self._next_time, time.monotonic() + seconds)

  def begin(self, environment_step: int) -> None:
    """Notes that an evaluation begins, of such parameters."""
    self._is_first, self._began = self._began is None, time.monotonic()
    self._next_time = self._began + self._period
    self._rests_until = self._began + self._period / 40
    self._next_step = (environment_step // self._period_steps + 1) * self._period_steps

  def end(self) -> None:
    """Notes that the evaluation has ended; the time of the first, which compiles, does not count."""
    if self._began is not None and not self._is_first:
      now = time.monotonic()
      self._rests_until = max(self._rests_until, now + 9 * (now - self._began))


class Camera:
  """Writes two videos periodically: an episode, and another next to the world model's prediction of it.

  They are VERSION.gif, by the version of the acting parameters, and STEP-dream.gif, by the learner step
  of the newest checkpoint, which `newest` returns with all parameters; None without one, and then no
  prediction is recorded. The period is in seconds.
  """

  def __init__(
    self,
    play: episodes.Play,
    videos: pathlib.Path,
    period: float,
    newest: Callable[[], tuple[int, Any] | None] = lambda: None,
  ):
    self._play = play
    self._videos = videos
    self._period = period
    self._newest = newest
    self._last_time = time.monotonic()

  def video(self, version: int, params: Any, key: jax.Array, *, final: bool) -> None:
    """Writes videos if the period has passed since the last ones, or if `final`.

    The acting parameters are of the learner step `version`. If a file cannot be written, such as on a full
    disk, a warning is logged.
    """
    if not final and time.monotonic() - self._last_time < self._period:
      return
    self._last_time = time.monotonic()
    play_key, dream_key = jax.random.split(key)
    self._write(f'{version}', self._play.record(params, play_key, VIDEO_LENGTH).frames)
    saved = self._newest()
    if saved is not None:
      step, all_params = saved
      self._write(f'{step}-dream', self._play.dream(all_params, dream_key))

  def _write(self, name: str, frames: list[np.ndarray] | None) -> None:
    video = self._videos / f'{name}.gif'
    try:
      if frames:
        videos.write(frames, video)
    except OSError as error:  # such as a full disk
      video.unlink(missing_ok=True)
      logging.warning('Could not write the video %s: %s', video, error)


class Scorer:
  """Scores acting parameters when that is due: plays episodes, logs their means, and records videos.

  The `seed` of the run and the version give the PRNG key of an evaluation, which ends when `should_stop`,
  called after each unroll, is True. `close` closes `play` and `logger`; `schedule` says when the next
  evaluation is due in a run of `num_steps` environment steps.
  """

  def __init__(
    self,
    play: episodes.Play,
    config: actors_config.EvaluatorConfig,
    logger: actor.Logger,
    camera: Camera,
    *,
    seed: int,
    num_steps: int,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    self._play = play
    self._config = config
    self._logger = logger
    self._camera = camera
    self._seed = seed
    self._should_stop = should_stop
    self.schedule = Schedule(config, num_steps)

  def score(self, snapshot: parameters.Snapshot, *, final: bool) -> None:
    """Evaluates acting parameters, logs the result unless asked to stop, and records videos that are due.

    The final ones play `final_episodes` episodes, not `num_episodes`, and videos are recorded at once.

    Raises:
      rollout.StoppedError: asked to stop within a step of an environment.
      ValueError: see `episodes.Play.evaluate`.
    """
    config, step = self._config, snapshot.environment_step
    self.schedule.begin(step)
    key = jax.random.fold_in(jax.random.key(self._seed), snapshot.version)
    play_key, video_key = jax.random.split(key)
    params = jax.device_put(snapshot.params)
    num_episodes = config.final_episodes if final else config.num_episodes
    result = self._play.evaluate(params, play_key, num_episodes, self._should_stop)
    if result is None:
      return
    counts = {'environment_step': step, 'learner_step': snapshot.version}
    self._logger.write({**counts, 'final': final, **result.row()})
    self.schedule.end()
    logging.info('Version %d: %s', snapshot.version, result)
    self._camera.video(snapshot.version, params, video_key, final=final)

  def close(self) -> None:
    """Closes the environments and the logger."""
    self._play.close()
    self._logger.close()


class Evaluator:
  """Scores the newest parameters periodically, and the final ones once; closes the scorer at the end.

  Final parameters of an older launch than `launch_id` do not end this node.
  """

  def __init__(
    self,
    scorer: Scorer,
    source: parameters.Subscription,
    should_stop: Callable[[], bool],
    launch_id: int,
  ):
    self._scorer = scorer
    self._source = source
    self._should_stop = should_stop
    self._launch_id = launch_id

  def run(self) -> None:
    """Evaluates until the learner's final parameters are scored, or the node is asked to stop."""
    try:
      self._evaluate()
    except rollout.StoppedError:
      logging.info('Stopped within an episode.')
    finally:
      self._scorer.close()

  def _evaluate(self) -> None:
    snapshot = actor.wait_for_parameters(self._source, self._should_stop)
    while snapshot is not None:
      if self._is_due(snapshot):
        self._scorer.score(snapshot, final=self._final(snapshot))
        if self._final(snapshot):
          break
      snapshot = self._newer()

  def _final(self, snapshot: parameters.Snapshot) -> bool:
    return snapshot.ended_launch == self._launch_id

  def _is_due(self, snapshot: parameters.Snapshot) -> bool:
    return self._final(snapshot) or self._scorer.schedule.is_due(snapshot.environment_step)

  def _newer(self) -> parameters.Snapshot | None:
    """Waits for a snapshot whose evaluation is due, or the final one; None when asked to stop."""
    newest = None
    while not self._should_stop():
      newest = self._source.newest(timeout_seconds=1.0) or newest
      if newest is not None and self._is_due(newest):
        return newest
      time.sleep(0.2)
    return None
