"""A fused run: environment and update in one process, by one program if in JAX, with its evaluation."""

import contextlib
import os
import pathlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from absl import logging

from hephaestus.actors import evaluator, rollout
from hephaestus.actors.environments import host
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import supervisor
from hephaestus.launch.run import composition, preflight, variables
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import progress as progress_lib
from hephaestus.learner import loop as loop_lib
from hephaestus.learner import profile as profile_lib
from hephaestus.learner.sources import stepped, unrolled
from hephaestus.replay import buffer, parameters

# An evaluation by time is followed by at least this many times its seconds of training, since one that takes
# longer than `evaluator.period` would otherwise follow each update.
REST = 3


def build(
  config: launch_config.ExperimentConfig,
  parts: parts_lib.Parts,
  devices: list[jax.Device],
  should_stop: Callable[[], bool] = lambda: False,
  fail: Callable[[host.Failure], None] | None = None,
) -> unrolled.FusedProgram:
  """Makes the program of a run for these devices, not yet compiled; of a `HostProgram` if stepped on the host.

  After each step or reset of an environment on the host, `should_stop` may end the unroll. Where one fails, the
  unroll ends likewise after `fail` was told. ValueError if environments, minibatches, strata or an unroll do not divide
  or fit, see `make_replay`.
  """
  environment, agent = parts.environment, parts.agent
  update: Any = config.record.make_update(config, parts.trained, num_devices=len(devices))
  num_envs = config.actor.num_envs
  replay = None if config.record.on_policy else make_replay(config, len(devices))
  is_on_host = isinstance(environment, host.HostEnvironment)
  unroll = rollout.make_unroll(
    environment,
    agent,
    num_envs=num_envs if is_on_host else num_envs // len(devices),
    sequence_length=config.actor.sequence_length,
    explore=True,
    should_stop=should_stop,
  )

  def until_stopped(call: Callable[..., Any]) -> Callable[..., Any]:
    def stoppable(*arguments: Any) -> Any:
      try:
        return call(*arguments)
      except rollout.StoppedError:
        return None
      except host.Failure as error:
        if fail is None:
          raise
        fail(error)
        return None

    return stoppable

  if is_on_host:
    unroll = unroll._replace(init=until_stopped(unroll.init), unroll=until_stopped(unroll.unroll))

  return (stepped.HostProgram if is_on_host else unrolled.FusedProgram)(
    update,
    agent.acting_params,
    unroll,
    devices,
    replay,
    num_envs=num_envs,
    num_steps=config.steps_per_sequence,
  )


