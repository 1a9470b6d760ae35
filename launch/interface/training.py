"""`train`, which runs `hephaestus train` from Python, and `Run`, which reads its results."""

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

from hephaestus.launch import records
from hephaestus.launch.run import commands as run_commands
from hephaestus.launch.run import flags

if TYPE_CHECKING:
  from typing_extensions import Unpack

  from hephaestus.actors.environments import environment as environment_lib
  from hephaestus.launch.interface import policy as policy_lib

Overrides = Mapping[str, Any] | Sequence[str]
INTERRUPTED = 130  # exit code of a run that Ctrl-C has stopped


class Options(TypedDict, total=False):
  """Less common options of `hephaestus train`; all but `origin` have the names of its flags.

  Attributes:
    preset: 'laptop', 'gpu' or 'tpu-v4-8'; by default the one for the accelerator of this machine.
    fused: whether environments, replay and learner are in one process, compiled where the environment
      is in JAX; by default wherever that is possible.
    origin: RUN[@best|@STEP], a run whose trained parameters the new run starts from; the flag is
      `--from`.
    expose: whether other machines can reach the port of the replay server.
    reset_moments: whether to reset Adam's moments when a PPO run resumes with another number of
      environments.
    profile: 'START:STOP', range of updates to trace with the profiler.
    config: path of a configuration file, whose values the other options override.
    trust: whether to import the agent and the environment that the folder of `run`, `origin` or
      `config` names by an import path; otherwise such a name is refused unless it is `agent` or `env`.
  """

  preset: str
  fused: bool
  origin: str
  expose: bool
  reset_moments: bool
  profile: str
  config: str | os.PathLike[str]
  trust: bool


class Run:
  """Gives access to the results of a run, which may still be training.

  Attributes:
    folder: path of the run's folder.
  """

  def __init__(self, folder: str | os.PathLike[str], *, trust: bool = False):
    """Opens the folder of a run.

    Args:
      folder: path of the run's folder.
      trust: whether to import the agent and the environment that the folder names by an import path.

    Raises:
      ValueError: it is not the folder of a run, its config is broken, or its agent would have to be
        imported without `trust`.
    """
    from hephaestus.launch.files import folder as folder_lib

    self.folder = pathlib.Path(folder)
    with records.trusting(trust):
      folder_lib.load_config(self.folder)

  def __fspath__(self) -> str:
    return str(self.folder)

  def __repr__(self) -> str:
    return f'Run({str(self.folder)!r})'

  def scores(self) -> dict[str, np.ndarray]:
    """Metrics of all evaluations, such as `episode_return`; same as `curves('evaluator')`.

    Returns:
      One array for each metric by name, [E] with an entry for each evaluation. Among them are
      `episode_return`, `normalised_score` and `environment_step`.
    """
    return self.curves('evaluator')

  def curves(self, node: str = 'learner') -> dict[str, np.ndarray]:
    """Reads all metrics that one process of the run has reported.

    Args:
      node: name of the process: 'learner', 'evaluator', or an actor such as 'actor-0'.

    Returns:
      An array [N] for each numeric metric by name, with an entry for each of N reports; NaN where a
      report lacks the metric. Empty before the first report of the learner or the evaluator.

    Raises:
      ValueError: no process of this name has reported, and it is neither the learner nor the
        evaluator; or a line of its metrics is damaged.
    """
    from hephaestus.launch.files import metrics

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

  def log_to(self, logger: Any, node: str = 'learner') -> None:
    """Writes all reports of one process to a logger, such as one of `acme.utils.loggers`.

    Args:
      logger: has a method `write`, which takes a dictionary of numbers; all have the same keys.
      node: as for `curves`.

    Raises:
      ValueError: as `curves`.
    """
    curves = self.curves(node)
    for row in zip(*curves.values(), strict=True):
      logger.write(dict(zip(curves, row, strict=True)))

  def policy(self, checkpoint: str | int | None = None) -> 'policy_lib.Policy':
    """Loads the run's policy.

    Args:
      checkpoint: learner step of a checkpoint, or 'best'; None for the newest.

    Raises:
      ValueError: as `load`.
    """
    from hephaestus.launch.interface import policy

    return policy.load(self.folder, checkpoint)


