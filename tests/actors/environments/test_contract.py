"""The contract of environments: all of ours, and some of each family."""

import dataclasses
import itertools
import pathlib
import re

import dm_env
import jax
import numpy as np
import pytest

from hephaestus.actors import environments
from hephaestus.actors.environments import wrappers

NUM_STEPS = 200
FIRST, MID, LAST = (step_type.value for step_type in dm_env.StepType)
TERMINATED, TRUNCATED = 0.0, 1.0  # the discount at LAST


@dataclasses.dataclass(frozen=True)
class Case:
  """An environment under test, with options by which NUM_STEPS steps have several episodes."""

  name: str  # argument of `make`
  options: dict = dataclasses.field(default_factory=dict)
  ends: tuple = (TERMINATED,)  # discounts at LAST of these episodes
  package: str | None = None  # required package, None for our own environments


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


@pytest.fixture(scope='module')
def play(environment):
  """A function from a seed to the states and time steps of the reset and of some steps."""
  num_traces = 0

  def random_step(key, state, observation):
    nonlocal num_traces
    num_traces += 1
    action_key, step_key = jax.random.split(key)
    action = wrappers.random_action(action_key, environment.action_spec, observation)
    return environment.step(step_key, state, action)

  reset, step = jax.jit(environment.reset), jax.jit(random_step)

  def play(seed, num_steps=NUM_STEPS):
    reset_key, steps_key = jax.random.split(jax.random.key(seed))
    steps = [reset(reset_key)]
    for step_key in jax.random.split(steps_key, NUM_STEPS)[:num_steps]:
      state, timestep = steps[-1]
      steps.append(step(step_key, state, timestep.observation))
    assert num_traces == 1
    return tuple(zip(*jax.device_get(steps), strict=True))

  return play


@pytest.fixture(scope='module')
def played(play):
  return play(1)


def abstract(tree):
  leaves, structure = jax.tree.flatten(tree)
  return [(leaf.shape, leaf.dtype) for leaf in leaves], structure


def test_observations_stay_within_their_spec(environment, played):
  _, timesteps = played
  for timestep in timesteps:
    jax.tree.map(
      lambda spec, value: spec.validate(np.asarray(value)),
      environment.observation_spec,
      timestep.observation,
    )


def test_shapes_and_dtypes_never_change_and_numbers_are_finite(played):
  states, timesteps = played
  for state, timestep in zip(states, timesteps, strict=True):
    assert abstract(state) == abstract(states[0])
    assert abstract(timestep) == abstract(timesteps[0])
  for leaf in jax.tree.leaves((states, timesteps)):
    assert np.isfinite(leaf).all()


def test_episodes_run_from_first_to_last(environment, played):
  _, timesteps = played
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
  _, timesteps = played
  discounts = [float(timestep.discount) for timestep in timesteps if timestep.last()]
  assert set(discounts) == set(case.ends)
  for length, discount in zip(episode_lengths(timesteps), discounts, strict=True):
    assert length == environment.max_steps or discount == TERMINATED


def test_step_may_be_traced_again(case, environment, played):
  """A Python number is of another type than an array, so nothing that was traced before serves it."""
  if case.package is None or environment.action_spec.shape:
    pytest.skip('the keys of our own are checked so; or this environment takes arrays')
  states, timesteps = played
  step = jax.eval_shape(lambda state: environment.step(jax.random.key(0), state, 0)[1], states[0])
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  assert shapes(step.observation) == shapes(timesteps[0].observation)


def test_last_observation_comes_before_the_reset(played):
  _, timesteps = played
  content = lambda timestep: [leaf.tobytes() for leaf in jax.tree.leaves(timestep.observation)]
  first = [content(timestep) for timestep in timesteps if timestep.first()]
  for timestep in timesteps:
    if timestep.last() and timestep.discount == TERMINATED:
      assert content(timestep) not in first


def test_first_has_no_reward_and_only_last_may_have_discount_zero(played):
  _, timesteps = played
  for timestep in timesteps:
    if timestep.first():
      assert timestep.reward == 0.0
    if not timestep.last():
      assert timestep.discount == 1.0
    assert timestep.discount in (0.0, 1.0)


def test_some_actions_are_legal_and_some_are_not(environment, played):
  _, timesteps = played
  observation = timesteps[0].observation
  if not (isinstance(observation, dict) and 'action_mask' in observation):
    pytest.skip('every action is legal')
  masks = np.stack([t.observation['action_mask'] for t in timesteps if not t.last()])
  assert masks.shape[1:] == (environment.action_spec.num_values,)
  assert masks.any(-1).all()
  assert not masks.all()


def test_trajectory_depends_only_on_the_key(play, played):
  runs = [timesteps[:31] for _, timesteps in (played, play(2, 30), play(1, 30))]
  one, other, same = map(jax.tree.leaves, runs)
  assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
  assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_no_key_is_used_twice(case, environment):
  if case.package is not None:
    pytest.skip('another package uses keys as it likes')
  with jax.debug_key_reuse(True):  # noticed when it is traced
    state, timestep = jax.eval_shape(environment.reset, jax.random.key(0))
    draw = lambda key, seen: wrappers.random_action(key, environment.action_spec, seen)
    jax.eval_shape(draw, jax.random.key(1), timestep.observation)
    step = lambda key, state: environment.step(key, state, 0)
    jax.eval_shape(step, jax.random.key(2), state)


PARTLY_HIDDEN = ('hackmatrix',)  # its frames show more than is observed


def test_frame_is_an_image_and_draws_what_is_observed(case, environment, played):
  states, timesteps = played
  frame = environment.render(states[0])
  if frame is None:
    pytest.skip('this environment renders no frames')
  assert frame.dtype == np.uint8
  assert frame.ndim == 3 and frame.shape[-1] == 3
  if case.name in environments.ENVIRONMENTS and case.name not in PARTLY_HIDDEN:
    observation = timesteps[0].observation
    np.testing.assert_array_equal(environment.draw(observation), frame)
    predicted = jax.tree.map(lambda x: 1.2 * x.astype(np.float32) + 0.1, observation)
    assert environment.draw(predicted).shape == frame.shape  # also beyond the bounds


@pytest.mark.parametrize(
  'name, options, random, scripted',
  [
    ('errands', {}, (-26.5, -23.5), (50, 50)),
    # 8 for collecting eight resources, up to 0.8 for discovery, -0.01 for each step.
    ('grid_world', {'size': 8, 'num_resources': 8}, (-3, 3), (8, 8.8)),
    # Returns of both policies are below -1.5. The script completes the empty first stage, and few more.
    ('hackmatrix', {}, (0, 0.3), (1, 1.3)),
    ('oasis', {}, (20, 45), (370, 460)),
    ('rooms', {}, (0.1, 0.4), (1, 1)),
    ('sprites', {}, (-0.45, -0.15), (0.97, 1)),  # an episode in some hundred has no way
  ],
)
def test_scores_of_the_random_and_of_the_scripted_policy(name, options, random, scripted):
  count = {'oasis': 16, 'hackmatrix': 32}.get(name, 128)  # whose episodes are long
  reference = wrappers.reference_returns(environments.make(name, **options), num_episodes=count)
  for found, (low, high) in ((reference.random, random), (reference.scripted, scripted)):
    assert low <= found <= high
