"""Speed of the learner, of environments, of replay and of a whole run, for `hephaestus bench speed`."""

import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import pathlib
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from multiprocessing import connection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from hephaestus.actors.environments import wrappers
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import dream, modules
from hephaestus.launch import config as launch_config
from hephaestus.launch import records
from hephaestus.launch.agents import dreamer as dreamer_record
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.files import metrics
from hephaestus.launch.processes import jobs
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import variables
from hephaestus.learner import devices as devices_lib
from hephaestus.learner import dreamer_update, process
from hephaestus.replay import columns as columns_lib
from hephaestus.replay import tables

SIZES: dict[str, tuple[str, str, list[str]]] = {
  'laptop': ('laptop', 'catch', []),
  '1m': (
    'gpu',
    'grid_world',
    ['environment.cells=false', 'learner.batch_size=16', 'actor.sequence_length=64'],
  ),
  'full': ('gpu', 'grid_world', ['environment.cells=false']),
}
"""Preset, environment and changes of each of `dreamer_config.SIZES`."""
BATCH = 256  # sequences of a batch that is sampled from replay
PARAMETERS = (5.0, 40.0, 140.0)  # MB that are published
RUN_SECONDS = 180.0

_MIN_ROUNDS = 3
_MATMUL_SECONDS = 1e-3  # least duration of a product, so that the overhead of calling it is small
_STEPS_PER_ROUND = 1 << 16  # environment steps of a timed call, summed over environments
_COPIED_BYTES = 1 << 27  # more than caches hold
_GROUP = 16  # sequences of one write, as by an actor of 16 environments
_LEAVES = 100  # arrays of the parameters
_PATIENCE = 120.0  # seconds for a process to start, or a batch to arrive
_UNLIMITED = 10**9  # sequences that may be inserted or sampled ahead, so the limiter blocks nothing
_ENDLESS = 10**12  # environment steps
_DIGITS = {'s': 3, 'us': 1, '%': 1, 'updates/s': 2, 'replayed/step': 1}


class Figure(NamedTuple):
  """A measurement by its name, such as 'env/catch/256_envs', and the largest value that the machine allows.

  `limit` has the same unit, and is None where nothing sets one.
  """

  name: str
  value: float
  unit: str
  limit: float | None = None

  @property
  def ratio(self) -> float | None:
    """The value as a share of its limit; None without a limit."""
    return None if self.limit is None else self.value / self.limit


def of_size(size: str) -> launch_config.ExperimentConfig:
  """Config of a run with an agent of `dreamer_config.SIZES`; ValueError if there is no such size."""
  if size not in SIZES:
    raise ValueError(f'--size {size}: choose one of {", ".join(SIZES)}')
  preset, environment, changes = SIZES[size]
  config = launch_config.of_preset(records.DREAMER, preset, environment)
  agent = cognition_config.CognitionConfig(**vars(dreamer_config.SIZES[size]))
  config = dataclasses.replace(config, agent=agent)
  return launch_config.override(config, changes)


