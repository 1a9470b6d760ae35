"""Trains danijar/dreamerv3 in environments of the suite of `bench learning`, at equal environment steps.

    git clone https://github.com/danijar/dreamerv3 && uv venv -p 3.11 other
    uv pip install -p other/bin/python jax==0.4.33 'numpy<2' elements granular ninjax portal scope einops chex \
      colored_traceback jaxtyping optax tqdm ipdb av ruamel.yaml psutil cloudpickle
    .venv/bin/python tests/bench/dreamerv3.py --clone dreamerv3 --python other/bin/python --out results

Its own program and defaults, of size 1m in float32 on a CPU, but for the train ratio: 64 replayed steps for each
environment step, as in the preset `laptop`; with another `--train-ratio`, rows have a label of their own. Environments
are stepped by a process of this project's Python, since the two need different versions of JAX. It reads images by a
CNN, and other leaves flat: integers of few values one-hot, the others as numbers.

Appends a row of `bench learning` to `rows.jsonl` for each run, without evaluations, and with the CPU minutes of both
processes; docs/results/rows.jsonl takes it as it is. The same command goes on with the runs that have no row; one that
was ended begins anew. `episodes.jsonl` of a run's folder has the return of each episode.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
from multiprocessing import connection
from typing import Any

TASKS = (
  'catch', 'cartpole', 'mountain_car', 'acrobot', 'deep_sea_12', 'memory_chain_5', 'memory_chain_20',
  'bernoulli_bandit', 'grid_world_8', 'breakout', 'snake', 'pixel_catch',
)  # fmt: skip
AGENT, EPISODES = 'dreamerv3', 'episodes.jsonl'
TRAIN_RATIO = 64  # replayed steps for each environment step
CNN_MULTIPLE = 16  # of the sides of an image


class FinishedError(Exception):
  """All environment steps are made; the other program counts resets, too."""


def serve(run: dict[str, Any]) -> None:
  """Steps environments for the other program until it disconnects.

  It sends spaces first: of each leaf and of the action a (dtype, shape, least, first beyond the largest). Then it
  answers (index of an environment, action or None for a reset) by (leaves, reward, discount, whether it is last).
  """
  import jax
  import numpy as np
  from dm_env import specs

  from hephaestus.actors import environments
  from hephaestus.agents import observation as observation_lib

  environment = environments.make(run['environment'], **run['options'])

  def space(leaf: specs.Array) -> tuple[Any, ...]:
    if len(leaf.shape) == 3 and leaf.dtype == np.uint8:
      return (
        np.uint8,
        tuple(_times(side) * side for side in leaf.shape[:2]) + leaf.shape[2:],
        0,
        256,
      )
    count = observation_lib.num_values(leaf)
    return (
      (np.int32, (leaf_size(leaf),), 0, count)
      if count
      else (np.float32, (leaf_size(leaf),), None, None)
    )

  def leaf_size(leaf: specs.Array) -> int:
    return int(np.prod(leaf.shape))

  def read(leaf: specs.Array, x: jax.Array) -> np.ndarray:
    dtype, shape, *_ = space(leaf)
    if dtype == np.uint8:
      rows, columns = map(_times, leaf.shape[:2])
      return np.repeat(np.repeat(x, rows, axis=0), columns, axis=1)
    least = leaf.minimum if dtype == np.int32 else 0
    return (np.asarray(x) - least).astype(dtype).reshape(shape)

  of_observation = observation_lib.without_mask(environment.observation_spec)
  leaves = jax.tree.leaves(of_observation)
  action = environment.action_spec
  if isinstance(action, specs.DiscreteArray):
    acts = np.int32, (), 0, action.num_values
  else:
    acts = np.float32, action.shape, action.minimum, action.maximum
  reset, step, states = jax.jit(environment.reset), jax.jit(environment.step), {}
  with connection.Client(run['address']) as link:
    link.send(([space(leaf) for leaf in leaves], acts))
    key = jax.random.key(run['seed'])
    while True:
      try:
        index, chosen = link.recv()
      except EOFError:
        return
      key, own = jax.random.split(key)
      found = reset(own) if chosen is None else step(own, states[index], chosen)
      states[index], timestep = found
      seen = jax.tree.leaves(observation_lib.without_mask(timestep.observation))
      link.send((
        [read(leaf, x) for leaf, x in zip(leaves, seen, strict=True)],
        float(timestep.reward), float(timestep.discount), bool(timestep.last()),
      ))  # fmt: skip


def _times(side: int) -> int:
  """How often each row of an image is repeated, so that the side is a multiple of CNN_MULTIPLE."""
  return next(times for times in range(1, CNN_MULTIPLE + 1) if side * times % CNN_MULTIPLE == 0)


def train(run: dict[str, Any]) -> None:
  """Trains the other program, in its Python, and prints CPU minutes; environments are in a process of ours."""
  sys.path.insert(0, run['clone'])
  import elements
  import embodied
  import numpy as np
  from dreamerv3 import main as program

  folder = pathlib.Path(run['folder'])
  steps = 0
  episodes = (folder / EPISODES).open('w', buffering=1)

  with tempfile.TemporaryDirectory() as place:
    listener = connection.Listener(f'{place}/environments', 'AF_UNIX')
    served = run | {'address': listener.address}
    server = subprocess.Popen([run['python'], __file__, '--serve', json.dumps(served)])
    link = listener.accept()
    listener.close()
    leaves, acts = link.recv()

    names = {f'leaf_{number}': elements.Space(*leaf) for number, leaf in enumerate(leaves)}
    actions = {'reset': elements.Space(bool), 'action': elements.Space(*acts)}
    flags = dict.fromkeys(('is_first', 'is_last', 'is_terminal'), elements.Space(bool))

    class Environment(embodied.Env):
      """An environment of the other process."""

      obs_space = names | {'reward': elements.Space(np.float32)} | flags
      act_space = actions

      def __init__(self, index: int):
        self.index, self.is_done, self.return_ = index, True, 0.0

      def step(self, action: dict[str, Any]) -> dict[str, Any]:
        nonlocal steps
        if steps == run['steps']:
          raise FinishedError
        is_first = bool(action['reset']) or self.is_done
        link.send((self.index, None if is_first else np.asarray(action['action'])))
        seen, reward, discount, self.is_done = link.recv()
        self.return_ = 0.0 if is_first else self.return_ + reward
        steps += not is_first
        if self.is_done:
          row = {'environment_step': steps, 'episode_return': self.return_}
          episodes.write(json.dumps(row) + '\n')
        observation = {f'leaf_{number}': x for number, x in enumerate(seen)}
        return observation | {
          'reward': np.float32(reward),
          'is_first': is_first,
          'is_last': self.is_done,
          'is_terminal': self.is_done and discount == 0,
        }

    program.make_env = lambda config, index: program.wrap_env(Environment(index), config)
    with contextlib.suppress(FinishedError):
      program.main([
        '--configs', 'size1m', '--logdir', str(folder / 'log'), '--seed', str(run['seed']),
        '--jax.platform', 'cpu', '--jax.compute_dtype', 'float32', '--jax.prealloc', 'False',
        '--run.train_ratio', str(run['train_ratio']),
        '--run.report_every', '1e9', '--run.save_every', '1e9', '--run.log_every', '60',
        '--logger.outputs', 'jsonl', '--replay.size', '1e6',
      ])  # fmt: skip
    link.close()
    server.wait()
  used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
  print(sum(each.ru_utime + each.ru_stime for each in used) / 60)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('tasks', nargs='*', default=TASKS, help='of the suite of `bench learning`')
  parser.add_argument('--clone', type=pathlib.Path, help='checkout of danijar/dreamerv3')
  parser.add_argument('--python', help='the Python that has its packages')
  parser.add_argument('--out', type=pathlib.Path, help='folder of the results')
  parser.add_argument('--seeds', type=int, nargs='+', default=[0])
  parser.add_argument('--steps', type=int, help='environment steps, if not those of the suite')
  parser.add_argument(
    '--train-ratio', type=int, default=TRAIN_RATIO, help='replayed steps for each environment step'
  )
  parser.add_argument('--train', type=json.loads, help=argparse.SUPPRESS)
  parser.add_argument('--serve', type=json.loads, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.serve:
    serve(arguments.serve)
  elif arguments.train:
    train(arguments.train)
  elif missing := [name for name in ('clone', 'python', 'out') if not getattr(arguments, name)]:
    parser.error(f'--{missing[0]}: is needed')
  else:
    compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
  """Makes the runs that have no row yet, one after another."""
  from hephaestus.launch.bench.learning import runs, scores, suite
  from hephaestus.launch.files import metrics

  try:
    tasks = suite.chosen(arguments.tasks)
  except ValueError as error:
    sys.exit(f'tasks: {error}')
  rows = metrics.JsonLines(arguments.out / runs.ROWS)
  present = [
    (row['environment'], row['seed'], row['budget'], row['label'])
    for row in metrics.read(arguments.out / runs.ROWS)
  ]
  version = ['git', '-C', str(arguments.clone), 'rev-parse', '--short', 'HEAD']
  commit = subprocess.run(version, check=True, capture_output=True, text=True).stdout
  ratio = arguments.train_ratio
  label = 'default' if ratio == TRAIN_RATIO else f'ratio{ratio}'
  if arguments.steps:  # targets are for the steps of the suite
    tasks = [dataclasses.replace(task, steps=arguments.steps, target=None) for task in tasks]
  for seed in arguments.seeds:
    for task in tasks:
      steps = task.steps
      if (task.name, seed, steps, label) in present:
        continue
      folder = arguments.out / f'{task.name}-{seed}-{label}'
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir()
      print(f'{task.name}, seed {seed}: {steps:,} steps, log in {folder}', flush=True)
      run = {
        'task': task.name, 'environment': task.environment, 'options': dict(task.options),
        'steps': steps, 'seed': seed, 'train_ratio': ratio, 'folder': str(folder.resolve()),
        'clone': str(arguments.clone.resolve()), 'python': sys.executable,
      }  # fmt: skip
      with (folder / 'log.txt').open('w') as log:
        command = [arguments.python, __file__, '--train', json.dumps(run)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True)
      if ended.returncode:
        sys.exit(f'{task.name}: ended with code {ended.returncode}, see {folder / "log.txt"}')
      episodes = [
        scores.Ended(row['environment_step'] - 1, row['environment_step'], 1, row['episode_return'])
        for row in map(json.loads, (folder / EPISODES).read_text().splitlines())
      ]
      row = {
        'environment': task.name, 'agent': AGENT, 'seed': seed, 'label': label, 'budget': steps,
        **scores.summary(task, episodes, steps),
        'cpu_minutes': float(ended.stdout.splitlines()[-1]), 'commit': commit.strip(),
      }  # fmt: skip
      print(json.dumps(row), flush=True)
      rows.write(row)


if __name__ == '__main__':
  main()
