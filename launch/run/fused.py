"""A fused run: environment and update in one program of one process, with what `local` gives to others."""

import os
import pathlib
import signal
import threading
from typing import Any

import jax
import psutil
from absl import logging

from hephaestus.actors import evaluator, rollout
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import masked_ppo
from hephaestus.launch import config as launch_config
from hephaestus.launch.run import folder as folder_lib
from hephaestus.launch.run import metrics, variables
from hephaestus.launch.run import progress as progress_lib
from hephaestus.learner import allocator, checkpoint, ppo_update
from hephaestus.learner import fused as fused_lib
from hephaestus.learner import profile as profile_lib
from hephaestus.replay import parameters


def make_ppo(
  config: launch_config.ExperimentConfig,
) -> tuple[environment_lib.Environment, masked_ppo.PPO]:
  """The environment and the agent of a run; makes no array."""
  environment = config.make_environment()
  agent_config, _ = config.ppo()
  return environment, masked_ppo.make_ppo(
    agent_config, environment.observation_spec, environment.action_spec
  )


def build(
  config: launch_config.ExperimentConfig,
  environment: environment_lib.Environment,
  ppo: masked_ppo.PPO,
  devices: list[jax.Device],
) -> fused_lib.Fused:
  """The program of a run, not yet compiled.

  Raises:
    ValueError: the environments do not divide over the devices or minibatches.
  """
  agent_config, learner_config = config.ppo()
  num_envs, num_steps = config.actor.num_envs, config.steps_per_sequence
  scale = ppo_update.auto_scale(
    learner_config,
    num_envs=num_envs,
    num_steps=num_steps,
    num_devices=len(devices),
    recurrent=bool(agent_config.recurrent_size),
  )
  unroll = rollout.make_unroll(
    environment,
    ppo.agent,
    num_envs=num_envs // len(devices),
    sequence_length=config.actor.sequence_length,
  )
  update = ppo_update.make_update(
    ppo,
    learner_config,
    scale,
    max_environment_steps=config.max_environment_steps,
  )
  worlds = fused_lib.Worlds(unroll.init, unroll.unroll, num_envs, num_steps)
  return fused_lib.Fused(update, ppo.agent.acting_params, worlds, devices)


def saved(
  config: launch_config.ExperimentConfig,
) -> tuple[environment_lib.Environment, agent_lib.Agent, fused_lib.FusedState]:
  """The environment, the agent, and the shapes of what a run's checkpoints hold, but for its environments."""
  environment, ppo = make_ppo(config)
  shapes = build(config, environment, ppo, jax.local_devices()[:1]).shapes()
  return environment, ppo.agent, shapes._replace(worlds=None)


def check_memory(
  memory: fused_lib.Memory, available: int | None, *, num_envs: int, num_devices: int
) -> str | None:
  """What to say before a program is compiled that may not fit; None if it should.

  Args:
    memory: that is needed on each device, estimated.
    available: bytes of each device; None where unknown.
    num_envs: on all devices together.
    num_devices: that share them.

  Raises:
    ValueError: even if it needs a third less than estimated, it is too much.
  """
  needed = memory.state + memory.batch
  if available is None or needed < 0.9 * available:
    return None
  # All but the parameters grows with the environments, so this is rather too few than too many.
  share = max(1, int(num_envs / num_devices * 0.9 * available / needed))
  fits = num_devices * 2 ** (share.bit_length() - 1)
  text = (
    f'actor.num_envs={num_envs}: needs about {needed / 2**30:.1f} GiB on each device, where '
    f'{available / 2**30:.1f} GiB are available; {fits} would fit'
  )
  if needed > 1.5 * available:
    raise ValueError(text)
  return text


def _available_bytes(devices: list[jax.Device]) -> int | None:
  """Of each device; those of a CPU share what the machine has."""
  if devices[0].platform == 'cpu':
    return psutil.virtual_memory().available // len(devices)
  return (devices[0].memory_stats() or {}).get('bytes_limit')