def learner(
  config: launch_config.ExperimentConfig, name: str, *, seconds: float, phases: bool = False
) -> list[Figure]:
  """Measures the dreamer's update on one device, a random batch already there, with its longest horizon.

  Args:
    config: config of the run; ValueError for another agent than the dreamer.
    name: part of the names of its figures.
    seconds: duration of each measurement, after a warm-up.
    phases: whether the world model's gradient and the imagination are also measured by themselves.

  Returns:
    Among others the seconds of an update (median), replayed and imagined steps per second, and the rate
    of the update's matrix products, whose limit is the rate of a plain product.
  """
  process.prepare()
  agent = dreamer_record.settings(config)[0]
  agent = dataclasses.replace(agent, horizon_min=agent.horizon_max)  # boredom shortens nothing
  config = dataclasses.replace(config, agent=agent)
  parts = parts_lib.make_parts(config)
  made = config.record.make_update(config, parts.trained, num_devices=1)
  batch = random_batch(parts.sequence_schema, config.batch_size)
  state = devices_lib.jit_once(made.init)(jax.random.key(0))
  state = state._replace(step=jnp.int32(agent.warm_up_updates))
  device = jax.local_devices()[:1]
  update = devices_lib.mapped(made.update, device)
  replica, sequence = devices_lib.replicate((state, batch), device)

  began = time.perf_counter()
  # The result of `pmap` has `lower` in every version of JAX, and no `trace` from JAX 0.11 on.
  compiled = update.lower(replica, sequence).compile()
  compile_seconds = time.perf_counter() - began
  memory = compiled.memory_analysis()
  peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
  peak -= memory.alias_size_in_bytes
  always, *by_loop = matmul_flops(jax.make_jaxpr(update)(replica, sequence).jaxpr)
  horizon = agent.horizon_max
  chunks = math.ceil(horizon / agent.steps_per_chunk)
  trips = (horizon, chunks, chunks)  # imagined steps; chunks of their values and of the gradient
  flops = always + sum(each * count for each, count in zip(by_loop, trips, strict=True))
  limit = _matmul_rate(agent.dtype, seconds)
  durations = _durations(lambda state: compiled(state, sequence)[0], replica, seconds)
  duration = statistics.median(durations)
  length = config.actor.sequence_length
  starts = config.batch_size * min(agent.starts_per_sequence or length, length)
  name = f'learner/{name}'
  figures = [
    Figure(f'{name}/compile', compile_seconds, 's'),
    Figure(f'{name}/parameters', sum(x.size for x in jax.tree.leaves(state.params)), ''),
    Figure(f'{name}/memory', float(peak), 'bytes'),
    Figure(f'matmul/{agent.compute_dtype}', limit, 'FLOP/s'),
    Figure(f'{name}/horizon', horizon, 'steps'),
    Figure(name, duration, 's'),
    Figure(f'{name}/updates', 1 / duration, 'updates/s'),
    Figure(f'{name}/replayed', config.batch_size * (length - 1) / duration, 'steps/s'),
    Figure(f'{name}/imagined', starts * horizon / duration, 'steps/s'),
    Figure(f'{name}/matmul', flops / duration, 'FLOP/s', limit),
  ]
  if phases:
    taken = _phases(parts.trained, agent_lib.all_params(state), batch, seconds)
    rest = duration - sum(taken.values())
    for part, value in {**taken, 'rest': rest}.items():
      figures.append(Figure(f'{name}/phase/{part}', value, 's'))
  return figures


def _phases(
  dreamer: dreamer_agent.Dreamer, params: Any, batch: experience.Sequence, seconds: float
) -> dict[str, float]:
  """Seconds of the world model's gradient and of the imagination, each a program of its own."""
  model, policy = dreamer.model, dreamer.actor_critic
  keys = jax.random.split(jax.random.key(1), (2, len(batch.identity)))
  sequence = experience.time_major(batch)

  @jax.jit
  def world_model(params):
    loss = lambda own: model.loss(modules.world(params | {'world_model': own}), keys[0], sequence)
    return jax.value_and_grad(loss, has_aux=True)(params['world_model'])

  @jax.jit
  def start(posterior):
    last = sequence.step_type == dreamer_update.LAST
    novelty = jnp.zeros(last.shape)
    read = policy.along(params['actor_critic'], posterior, novelty)
    return dream.starts(
      read, posterior.latent, last, novelty, keys[1], observation_lib.action_mask(sequence.observation),
      num_steps=dreamer.config.starts_per_sequence, even=policy.explores,
    )  # fmt: skip

  @jax.jit
  def dreamt(start, horizon):
    critics = policy.critics(params['actor_critic'])
    return dream.rollout(model, policy, params, critics, start, horizon, explore=True)

  (_, (posterior, *_)), _ = world_model(params)
  begin, horizon = start(posterior), jnp.int32(dreamer.config.horizon_max)
  median = lambda run: statistics.median(_durations(run, None, seconds))
  return {
    'world_model': median(lambda _: world_model(params)),
    'dream': median(lambda _: dreamt(begin, horizon)),
  }


def random_batch(schema: Any, count: int) -> experience.Sequence:
  """Random sequences [count, T, ...] of a schema, in the middle of an episode; all actions are legal."""
  rng = np.random.default_rng(0)

  def draw(path: Any, leaf: Any) -> np.ndarray:
    shape, dtype = (count, *leaf.shape), np.dtype(leaf.dtype)
    name = jax.tree_util.keystr(path)
    if name in ('.step_type', '.discount') or observation_lib.ACTION_MASK in name:
      return np.full(shape, 1, dtype)  # which is MID
    values = rng.integers(0, 2, shape) if dtype.kind in 'biu' else rng.normal(size=shape)
    return values.astype(dtype)

  drawn: experience.Sequence = jax.tree_util.tree_map_with_path(draw, schema)
  return drawn


