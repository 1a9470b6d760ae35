"""Measures an accelerator unattended, section by section, and writes one JSON file.

Each section is a command of this project in a process of its own: an accelerator belongs to one
process at a time, and a section that runs out of memory does not end the others.
"""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from hephaestus.launch.agents import machine
from hephaestus.launch.bench import speed
from hephaestus.launch.bench.learning import runs, scores
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import jobs

_TRAINING = 60.0  # least seconds of training of a run; with less time left it is not started
_RESERVE = 180.0  # seconds that a run needs outside training: imports, compilation, last evaluation
_PATIENCE = 600.0  # seconds outside training after which a run is killed
_BATCHES, _HORIZONS = [64, 128, 512, 1024], [8, 15, 32]  # `full` itself has 256 and 64
_FUSED = (
  'evaluator.period=1000000', 'evaluator.final_episodes=64', 'evaluator.greedy=false',
  'learner.log_period=5', 'tensorboard=false',
)  # fmt: skip
_TINY: Sequence[str] = (
  'agent.deterministic_size=16', 'agent.hidden_size=16', 'agent.horizon_max=8', 'agent.ensemble_size=1',
  'learner.batch_size=4', 'actor.num_envs=4', 'actor.sequence_length=8', 'evaluator.num_episodes=2',
  'replay.strata[1].max_size=512',
)  # fmt: skip
_PLATFORM = 'import jax; print(jax.devices()[0].platform)'


class Section(NamedTuple):
  """One measurement of `bench accelerator`."""

  name: str  # its key in the output file
  words: Sequence[str]  # of its command, after `hephaestus`
  seconds: float  # time limit of the command; for a training run, its training time
  run: pathlib.Path | None = None  # folder of the training run; None: it prints figures as JSON


def platform() -> str:
  """Name of JAX's platform, such as 'gpu' or 'tpu', found in a child process, which leaves it free.

  Raises:
    ValueError: it is the CPU, or JAX does not start.
  """
  done = subprocess.run([sys.executable, '-c', _PLATFORM], capture_output=True, text=True)
  found = 'cpu' if done.returncode else done.stdout.split()[-1]
  if found != 'cpu':
    return found
  broken = done.stderr.strip().splitlines()[-1:] if done.returncode else []
  why = machine.find().lack or ' '.join(broken) or 'JAX finds no accelerator here'
  raise ValueError(f'{why}; --rehearse measures the smallest sizes on the CPU')


def sections(preset: str, folder: pathlib.Path, *, rehearse: bool = False) -> list[Section]:
  """Lists all sections, the most important ones first; the last one trains as long as time is left.

  A rehearsal is a test on the CPU with the smallest sizes and times. Training runs are in `folder`.
  """
  tiny = ['--set', *_TINY] if rehearse else []
  batches, horizons = ([2], [2]) if rehearse else (_BATCHES, _HORIZONS)
  # A CPU that others use as well may take minutes to compile.
  limit, long_limit = (600.0, 600.0) if rehearse else (150.0, 300.0)
  training, longest = (5.0, 5.0) if rehearse else (240.0, math.inf)
  learner = ['bench', 'speed', 'learner', '--json', '--seconds', '0.1' if rehearse else '5', *tiny]
  of_size = [*learner, '--size', 'laptop' if rehearse else 'full']
  update = [*learner, '--preset', preset]
  fused = ['train', '--fused', '--preset', preset, *tiny, '--set', *_FUSED]
  catch, craftax = ['--env', 'catch'], ['--env', 'craftax/Craftax-Classic-Symbolic-v1']
  horizon = lambda n: ['--set', f'agent.horizon_max={n}', f'agent.horizon_min={n}']
  return [
    Section('learner', [*of_size, '--phases'], long_limit),
    Section('update', [*update, *catch], limit),
    Section('update/craftax', [*update, *craftax], limit),
    Section('fused', [*fused, *catch], training, folder / 'fused'),
    *(
      Section(f'batch/{n}', [*of_size, '--set', f'learner.batch_size={n}'], limit) for n in batches
    ),
    *(Section(f'horizon/{n}', [*of_size, *horizon(n)], limit) for n in horizons),
    Section('craftax', [*fused, *craftax, '--steps', '1000000'], longest, folder / 'craftax'),
  ]


