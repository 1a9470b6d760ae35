"""Scores of a checkpoint of a run, for `hephaestus evaluate`."""

import pathlib
from typing import Any

import jax

from hephaestus.actors import evaluator, videos
from hephaestus.launch.run import saved as saved_lib


def evaluate(
  folder: pathlib.Path,
  episodes: int,
  video: pathlib.Path | None,
  seed: int,
  *,
  at_random: bool = False,
  greedy: bool | None = None,
  checkpoint: str | None = None,
) -> dict[str, Any]:
  """Evaluates a checkpoint of a run, also while the run is training.

  Args:
    folder: of the run.
    episodes: least number of episodes.
    video: path of a video of one episode, or None.
    seed: of the environments.
    at_random: evaluates the uniform random policy over legal actions instead.
    greedy: greedy or sampled actions; None: as the run is evaluated.
    checkpoint: a learner step, or 'best'; None for the newest.

  Raises:
    ValueError: not a run, or no such checkpoint.
  """
  saved = saved_lib.untrained(folder) if at_random else saved_lib.load(folder, checkpoint)
  config = saved.config
  greedy = config.evaluator.greedy if greedy is None else greedy
  play = evaluator.Play(saved.environment, saved.agent, min(episodes, 64), greedy=greedy)
  play_key, video_key = jax.random.split(jax.random.key(seed))
  result = play.evaluate(saved.params, play_key, episodes)
  assert result is not None  # nothing stops it
  if video is not None:
    recording = play.record(saved.params, video_key)
    if recording.frames is None:
      raise ValueError(f'--video {video}: {config.environment["name"]} has no renderer')
    videos.write(recording.frames, video)
  return {'learner_step': saved.step, **result._asdict()}