def matmul_flops(jaxpr: Any) -> list[float]:
  """Counts floating-point operations in the matrix products and convolutions of a program.

  A multiplication and an addition count as two. XLA's own analysis counts the body of a loop once,
  so they are counted in the traced program.

  Args:
    jaxpr: the traced program, a `jax.core.Jaxpr`.

  Returns:
    Operations that are always done, then operations of one iteration of each `while` loop, whose number
    of iterations is data, times how often the loop itself runs.
  """
  always, loops = 0.0, []
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      operand, output = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
      always += 2.0 * math.prod(output) * math.prod(operand[axis] for axis in contracted)
    elif name == 'conv_general_dilated':
      output_axis = equation.params['dimension_numbers'].rhs_spec[0]
      kernel, output = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
      always += 2.0 * math.prod(output) * math.prod(kernel) / kernel[output_axis]
    inner = [
      matmul_flops(getattr(each, 'jaxpr', each))
      for value in equation.params.values()
      for each in (value if isinstance(value, tuple) else (value,))
      if hasattr(each, 'jaxpr') or hasattr(each, 'eqns')
    ]
    if name == 'while':
      loops += [once for once, *_ in inner if once]
      continue
    turns = equation.params.get('length', 1) if name == 'scan' else 1
    for once, *more in inner:
      always += turns * once
      loops += [turns * each for each in more]
  return [always, *loops]


def _matmul_rate(dtype: Any, seconds: float) -> float:
  """Floating-point operations per second of a large square matrix product in `dtype`."""
  product = jax.jit(jnp.matmul)
  for size in (1024, 2048, 4096, 8192, 16384):
    matrix = jnp.ones((size, size), dtype)
    run = functools.partial(lambda matrix, _: product(matrix, matrix), matrix)
    if statistics.median(_durations(run, None, _MATMUL_SECONDS)) > _MATMUL_SECONDS:
      break
  return 2 * size**3 / statistics.median(_durations(run, None, seconds))


def _durations(run: Callable[[Any], Any], state: Any, seconds: float) -> list[float]:
  """Seconds of each round, at least 3, after a warm-up round; `run` takes the result of the round before."""
  state = jax.block_until_ready(run(state))
  durations: list[float] = []
  while len(durations) < _MIN_ROUNDS or sum(durations) < seconds:
    began = time.perf_counter()
    state = jax.block_until_ready(run(state))
    durations.append(time.perf_counter() - began)
  return durations


def environments(
  config: launch_config.ExperimentConfig, num_envs: Sequence[int], seconds: float
) -> list[Figure]:
  """Measures an environment under vmap, with auto-reset and random legal actions.

  On a CPU each of `num_envs`, numbers of parallel environments, is divided over one process per core, each
  like an actor of a run. On an accelerator this process steps all of them.

  Returns:
    For each number: steps per second of all processes together, whose limit is the rate at which they
    could copy observations; and the longest time to trace and compile. Last, the bandwidth of copying.

  Raises:
    ValueError: a number of environments is below 1, or the environment cannot be made.
  """
  if min(num_envs) < 1:
    raise ValueError(f'--num-envs {" ".join(map(str, num_envs))}: each must be at least 1')
  spec = config.make_environment().observation_spec
  nbytes = sum(
    math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(spec)
  )
  figures, bandwidth = [], 0.0
  for count in num_envs:
    measure = functools.partial(_step, config.make_environment, seconds=seconds)
    if jax.default_backend() == 'cpu':
      processes = min(count, len(jobs.available_cores()))
      sizes = [len(share) for share in np.array_split(np.arange(count), processes)]
      measured = _at_once(measure, sizes)
    else:
      measured = [measure(count, 0)]
    rates, copied, compiling = zip(*measured, strict=True)
    bandwidth = sum(copied)
    name = f'env/{config.environment["name"]}/{count}_envs'
    figures += [
      Figure(name, sum(rates), 'steps/s', bandwidth / nbytes),
      Figure(f'{name}/compile', max(compiling), 's'),
    ]
  return [*figures, Figure('copy', bandwidth, 'bytes/s')]


_barrier: Any = None  # at which the processes of `_at_once` wait for each other


def _at_once(measure: Callable[[int, int], Any], sizes: Sequence[int]) -> list[Any]:
  """Calls measure(size, index) in a process of its own for each size; they wait at `_barrier`."""
  context = _processes()
  begin = variables.ONE_THREAD, context.Barrier(len(sizes))
  with futures.ProcessPoolExecutor(len(sizes), context, _begin, begin) as pool:
    return list(pool.map(measure, sizes, range(len(sizes))))


