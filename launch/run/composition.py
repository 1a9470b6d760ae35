"""Logger, evaluation and training loop of a run, the same for one process and several."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from hephaestus.actors import episodes, evaluator
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import metrics
from hephaestus.launch.run import parts as parts_lib
from hephaestus.learner import loop, process_group
from hephaestus.learner import profile as profile_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One launch of a run on this host, from which its process or its nodes are built.

  Attributes:
    config: config of the run.
    folder: folder of the run.
    profile: learner updates to trace, and actor 0 at about the same time; None for none.
    launch_id: number of this launch, another at every launch and the same on all hosts, by which its
      end differs from the end of an older one; 0 in one process.
    shards_here: shards of replay on this host, which write into `folder`.
    exposed: whether other machines may reach replay.
    coordinator: HOST:PORT of the first process of a learner that has several; None for one process.
  """

  config: launch_config.ExperimentConfig
  folder: pathlib.Path
  profile: profile_lib.Span | None = None
  launch_id: int = 0
  shards_here: Sequence[int] = ()
  exposed: bool = False
  coordinator: str | None = None

  def make_logger(self, name: str, *, resume: int | None = None) -> metrics.Loggers:
    """Makes the logger of a node's metrics; rows after the learner step `resume` are dropped, unless it is None."""
    return metrics.make_logger(
      self.folder,
      name,
      steps_key='learner_step' if name == parts_lib.LEARNER else 'environment_step',
      tensorboard=self.config.tensorboard,
      wandb=self.config.wandb,
      own=self.config.logger,
      resume=None if resume is None else ('learner_step', resume),
    )

  def make_scorer(
    self, parts: parts_lib.Parts, should_stop: Callable[[], bool], *, resume: int | None = None
  ) -> evaluator.Scorer:
    """Makes the evaluation of the run: its episodes, videos and logger; `resume` is as of `make_logger`."""
    config, options, agent = self.config, self.config.evaluator, parts.agent
    play = episodes.Play(
      parts.environment, agent, options.num_episodes, greedy=options.greedy, should_stop=should_stop
    )

    def newest() -> tuple[int, Any] | None:
      if agent.foresee is None:
        return None
      found = parts_lib.saved_train(self.folder, parts_lib.saved_shapes(config, parts))
      return found and (found[0], agent_lib.all_params(found[1]))

    return evaluator.Scorer(
      play,
      options,
      self.make_logger(parts_lib.EVALUATOR, resume=resume),
      evaluator.Camera(play, self.folder / 'videos', options.video_period, newest),
      seed=config.seed,
      num_steps=config.max_environment_steps,
      should_stop=should_stop,
    )

  def make_loop(
    self,
    source: loop.Source,
    hooks: loop.Hooks,
    group: process_group.Group = process_group.ONE_PROCESS,
  ) -> loop.Loop:
    """Makes the training loop of the run, with its limits and checkpoints.

    Of the processes that learn as one `group`, only the first saves and is traced. ValueError if the newest
    checkpoint is of another config.
    """
    config, profiler, saved = self.config, None, None
    if group.is_first:
      saved = parts_lib.checkpointer(self.folder, config.learner.keep)
    if self.profile is not None and group.is_first:
      folder = self.profile.folder(self.folder) / parts_lib.LEARNER
      profiler = profile_lib.Profiler(self.profile, folder)
    return loop.Loop(
      source,
      config.learner,
      hooks,
      max_environment_steps=config.max_environment_steps,
      max_seconds=None if config.max_minutes is None else 60 * config.max_minutes,
      checkpointer=saved,
      seed=config.seed,
      environment=config.environment['name'],
      group=group,
      profiler=profiler,
    )
