"""Policy: a trained agent for use in other programs, loaded from a run or an exported folder, or exported."""

import functools
import os
import pathlib
from typing import Any, NamedTuple

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs as specs_lib

from hephaestus.actors import environments
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.agents import agent as agent_lib
from hephaestus.launch import config as launch_config
from hephaestus.launch import records
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.interface import exported as exported_lib
from hephaestus.launch.interface import places
from hephaestus.launch.run import validation


class State(NamedTuple):
  """The recurrent state of a policy between two steps, a tree of arrays."""

  memory: Any  # the agent's policy state, [N, ...] arrays; N is 1 without a batch axis
  first: (
    jax.Array
  )  # [N] bool, [] without a batch axis: whether the next observation begins an episode
  num_calls: jax.Array  # [] int32, calls of `act` so far, folded into the key: each samples anew


class Policy:
  """A trained agent that chooses greedy or sampled actions; made by `load`.

  Attributes:
    path: folder from which it was loaded, or name of a shipped agent.
    config: config of its run.
    learner_step: number of updates after which its parameters were saved.
    observation_spec: tree of `dm_env.specs` of one observation.
    action_spec: `dm_env.specs` of one action.
    action_names: names of the discrete actions, in order; empty if the environment names none.
    agent: the agent's pure functions; `agent.act` takes `params`.
    params: acting parameters, on the device.
    all_params: all parameters, host arrays; these include the model's decoder, which `agent.foresee`
      needs. None for a policy that `export` wrote, which has the acting parameters only.
  """

  def __init__(
    self,
    path: pathlib.Path,
    exported: exported_lib.Exported,
    agent: agent_lib.Agent,
    params: Any,
    *,
    all_params: Any = None,
    environment: environment_lib.Environment | None = None,
  ):
    self.path = path
    self.config = exported.config
    self.learner_step = exported.learner_step
    self.observation_spec = exported.observation_spec
    self.action_spec = exported.action_spec
    self.action_names = exported.action_names
    self.params = jax.device_put(params)
    self.all_params = all_params
    self.agent = agent
    self._exported = exported._replace(arrays={})
    self._environment = environment
    specs = self.observation_spec, self.action_spec
    self._act = jax.jit(functools.partial(step, agent, specs), static_argnames='greedy')
    self._tree: Any
    flat, self._tree = jax.tree_util.tree_flatten_with_path(self.observation_spec)
    self._leaves = [(jax.tree_util.keystr(path), spec) for path, spec in flat]

  def __repr__(self) -> str:
    return (
      f'Policy({self.config.agent_name} for {self.config.environment["name"]}, '
      f'update {self.learner_step:,})'
    )

  @functools.cached_property
  def environment(self) -> environment_lib.Environment:
    """The environment of its run, without auto-reset; ValueError if it cannot be made."""
    return self._environment or self.config.make_environment()

  def exported(self, params: Any) -> exported_lib.Exported:
    """The policy as `exported.write` takes it, with its `params` or `all_params`."""
    return self._exported._replace(arrays=exported_lib.named(jax.device_get(params)))

  def initial_state(self, batch: int | None = None) -> State:
    """The state with which an episode begins, of N = `batch` environments; None: without a batch axis."""
    if batch is not None and batch < 1:
      raise ValueError(f'batch={batch}: must be at least 1, or None for no batch axis')
    return State(
      memory=self.agent.initial_policy_state(1 if batch is None else batch),
      first=jnp.ones(() if batch is None else (batch,), bool),
      num_calls=jnp.zeros((), jnp.int32),
    )

  def reset(self, state: State, ended: Any) -> State:
    """Resets the state of those environments whose episode has ended.

    Args:
      state: the state that `act` returned.
      ended: bool, of the shape of `state.first`; whether the next observation begins an episode.
    """
    return state._replace(first=jnp.logical_or(state.first, jnp.asarray(ended, bool)))

  def act(
    self,
    observation: Any,
    state: State,
    *,
    key: jax.Array | None = None,
    greedy: bool = False,
  ) -> tuple[Any, State]:
    """Chooses actions; compiled at the first call for each number of environments.

    Args:
      observation: tree of arrays as in `observation_spec`, with a leading axis N if the state has a
        batch axis. An action mask is its entry `action_mask`, True for legal actions. A Discrete one of
        gymnasium is as its space has it, from its `start` on.
      state: the state from `initial_state`, from `reset`, or from the call before.
      key: PRNG key of the samples; the same key may be given at each step, since the number of calls
        is folded into it. Not needed for greedy actions.
      greedy: whether to take the most probable action; else it is sampled.

    Returns:
      The action, a NumPy array as in `action_spec` with the same leading axis (a JAX array while
      being traced), and the state for the next step. Choices count from the `start` of gymnasium's space,
      or the minimum of dm_env's spec.

    Raises:
      ValueError: the observation has another shape or structure, has a number that its spec does not have
        (of bools, integers and Discrete ones), or the key is missing.
    """
    if key is None and not greedy:
      raise ValueError(
        'key=None: sampled actions need a key, such as jax.random.key(0); or give greedy=True'
      )
    observation = self._checked(observation, state.first.shape)
    key = _default_key() if key is None else key
    action, state = self._act(self.params, key, state, observation, greedy=greedy)
    return action if isinstance(action, jax.core.Tracer) else np.asarray(action)[()], state

  def as_acme_actor(self, *, seed: int = 0, greedy: bool | None = None) -> Any:
    """Makes an `acme.core.Actor`, which acts in one environment of `dm_env`; it does not learn.

    Args:
      seed: seed of the sampled actions.
      greedy: whether to take the most probable action; None: as the run was evaluated.

    Raises:
      ValueError: dm-acme is not installed.
    """
    try:
      import acme
    except ModuleNotFoundError as error:
      raise ValueError(f'as_acme_actor: needs {validation.DISTRIBUTED}; {error}') from None
    policy, key, state = self, jax.random.key(seed), self.initial_state()
    is_greedy = self.config.evaluator.greedy if greedy is None else greedy

    class Actor(acme.Actor):
      def observe_first(self, timestep: dm_env.TimeStep) -> None:
        nonlocal state
        state = policy.reset(state, True)

      def select_action(self, observation: Any) -> Any:
        nonlocal state
        action, state = policy.act(observation, state, key=key, greedy=is_greedy)
        return action

      def observe(self, action: Any, next_timestep: dm_env.TimeStep) -> None:
        pass

      def update(self, wait: bool = False) -> None:
        pass

    return Actor()

  def _checked(self, observation: Any, batch: tuple[int, ...]) -> Any:
    try:
      leaves = self._tree.flatten_up_to(observation)
      if any(isinstance(leaf, dict) for leaf in leaves):  # where an array is needed
        raise TypeError
    except (ValueError, TypeError):
      names = ', '.join(name for name, _ in self._leaves if name)
      needed = f'have the entries {names}' if names else 'be one array'
      raise ValueError(f'observation: should {needed}, see observation_spec') from None
    checked = []
    for (name, spec), leaf in zip(self._leaves, leaves, strict=True):
      array = _of_spec(f'observation{name}', spec, leaf)
      if array.shape != (*batch, *spec.shape):
        raise ValueError(
          f'observation{name}: has shape {array.shape}, and should have {(*batch, *spec.shape)}, as the '
          f'state is of initial_state({f"batch={batch[0]}" if batch else ""})'
        )
      checked.append(array)
    return jax.tree.unflatten(self._tree, checked)