def train(
  config: launch_config.ExperimentConfig,
  folder: pathlib.Path,
  *,
  reset_moments: bool = False,
  profile: profile_lib.Span | None = None,
) -> int:
  """Runs until it is learned, interrupted or failed.

  Args:
    config: of the run.
    folder: of the run, opened.
    reset_moments: whether the optimizer begins anew where the run goes on.
    profile: updates that are traced; None for none.

  Returns:
    The exit code: 0 when learned or stopped, 1 when its numbers were no longer finite.
  """
  _prepare_process(config)
  environment, ppo = make_ppo(config)
  agent_config, learner_config = config.ppo()
  with folder_lib.only_one(folder), _interrupts() as stop:
    progress = progress_lib.Progress(config, folder, starting='compiling, some ten seconds')
    progress.tick()
    fused = build(config, environment, ppo, jax.local_devices())
    memory = fused.memory()
    progress.say(
      f'estimated on each device: {memory.state / 2**20:,.0f} MiB of parameters, moments and environments, '
      f'{memory.batch / 2**20:,.0f} MiB for a batch and its gradients'
    )
    scarce = check_memory(
      memory,
      _available_bytes(fused.devices),
      num_envs=config.actor.num_envs,
      num_devices=len(fused.devices),
    )
    events = metrics.JsonLines(folder / 'metrics' / 'events.jsonl')
    events.write({'kind': 'started', 'name': 'learner'})

    def warn(text: str) -> None:
      events.write({'kind': 'warning', 'text': text})
      progress.say(f'warning: {text}')

    if scarce is not None:
      warn(scarce)
    progress.say(_describe(config, fused, fused.compile()))
    play = evaluator.Play(
      environment, ppo.agent, config.evaluator.num_episodes, greedy=config.evaluator.greedy
    )
    camera = evaluator.Camera(play, folder / 'videos', config.evaluator.video_period)
    loggers: dict[str, Any] = {}

    def make_logger(step: int) -> Any:
      make = lambda name, key: metrics.make_logger(
        folder, name, steps_key=key, tensorboard=config.tensorboard, wandb=config.wandb,
        resume=('learner_step', step),
      )  # fmt: skip
      loggers['evaluator'] = make('evaluator', 'environment_step')
      return make('learner', 'learner_step')

    def score(params: Any, step: int, environment_step: int, final: bool) -> float | None:
      result = evaluator.score(
        play,
        parameters.Snapshot(step, environment_step, ended_launch=0, params=params),
        final=final,
        config=config.evaluator,
        logger=loggers['evaluator'],
        camera=camera,
        seed=config.seed,
      )
      return result.normalised_score

    run = fused_lib.Run(
      fused=fused,
      config=learner_config,
      checkpointer=checkpoint.Checkpointer(folder / 'checkpoints'),
      score=score,
      score_period=config.evaluator.period,
      make_logger=make_logger,
      warn=warn,
      tick=progress.tick,
      should_stop=stop.is_set,
      max_environment_steps=config.max_environment_steps,
      max_seconds=None if config.max_minutes is None else 60 * config.max_minutes,
      seed=config.seed,
      entropy_scale=agent_config.entropy_scale,
      reset_moments=reset_moments,
      profiler=None
      if profile is None
      else profile_lib.Profiler(profile, profile.folder(folder) / 'learner'),
    )
    try:
      finished = run.run()
    except FloatingPointError as error:
      progress.end()
      print(error, flush=True)
      return 1
    finally:
      for logger in (*loggers.values(), events):
        logger.close()
  progress.end()
  if profile is not None:
    print(profile_lib.report(profile, folder), flush=True)
  print(progress_lib.summary(folder) if finished else _farewell(folder), flush=True)
  return 0


def _farewell(folder: pathlib.Path) -> str:
  return f'stopped; go on with: hephaestus train --run {folder}'


def _describe(
  config: launch_config.ExperimentConfig, fused: fused_lib.Fused, num_bytes: int
) -> str:
  scale, devices = fused.scale, fused.devices
  return (
    f'{config.actor.num_envs:,} environments x {config.steps_per_sequence} steps: '
    f'{scale.num_minibatches} minibatches of {fused.steps_per_update // scale.num_minibatches:,}, '
    f'{scale.num_epochs} epochs, learning rate {scale.learning_rate:.3g}; '
    f'{len(devices)} x {devices[0].platform}, {num_bytes / 2**20:,.0f} MiB compiled'
  )


def _prepare_process(config: launch_config.ExperimentConfig) -> None:
  """What other runs tell their nodes by the environment; here JAX is imported already."""
  allocator.keep()
  logging.set_verbosity(logging.WARNING)  # what nodes log goes to files, and here is the terminal
  for name, value in variables.COMMON.items():
    os.environ.setdefault(name, value)
  if not config.accelerator:
    jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_compilation_cache_dir', variables.COMMON['JAX_COMPILATION_CACHE_DIR'])
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


class _interrupts:  # noqa: N801  it reads as a function
  """A flag that the first Ctrl-C or SIGTERM sets; the second ends the process as it always did."""

  def __enter__(self) -> threading.Event:
    stop = threading.Event()
    self._before: dict[int, Any] = {}

    def on_signal(number: int, frame: Any) -> None:
      del frame
      stop.set()
      signal.signal(number, self._before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
      self._before[number] = signal.signal(number, on_signal)
    return stop

  def __exit__(self, *error: Any) -> None:
    for number, before in self._before.items():
      signal.signal(number, before)
