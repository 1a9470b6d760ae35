"""Parts of a run, made of its config, names of its nodes, and its checkpoints; imports neither Reverb nor Launchpad."""

import contextlib
import dataclasses
import functools
import pathlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from hephaestus.actors import rollout
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch.files import metrics
from hephaestus.learner import checkpoint

REPLAY, LEARNER, ACTOR, EVALUATOR = 'replay', 'learner', 'actor', 'evaluator'
ENDING = 'ending'  # node that exits with the run, on a host with only replay


def learners(count: int) -> list[str]:
  """Names of the `count` processes of the learner; the first writes metrics and checkpoints."""
  return [LEARNER] if count == 1 else [f'{LEARNER}-{rank}' for rank in range(count)]


@dataclasses.dataclass(frozen=True)
class Parts:
  """Definitions that all nodes of a run share, computed only from its config.

  Attributes:
    config: config of the run.
    environment: environment of the run, an `environment.Environment` or `host.HostEnvironment`.
    trained: the agent with its losses, from `AgentRecord.make`.
    should_stop: whether to end an unroll, see `rollout.make_unroll`.
  """

  config: launch_config.ExperimentConfig
  environment: Any
  trained: Any
  should_stop: Callable[[], bool]

  @property
  def agent(self) -> agent_lib.Agent:
    """Functions by which the agent acts."""
    agent: agent_lib.Agent = self.trained.agent
    return agent

  @functools.cached_property
  def unroll(self) -> rollout.Unroll:
    """Functions by which an actor steps its environments."""
    return rollout.make_unroll(
      self.environment,
      self.agent,
      num_envs=self.config.actor.num_envs,
      sequence_length=self.config.actor.sequence_length,
      explore=True,
      should_stop=self.should_stop,
    )

  @functools.cached_property
  def params_schema(self) -> Any:
    """Shapes and dtypes of acting parameters, a tree of `jax.ShapeDtypeStruct`."""
    agent = self.agent
    return jax.eval_shape(lambda key: agent.acting_params(agent.init_params(key)), _key())

  @functools.cached_property
  def sequence_schema(self) -> Any:
    """Shapes and dtypes of one stored Sequence, found by tracing the environment and the policy."""
    return rollout.sequence_schema(self.unroll, self.params_schema)


def _key() -> Any:
  """The shape and dtype of a PRNG key."""
  return jax.eval_shape(lambda: jax.random.key(0))


def make_parts(
  config: launch_config.ExperimentConfig, should_stop: Callable[[], bool] = lambda: False
) -> Parts:
  """Makes the parts of a run, without any array.

  ValueError if the environment is unknown, or not one that the agent supports.
  """
  environment = config.make_environment()
  trained = config.record.make(config.agent, environment.observation_spec, environment.action_spec)
  return Parts(config, environment, trained, should_stop)


def saved_shapes(config: launch_config.ExperimentConfig, parts: Parts | None = None) -> Any:
  """Shapes and dtypes of the state in the checkpoints of a run, without environments and replay; a tree."""
  trained = (parts or make_parts(config)).trained
  state = jax.eval_shape(config.record.make_update(config, trained, num_devices=1).init, _key())
  if config.fused:
    from hephaestus.learner.sources import unrolled  # whose loop few commands need

    return unrolled.FusedState(state, jax.eval_shape(jax.random.key_data, _key()), worlds=None)
  if not config.record.on_policy:
    return state
  from hephaestus.learner.sources import on_policy  # likewise

  return on_policy.saved_shapes(state)


def train_part(state: Any) -> Any:
  """The train state within the state of a checkpoint."""
  return getattr(state, 'train', state)


def checkpointer(
  run: pathlib.Path, keep: int = checkpoint.WHOLE, *, read_only: bool = False
) -> checkpoint.Checkpointer:
  """Opens the checkpoints of a run; close them after use.

  Kept are the `keep` newest, and the best one: nearest to the evaluation with the highest mean episode return.
  """

  def scores() -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for row in metrics.read(run / 'metrics' / f'{EVALUATOR}.jsonl'):
      step, score = row.get('learner_step'), row.get('episode_return')
      if step is None or score is None:
        continue
      # A learner that resumed repeats updates; evaluations of the lost ones say nothing about them.
      while found and found[-1][0] >= step:
        found.pop()
      found.append((step, score))
    return found

  return checkpoint.Checkpointer(run / 'checkpoints', read_only=read_only, keep=keep, scores=scores)