def make_replay(config: launch_config.ExperimentConfig, num_devices: int) -> buffer.ReplaySizes:
  """Computes the sizes of a run's replay, whose capacity is less than twice what the run will collect.

  It is 2^n unrolls, at most the largest stratum, so that runs of similar length share one compiled program.
  ValueError if environments or strata do not divide over the devices, or the strata are smaller than an unroll.
  """
  strata, num_envs = config.replay.strata, config.actor.num_envs
  sizes = {f'replay.strata.{each.name}.max_size': each.max_size for each in strata}
  for name, count in {'actor.num_envs': num_envs, **sizes}.items():
    if count % num_devices:
      near = max(1, round(count / num_devices)) * num_devices
      raise ValueError(f'{name}={count}: does not divide over {num_devices} devices; {near} would')
  largest = config.replay.limiting_stratum.max_size
  if num_envs > largest:
    raise ValueError(
      f'actor.num_envs={num_envs}: gives more sequences at once than replay stores; use at most {largest}'
    )
  # An unroll is of whole sequences of all environments.
  steps_per_unroll = num_envs * config.steps_per_sequence
  unrolls = -(-config.max_environment_steps // steps_per_unroll)
  return buffer.ReplaySizes(
    sizes=buffer.batch_sizes(config.replay, config.batch_size),
    strata={each.name: each.max_size for each in strata},
    capacity=min(largest, num_envs * 2 ** (unrolls - 1).bit_length()),
    warm_up=config.replay.warm_up,
    rate=buffer.updates_per_sequence(config.replay, config.batch_size),
  )


def check_memory(
  config: launch_config.ExperimentConfig, needed: int, available: int, num_devices: int
) -> None:
  """Raises ValueError if a compiled program needs more bytes on each device than JAX may use there."""
  if needed <= available:
    return
  key, size = 'learner.batch_size', config.batch_size
  remedy = 'use fewer, a smaller network, or a smaller replay (replay.strata; it grows with max_environment_steps)'
  if config.record.on_policy:  # all of its memory shrinks with the environments
    key, size = 'actor.num_envs', config.actor.num_envs
    each = max(1, size * available // (needed * num_devices))
    remedy = f'{num_devices * 2 ** (each.bit_length() - 1)} would fit'
  raise ValueError(
    f'{key}={size}: the compiled program needs {_gib(needed)} on each device, of which JAX may use '
    f'{_gib(available)}; {remedy}'
  )


def _gib(count: int) -> str:
  return f'{count / 2**30:,.1f} GiB'


def _available_bytes(devices: list[jax.Device]) -> int | None:
  """Bytes that JAX may use on each device, None if unknown; CPU devices share the memory of the machine."""
  if devices[0].platform == 'cpu':
    return preflight.memory() // len(devices)
  return (devices[0].memory_stats() or {}).get('bytes_limit')


class Prepared(NamedTuple):
  """Parts and program of a fused run, nothing of it compiled yet.

  While it is entered, `stop` notes signals; `failures` are of environments on the host, which end the run, too.
  """

  config: launch_config.ExperimentConfig
  parts: parts_lib.Parts
  program: unrolled.FusedProgram
  stop: supervisor.Interrupts
  failures: list[host.Failure]

  def should_stop(self) -> bool:
    return self.stop.count > 0 or bool(self.failures)


def prepare(config: launch_config.ExperimentConfig) -> Prepared:
  """Makes the parts and the program of a run whose environment was checked; ValueError as `build`."""
  _prepare_process()
  parts_lib.seed_generators(config.seed, 1)
  parts = parts_lib.make_parts(config)
  stop = supervisor.Interrupts(_say_stopping)
  failures: list[host.Failure] = []
  program = build(config, parts, jax.local_devices(), lambda: stop.count > 0, failures.append)
  return Prepared(config, parts, program, stop, failures)


def train(
  prepared: Prepared,
  folder: pathlib.Path,
  *,
  profile: profile_lib.Span | None = None,
) -> int:
  """Trains until the run is over, interrupted or failed; may trace updates.

  Returns:
    The exit code: 0 when finished or stopped by SIGTERM, 130 by Ctrl-C, 1 when a metric is not finite.

  Raises:
    ValueError: the folder is locked, the program exceeds the memory, the checkpoint has another config, or an
      environment on the host has failed; its traceback is in the learner's log then, and a checkpoint is saved.
  """
  config, program = prepared.config, prepared.program
  launch = composition.Launch(config=config, folder=folder, profile=profile)
  with (
    folder_lib.only_one(folder),
    prepared.stop as stop,
    contextlib.closing(_Monitor(prepared, launch)) as monitor,
  ):
    is_on_host = isinstance(program, stepped.HostProgram)
    monitor.phase(f'compiling {"" if is_on_host else "collection and "}updates')
    _compile(prepared, monitor.say)
    launch_config.save(config, folder / folder_lib.CONFIG)  # which nothing refuses from here on
    if stop.count:  # nothing was learned since the last checkpoint
      return progress_lib.farewell(folder, config, stop.first)
    monitor.phase('compiling and making the first state')
    source = (stepped.Stepped if is_on_host else unrolled.Unrolled)(
      program,
      max_environment_steps=config.max_environment_steps,
      warn=monitor.warn,
    )
    loop = launch.make_loop(source, monitor.hooks)
    try:
      finished = loop.run()
    except FloatingPointError as error:
      monitor.say(str(error))
      return 1
    if prepared.failures:
      failure = prepared.failures[0]
      monitor.say(f'an environment failed; traceback: {_log(folder, failure)}')
      raise failure
  if profile is not None:
    print(profile_lib.report(profile, folder), flush=True)
  # A run that is over may be asked to stop during its last evaluation, which then is missing.
  is_complete = finished and (not stop.count or folder_lib.has_finished(folder, config))
  return progress_lib.farewell(folder, config, 0 if is_complete else stop.first)


def _log(folder: pathlib.Path, error: Exception) -> pathlib.Path:
  """Writes the traceback of an error to the learner's log, unless the disk is full; returns the log's path."""
  log = folder / 'logs' / f'{parts_lib.LEARNER}.log'
  with contextlib.suppress(OSError):  # the error itself says more
    log.parent.mkdir(exist_ok=True)
    log.write_text(''.join(traceback.format_exception(error)))
  return log


class _Monitor:
  """Shows progress and warnings on the terminal, and evaluates between the updates of a loop, by its `hooks`."""

  def __init__(self, prepared: Prepared, launch: composition.Launch):
    self._prepared, self._launch = prepared, launch
    self._progress = progress_lib.Progress(launch.config, launch.folder, starting='starting')
    self._phases = set[str]()
    self.say = self._progress.say
    self._events = metrics.JsonLines(launch.folder / 'metrics' / 'events.jsonl')
    self._warnings = progress_lib.Warnings(launch.config, launch.folder, self._events, self.say)
    self.warn = self._warnings.warn
    self._count = progress_lib.count_writer(launch.folder)
    self._scorer: evaluator.Scorer | None = None
    self._should_stop = prepared.should_stop
    self.hooks = loop_lib.Hooks(
      should_stop=self._should_stop,
      make_logger=self._make_logger,
      between=self._between,
      phase=self.phase,
    )
    self._is_closed = threading.Event()
    # A thread shows the line, since compilation, a call of updates or an evaluation may take minutes.
    self._thread = threading.Thread(target=self._show, name='progress', daemon=True)
    self._thread.start()
    self._events.write({'kind': 'started', 'name': parts_lib.LEARNER})

  def phase(self, phase: str) -> None:
    """Notes for the line what the process does now; collection on the host and evaluation compile at first."""
    compiles = phase in ('collecting', 'evaluating') and phase not in self._phases
    self._phases.add(phase)
    self._progress.phase = f'compiling, then {phase}' if compiles else phase

  def _show(self) -> None:
    while not self._is_closed.wait(0.5):
      with contextlib.suppress(OSError):  # a closed terminal is no reason to stop
        self._progress.tick()
        self._warnings.tick()

  def _make_logger(self, step: int) -> loop_lib.Logger:
    """Makes the evaluation, and the learner's logger."""
    self._scorer = self._launch.make_scorer(self._prepared.parts, self._should_stop, resume=step)
    return self._launch.make_logger(parts_lib.LEARNER, resume=step)

  def _between(self, status: loop_lib.Status) -> None:
    """Notes progress; evaluates if that is due after the first update, or if the run has finished."""
    assert self._scorer is not None
    self._count(status)
    is_due = status.step > 0 and self._scorer.schedule.is_due(status.environment_step)
    if is_due or status.finished:
      snapshot = parameters.Snapshot(
        status.step, status.environment_step, ended_launch=0, params=status.acting_params()
      )
      compiles = 'evaluating' not in self._phases
      self.phase('evaluating')
      began = time.monotonic()
      try:
        self._scorer.score(snapshot, final=status.finished)
        if not compiles:
          self._scorer.schedule.wait(REST * (time.monotonic() - began))
      except rollout.StoppedError:
        pass
      except host.Failure as error:
        self._prepared.failures.append(error)

  def close(self) -> None:
    """Closes the evaluation and the events; ends the line, so that the next text begins one."""
    if self._scorer is not None:
      self._scorer.close()
    self._is_closed.set()
    self._thread.join()
    self._progress.end()
    self._warnings.tick()
    self._events.close()


def _compile(prepared: Prepared, say: Callable[[str], None]) -> None:
  """Compiles the program of a run and prints its memory; ValueError if that exceeds the devices'."""
  config, program, devices = prepared.config, prepared.program, prepared.program.devices
  needed, available = program.compile(), _available_bytes(devices)
  of_device = ''
  if available is not None:
    check_memory(config, needed, available, len(devices))
    of_device = f' of {_gib(available)}'
  if isinstance(program, stepped.HostProgram):
    say(host.SLOW)
  say(
    f'{config.actor.num_envs:,} environments x {config.steps_per_sequence} steps: '
    f'{config.record.describe_update(config, program.update)}; '
    f'{len(devices)} x {devices[0].platform}, {needed / 2**20:,.0f} MiB{of_device} compiled'
  )


def _prepare_process() -> None:
  """Sets up logging and libraries in this process, as nodes are by their environment; see also `preflight`."""
  logging.set_verbosity(logging.WARNING)  # nodes log to files; this is the terminal
  for name, value in variables.COMMON.items():
    os.environ.setdefault(name, value)


def _say_stopping() -> None:
  """Confirms a signal at once, from its handler."""
  with contextlib.suppress(OSError):  # not print, which the signal may have interrupted
    os.write(1, f'\n{folder_lib.STOPPING}\n'.encode())
