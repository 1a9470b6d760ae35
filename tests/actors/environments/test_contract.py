"""The contract of environments: all of ours, and some of each family."""

import dataclasses
import functools
import itertools
import pathlib
import re

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors import environments
from hephaestus.actors.environments import wrappers

NUM_STEPS = 200
FIRST, MID, LAST = (step_type.value for step_type in dm_env.StepType)
TERMINATED, TRUNCATED = 0.0, 1.0  # the discount at LAST


@dataclasses.dataclass(frozen=True)
class Case:
  """An environment under test.

  Attributes:
    name: argument of `make`.
    options: with which NUM_STEPS steps have several episodes.
    ends: discounts at LAST of these episodes.
    package: required package, None for our own environments.
  """

  name: str
  options: dict = dataclasses.field(default_factory=dict)
  ends: tuple = (TERMINATED,)
  package: str | None = None


BOTH = (TERMINATED, TRUNCATED)
ENVIRONMENTS = [
  Case('example:make', {'max_steps': 10}, BOTH),  # from docs/environments.md
  Case('catch'),
  Case('errands', {'max_steps': 30}, (TRUNCATED,)),
  Case('grid_world', {'size': 4, 'num_resources': 3, 'max_steps': 45}, (TRUNCATED,)),
  Case('hackmatrix', {'max_steps': 18}, BOTH),
  Case('ice', {'max_steps': 40}, (TRUNCATED,)),
  Case('noisy_corridor', {'max_steps': 18}, (TRUNCATED,)),
  Case('oasis', {'max_steps': 25}, BOTH),
  Case('oasis', {'max_steps': 25, 'image': True}, BOTH),
  Case('rooms', {'fresh_after': 10}),
  Case('sprites', {'max_steps': 12}, BOTH),
  Case('gymnax/CartPole-v1', {'max_steps': 14}, BOTH, 'gymnax'),
  Case('gymnax/Breakout-MinAtar', {'max_steps': 14}, BOTH, 'gymnax'),
  Case('gymnax/DeepSea-bsuite', {'size': 5}, (TERMINATED,), 'gymnax'),
  Case('jumanji/Tetris-v0', {'num_rows': 5, 'num_cols': 5, 'max_steps': 6}, BOTH, 'jumanji'),
  Case('brax/inverted_pendulum', {'backend': 'positional', 'max_steps': 16}, BOTH, 'brax'),
  Case('navix/Navix-DoorKey-5x5-v0', {'max_steps': 14}, (TRUNCATED,), 'navix'),
  Case('navix/Navix-MemoryS7-v0', {'max_steps': 14, 'first_person': True}, BOTH, 'navix'),
  Case('craftax/Craftax-Classic-Symbolic-v1', {'max_steps': 30}, (TRUNCATED,), 'craftax'),
]
SLOW = ('brax', 'craftax')  # to compile


@pytest.fixture(
  params=[
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.package in SLOW else [])
    for case in ENVIRONMENTS
  ],
  scope='module',
)
def case(request):
  if request.param.package is not None:
    pytest.importorskip(request.param.package, reason='of the extra envs')
  return request.param


@pytest.fixture(scope='module')
def example(tmp_path_factory):
  """The example of docs/environments.md as a module on the import path."""
  page = pathlib.Path(__file__).parents[3] / 'docs' / 'environments.md'
  blocks = re.findall(r'^```python\n(.*?)^```$', page.read_text(), re.DOTALL | re.MULTILINE)
  (code,) = (block for block in blocks if 'def make' in block)
  assert code.count('\n') <= 40
  folder = tmp_path_factory.mktemp('example')
  (folder / 'example.py').write_text(code)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    yield


@pytest.fixture(scope='module')
def environment(case, example):
  del example
  return wrappers.AutoReset(environments.make(case.name, **case.options))


def random_step(environment, key, state, observation):
  action_key, step_key = jax.random.split(key)
  action = wrappers.random_action(action_key, environment.action_spec, observation)
  return environment.step(step_key, state, action)


def play_keys(seed):
  reset_key, steps_key = jax.random.split(jax.random.key(seed))
  return reset_key, jax.random.split(steps_key, NUM_STEPS)


@pytest.fixture(scope='module')
def played(environment):
  """Number of traces of the step; states and time steps of the reset and of each step."""
  num_traces = 0

  @jax.jit
  def step(key, state, observation):
    nonlocal num_traces
    num_traces += 1
    return random_step(environment, key, state, observation)

  reset_key, step_keys = play_keys(seed=1)
  steps = [jax.jit(environment.reset)(reset_key)]
  for step_key in step_keys:
    state, timestep = steps[-1]
    steps.append(step(step_key, state, timestep.observation))
  states, timesteps = zip(*jax.device_get(steps), strict=True)
  return num_traces, states, timesteps


