"""`train`: a run from Python, with the options of the command; and Run: its results."""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from hephaestus.launch import flags
from hephaestus.launch.run import commands as run_commands

if TYPE_CHECKING:
  from typing_extensions import Unpack

  from hephaestus.actors.environments import environment as environment_lib
  from hephaestus.launch.interface import policy as policy_lib

Overrides = Mapping[str, Any] | Sequence[str]
INTERRUPTED = 130  # exit code of a run that Ctrl-C has stopped


class Options(TypedDict, total=False):
  """Less common options of `hephaestus train`; all but `origin` have the names of its flags.

  Attributes:
    preset: 'laptop', 'gpu' or 'tpu-v4-8'; by default by the accelerator that is found.
    fused: whether the run is one program of one process; by default wherever that is possible.
    origin: RUN[@best|@STEP], whose agent the run begins with; the flag is `--from`.
    expose: let other machines reach replay's port.
    reset_moments: reset Adam where a PPO run resumes with another number of environments.
    profile: 'START:STOP', updates to trace.
    config: path of a configuration file, whose values the other options override.
  """

  preset: str
  fused: bool
  origin: str
  expose: bool
  reset_moments: bool
  profile: str
  config: str | os.PathLike[str]


class Run:
  """The folder of a run, which may be running.

  Attributes:
    folder: its path.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Opens a folder; ValueError where it is not that of a run."""
    from hephaestus.launch.run import folder as folder_lib

    self.folder = pathlib.Path(folder)
    folder_lib.load_config(self.folder)

  def __fspath__(self) -> str:
    return str(self.folder)

  def __repr__(self) -> str:
    return f'Run({str(self.folder)!r})'

  def scores(self) -> dict[str, np.ndarray]:
    """All evaluations: `episode_return`, `normalised_score`, `environment_step` and others."""
    return self.curves('evaluator')

  def curves(self, node: str = 'learner') -> dict[str, np.ndarray]:
    """The metrics of a node, each an array with an entry for every report; NaN where it has none.

    Args:
      node: 'learner', 'evaluator', or an actor such as 'actor-0'.

    Returns:
      Empty before the first report.

    Raises:
      ValueError: no node of this name has reported.
    """
    from hephaestus.launch.run import metrics

    files = {path.stem: path for path in (self.folder / 'metrics').glob('*.jsonl')}
    known = sorted(files.keys() - {'events'} | {'learner', 'evaluator'})
    if node not in known:
      raise ValueError(
        f'node={node!r}: has no metrics in {self.folder}; choose of {", ".join(known)}'
      )
    rows = metrics.read(files[node]) if node in files else []
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    is_number = lambda x: x is None or isinstance(x, int | float)
    return {
      name: np.array([np.nan if x is None else x for x in column])
      for name, column in columns.items()
      if all(map(is_number, column))
    }

  def policy(self, checkpoint: str | int | None = None) -> 'policy_lib.Policy':
    """Its policy, see `load`."""
    from hephaestus.launch.interface import policy

    return policy.load(self.folder, checkpoint)


def train(
  env: 'str | environment_lib.Environment | None' = None,
  *,
  steps: int | None = None,
  seed: int | None = None,
  run: str | os.PathLike[str] | None = None,
  agent: str | None = None,
  set: Overrides = (),
  **options: 'Unpack[Options]',
) -> Run:
  """Trains an agent, or resumes the run of a folder, with the progress that the command shows.

  The run is one compiled program in this process where the agent and the environment can, unless
  several processes are asked for: by `fused=False`, `expose`, or more than one actor, learner or
  shard of replay. Those run beside this process, as by the command.

  Args:
    env: name of an environment, or an instance of one written in JAX; 'catch' for a new run.
    steps: environment steps in total; those of the preset by default.
    seed: of all random keys; 0 by default.
    run: folder; a new one in `runs/` by default.
    agent: 'dreamer', 'plain', 'ppo' or 'module:Class'; the dreamer by default.
    set: values of the config by their path, such as {'agent.gamma': 0.995}, or as of the command,
      ['agent.gamma=0.995'].
    **options: see `Options`.

  Returns:
    The run, finished, or stopped by an interrupt.

  Raises:
    ValueError: an option or a value is invalid; the text is that of the command.
    RuntimeError: training failed; the lines before say how.
  """
  arguments = _command_defaults()
  unknown = sorted(options.keys() - Options.__annotations__.keys())
  if unknown:
    raise TypeError(
      f'train() has no option {unknown[0]!r}; choose of {", ".join(Options.__annotations__)}'
    )
  vars(arguments).update(options, steps=steps, seed=seed, agent=agent, set=_assignments(set))
  arguments.run = None if run is None else pathlib.Path(run)
  arguments.config = None if arguments.config is None else pathlib.Path(arguments.config)
  is_instance = not (env is None or isinstance(env, str))
  arguments.env = _register(env, arguments.run) if is_instance else env
  if arguments.fused is None and _can_be_one_process(arguments):
    arguments.fused = True
  config = flags.make_config(arguments)
  if is_instance and not config.fused:
    raise ValueError(
      f'environment.name={arguments.env!r}: an instance is in this process alone, and this run has '
      "several; give an import path, 'package.module:Class'"
    )
  if arguments.run is None:
    from hephaestus.launch.run import folder as folder_lib

    arguments.run = folder_lib.new(config)
  exit_code = run_commands.begin(arguments, config) if config.fused else _beside(arguments)
  if exit_code not in (0, INTERRUPTED):
    raise RuntimeError(f'{arguments.run}: training failed with exit code {exit_code}')
  return Run(arguments.run)


