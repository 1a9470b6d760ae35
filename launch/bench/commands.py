"""`hephaestus bench`: the throughput of each part, compared with its limit."""

import argparse
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from hephaestus.launch import records
from hephaestus.launch.run import flags

CHANGES = ('ensemble', 'horizon', 'batch', 'length')  # flags that change a named size
NEED_NONE = 'bench learner, env, learning, dreams and accelerator need none of it'
PARAMETERS = (5.0, 40.0, 140.0)  # MB that `bench replay` publishes
BATCH, LENGTH = 256, 50  # sequences that it samples, and their steps


class Target(NamedTuple):
  """A sub-command of `bench`.

  Attributes:
    call: runs it and returns the exit code; with a `limit`, measures and returns figures.
    help: its line in the help of `bench`.
    flags: 'FLAG VALUE', the default or else the type of the value, and the help of each flag, see `_options`.
    limit: what the figures are compared with; '' if the command prints something else.
    description: text above the flags in its own help.
  """

  call: Callable[[argparse.Namespace], Any]
  help: str
  flags: tuple[tuple[str, Any, str], ...]
  limit: str = ''
  description: str | None = None


def add(commands: Any) -> None:
  """Adds the command `bench` and its sub-commands to the parser."""
  bench = commands.add_parser(
    'bench', allow_abbrev=False, help='compare the throughput of a part with its limit'
  )
  parsers = bench.add_subparsers(dest='target', required=True)
  for name, target in TARGETS.items():
    parser = parsers.add_parser(
      name, allow_abbrev=False, help=target.help, description=target.description
    )
    for usage, value, text in target.flags:
      flag, _, metavar = usage.partition(' ')
      named = {'metavar': metavar} if metavar else {}
      parser.add_argument(flag, help=text, **named, **_options(value))
    if name == 'dreams':
      flags.add_trust_flag(parser)
    parser.set_defaults(call=_show if target.limit else target.call)


def _options(value: Any) -> dict[str, Any]:
  """Options of a flag by its default, or by the type of its value; in a list if it takes several."""
  if value is False:
    return {'action': 'store_true'}
  if isinstance(value, list) and isinstance(value[0], type):
    return {'type': value[0], 'nargs': '+', 'action': 'extend', 'default': []}
  if isinstance(value, list):
    return {'type': type(value[0]), 'nargs': '+', 'default': value}
  return {'type': value} if isinstance(value, type) else {'type': type(value), 'default': value}


def _show(arguments: argparse.Namespace) -> int:
  """Measures, and prints the figures."""
  from hephaestus.launch.files import metrics
  from hephaestus.launch.run import packages
  from hephaestus.learner import bench as learner_bench

  if arguments.target in ('end-to-end', 'replay'):
    packages.check_distributed(f'bench {arguments.target}', NEED_NONE)
  target = TARGETS[arguments.target]
  measured = target.call(arguments)
  if arguments.json:
    print(metrics.to_json(learner_bench.to_rows(measured)))
  else:
    learner_bench.show(measured)
    if any(figure.limit is not None for figure in measured):
      print(f'limit: {target.limit}')
  return 0


def _accelerator(arguments: argparse.Namespace) -> int:
  from hephaestus.launch.bench import accelerator

  return accelerator.accelerator(
    arguments.out, arguments.minutes, arguments.sections, rehearse=arguments.rehearse
  )


def _learning(arguments: argparse.Namespace) -> int:
  """Trains the runs that have no row of results yet, then shows all rows that were asked for."""
  from hephaestus.launch.bench.learning import runs as runs_lib
  from hephaestus.launch.bench.learning import suite, table
  from hephaestus.launch.files import metrics
  from hephaestus.launch.processes import jobs

  tasks = suite.chosen(arguments.environments or None)
  asked = [
    runs_lib.SuiteRun(task, agent, seed)
    for seed in dict.fromkeys(arguments.seeds)
    for task in tasks
    for agent in dict.fromkeys(arguments.agents)
  ]
  settings = _learning_settings(arguments)
  say = lambda text: print(text, file=sys.stderr, flush=True)
  missing = [] if arguments.table else runs_lib.missing(asked, settings)
  code = 0
  if missing:
    cores = jobs.available_cores(arguments.jobs)
    say(f'{len(missing)} runs of {len(asked)} to do, {len(cores)} at a time, in {arguments.out}')
    code = runs_lib.run_all(missing, settings, cores, say)
  rows = runs_lib.read_rows(arguments.out)
  if not arguments.table:
    names = {(run.task.name, run.agent, run.seed) for run in asked}
    rows = [row for row in rows if (row['environment'], row['agent'], row['seed']) in names]
  if arguments.json:
    print(metrics.to_json(rows))
  elif rows:
    print(table.markdown(rows), end='')
  if rows:
    for remark in table.write(rows, arguments.out):
      say(remark)
  return code