@pytest.fixture(scope='module')
def batched(environment):
  """[N, T] time steps of parallel environments; the first and the last have the same key."""

  def play(seed):
    def step(carry, key):
      state, timestep = random_step(environment, key, *carry)
      return (state, timestep.observation), timestep

    reset_key, step_keys = play_keys(seed)
    state, first = environment.reset(reset_key)
    _, timesteps = jax.lax.scan(step, (state, first.observation), step_keys)
    return jax.tree.map(lambda one, rest: jnp.concatenate([one[None], rest]), first, timesteps)

  return jax.device_get(jax.jit(jax.vmap(play))(jnp.array([1, 2, 1])))


def abstract(tree):
  leaves, structure = jax.tree.flatten(tree)
  return [(leaf.shape, leaf.dtype) for leaf in leaves], structure


def test_step_is_traced_once(played):
  num_traces, _, _ = played
  assert num_traces == 1


def test_observations_stay_within_their_spec(environment, played):
  _, _, timesteps = played
  for timestep in timesteps:
    jax.tree.map(
      lambda spec, value: spec.validate(np.asarray(value)),
      environment.observation_spec,
      timestep.observation,
    )


def test_shapes_and_dtypes_never_change(played):
  _, states, timesteps = played
  for state, timestep in zip(states, timesteps, strict=True):
    assert abstract(state) == abstract(states[0])
    assert abstract(timestep) == abstract(timesteps[0])


def test_states_and_timesteps_are_finite(played):
  _, states, timesteps = played
  for leaf in jax.tree.leaves((states, timesteps)):
    assert np.isfinite(leaf).all()


def test_episodes_run_from_first_to_last(environment, played):
  _, _, timesteps = played
  step_types = [int(timestep.step_type) for timestep in timesteps]
  assert step_types[0] == FIRST
  assert step_types.count(LAST) >= 2
  follows = {FIRST: {MID, LAST}, MID: {MID, LAST}, LAST: {FIRST}}
  for step_type, next_step_type in itertools.pairwise(step_types):
    assert next_step_type in follows[step_type]
  assert max(episode_lengths(timesteps)) <= environment.max_steps


def episode_lengths(timesteps):
  """Number of steps of each finished episode."""
  ends = [t for t, timestep in enumerate(timesteps) if timestep.last()]
  return np.diff([-1, *ends]) - 1


def test_truncation_keeps_discount_one(case, environment, played):
  _, _, timesteps = played
  discounts = [float(timestep.discount) for timestep in timesteps if timestep.last()]
  assert set(discounts) == set(case.ends)
  for length, discount in zip(episode_lengths(timesteps), discounts, strict=True):
    assert length == environment.max_steps or discount == TERMINATED


def test_last_observation_comes_before_the_reset(played):
  _, _, timesteps = played
  content = lambda timestep: [leaf.tobytes() for leaf in jax.tree.leaves(timestep.observation)]
  first = [content(timestep) for timestep in timesteps if timestep.first()]
  for timestep in timesteps:
    if timestep.last() and timestep.discount == TERMINATED:
      assert content(timestep) not in first


def test_first_has_no_reward_and_only_last_may_have_discount_zero(played):
  _, _, timesteps = played
  for timestep in timesteps:
    if timestep.first():
      assert timestep.reward == 0.0
    if not timestep.last():
      assert timestep.discount == 1.0
    assert timestep.discount in (0.0, 1.0)


def test_vmapped_environments_match_a_single_one(played, batched):
  _, _, timesteps = played
  unbatched = jax.tree.map(lambda *steps: np.stack(steps), *timesteps)
  one = jax.tree.map(lambda leaf: leaf[0], batched)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one, unbatched)


def test_trajectory_depends_only_on_the_key(batched):
  one, other, same = ([leaf[n] for leaf in jax.tree.leaves(batched)] for n in range(3))
  assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
  assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_some_actions_are_legal_and_some_are_not(environment, played):
  _, _, timesteps = played
  observation = timesteps[0].observation
  if not (isinstance(observation, dict) and 'action_mask' in observation):
    pytest.skip('every action is legal')
  masks = np.stack([t.observation['action_mask'] for t in timesteps if not t.last()])
  assert masks.shape[1:] == (environment.action_spec.num_values,)
  assert masks.any(-1).all()
  assert not masks.all()


def test_scripted_policy_beats_the_random_policy(case, environment):
  if case.name not in environments.ENVIRONMENTS:
    pytest.skip('only our own environments have a scripted policy')
  if case.name in ('ice', 'noisy_corridor'):
    pytest.skip('all rewards are 0')
  if case.name in ('catch', 'errands', 'grid_world', 'hackmatrix', 'oasis', 'sprites'):
    pytest.skip('its own tests or the tests of wrappers compare both scores with exact ones')
  # Without auto-reset, which would compile the reset once more.
  reference = wrappers.reference_returns(environment.environment, num_episodes=64)
  assert reference is not None
  assert reference.scripted > reference.random


def test_frame_is_an_rgb_image(environment, played):
  _, states, _ = played
  frame = environment.render(states[0])
  if frame is None:
    pytest.skip('this environment renders no frames')
  assert frame.dtype == np.uint8
  assert frame.ndim == 3 and frame.shape[-1] == 3