class _Job(jobs.Job):
  """Measures one section, and rewrites the output file, `content`, with its results or its error."""

  def __init__(self, section: Section, content: dict[str, Any], out: pathlib.Path, deadline: float):
    self.name, self._section, self._deadline = section.name, section, deadline
    self._content, self._out = content, out
    self.log = out.with_suffix('') / f'{section.name.replace("/", "-")}.log'

  def commands(self) -> Generator[jobs.Command, jobs.Ended, None]:
    words, run, most = self._section.words, self._section.run, self._section.seconds
    left, output = self._deadline - time.monotonic(), self.log.with_suffix('.json')
    training = min(left - _RESERVE, most)
    late = left <= 0 or (run is not None and training < min(_TRAINING, most))
    try:
      if late:
        raise jobs.Failed('no time left; the same command again continues')
      if run is None:
        ended = yield jobs.Command(self.name, words, output, max_seconds=min(left, most))
      else:
        words = [*words, '--run', str(run), '--set', f'max_minutes={training / 60:g}']
        ended = yield jobs.Command(self.name, words, max_seconds=min(left, training + _PATIENCE))
      if ended.code == -9:
        raise jobs.Failed(f'killed after {ended.wall_seconds:.0f} s')
      self.check(ended)
      measured = _run(run) if run else {'figures': json.loads(output.read_text().splitlines()[-1])}
    except (jobs.Failed, LookupError, ValueError) as error:
      failed = error if isinstance(error, jobs.Failed) else jobs.Failed(f'no results: {error!r}')
      if not late or self.name not in self._content['sections']:  # an earlier error says more
        self._write({'error': str(failed)})
      raise failed from None
    self._write({'seconds': ended.wall_seconds, **measured})

  def _write(self, section: dict[str, Any]) -> None:
    """Adds or replaces the section, with time, commit and version of JAX, and writes the file."""
    self._content['sections'][self.name] = {
      'at': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
      'commit': runs.commit(),
      'jax': importlib.metadata.version('jax'),
      **section,
    }
    new = self._out.with_name(f'{self._out.name}.new')
    new.write_text(metrics.to_json(self._content) + '\n')
    new.replace(self._out)

  def line(self, seconds: float) -> str:
    left = max(0.0, self._deadline - time.monotonic())
    return f'{self.name}: {f"{seconds:.0f} s" if seconds else "written"}, {left / 60:.0f} min left'


def _run(folder: pathlib.Path) -> dict[str, Any]:
  """Rates of a training run over its second half, its curve of returns, and its last evaluation."""
  learner = folder / 'metrics' / 'learner.jsonl'
  spans, steps = scores.read(folder)
  evaluation = metrics.last(folder / 'metrics' / 'evaluator.jsonl') or {}
  return {
    'environment_steps': steps,
    'updates': (metrics.last(learner) or {}).get('learner_step', 0),
    **speed.rates(metrics.read(learner)),
    'returns_by_tenth': scores.curve(spans, steps, steps),
    'episode_return': evaluation.get('episode_return'),
  }


def accelerator(
  out: pathlib.Path | None, minutes: float, names: Sequence[str] | None, *, rehearse: bool
) -> int:
  """Measures the sections, by default all, that the file `out` lacks; returns the exit code, see `measure`.

  `rehearse` measures the smallest sizes on the CPU.

  Raises:
    ValueError: a flag is invalid, there is no accelerator, or the file is not one of this command.
  """
  if not 0 < minutes < math.inf:
    raise ValueError(f'--minutes {minutes:g}: must be positive')
  out = out or pathlib.Path('runs', f'accelerator{"-rehearsal" * rehearse}.json')
  if out.suffix != '.json':  # the folder of logs has its name without
    raise ValueError(f'--out {out}: must end with .json')
  _read(out, rehearse)  # before JAX starts
  preset = 'laptop'
  if rehearse:
    os.environ |= {'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
  else:
    preset = machine.PRESETS.get(platform(), 'gpu')
  known = {each.name: each for each in sections(preset, out.with_suffix(''), rehearse=rehearse)}
  for name in names or ():
    if name not in known:
      raise ValueError(f'--sections {name}: choose from {", ".join(known)}')
  return measure([known[name] for name in names or known], out, minutes, rehearsal=rehearse)


def _read(out: pathlib.Path, rehearsal: bool) -> dict[str, Any]:
  """The content of the output file, {'rehearsal', 'sections': results or {'error': reason} by name}.

  ValueError if it is not a file of this command, or only one of file and call is a rehearsal.
  """
  try:
    content: dict[str, Any] = {'rehearsal': rehearsal}
    if out.exists():
      content = json.loads(out.read_text())
    content.setdefault('sections', {})
    found = content.get('rehearsal')
  except (ValueError, AttributeError):
    raise ValueError(f'--out {out}: is not a file of this command; give another') from None
  if found is not rehearsal:
    raise ValueError(f'--out {out}: is {"not " * rehearsal}of a rehearsal; give another')
  return content


def measure(
  chosen: Sequence[Section], out: pathlib.Path, minutes: float, *, rehearsal: bool
) -> int:
  """Measures the sections that a file lacks, one after the other, on all cores, within some minutes.

  Logs and runs go to a folder of the file's name without its suffix. A failed section is written with
  its error. Returns 0, 1 if one failed, or 130 after Ctrl-C.
  """
  content, logs = _read(out, rehearsal), out.with_suffix('')
  logs.mkdir(parents=True, exist_ok=True)
  say = lambda text: print(text, file=sys.stderr, flush=True)
  deadline = time.monotonic() + 60 * minutes
  known = content['sections']
  missing = [each for each in chosen if 'error' in known.get(each.name, {'error': None})]
  say(f'{len(missing)} sections of {len(chosen)} to do, in at most {minutes:g} minutes')
  made = [_Job(section, content, out, deadline) for section in missing]
  code, _ = jobs.run_all(made, [jobs.available_cores()], say)
  say(f'{out}: results; {logs}: logs and runs')
  return code
