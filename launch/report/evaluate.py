"""Scores the newest checkpoint of a run, or a random policy in its environment."""

import pathlib
from typing import Any

from hephaestus.launch.run import local


def _untrained(folder: pathlib.Path) -> local.Saved:
  """What plays a run's environment at random."""
  from hephaestus.actors import evaluator

  config = local.load_config(folder)
  environment = config.make_environment()
  agent = evaluator.random_agent(environment.action_spec)
  return local.Saved(config, environment, agent, params=(), all_params=(), step=0)


def evaluate(
  folder: pathlib.Path,
  episodes: int,
  video: pathlib.Path | None,
  seed: int,
  *,
  at_random: bool = False,
) -> dict[str, Any]:
  """Scores a run's newest checkpoint; may run beside training.

  Args:
    folder: of the run.
    episodes: at least so many are played.
    video: where to put a video of one episode, or None.
    seed: of the environments.
    at_random: plays uniformly among the legal actions of the run's environment instead.

  Raises:
    ValueError: not a run, or nothing saved yet.
  """
  import jax

  from hephaestus.actors import evaluator, videos

  saved = _untrained(folder) if at_random else local.newest(folder)
  config = saved.config
  play = evaluator.Play(
    saved.environment, saved.agent, min(episodes, 64), greedy=config.evaluator.greedy
  )
  play_key, video_key = jax.random.split(jax.random.key(seed))
  result = play.evaluate(saved.params, play_key, episodes)
  if video is not None:
    recording = play.record(saved.params, video_key)
    if recording.frames is None:
      raise ValueError(f'--video {video}: {config.environment["name"]} has no renderer')
    videos.write(recording.frames, video)
  return {'learner_step': saved.step, **result._asdict()}