def _command_defaults() -> argparse.Namespace:
  """The arguments of the command where no flag is given."""
  parser = argparse.ArgumentParser()
  run_commands.add(parser.add_subparsers())
  return parser.parse_args(['train'])


def _assignments(overrides: Overrides) -> list[str]:
  """Overrides as of the command; a mapping may be nested, and strings are read as the command does."""
  if not isinstance(overrides, Mapping):
    return list(overrides)
  result = []
  for key, value in overrides.items():
    if isinstance(value, Mapping):
      result += [f'{key}.{entry}' for entry in _assignments(value)]
    elif isinstance(value, str):
      result.append(f'{key}={value}')
    else:
      result.append(f'{key}={json.dumps(value, default=lambda x: x.item())}')
  return result


def _register(env: Any, run: pathlib.Path | None) -> str:
  """A name for an instance: that in the folder of a run that is resumed, or a new one."""
  from hephaestus.actors import environments
  from hephaestus.launch.run import folder as folder_lib

  known = None
  if run is not None and (run / folder_lib.CONFIG).exists():
    known = folder_lib.load_config(run).environment['name']
  return environments.register(env, known)


def _can_be_one_process(arguments: argparse.Namespace) -> bool:
  """Whether a new run can be fused, and nothing asks for several processes."""
  from hephaestus.actors import environments
  from hephaestus.launch import config_file, records
  from hephaestus.launch.run import folder as folder_lib

  file = config_file.read(arguments.config, arguments.agent)
  is_new = arguments.run is None or not (arguments.run / folder_lib.CONFIG).exists()
  asked = ('learner.fused', *flags.SEVERAL)
  if not is_new or arguments.expose or any(flags.sets(arguments, key) for key in asked):
    return False
  if (arguments.env or file.env or '').partition('/')[0] in environments.HOST_FAMILIES:
    return False
  return arguments.origin is not None or records.find_record(file.agent or records.DREAMER).can_fuse


def _beside(arguments: argparse.Namespace) -> int:
  """Runs the command in a process of its own, since one that uses JAX must not be forked."""
  command = [sys.executable, '-m', 'hephaestus.launch.main', 'train', '--run', str(arguments.run)]
  command += flags.given_config_flags(arguments)
  if arguments.fused is not None:
    command.append('--fused' if arguments.fused else '--no-fused')
  for flag in ('expose', 'reset_moments'):
    command += [f'--{flag.replace("_", "-")}'] if getattr(arguments, flag) else []
  files = (
    ('--config', arguments.config),
    ('--from', arguments.origin),
    ('--profile', arguments.profile),
  )
  for flag, value in files:
    command += [] if value is None else [flag, str(value)]
  live = sys.stdout.isatty()  # else passed on line by line: a notebook shows its own output alone
  process = subprocess.Popen(
    command, stdout=None if live else subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  try:
    errors = _follow(process)
  except KeyboardInterrupt:
    if not live:  # a terminal interrupts both
      process.send_signal(signal.SIGINT)
    errors = _follow(process)
  if process.returncode == 2:
    raise ValueError(errors.strip().rpartition('hephaestus train: ')[2])
  sys.stderr.write(errors)
  return process.returncode


def _follow(process: subprocess.Popen) -> str:
  """Prints what a process prints until it ends; returns what it has written to stderr."""
  for line in process.stdout or ():
    print(line, end='', flush=True)
  return process.communicate()[1]
