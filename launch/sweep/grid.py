"""Runs of several seeds and settings: their configs, their folders, and the table of their curves."""

import contextlib
import dataclasses
import io
import itertools
import os
import pathlib
import re
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import yaml
from absl import logging as absl_logging

from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.run import request as request_lib
from hephaestus.launch.sweep import jobs

BY_FLAG = {
  'seed': '--seeds', 'max_environment_steps': '--steps', launch_config.AGENT: '--agent',
}  # fmt: skip


class SweepRun(NamedTuple):
  """One run of a sweep.

  Attributes:
    folder: folder of the run, named by its setting and seed.
    setting: values of the grid's keys, such as 'gamma=0.9,window=4'; '' where only seeds differ.
    config: config of the run.
  """

  folder: pathlib.Path
  setting: str
  config: launch_config.ExperimentConfig


def plan(
  request: request_lib.TrainRequest, seeds: Sequence[int] | None, grids: Sequence[str]
) -> list[SweepRun]:
  """Lists the runs that --seeds and --grid ask for: one for each seed with each setting.

  Args:
    request: what all runs share. Its `run` is the parent folder of all runs; None for a new one.
    seeds: seeds of the runs; None for the one of `request`.
    grids: values of config keys, each 'KEY=VALUE,VALUE'.

  Returns:
    The runs in the order in which they are started: all settings of the first seed first.

  Raises:
    ValueError: a flag or key is invalid, or the folder of a run has another config; names it.
  """
  seeds = [request.seed or 0] if seeds is None else list(dict.fromkeys(seeds))
  chosen = list(itertools.product(seeds, _settings(grids)))
  configs: list[launch_config.ExperimentConfig] = []
  for seed, (_, assignments) in chosen:
    one = dataclasses.replace(request, run=None, seed=seed, set=(*request.set, *assignments))
    # Each run prints the same lines.
    with contextlib.redirect_stdout(io.StringIO()) if configs else contextlib.nullcontext():
      configs.append(request_lib.make_config(one))
  parent = request.run or folder_lib.new(configs[0])
  found = []
  for (seed, (setting, _)), config in zip(chosen, configs, strict=True):
    name = re.sub(r'[^\w.,=+-]+', '-', ','.join(filter(None, [setting, f'seed={seed}'])))
    # Its reports have this group and name in Weights & Biases, unless it has others.
    wandb = config.wandb
    named = dataclasses.replace(wandb, group=wandb.group or parent.name, name=wandb.name or name)
    found.append(SweepRun(parent / name, setting, dataclasses.replace(config, wandb=named)))
  names = [run.folder.name for run in found]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(f'--grid: two settings are named {name}; give each value once')
  for run in found:
    if (run.folder / folder_lib.CONFIG).exists():
      folder_lib.check(run.folder, run.config)
  return found


def _settings(grids: Sequence[str]) -> list[tuple[str, list[str]]]:
  """Lists (name, assignments for --set) of each setting: all combinations of the values of all keys."""
  values: dict[str, list[str]] = {}
  for text in grids:
    key, separator, listed = text.partition('=')
    if not separator or not key:
      raise ValueError(f'--grid {text}: write it as key=value,value, such as agent.gamma=0.9,0.99')
    if key in BY_FLAG:
      raise ValueError(f'--grid {text}: is given by {BY_FLAG[key]}')
    if key in values:
      raise ValueError(f'--grid {text}: the key is given twice; list all its values in one')
    values[key] = _split(text, listed)
  shorts = [key.rpartition('.')[2] for key in values]
  names = {
    key: short if shorts.count(short) == 1 else key
    for key, short in zip(values, shorts, strict=True)
  }
  found = []
  for chosen in itertools.product(*values.values()):
    pairs = list(zip(values, chosen, strict=True))
    name = ','.join(f'{names[key]}={value}' for key, value in pairs)
    found.append((name, [f'{key}={value}' for key, value in pairs]))
  return found


