"""`train`, which runs `hephaestus train` from Python, and `Run`, which reads its results."""

import argparse
import contextlib
import dataclasses
import enum
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hephaestus.actors.environments import names
from hephaestus.launch import records
from hephaestus.launch.processes import fork_server
from hephaestus.launch.run import commands as run_commands
from hephaestus.launch.run import flags, validation
from hephaestus.launch.run import request as request_lib

if TYPE_CHECKING:
  from hephaestus.actors.environments import environment as environment_lib
  from hephaestus.launch.interface import policy as policy_lib

Overrides = Mapping[str, Any] | Sequence[str]
INTERRUPTED = 130  # exit code of a run that Ctrl-C has stopped


class Run:
  """Gives access to the results of a run, which may still be training.

  Attributes:
    folder: path of the run's folder.
  """

  def __init__(self, folder: str | os.PathLike[str], *, trust: bool = False):
    """Opens the folder of a run; `trust` imports the agent and environment that it names by an import path.

    ValueError if it is not the folder of a run, its config is broken, or trust is needed.
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
    """Metrics of all evaluations by name, [E] each, such as `episode_return`: `curves('evaluator')`."""
    return self.curves('evaluator')

  def curves(self, node: str = 'learner') -> dict[str, np.ndarray]:
    """Reads all metrics that one process of the run has reported, as in `metrics`.

    `node` is 'learner', 'evaluator', or an actor such as 'actor-0'; ValueError if no process of another
    name has reported.
    """
    found: dict[str, dict[str, np.ndarray]] = {'learner': {}, 'evaluator': {}} | self.metrics()
    if node not in found:
      known = ', '.join(sorted(found))
      raise ValueError(f'node={node!r}: has no metrics in {self.folder}; choose of {known}')
    return found[node]

  def metrics(self) -> dict[str, dict[str, np.ndarray]]:
    """Reads all metrics of the run, by the name of the process that has reported them.

    Returns:
      For each process, such as 'learner', 'evaluator' or 'actor-0', an array [N] for each numeric
      metric by name, with an entry for each of its N reports; NaN where a report lacks the metric.
      Among them are `time`, `environment_step` and `learner_step`.
    """
    from hephaestus.launch.files import metrics

    files = sorted((self.folder / 'metrics').glob('*.jsonl'))
    rows = {file.stem: metrics.read(file) for file in files if file.stem != 'events'}
    return {
      node: {
        name: np.array([np.nan if row.get(name) is None else row[name] for row in reports])
        for name in dict.fromkeys(name for row in reports for name in row)
      }
      for node, reports in rows.items()
    }

  def log_to(self, logger: Any, node: str = 'learner') -> None:
    """Writes all reports of one process, see `curves`, to a logger, such as one of `acme.utils.loggers`.

    Its method `write` gets dictionaries of numbers, all with the same keys.
    """
    curves = self.curves(node)
    for row in zip(*curves.values(), strict=True):
      logger.write(dict(zip(curves, row, strict=True)))

  def policy(self, checkpoint: str | int | None = None) -> 'policy_lib.Policy':
    """Loads the run's policy, see `load`."""
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
  **options: Any,
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
    **options: any other field of `request.TrainRequest`, such as `preset`, `fused` or `origin`.

  Returns:
    The run, finished or stopped by SIGTERM.

  Raises:
    KeyboardInterrupt: Ctrl-C has stopped the run, whose last checkpoint is saved; the same call resumes it.
    ValueError: an option or a value is invalid; the command prints the same message.
    TypeError: there is no option of this name.
    RuntimeError: training failed; the output printed before shows why.
  """
  flags.say_import('hephaestus.train')
  unknown = sorted(options.keys() - {*request_lib.NAMES})
  if unknown:
    raise TypeError(
      f'train() has no option {unknown[0]!r}; {names.choices(unknown[0], request_lib.NAMES)}'
    )
  numbers = {'steps': _whole('steps', steps), 'seed': _whole('seed', seed)}
  options |= {**numbers, 'run': run, 'agent': agent, 'set': _assignments(set)}
  request = request_lib.TrainRequest(**options)
  with records.trusting(request.trust):
    return _train(request, env)


def _train(request: request_lib.TrainRequest, env: Any) -> Run:
  """Trains as `train`, for a request without an environment, which `env` gives by name or as an object."""
  is_instance = not (env is None or isinstance(env, str))
  request = dataclasses.replace(request, env=_register(env, request.run) if is_instance else env)
  if request.fused is None and _can_be_one_process(request):
    request = dataclasses.replace(request, fused=True)
  with contextlib.redirect_stdout(io.StringIO()) as said:
    config = request_lib.make_config(request)
  if config.fused:  # a child process says it itself
    print(said.getvalue(), end='', flush=True)
  if is_instance and not config.fused:
    raise ValueError(
      f'environment.name={request.env!r}: an instance exists only in this process, and this run has '
      "several; give an import path, 'package.module:Class'"
    )
  folder = request.run
  if folder is None:
    from hephaestus.launch.files import folder as folder_lib

    folder = folder_lib.new(config)
    request = dataclasses.replace(request, run=folder)
  exit_code = run_commands.begin(request, config) if config.fused else _in_child(request)
  if exit_code == INTERRUPTED:  # so that a loop over seeds ends, too
    raise KeyboardInterrupt
  if exit_code:
    raise RuntimeError(f'{folder}: training failed with exit code {exit_code}')
  return Run(folder)


def _whole(name: str, value: Any) -> int | None:
  """The whole number of an argument, as the flag of its name reads it; ValueError, which names it."""
  try:
    return None if value is None else request_lib.whole_number(str(value))
  except argparse.ArgumentTypeError as error:
    raise ValueError(f'{name}={error}') from None


def _plain(value: Any) -> Any:
  """A value of NumPy, a path or an entry of an enumeration as JSON can hold it; TypeError for others."""
  if isinstance(value, pathlib.PurePath):
    return str(value)
  if isinstance(value, enum.Enum):
    return value.value
  if hasattr(value, 'tolist'):  # scalars and arrays of NumPy and JAX
    return value.tolist()
  raise TypeError(type(value).__name__)


def _assignments(overrides: Overrides) -> list[str]:
  """Converts overrides, of which mappings may be nested, to assignments PATH=VALUE as for `--set`.

  A text in a mapping stays that text, also 'no' or '007', which `--set` would read as YAML.

  Raises:
    ValueError: a value is of another kind than YAML has; names its key.
  """
  if not isinstance(overrides, Mapping):
    return list(overrides)
  result = []
  for key, value in overrides.items():
    if isinstance(value, Mapping):
      result += [f'{key}.{entry}' for entry in _assignments(value)]
    else:
      try:
        text = json.dumps(value, default=_plain, ensure_ascii=False)
      except TypeError:
        raise ValueError(
          f'{key}={value!r}: give a number, a text, a truth value, None, or a list of these'
        ) from None
      result.append(f'{key}={text}')
  return result


def _register(env: Any, run: pathlib.Path | None) -> str:
  """Registers an object, by the name that a resumed run has for it or a new one; returns the name."""
  from hephaestus.actors import environments
  from hephaestus.launch.files import folder as folder_lib

  known = None
  if run is not None and folder_lib.resumes(run):
    known = folder_lib.load_config(run).environment['name']
  return environments.register(env, known)


def _can_be_one_process(request: request_lib.TrainRequest) -> bool:
  """Whether this is a new run that can be fused, and no option asks for several processes."""
  from hephaestus.launch.files import folder as folder_lib

  asked = ('learner.fused', *validation.SEVERAL)
  if folder_lib.resumes(request.run) or request.expose or any(map(request.sets, asked)):
    return False
  agent = request.agent or request.file.agent or records.DREAMER
  return request.origin is not None or records.find_record(agent).can_fuse


def _in_child(request: request_lib.TrainRequest) -> int:
  """Runs the command in a child process, since one with JAX must not fork; returns the exit code."""
  command = [sys.executable, '-m', 'hephaestus.launch.main', 'train', *request.words()]
  exit_code, errors = _run(command, live=sys.stdout.isatty())
  if exit_code == 2:
    raise ValueError(errors.strip().rpartition('hephaestus train: ')[2])
  sys.stderr.writelines(each for each in errors.splitlines(True) if flags.IMPORTING not in each)
  return exit_code


def _run(command: Sequence[str], *, live: bool) -> tuple[int, str]:
  """Runs a command; returns its exit code and its stderr.

  Args:
    command: the command and its arguments.
    live: its stdout is this terminal. Otherwise lines are passed on, since a notebook shows only its own output.
  """
  # Not a pipe: one that nobody reads stops the command once it is full.
  with tempfile.TemporaryFile('w+') as errors:
    stdout = None if live else subprocess.PIPE
    # The command ends with this process; it says so itself, since one with threads should run nothing in a fork.
    bound = os.environ | {fork_server.PARENT: str(os.getpid())}
    process = subprocess.Popen(command, stdout=stdout, stderr=errors, text=True, env=bound)
    try:
      _follow(process)
    except KeyboardInterrupt:
      if not live:  # a terminal interrupts both
        process.send_signal(signal.SIGINT)
      _follow(process)
    errors.seek(0)
    return process.returncode, errors.read()


def _follow(process: subprocess.Popen) -> None:
  """Prints the output of a process until it ends."""
  for line in process.stdout or ():
    print(line, end='', flush=True)
  process.wait()
