"""Logger, evaluation and training loop of a run, the same for one process and several."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from hephaestus.actors import episodes, evaluator
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import metrics
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import loop, process_group
from hephaestus.learner import profile as profile_lib


def make_logger(
  config: launch_config.ExperimentConfig,
  run: pathlib.Path,
  name: str,
  *,
  resume: int | None = None,
  also: Sequence[Any] = (),
) -> metrics.Loggers:
  """Makes the logger of a node's metrics, as the config asks for it.

  Args:
    config: config of the run.
    run: folder of the run.
    name: name of the node.
    resume: learner step from which the run resumes; later rows are dropped. None keeps all rows.
    also: further loggers that get each row.
  """
  return metrics.make_logger(
    run,
    name,
    steps_key='learner_step' if name == parts_lib.LEARNER else 'environment_step',
    tensorboard=config.tensorboard,
    wandb=config.wandb,
    resume=None if resume is None else ('learner_step', resume),
    also=also,
  )


def make_scorer(
  config: launch_config.ExperimentConfig,
  parts: parts_lib.Parts,
  run: pathlib.Path,
  should_stop: Callable[[], bool],
  *,
  resume: int | None = None,
) -> evaluator.Scorer:
  """Makes the evaluation of a run: its episodes, videos and logger.

  Args:
    config: config of the run.
    parts: parts of the run.
    run: folder of the run.
    should_stop: returns whether the process was asked to stop.
    resume: see `make_logger`.
  """
  options, agent = config.evaluator, parts.agent
  play = episodes.Play(
    parts.environment, agent, options.num_episodes, greedy=options.greedy, should_stop=should_stop
  )

  def newest() -> tuple[int, Any] | None:
    return (
      None
      if agent.foresee is None
      else parts_lib.newest_params(run, parts_lib.saved_shapes(config, parts))
    )

  return evaluator.Scorer(
    play,
    options,
    make_logger(config, run, parts_lib.EVALUATOR, resume=resume),
    evaluator.Camera(play, run / 'videos', options.video_period, newest),
    seed=config.seed,
    should_stop=should_stop,
  )


def make_loop(
  config: launch_config.ExperimentConfig,
  run: pathlib.Path,
  source: loop.Source,
  hooks: loop.Hooks,
  *,
  profile: profile_lib.Span | None,
  group: process_group.Group = process_group.ONE_PROCESS,
) -> loop.Loop:
  """Makes the training loop of a run, with its limits and checkpoints.

  Args:
    config: config of the run.
    run: folder of the run.
    source: supplies batches, and does the updates.
    hooks: callbacks to this process.
    profile: learner updates to trace; None for none.
    group: the processes that learn as one. Only the first saves and is traced.

  Raises:
    ValueError: the newest checkpoint is of another config.
  """
  return loop.Loop(
    source,
    config.learner,
    loop.Budget(
      max_environment_steps=config.max_environment_steps,
      max_seconds=None if config.max_minutes is None else 60 * config.max_minutes,
    ),
    hooks,
    checkpointer=parts_lib.checkpointer(run, config.learner.keep) if group.is_first else None,
    seed=config.seed,
    group=group,
    profiler=profile_lib.Profiler(profile, profile.folder(run) / parts_lib.LEARNER)
    if profile is not None and group.is_first
    else None,
  )