def _split(text: str, listed: str) -> list[str]:
  """Splits values at their commas, as they were written; a value may be a list. ValueError for none."""
  try:
    (node,) = yaml.compose_all(f'[{listed}]')
  except (yaml.YAMLError, ValueError):
    node = None
  if not isinstance(node, yaml.SequenceNode) or not node.value:
    raise ValueError(f'--grid {text}: give its values, separated by commas')
  return [listed[each.start_mark.index - 1 : each.end_mark.index - 1] for each in node.value]


def is_done(run: SweepRun) -> bool:
  """Whether a run has finished, with the limits of steps and minutes that its config has now."""
  if not (run.folder / folder_lib.CONFIG).exists() or not folder_lib.has_finished(run.folder):
    return False
  known = folder_lib.load_config(run.folder)
  limits = lambda config: (config.max_environment_steps, config.max_minutes)
  return limits(known) == limits(run.config)


def shares(runs: Sequence[SweepRun], asked: int | None) -> list[list[int]]:
  """Divides the available CPU cores among the runs that are trained at the same time.

  If `asked` is None, as many are trained at a time as the cores allow: a run of one process needs a
  core, and a run with actors needs one for each actor and two more. Runs that use an accelerator are
  then trained one after another.

  Args:
    asked: number of runs at a time, from --jobs; None to choose it as above.

  Returns:
    A list of core indices for each run that is trained at a time; at most one for each of `runs`.

  Raises:
    ValueError: `asked` is below 1, or above the number of cores.
  """
  available = jobs.available_cores()
  if asked is None:
    needed = max(1 if each.config.fused else 2 + each.config.actor.num_actors for each in runs)
    asked = max(1, len(available) // needed)
    if presets.default_preset() != 'laptop' and any(each.config.accelerator for each in runs):
      asked = 1
  else:
    jobs.available_cores(asked)
  parts = np.array_split(available, min(asked, len(runs)))
  return [[int(core) for core in part] for part in parts]


class Training(jobs.Job):
  """Job that trains or resumes a run of a sweep, by `hephaestus train --run`.

  Attributes:
    run: run to train.
  """

  def __init__(self, run: SweepRun):
    self.run, self.name = run, run.folder.name
    self.log = run.folder / 'logs' / 'train.log'

  def commands(self) -> Generator[jobs.Command, jobs.Ended, None]:
    try:
      folder_lib.open_run(self.run.folder, self.run.config)  # so the command needs no other flag
    except ValueError as error:
      raise jobs.Failed(str(error)) from None
    self.check(
      (yield jobs.Command('training', ['train', '--trust', '--run', str(self.run.folder)]))
    )
    if not folder_lib.has_finished(self.run.folder):
      raise jobs.Failed('training was stopped before its end; the same command resumes it')

  def line(self, seconds: float) -> str:
    files = self.run.folder / 'metrics'
    steps = (metrics.last(files / 'learner.jsonl') or {}).get('environment_step') or 0
    episode_return = (metrics.last(files / 'evaluator.jsonl') or {}).get('episode_return')
    shown = 'not evaluated yet' if episode_return is None else f'return {episode_return:.2f}'
    time = f', {seconds / 60:.1f} min' if seconds else ''
    return f'{self.name}: {shown}, {steps:,}/{self.run.config.max_environment_steps:,} steps{time}'


def table(runs: Sequence[SweepRun]) -> tuple[str, list[str]]:
  """Summarises the learning curves of the runs, one for each setting.

  Returns:
    The Markdown table of `hephaestus report`, and a remark for each run that it leaves out.

  Raises:
    ValueError: there are no curves, or the extra `report` is not installed.
  """
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  from hephaestus.launch.report import curves

  absl_logging.set_verbosity(absl_logging.WARNING)  # rliable logs each step
  settings = dict.fromkeys(run.setting for run in runs if run.setting)
  labelled = [(name, [run.folder for run in runs if run.setting == name]) for name in settings]
  unlabelled = [run.folder for run in runs if not run.setting]
  made: Any = curves.make(unlabelled, labelled)
  return made.markdown, [f'left out: {reason}' for reason in made.left_out]
