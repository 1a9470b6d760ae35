"""Scores an agent, for `hephaestus evaluate`."""

import contextlib
import pathlib
from typing import Any

import jax

from hephaestus.actors import environments, rollout, videos
from hephaestus.actors import episodes as episodes_lib
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
  """Evaluates an agent on whole episodes; its run may still be training.

  Args:
    path: folder of the run or of an exported policy, or name of a shipped agent.
    episodes: least number of episodes.
    video: path of a video of one more episode, .gif or .mp4; None for no video.
    seed: seed of environments and actions.
    at_random: whether to evaluate the random policy, uniform over legal actions, instead.
    greedy: whether actions are greedy, else sampled; None: as in the evaluations of the run.
    checkpoint: learner step of a checkpoint, or 'best'; None for the newest.

  Returns:
    {'learner_step', the entries of `episodes.Evaluation.row`}; and 'package', name and version of the
    environment's package, on which a score may depend, if it is another's.

  Raises:
    ValueError: as `policy.load`; or a video is asked for and the environment has no renderer.
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
  with contextlib.closing(play):
    result = play.evaluate(params, play_key, episodes)
    assert result is not None  # nothing stops it
    if video is not None:
      recording = play.record(params, video_key)
      if recording.frames is None:
        raise ValueError(f'--video {video}: {config.environment["name"]} has no renderer')
      videos.write(recording.frames, video)
  package = environments.package(config.environment['name'])
  return {'learner_step': step, **result.row(), **({'package': package} if package else {})}