def saved_train(run: pathlib.Path, like: Any, which: str | None = None) -> tuple[int, Any] | None:
  """Learner step and train state of a checkpoint: of a learner step, 'best', or None for the newest intact one.

  Args:
    run: folder of the run.
    like: shapes and dtypes of the state, or of the parts to restore.
    which: the user's choice of a checkpoint.

  Returns:
    None if there is no intact checkpoint at all. ValueError if the chosen one is missing or broken, or has
    other arrays.
  """
  if not (run / 'checkpoints').exists():
    return None
  with contextlib.closing(checkpointer(run, read_only=True)) as saved:
    try:
      step = None if which is None else saved.find(which)
    except ValueError as error:
      raise ValueError(f'--checkpoint {error}') from None
    restored = saved.restore(like, step=step)
  if restored is None and which is not None:
    raise ValueError(f'--checkpoint {which}: is broken; give another')
  return restored and (restored.step, train_part(restored.state))


def find_train(run: pathlib.Path, like: Any, which: str | None) -> tuple[int, Any]:
  """Does the same as `saved_train`, but raises ValueError where there is no intact checkpoint."""
  found = saved_train(run, like, which)
  if found is None:
    raise no_checkpoint(run)
  return found


def no_checkpoint(run: pathlib.Path) -> ValueError:
  """The error for a run of which no checkpoint is intact, or which has none yet."""
  steps = checkpoint.saved_steps(run / 'checkpoints')
  if not steps:
    return ValueError(f'{run}: nothing has been saved yet; wait for the first checkpoint')
  saved = ', '.join(map(str, steps))
  return ValueError(f'{run}: no checkpoint is intact of {saved}; restore one from a backup')


class _WithParams(NamedTuple):
  params: Any
  statistics: Any


class _WithTrain(NamedTuple):
  train: Any


def saved_params(
  run: pathlib.Path, config: launch_config.ExperimentConfig, like: Any, which: str | None
) -> tuple[int, Any]:
  """Learner step and all parameters of a checkpoint, read without the rest of its train state.

  Arguments and errors are as in `find_train`, but `like` is the shapes and dtypes of what it returns.
  """
  state: Any = _WithParams(*agent_lib.apart(like))
  if config.fused or config.record.on_policy:
    state = _WithTrain(state)
  step, train = find_train(run, state, which)
  return step, agent_lib.all_params(train)


def replay_names(num_shards: int) -> list[str]:
  """Names of the nodes of replay, one for each shard."""
  return [REPLAY] if num_shards == 1 else [f'{REPLAY}-{shard}' for shard in range(num_shards)]


def nodes(config: launch_config.ExperimentConfig) -> list[str]:
  """Names of all nodes of a run, but for `ENDING`, in the order in which they start."""
  actors = [f'{ACTOR}-{index}' for index in range(config.actor.num_actors)]
  shards, count = replay_names(config.replay.num_shards), config.learner.num_processes
  return [*shards, *learners(count), *actors, EVALUATOR]


def replay_folders(run: pathlib.Path, num_shards: int) -> list[str]:
  """Folder of the checkpoints of each shard of replay, in the folder of a run."""
  folder = run / 'replay'
  folders = [folder] if num_shards == 1 else [folder / f'shard-{i}' for i in range(num_shards)]
  return [str(each) for each in folders]


def seed_generators(seed: int, node: int) -> None:
  """Seeds the global generators of Python and NumPy, which environments may use, by run and node.

  Nodes are forked from one process, so without it all would draw the same levels. A fused run is node 1.
  """
  words = np.random.SeedSequence([seed, node]).generate_state(8)
  np.random.seed(words)
  random.seed(words.tobytes())