def _begin(environment: dict[str, str], barrier: Any) -> None:
  """Begins a process as an actor's: with its variables, before JAX initializes its devices and reads them."""
  global _barrier
  os.environ.update(environment)
  _barrier = barrier


def _processes(*modules: str) -> Any:
  """Context of processes that fork from one that has imported this module and others, and has run nothing."""
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload([__name__, *modules])
  return context


def _step(
  make: Callable[[], Any], size: int, seed: int, *, seconds: float
) -> tuple[float, float, float]:
  """Steps per second of `size` parallel environments, bytes per second of copying, seconds to compile."""
  environment = wrappers.AutoReset(make())
  num_steps = min(max(_STEPS_PER_ROUND // size, 16), 256)

  def step(carry, key):
    env_state, timestep = carry
    action_key, step_key = jax.random.split(key)
    action = jax.vmap(wrappers.random_action, (0, None, 0))(
      jax.random.split(action_key, size), environment.action_spec, timestep.observation
    )
    return jax.vmap(environment.step)(jax.random.split(step_key, size), env_state, action), None

  @functools.partial(jax.jit, donate_argnums=0)
  def unroll(state):
    # Carrying the observation makes every step write it.
    key, steps_key = jax.random.split(state[0])
    return key, jax.lax.scan(step, state[1], jax.random.split(steps_key, num_steps))[0]

  @functools.partial(jax.jit, donate_argnums=1)
  def copy(source, target):
    return jax.lax.dynamic_update_slice(target, source, (0,))

  key, reset_key = jax.random.split(jax.random.key(seed))
  reset, reset_keys = jax.vmap(environment.reset), jax.random.split(reset_key, size)
  # Before anything else traces the environment, since JAX caches traces.
  began = time.perf_counter()
  compiled = unroll.lower((key, jax.eval_shape(reset, reset_keys))).compile()
  compile_seconds = time.perf_counter() - began
  source = jnp.zeros(_COPIED_BYTES // 4, jnp.int32)
  rates = []
  for run, state, amount in (
    (compiled, (key, jax.jit(reset)(reset_keys)), size * num_steps),
    (functools.partial(copy, source), source + 1, _COPIED_BYTES),
  ):
    if _barrier is not None:
      _barrier.wait()
    # The mean, since episodes that started together end together, in a slow round.
    rates.append(amount / statistics.mean(_durations(run, state, seconds)))
  return rates[0], rates[1], compile_seconds


def replay(config: launch_config.ExperimentConfig, *, stored: int, seconds: float) -> list[Figure]:
  """Measures Reverb servers in child processes, with the same clients as actors and learner use.

  `stored` random sequences of a run, which hardly compress, fill two strata; a batch has BATCH, half of
  each. The rate limiter blocks nothing.

  Returns:
    Sequences per second of inserting and sampling, with the CPU time per sequence of client and servers;
    bytes per second of publishing and fetching PARAMETERS, at the median of the latencies, which follows
    with their 99th percentile. The limit is the rate of copying in memory by one thread.

  Raises:
    ValueError: `stored` is too small.
    RuntimeError: a server did not answer in time.
  """
  from hephaestus.replay import reader, writer

  shards = config.replay.num_shards
  if stored < 2 * shards:
    raise ValueError(f'--stored {stored}: use at least {2 * shards}, two for each shard')
  source, target = (np.full(_COPIED_BYTES // 8, value) for value in (1.0, 2.0))
  copied = _durations(lambda _: np.copyto(target, source), None, seconds)
  bandwidth = _COPIED_BYTES / statistics.median(copied)
  schema = parts_lib.make_parts(config).sequence_schema
  nbytes, sequences = columns_lib.Columns(schema).nbytes, random_batch(schema, _GROUP)
  strata = tuple(
    tables.Stratum(name=name, max_size=stored, share=0.5) for name in ('frontier', 'episodic')
  )
  replaced = tables.ReplayConfig(strata=strata, warm_up=shards, num_shards=shards)
  figures = [Figure('replay/sequence', nbytes, 'bytes'), Figure('copy', bandwidth, 'bytes/s')]
  with _servers(replaced, schema) as (addresses, pids):
    with contextlib.closing(writer.Writer(addresses, strata, schema)) as entry:
      write = lambda: entry.write(sequences, lambda: False)
      while entry.sequences_written < stored + _GROUP * shards:
        write()
      inserting = _repeat(write, _GROUP, seconds, pids)
    batches = reader.Reader(addresses, strata, schema, batch_size=BATCH)

    def read() -> None:
      if batches.get(timeout_seconds=60.0) is None:
        raise RuntimeError('replay gave no batch within 60 s')

    with contextlib.closing(batches):
      for _ in range(4):  # that were prefetched
        read()
      sampling = _repeat(read, BATCH, seconds, pids)
    for what, (rate, client, server) in (('insert', inserting), ('sample', sampling)):
      name = f'replay/{what}'
      figures += [
        Figure(name, rate, 'sequences/s', bandwidth / nbytes),
        Figure(f'{name}/bytes', rate * nbytes, 'bytes/s', bandwidth),
        Figure(f'{name}/client', 1e6 * client, 'us of CPU/sequence'),
        Figure(f'{name}/servers', 1e6 * server, 'us of CPU/sequence'),
      ]
    for size in PARAMETERS:
      for way, latencies in _publish(addresses, size, seconds).items():
        median, late = np.quantile(latencies, (0.5, 0.99))
        name = f'replay/parameters/{size:g}_MB/{way}'
        figures += [
          Figure(name, 1e6 * size / median, 'bytes/s', bandwidth),
          Figure(f'{name}/median', median, 's'),
          Figure(f'{name}/p99', late, 's'),
        ]
  return figures


@contextlib.contextmanager
def _servers(config: tables.ReplayConfig, schema: Any) -> Iterator[tuple[list[str], list[int]]]:
  """Context of replay servers in child processes; yields the addresses and PIDs of the shards."""
  context, started, addresses = _processes('reverb'), [], []
  try:
    for _ in range(config.num_shards):
      here, there = context.Pipe()
      started.append(context.Process(target=_serve, args=(there, config, schema), daemon=True))
      started[-1].start()
      if not here.poll(_PATIENCE):
        raise RuntimeError(f'a replay server did not start within {_PATIENCE:g} s')
      addresses.append(f'localhost:{here.recv()}')
    yield addresses, [server.pid for server in started]
  finally:
    for server in started:
      server.kill()
      server.join()


def _serve(link: connection.Connection, config: tables.ReplayConfig, schema: Any) -> None:
  """Runs a server until it is killed, and sends its port."""
  made = tables.make_tables(config, schema, batch_size=BATCH, insert_size=_UNLIMITED)
  server = tables.make_server(made)
  link.send(server.port)
  server.wait()


def _repeat(
  run: Callable[[], Any], amount: int, seconds: float, servers: Sequence[int]
) -> tuple[float, float, float]:
  """Rate of a function that moves `amount` sequences: sequences per second, CPU s each here and in servers."""
  nodes = [psutil.Process(pid) for pid in (os.getpid(), *servers)]
  used = lambda: np.array([sum(node.cpu_times()[:2]) for node in nodes])
  before, began, count = used(), time.perf_counter(), 0
  while count < _MIN_ROUNDS * amount or time.perf_counter() - began < seconds:
    run()
    count += amount
  wall, (client, *others) = time.perf_counter() - began, used() - before
  return count / wall, client / count, sum(others) / count


def _publish(addresses: list[str], megabytes: float, seconds: float) -> dict[str, list[float]]:
  """Latencies, in seconds, of publishing parameters ('push') and of fetching them ('fetch')."""
  from hephaestus.replay import parameters

  leaf = np.random.default_rng(0).normal(size=max(1, round(1e6 * megabytes / 4 / _LEAVES)))
  params = {f'leaf_{i:03d}': leaf.astype(np.float32) for i in range(_LEAVES)}
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  taken: dict[str, list[float]] = {'push': [], 'fetch': []}
  publisher = parameters.Publisher(addresses, shapes, timeout_seconds=_PATIENCE)
  source = parameters.Subscription(addresses, shapes)
  with contextlib.closing(publisher):
    end, version = time.perf_counter() + seconds, 0
    while version <= _MIN_ROUNDS or time.perf_counter() < end:
      version += 1
      began = time.perf_counter()
      if not publisher.publish(parameters.Snapshot(version, 0, 0, params)):
        raise RuntimeError(f'{megabytes:g} MB of parameters were not published')
      pushed = time.perf_counter()
      if source.newest(_PATIENCE) is None:
        raise RuntimeError(f'{megabytes:g} MB of parameters did not arrive')
      if version > 1:  # the first call opens connections
        taken['push'].append(pushed - began)
        taken['fetch'].append(time.perf_counter() - pushed)
  return taken


def run(config: launch_config.ExperimentConfig, name: str, seconds: float) -> list[Figure]:
  """Trains a run of the dreamer for some seconds, and measures its second half.

  Returns:
    Updates per second, with those of `learner` by itself as the limit; environment steps per second;
    and what the run logs of: the mean horizon, shares of time in which the learner waits for data and
    in which the rate limiter blocks actors (of several processes), and the replay ratio.

  Raises:
    ValueError: the agent is not the dreamer, or the run ended with an error or wrote no metrics.
  """
  alone = learner(config, name, seconds=min(seconds, 10.0))
  (limit,) = (each.value for each in alone if each.name.endswith('/updates'))
  changes = [
    f'max_minutes={seconds / 60}', f'max_environment_steps={_ENDLESS}', 'evaluator.period=1000000',
    'evaluator.final_episodes=1', 'tensorboard=false',
  ]  # fmt: skip
  with tempfile.TemporaryDirectory(prefix='hephaestus-speed-') as place:
    folder = pathlib.Path(place) / 'run'
    folder_lib.open_run(folder, launch_config.override(config, changes))
    command = [*jobs.COMMAND, 'train', '--trust', '--run', str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
      raise ValueError(
        f'the run ended with code {done.returncode}: {done.stdout.splitlines()[-1:]}'
      )
    learned, acted = (
      metrics.read(folder / 'metrics' / f'{node}.jsonl') for node in ('learner', 'actor-0')
    )
  found = rates(learned)
  if not found:
    raise ValueError(f'--seconds {seconds:g}: is too short for this run')
  mean = lambda rows, key: statistics.mean(row[key] for row in rows[len(rows) // 2 :])
  name = f'run/{name}'
  figures = [
    Figure(f'{name}/updates', found['learner_steps_per_second'], 'updates/s', limit),
    Figure(f'{name}/steps', found['environment_steps_per_second'], 'steps/s'),
    Figure(f'{name}/horizon', mean(learned, 'dream/horizon'), 'steps'),
    Figure(f'{name}/replay_ratio', learned[-1]['replay_ratio'], 'replayed/step'),
  ]
  if acted:  # by several processes
    figures += [
      Figure(f'{name}/learner_waits', 100 * mean(learned, 'starved_fraction'), '%'),
      Figure(f'{name}/actors_wait', 100 * mean(acted, 'throttled_fraction'), '%'),
    ]
  return figures


def rates(rows: list[dict[str, Any]]) -> dict[str, float]:
  """Updates and environment steps per second over the second half of a learner's rows; {} for too few."""
  pairs = list(itertools.pairwise(rows))[len(rows) // 2 :]
  span = lambda pair: pair[1]['time'] - pair[0]['time']
  # A run that was resumed was not measured in between.
  longest = 10 * statistics.median(map(span, pairs)) if pairs else 0.0
  pairs = [pair for pair in pairs if span(pair) <= longest]
  return {
    f'{key}s_per_second': sum(after[key] - before[key] for before, after in pairs)
    / sum(map(span, pairs))
    for key in ('learner_step', 'environment_step')
    if pairs
  }


def machine() -> str:
  """Describes this machine: processor or accelerator, and number of CPU cores for this process."""
  device, cpu = jax.devices()[0], pathlib.Path('/proc/cpuinfo')
  kind = device.device_kind
  if device.platform == 'cpu':
    found = re.search(r'model name\s*: (.*)', cpu.read_text()) if cpu.exists() else None
    kind = found[1] if found else platform.machine()
  return f'{kind}, {len(jobs.available_cores())} CPU cores'


def show(figures: list[Figure], *, as_json: bool) -> None:
  """Prints figures to stdout as a table, or as JSON with their `ratio` and `machine`, see `machine`."""
  here = machine()
  if as_json:
    rows = [each._asdict() | {'ratio': each.ratio, 'machine': here} for each in figures]
    print(metrics.to_json(rows))
    return
  print(f'on {here}')
  width = max(len(figure.name) for figure in figures)
  for figure in figures:
    name, value, unit, limit = figure
    bound = '' if limit is None else f'  {figure.ratio:.1%} of {limit:,.0f} {unit}'
    print(f'{name:<{width}}  {value:>18,.{_DIGITS.get(unit, 0)}f} {unit:<9}{bound}'.rstrip())