def _of_spec(name: str, spec: Any, leaf: Any) -> Any:
  """An array of the spec's dtype; ValueError if it would change bools or integers, or is no such choice."""
  if isinstance(leaf, jax.core.Tracer) or spec.dtype.kind == 'f':
    return leaf.astype(spec.dtype) if isinstance(leaf, jax.Array) else np.asarray(leaf, spec.dtype)
  given = np.asarray(leaf)
  with np.errstate(invalid='ignore'):
    array = given.astype(spec.dtype)
  if isinstance(spec, specs_lib.DiscreteArray):
    first = int(environment_lib.start_of(spec))
    lost = (array != given) | (array < first) | (array >= first + spec.num_values)
    needed = f'one of {first} to {first + spec.num_values - 1}'
  else:
    lost, needed = array != given, f'{spec.dtype}'
  if lost.any():
    raise ValueError(f'{name}: is {given[lost][0]}, and should be {needed}, see observation_spec')
  return array


@functools.cache
def _default_key() -> jax.Array:
  with jax.ensure_compile_time_eval():
    return jax.random.key(0)


def step(
  agent: agent_lib.Agent,
  specs: tuple[Any, specs_lib.BoundedArray],
  params: Any,
  key: Any,
  state: State,
  observation: Any,
  *,
  greedy: bool,
) -> tuple[jax.Array, State]:
  """The function that `Policy.act` compiles.

  The `specs` of observation and action say from which numbers their choices count, see `start_of`.
  """
  one = not state.first.ndim
  observation = jax.tree.map(lambda spec, x: _shifted(spec, x, -1), specs[0], observation)
  first, observation = jax.tree.map(lambda x: x[None] if one else x, (state.first, observation))
  kinds = dm_env.StepType
  timestep = environment_lib.TimeStep(
    step_type=jnp.where(first, kinds.FIRST.value, kinds.MID.value).astype(jnp.int32),
    reward=jnp.zeros(first.shape, jnp.float32),
    discount=jnp.ones(first.shape, jnp.float32),
    observation=observation,
  )
  key = jax.random.fold_in(key, state.num_calls)
  memory, decision = agent.act(params, key, state.memory, timestep, greedy=greedy)
  action = decision.action[0] if one else decision.action
  return _shifted(specs[1], action, 1), State(
    memory, jnp.zeros_like(state.first), state.num_calls + 1
  )