def _dreams(arguments: argparse.Namespace) -> int:
  """Prints a comparison of imagination rollouts of a checkpoint with the environment."""
  from hephaestus.launch.bench import dreams
  from hephaestus.launch.files import metrics

  if arguments.steps < 1:
    raise ValueError(f'--steps {arguments.steps}: must be at least 1')
  result = dreams.dreams(
    arguments.run, checkpoint=arguments.checkpoint, num_steps=arguments.steps, seed=arguments.seed
  )
  if arguments.json:
    rows = [row._asdict() for row in result.summary.rows]
    found = result.summary._asdict() | {'rows': rows}
    print(metrics.to_json({'learner_step': result.learner_step, **found}))
  else:
    print(dreams.table(result))
  return 0


def _learning_settings(arguments: argparse.Namespace) -> Any:
  """Settings of all runs; raises ValueError for an invalid flag before anything starts."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.bench.learning import runs as runs_lib
  from hephaestus.launch.run import packages

  if arguments.distributed:
    packages.check_distributed('--distributed', 'leave it out for runs of one process')
  for assignment in arguments.set:
    if assignment.startswith(('environment.', 'seed=', 'max_environment_steps=')):
      raise ValueError(f'--set {assignment}: is decided by the suite and --seeds')
  for agent in arguments.agents:
    if agent not in records.AGENTS:
      raise ValueError(f'--agents {agent}: choose from {", ".join(records.AGENTS)}')
    launch_config.override(launch_config.of_preset(agent, arguments.preset, 'catch'), arguments.set)
  if not re.fullmatch(r'[\w.-]+', arguments.label):
    raise ValueError(f'--label {arguments.label}: takes letters, digits, _, . and -')
  if arguments.max_minutes is not None and not arguments.max_minutes > 0:
    raise ValueError(f'--max-minutes {arguments.max_minutes:g}: must be positive')
  return runs_lib.Settings(
    arguments.out,
    arguments.label,
    arguments.preset,
    arguments.set,
    arguments.max_minutes,
    fused=not arguments.distributed,
  )


def _learner_figures(arguments: argparse.Namespace) -> Any:
  """Measures the update of a named size, or of a preset and an environment."""
  from hephaestus.launch.bench import end_to_end
  from hephaestus.learner import bench as learner_bench

  if arguments.size is None:
    config = flags.preset_config(arguments)
    work = end_to_end.make_work(config, str(config.environment['name']))
  elif arguments.preset or arguments.env or arguments.set:
    raise ValueError(f'--size {arguments.size}: takes neither --preset, --env nor --set')
  else:
    work = learner_bench.Work.of_size(arguments.size)
  return learner_bench.update(
    work.changed(**{name: getattr(arguments, name) for name in CHANGES}),
    arguments.boredom,
    seconds=arguments.seconds,
    phases=arguments.phases,
  )


def _end_to_end_figures(arguments: argparse.Namespace) -> Any:
  from hephaestus.launch.bench import end_to_end

  return end_to_end.end_to_end(flags.preset_config(arguments), arguments.seconds)


def _environment_figures(arguments: argparse.Namespace) -> Any:
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import presets
  from hephaestus.launch.bench import environments
  from hephaestus.launch.run import variables

  if arguments.set and len(arguments.env) > 1:
    raise ValueError(f'--set {arguments.set[0]}: needs a single environment; run once for each')
  foreign = [each for each in arguments.set if not each.startswith('environment.')]
  configs = {
    name: launch_config.override(presets.laptop(name), arguments.set) for name in arguments.env
  }
  if foreign:
    raise ValueError(f'--set {foreign[0]}: bench env takes environment.KEY=VALUE only')
  makers = {name: config.make_environment for name, config in configs.items()}
  return environments.environments(
    makers, arguments.num_envs, arguments.seconds, of_actors=variables.ONE_THREAD
  )


def _replay_figures(arguments: argparse.Namespace) -> Any:
  """Measures replay with sequences like those that an actor of the laptop preset writes."""
  from hephaestus.launch import config as launch_config
  from hephaestus.launch.agents import presets
  from hephaestus.launch.run import parts as parts_lib
  from hephaestus.learner import bench as learner_bench
  from hephaestus.replay import bench as replay_bench

  given = {'batch_size': BATCH, 'seconds': arguments.seconds}
  if arguments.sizes:
    rows = replay_bench.by_size(arguments.sizes, **given)
  else:
    length = f'actor.sequence_length={LENGTH}'
    config = launch_config.override(presets.laptop(arguments.env), [length])
    rows = replay_bench.measure(
      parts_lib.make_parts(config).sequence_schema,
      shards=arguments.shards,
      writers=arguments.writers,
      megabytes=PARAMETERS,
      stored=arguments.stored,
      **given,
    )
  return [learner_bench.Figure(*row) for row in rows]


CONFIG = (
  ('--preset NAME', str, 'as of train (default: laptop)'),
  ('--env NAME', str, 'as of train (default: catch)'),
  ('--set KEY=VALUE', [str], ''),
)
MEASURED = (('--seconds N', 5.0, 'of each measurement (default: 5)'), ('--json', False, ''))
TARGETS = {
  'env': Target(
    _environment_figures,
    'environment steps per second',
    (
      ('--env NAME', ['catch'], 'environments, each as of train (default: catch)'),
      ('--num-envs N', [256, 2048], 'parallel environments (default: 256 2048)'),
      ('--set environment.KEY=VALUE', [str], ''),
      *MEASURED,
    ),
    'the rate at which observations could be copied, by the bandwidth of copying measured here',
  ),
  'replay': Target(
    _replay_figures,
    'sequences and parameters per second of replay servers',
    (
      ('--env NAME', 'catch', 'environment of the sequences (default: catch)'),
      ('--shards S', [1, 2, 4], '(default: 1 2 4)'),
      ('--writers N', [1, 4, 16], '(default: 1 4 16)'),
      ('--stored N', 2048, 'sequences (default: 2048)'),
      (
        '--sizes N', [int], 'numbers of sequences to store: measures only small sequences, in Reverb and '
        "in a fused run's replay, at each of these sizes",
      ),
      *MEASURED,
    ),
    'the bandwidth of one thread that copies memory, measured here',
  ),
  'learner': Target(
    _learner_figures,
    "the dreamer's update, without actors and replay",
    (
      ('--size NAME', str, 'laptop, 1m or full, without an environment'),
      ('--ensemble K', int, 'prior heads of the ensemble'),
      ('--horizon H', int, 'longest imagined horizon'),
      ('--batch B', int, 'sequences per device'),
      ('--length T', int, 'steps of a sequence'),
      *CONFIG,
      ('--boredom B', [0.0, 1.0], '(default: 0 1)'),
      ('--phases', False, 'also measure each of its phases'),
      *MEASURED,
    ),
    'the rate of a plain matrix product on this device, measured here',
    'Measures the update of a model of --size, or of a run by --preset, --env and --set.',
  ),
  'end-to-end': Target(
    _end_to_end_figures,
    'a whole run of the dreamer, compared with its parts',
    (*CONFIG, ('--seconds N', 180.0, 'after the warm-up (default: 180)'), ('--json', False, '')),
    'an update without acting, and an unroll without learning, measured after the run',
  ),
  'learning': Target(
    _learning,
    'scores of agents on a suite of environments, one configuration for all',
    (
      ('--environments NAME', [str], 'of the suite (default: all of it)'),
      ('--agents NAME', ['dreamer', 'ppo'], f'of {", ".join(records.AGENTS)} (default: dreamer ppo)'),
      ('--seeds N', [0, 1, 2], '(default: 0 1 2)'),
      ('--preset NAME', 'laptop', 'as of train (default: laptop)'),
      ('--set KEY=VALUE', [str], 'override the config of all runs, as an ablation; give it a --label'),
      ('--label NAME', 'default', 'name of these settings in rows and tables (default: default)'),
      (
        '--out DIR', pathlib.Path('runs/bench-learning'),
        'folder of rows, runs, table and pictures (default: runs/bench-learning)',
      ),
      ('--jobs N', int, 'runs at a time (default: number of available cores)'),
      ('--max-minutes N', float, 'of training, after which a run ends early'),
      ('--table', False, 'show the rows that are there, and train nothing'),
      (
        '--distributed', False,
        'train in several processes; by default each run is one process if its agent can be fused',
      ),
      ('--json', False, 'print the rows instead of the table'),
    ),
    description='Trains each agent in each environment with each seed, one run on a core of its own, '
    'and appends a row for each to OUT/rows.jsonl. The same command again continues where it '
    'stopped; once all rows are there, it only prints the table.',
  ),
  'dreams': Target(
    _dreams,
    'imagination rollouts of a trained dreamer, compared with its environment',
    (
      ('run', pathlib.Path, ''),
      ('--checkpoint STEP', str, "a learner step, or 'best' by evaluation (default: the newest)"),
      ('--steps N', 8_192, 'environment steps, at least (default: 8192)'),
      ('--seed N', 0, '(default: 0)'),
      ('--json', False, ''),
    ),
  ),
  'accelerator': Target(
    _accelerator,
    'run all benchmarks of a GPU or TPU unattended, and write one file',
    (
      ('--out FILE', pathlib.Path, 'the file (default: runs/accelerator.json, or -rehearsal.json)'),
      ('--minutes N', 38.0, 'for all (default: 38)'),
      ('--sections NAME', [str], '(default: all)'),
      ('--rehearse', False, 'smallest sizes, on the CPU'),
    ),
    description='Measures section by section, and writes the file after each. The same command again '
    'continues with the sections that are missing or failed.',
  ),
}  # fmt: skip
