"""`hephaestus train --seeds`: several runs by one command, which differ only in their seed."""

import contextlib
import dataclasses
import io
import itertools
import pathlib
import sys
from collections.abc import Generator, Sequence
from typing import NamedTuple

import jax

from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import jobs
from hephaestus.launch.report import page
from hephaestus.launch.run import preflight, validation
from hephaestus.launch.run import request as request_lib


class SeedRun(NamedTuple):
  """The run of one seed: its folder, named by the seed, and its config."""

  folder: pathlib.Path
  config: launch_config.ExperimentConfig


def train(request: request_lib.TrainRequest, seeds: Sequence[int], at_a_time: int | None) -> int:
  """Trains or resumes the run of each seed, and prints their score as one curve; returns the exit code.

  Args:
    request: what all runs share; its `run` is the parent of their folders, None for a new one.
    seeds: the seeds.
    at_a_time: number of runs at a time, see `shares`.
  """
  runs = plan(request, seeds)
  parent = runs[0].folder.parent
  missing = [run for run in runs if not is_done(run)]
  code = 0
  if missing:
    cores = shares(missing, at_a_time)
    config = missing[0].config  # before any folder is made; each run checks its own later
    validation.validate_here(request, config)
    jax.config.update('jax_platforms', 'cpu')  # accelerators are for the runs
    preflight.check_environment(config)
    say = lambda text: print(text, flush=True)
    say(f'{len(missing)} runs of {len(runs)} to do, {len(cores)} at a time, in {parent}')
    code, left = jobs.run_all([_Training(run) for run in missing], cores, say)
    if code == jobs.INTERRUPTED:
      say(f'stopped with {left} runs left; resume them by the same command with --run {parent}')
      return code
  try:
    lines, remarks = page.report([run.folder for run in runs])
  except ValueError as error:
    lines, remarks, code = [], [str(error)], 1
  print(*lines, sep='\n')
  for remark in remarks:
    print(f'hephaestus train: {remark}', file=sys.stderr)
  return code


def plan(request: request_lib.TrainRequest, seeds: Sequence[int]) -> list[SeedRun]:
  """Makes the run of each seed, see `train`; ValueError, which names a flag or key, if one is invalid."""
  if request.seed is not None:
    raise ValueError(f'--seed {request.seed}: is one of --seeds; give one of the two options')
  if words := request.words(*request_lib.SINGLE):
    raise ValueError(f'{words[0]}: is of a single run; leave it out, or --seeds')
  if folder_lib.resumes(request.run):
    raise ValueError(
      f'--run {request.run}: is the folder of a single run; give another for several, or leave out '
      '--seeds to resume it'
    )
  if len(set(seeds)) < len(seeds):
    raise ValueError(f'--seeds {" ".join(map(str, seeds))}: give each seed once')
  parent = request.run
  found: list[SeedRun] = []
  for seed in seeds:
    # Each run prints the same lines.
    with contextlib.redirect_stdout(io.StringIO()) if found else contextlib.nullcontext():
      config = request_lib.make_config(dataclasses.replace(request, run=None, seed=seed))
    parent = parent or folder_lib.new(config)
    name = f'seed={seed}'
    wandb = config.wandb
    named = dataclasses.replace(wandb, group=wandb.group or parent.name, name=wandb.name or name)
    found.append(SeedRun(parent / name, dataclasses.replace(config, wandb=named)))
    if folder_lib.resumes(found[-1].folder):
      folder_lib.check(*found[-1])
  return found


def is_done(run: SeedRun) -> bool:
  """Whether a run has finished, with the limits of steps and minutes that its config has now."""
  if not folder_lib.resumes(run.folder) or not folder_lib.has_finished(run.folder, run.config):
    return False
  known = folder_lib.load_config(run.folder)
  limits = lambda config: (config.max_environment_steps, config.max_minutes)
  return limits(known) == limits(run.config)


def shares(runs: Sequence[SeedRun], asked: int | None) -> list[list[int]]:
  """Divides the available CPU cores among the runs that are trained at the same time.

  By default as many are trained at a time as the cores allow: a run of one process needs a core, and a
  run with actors needs one for each actor and two more; runs on an accelerator are trained in turn.

  Args:
    asked: number of runs at a time, from --jobs; None for the default. ValueError if it is below 1, or
      above the number of cores.

  Returns:
    Core indices of each run that is trained at a time.
  """
  cores, config = jobs.available_cores(), runs[0].config
  if asked is not None:
    jobs.available_cores(asked)
  elif config.accelerator and presets.default_preset() != 'laptop':
    asked = 1
  else:
    asked = max(1, len(cores) // (1 if config.fused else 2 + config.actor.num_actors))
  count = min(asked, len(runs))
  edges = [len(cores) * index // count for index in range(count + 1)]
  return [cores[begin:end] for begin, end in itertools.pairwise(edges)]


class _Training(jobs.Job):
  """Job that trains or resumes a run, by `hephaestus train --run`."""

  def __init__(self, run: SeedRun):
    self.run, self.name = run, run.folder.name
    self.log = run.folder / 'logs' / 'train.log'

  def commands(self) -> Generator[jobs.Command, jobs.Ended, None]:
    folder = self.run.folder
    try:
      folder_lib.open_run(folder, self.run.config)  # so the command needs no other flag
    except ValueError as error:
      raise jobs.Failed(str(error)) from None
    self.check((yield jobs.Command('training', ['train', '--trust', '--run', str(folder)])))
    if not folder_lib.has_finished(folder, self.run.config):
      raise jobs.Failed('training was stopped before its end; the same command resumes it')

  def line(self, seconds: float) -> str:
    files = self.run.folder / 'metrics'
    steps = (metrics.last(files / 'learner.jsonl') or {}).get('environment_step') or 0
    episode_return = (metrics.last(files / 'evaluator.jsonl') or {}).get('episode_return')
    shown = 'not evaluated yet' if episode_return is None else f'return {episode_return:.2f}'
    time = f', {seconds / 60:.1f} min' if seconds else ''
    return f'{self.name}: {shown}, {steps:,}/{self.run.config.max_environment_steps:,} steps{time}'