def _shifted(spec: Any, array: Any, sign: int) -> Any:
  return array + sign * environment_lib.start_of(spec) if hasattr(spec, 'start') else array


def load(
  path: str | os.PathLike[str],
  checkpoint: str | int | None = None,
  *,
  environment: Any = None,
  trust: bool = False,
) -> Policy:
  """Loads a trained agent, without its replay and optimizer state.

  Args:
    path: folder of a run, which may still be training, or folder that `export` wrote; or the name
      of an agent that comes with the package, such as 'catch', if no folder has this name.
    checkpoint: learner step of a checkpoint of the run, or 'best'; None for the newest.
    environment: environment with the specs of the run's own, or what was passed to `train`. Needed only
      if the run was trained in another process on an environment that was passed as an object.
    trust: whether to import the agent and the environment that the folder names by an import path.

  Raises:
    ValueError: `path` is none of these; its files are broken or of another version; there is no such
      checkpoint, or one was given for an exported policy; the environment is needed and cannot be
      made; or something would have to be imported without `trust`.
  """
  with records.trusting(trust):
    folder = places.find(path)
    if not (folder / places.POLICY).exists():
      return _of_run(folder, None if checkpoint is None else str(checkpoint), environment)
    if checkpoint is not None:
      raise ValueError(
        f'--checkpoint {checkpoint}: {path} is exported, so it has one checkpoint; leave it out'
      )
    exported = exported_lib.read(folder)
    environment = _made(environment, exported.config)
    if environment is not None or exported.observation_spec is None:
      environment = environment or exported.config.make_environment()
      exported = exported._replace(observation_spec=environment.observation_spec)
    try:
      agent, shapes = _make_agent(exported)
    except ValueError:
      raise
    except Exception as error:  # of specs that no environment has
      raise exported_lib.refusal(folder, error) from None
    file = str(folder / exported_lib.PARAMS)
    # Shipped agents have all parameters, since they can be dreamt; `export` writes what acting needs.
    has_all = exported.arrays.keys() >= exported_lib.named(shapes).keys()
    like = shapes if has_all else jax.eval_shape(agent.acting_params, shapes)
    params = exported_lib.rebuild(exported.arrays, like, file)
    return Policy(
      pathlib.Path(path),
      exported,
      agent,
      agent.acting_params(params) if has_all else params,
      all_params=params if has_all else None,
      environment=environment,
    )


def export(
  path: str | os.PathLike[str],
  out: str | os.PathLike[str],
  checkpoint: str | int | None = None,
  *,
  trust: bool = False,
) -> Policy:
  """Exports the policy of a run to a folder that `load` can read.

  Args:
    path: folder of the run.
    out: new or empty folder, for `params.safetensors` and `policy.json`.
    checkpoint: learner step of a checkpoint, or 'best'; None for the newest.
    trust: as of `load`.

  Raises:
    ValueError: as `load`; or `out` is not empty, or cannot be written to.
  """
  policy = load(path, checkpoint, trust=trust)
  exported_lib.write(policy.exported(policy.params), pathlib.Path(out))
  return policy


def load_config(path: str | os.PathLike[str]) -> launch_config.ExperimentConfig:
  """Reads the config of a run, or of an exported or shipped policy; ValueError if `path` is none of these."""
  folder = places.find(path)
  if (folder / places.POLICY).exists():
    return exported_lib.read(folder).config
  return folder_lib.load_config(folder)


def _of_run(folder: pathlib.Path, checkpoint: str | None, environment: Any) -> Policy:
  from hephaestus.launch.run import parts  # which an exported policy does not need

  config = folder_lib.load_config(folder)
  environment = _made(environment, config) or config.make_environment()
  specs = environment.observation_spec, environment.action_spec
  exported = exported_lib.Exported(config, 0, tuple(environment.action_names), *specs, arrays={})
  agent, shapes = _make_agent(exported)
  step, all_params = parts.saved_params(folder, config, shapes, checkpoint)
  exported, params = exported._replace(learner_step=step), agent.acting_params(all_params)
  return Policy(folder, exported, agent, params, all_params=all_params, environment=environment)


def _made(
  environment: Any, config: launch_config.ExperimentConfig
) -> environment_lib.Environment | None:
  """The environment of a run from what was passed to `train`; ValueError where it is of another class."""
  if environment is None or isinstance(environment, environment_lib.Environment):
    return environment
  environments.register(environment, config.environment['name'])
  made: environment_lib.Environment = config.make_environment()
  return made


def _make_agent(exported: exported_lib.Exported) -> tuple[agent_lib.Agent, Any]:
  """Returns the agent, and the tree of shapes and dtypes of all its parameters."""
  config, specs = exported.config, (exported.observation_spec, exported.action_spec)
  agent = config.record.make(config.agent, *specs).agent
  key = jax.eval_shape(lambda: jax.random.key(0))
  return agent, jax.eval_shape(agent.init_params, key)
