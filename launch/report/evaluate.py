"""Scores of an agent, for `hephaestus evaluate`."""

import pathlib
from typing import Any

import jax

from hephaestus.actors import episodes as episodes_lib
from hephaestus.actors import rollout, videos
from hephaestus.launch.interface import policy as policy_lib


def evaluate(
  path: pathlib.Path,
  episodes: int,
  video: pathlib.Path | None,
  seed: int,
  *,
  at_random: bool = False,
  greedy: bool | None = None,
  checkpoint: str | None = None,
) -> dict[str, Any]:
  """Evaluates an agent, also while its run is training.

  Args:
    path: of the run or of an exported policy, or the name of a shipped agent.
    episodes: least number of episodes.
    video: path of a video of one episode, or None.
    seed: of the environments.
    at_random: evaluates the uniform random policy over legal actions instead.
    greedy: greedy or sampled actions; None: as its run is evaluated.
    checkpoint: a learner step, or 'best'; None for the newest.

  Raises:
    ValueError: not a run, or no such checkpoint.
  """
  params: Any
  if at_random:
    config, step = policy_lib.load_config(path), 0
    environment = config.make_environment()
    agent, params = rollout.random_agent(environment.action_spec), ()
  else:
    policy = policy_lib.load(path, checkpoint)
    config, step, environment = policy.config, policy.learner_step, policy.environment
    agent, params = policy.agent, policy.params
  greedy = config.evaluator.greedy if greedy is None else greedy
  play = episodes_lib.Play(environment, agent, min(episodes, 64), greedy=greedy)
  play_key, video_key = jax.random.split(jax.random.key(seed))
  result = play.evaluate(params, play_key, episodes)
  assert result is not None  # nothing stops it
  if video is not None:
    recording = play.record(params, video_key)
    if recording.frames is None:
      raise ValueError(f'--video {video}: {config.environment["name"]} has no renderer')
    videos.write(recording.frames, video)
  return {'learner_step': step, **result._asdict()}
