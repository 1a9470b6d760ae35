"""Parts of a run and names of its nodes, from its config alone: no Reverb, and no Launchpad."""

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax

from hephaestus.actors import rollout
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch.run import metrics
from hephaestus.learner import checkpoint
from hephaestus.learner.sources import stale_filter

REPLAY, LEARNER, ACTOR, EVALUATOR = 'replay', 'learner', 'actor', 'evaluator'
ENDING = 'ending'  # ends with the run, on a host with replay alone


def learners(count: int) -> list[str]:
  """The names of the processes of the learner; the first writes metrics and checkpoints."""
  return [LEARNER] if count == 1 else [f'{LEARNER}-{rank}' for rank in range(count)]


@dataclasses.dataclass(frozen=True)
class Parts:
  """Definitions that all nodes of a run share, computed from its config alone.

  Attributes:
    environment: the environment.
    agent: the acting part of the agent.
    trained: the agent with its losses, as its record makes it.
    unroll: of the actors.
    params_schema: shapes and dtypes of acting parameters.
  """

  environment: Any
  agent: agent_lib.Agent
  trained: Any
  unroll: rollout.Unroll
  params_schema: Any

  @functools.cached_property
  def sequence_schema(self) -> Any:
    """Shapes and dtypes of one Sequence, by tracing the environment and the policy."""
    return rollout.sequence_schema(self.unroll, self.params_schema)


def make_parts(config: launch_config.ExperimentConfig) -> Parts:
  """Makes the parts; makes no array."""
  environment = config.make_environment()
  specs = environment.observation_spec, environment.action_spec
  trained = config.record.make(config.agent, *specs)
  agent = trained.agent
  unroll = rollout.make_unroll(
    environment,
    agent,
    num_envs=config.actor.num_envs,
    sequence_length=config.actor.sequence_length,
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = jax.eval_shape(lambda key: agent.acting_params(agent.init_params(key)), key)
  return Parts(environment, agent, trained, unroll, params)


def saved_shapes(config: launch_config.ExperimentConfig, parts: Parts) -> Any:
  """Shapes and dtypes of the learner's checkpoints."""
  update = config.record.make_update(config, parts.trained, num_devices=1)
  state = jax.eval_shape(update.init, jax.eval_shape(lambda: jax.random.key(0)))
  return stale_filter.saved_shapes(state) if config.record.on_policy else state


def checkpointer(
  run: pathlib.Path, keep: int = checkpoint.WHOLE, *, read_only: bool = False
) -> checkpoint.Checkpointer:
  """The checkpoints of a run; the best is by the returns of its evaluations."""

  def scores() -> list[tuple[int, float]]:
    rows = metrics.read(run / 'metrics' / f'{EVALUATOR}.jsonl')
    return [
      (row['learner_step'], row['episode_return'])
      for row in rows if row.get('episode_return') is not None
    ]  # fmt: skip

  return checkpoint.Checkpointer(run / 'checkpoints', read_only=read_only, keep=keep, scores=scores)


def find_step(run: pathlib.Path, which: str) -> int:
  """The learner step of a checkpoint of a run, by a step or 'best'; ValueError names those there are."""
  with contextlib.closing(checkpointer(run, read_only=True)) as saved:
    return saved.find(which)


def saved_train(run: pathlib.Path, like: Any, step: int | None = None) -> tuple[int, Any] | None:
  """Learner step and train state of one of a run's checkpoints; None when there is none.

  Args:
    run: its folder.
    like: shapes and dtypes of its checkpoints.
    step: of the checkpoint; None for the newest that is intact.
  """
  if not (run / 'checkpoints').exists():
    return None
  with contextlib.closing(checkpointer(run, read_only=True)) as saved:
    restored = saved.restore(like, step=step)
  if restored is None:
    return None
  state: Any = restored.state
  return restored.step, getattr(state, 'train', state)


def find_train(run: pathlib.Path, like: Any, which: str | None) -> tuple[int, Any]:
  """Learner step and train state of the checkpoint that a user has chosen.

  Args:
    run: its folder.
    like: shapes and dtypes of its checkpoints, or of those parts that are needed.
    which: a learner step, or 'best'; None for the newest.

  Raises:
    ValueError: there is no such checkpoint, or it is broken.
  """
  step = None
  if which is not None:
    try:
      step = find_step(run, which)
    except ValueError as error:
      raise ValueError(f'--checkpoint {error}') from None
  found = saved_train(run, like, step)
  if found is None and step is not None:
    raise ValueError(f'--checkpoint {which}: is broken; give another')
  if found is None:
    raise ValueError(f'{run}: nothing has been saved yet; wait for the first checkpoint')
  return found


class _WithParams(NamedTuple):
  params: Any


class _WithTrain(NamedTuple):
  train: Any


def saved_params(
  run: pathlib.Path, config: launch_config.ExperimentConfig, like: Any, which: str | None
) -> tuple[int, Any]:
  """Learner step and all parameters of a checkpoint, without the rest of its train state.

  Args:
    run: its folder.
    config: of the run.
    like: shapes and dtypes of the parameters.
    which: as of `find_train`, whose errors it raises.
  """
  state: Any = _WithParams(like)
  if config.fused or config.record.on_policy:
    state = _WithTrain(state)
  step, train = find_train(run, state, which)
  return step, train.params


def newest_params(run: pathlib.Path, like: Any) -> tuple[int, Any] | None:
  """Learner step and all parameters of a run's newest checkpoint; None when there is none."""
  found = saved_train(run, like)
  return None if found is None else (found[0], found[1].params)


def replay_names(num_shards: int) -> list[str]:
  """The names of the nodes of replay."""
  return [REPLAY] if num_shards == 1 else [f'{REPLAY}-{shard}' for shard in range(num_shards)]


def is_replay(name: str) -> bool:
  """Whether a node is a shard of replay."""
  return name == REPLAY or name.startswith(f'{REPLAY}-')


def replay_folders(run: pathlib.Path, num_shards: int) -> list[str]:
  """The folder of each shard's checkpoints."""
  folder = run / 'replay'
  folders = [folder] if num_shards == 1 else [folder / f'shard-{i}' for i in range(num_shards)]
  return [str(each) for each in folders]