def train(
  env: 'str | environment_lib.Environment | Any' = None,
  *,
  steps: int | None = None,
  seed: int | None = None,
  run: str | os.PathLike[str] | None = None,
  agent: str | None = None,
  set: Overrides = (),
  **options: 'Unpack[Options]',
) -> Run:
  """Trains an agent, or resumes a run, and prints the same progress as `hephaestus train`.

  By default the run is in this process, if the agent permits it: one compiled program, but for steps of
  environments that are not written in JAX.
  It uses several child processes, as the command does, with `fused=False`, with `expose`, or with
  more than one actor, learner process or replay shard.

  Args:
    env: name of an environment; an instance or a class of one written in JAX; or a class or function that
      makes an environment of gymnasium or dm_env, to which `set` can give `environment.max_steps` and
      keyword arguments; an environment of `gymnasium.make` stands for its spec. A new run's default is
      'catch'.
    steps: environment steps in total; by default as many as the preset has.
    seed: seed of all random keys; 0 by default.
    run: folder of the run, which is resumed if it exists; by default a new one in `runs/`.
    agent: 'dreamer', 'plain', 'ppo', or 'module:Class' of an `AgentRecord`; by default the dreamer.
    set: config values by path, {'agent.gamma': 0.995}, or as for `--set`, ['agent.gamma=0.995'].
    **options: less common options, see `Options`.

  Returns:
    The run, finished or stopped by Ctrl-C.

  Raises:
    ValueError: an option or a value is invalid; the command prints the same message.
    TypeError: there is no option of this name.
    RuntimeError: training failed; the output printed before shows why.
  """
  flags.say_import('hephaestus.train')
  arguments = _command_defaults()
  unknown = sorted(options.keys() - Options.__annotations__.keys())
  if unknown:
    raise TypeError(
      f'train() has no option {unknown[0]!r}; choose of {", ".join(Options.__annotations__)}'
    )
  numbers = {'steps': _whole('steps', steps), 'seed': _whole('seed', seed)}
  vars(arguments).update(options, **numbers, agent=agent, set=_assignments(set))
  with records.trusting(arguments.trust):
    return _train(arguments, env, run)


def _train(arguments: argparse.Namespace, env: Any, run: str | os.PathLike[str] | None) -> Run:
  """Trains with the options of `train`, given as parsed flags."""
  arguments.run = None if run is None else pathlib.Path(run)
  arguments.config = None if arguments.config is None else pathlib.Path(arguments.config)
  is_instance = not (env is None or isinstance(env, str))
  arguments.env = _register(env, arguments.run) if is_instance else env
  if arguments.fused is None and _can_be_one_process(arguments):
    arguments.fused = True
  config = flags.make_config(arguments)
  if is_instance and not config.fused:
    raise ValueError(
      f'environment.name={arguments.env!r}: an instance exists only in this process, and this run has '
      "several; give an import path, 'package.module:Class'"
    )
  if arguments.run is None:
    from hephaestus.launch.files import folder as folder_lib

    arguments.run = folder_lib.new(config)
  exit_code = run_commands.begin(arguments, config) if config.fused else _in_child(arguments)
  if exit_code not in (0, INTERRUPTED):
    raise RuntimeError(f'{arguments.run}: training failed with exit code {exit_code}')
  return Run(arguments.run)


def _command_defaults() -> argparse.Namespace:
  """Parsed arguments of `hephaestus train` without any flag."""
  parser = argparse.ArgumentParser()
  run_commands.add(parser.add_subparsers())
  return parser.parse_args(['train'])


def _whole(name: str, value: Any) -> int | None:
  """The whole number of an argument, as the flag of its name reads it; ValueError, which names it."""
  try:
    return None if value is None else flags.whole_number(str(value))
  except argparse.ArgumentTypeError as error:
    raise ValueError(f'{name}={error}') from None


def _assignments(overrides: Overrides) -> list[str]:
  """Converts overrides, of which mappings may be nested, to assignments PATH=VALUE as for `--set`."""
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
  """Registers an object, by the name that a resumed run has for it or a new one; returns the name."""
  from hephaestus.actors import environments
  from hephaestus.launch.files import folder as folder_lib

  known = None
  if run is not None and folder_lib.resumes(run):
    known = folder_lib.load_config(run).environment['name']
  return environments.register(env, known)


def _can_be_one_process(arguments: argparse.Namespace) -> bool:
  """Whether this is a new run that can be fused, and no argument asks for several processes."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch import records
  from hephaestus.launch.files import folder as folder_lib

  file = launch_config.read_partial(arguments.config, arguments.agent)
  is_new = not folder_lib.resumes(arguments.run)
  asked = ('learner.fused', *flags.SEVERAL)
  if not is_new or arguments.expose or any(flags.sets(arguments, key) for key in asked):
    return False
  return arguments.origin is not None or records.find_record(file.agent or records.DREAMER).can_fuse


def _in_child(arguments: argparse.Namespace) -> int:
  """Runs the command in a child process, since a process with JAX must not fork; returns the exit code."""
  command = [sys.executable, '-m', 'hephaestus.launch.main', 'train', '--run', str(arguments.run)]
  command += flags.given_config_flags(arguments)
  if arguments.fused is not None:
    command.append('--fused' if arguments.fused else '--no-fused')
  for flag in ('expose', 'reset_moments', 'trust'):
    command += [f'--{flag.replace("_", "-")}'] if getattr(arguments, flag) else []
  files = (
    ('--config', arguments.config),
    ('--from', arguments.origin),
    ('--profile', arguments.profile),
  )
  for flag, value in files:
    command += [] if value is None else [flag, str(value)]
  live = sys.stdout.isatty()  # a notebook shows only its own output, so lines are passed on
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
  sys.stderr.writelines(each for each in errors.splitlines(True) if flags.IMPORTING not in each)
  return process.returncode


def _follow(process: subprocess.Popen) -> str:
  """Prints the output of a process until it ends; returns its stderr."""
  for line in process.stdout or ():
    print(line, end='', flush=True)
  return process.communicate()[1]
