"""Survival: vitals of an observation, the reward of drive reduction, and the input that is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dm_env import specs

from hephaestus.actors import environments
from hephaestus.actors.environments import environment
from hephaestus.actors.environments.cognition import oasis
from hephaestus.agents import observation
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.cognition import survival as survival_lib
from hephaestus.agents.dreamer import numbers

ONES = np.ones(3, np.float32)


def survival(vitals, discount, set_points=ONES):
  """Rewards [T] along steps; 0 at step 0, whose previous step is not known."""
  vitals, discount = jnp.asarray(vitals, jnp.float32), jnp.asarray(discount, jnp.float32)
  found = survival_lib.reduction(vitals[:-1], vitals[1:], discount[1:], set_points)
  return np.concatenate([np.zeros(1, np.float32), found])


def test_lack_by_hand():
  lack = lambda *vitals: float(survival_lib.lack(jnp.array(vitals), ONES))
  assert lack(1, 1, 1) == 0
  assert lack(0, 1, 1) == pytest.approx(1)
  assert lack(0.5, 1, 1) == pytest.approx(0.5 ** (4 / 3))
  assert lack(0, 0, 0) == pytest.approx(3 ** (1 / 3))
  assert lack(1.5, 2, 1) == 0  # more than enough is not a lack
  assert lack(0.2, 0.8, 0.8) > lack(0.6, 0.6, 0.6)  # one large lack counts more than three small


def test_reward_at_a_step_is_for_the_transition_into_it():
  """Eating between steps 1 and 2 is rewarded at step 2, not at step 1 or 3."""
  vitals = np.ones((4, 3))
  vitals[:, 0] = [0.5, 0.25, 1.0, 0.75]
  lack = lambda h: (1 - h) ** (4 / 3)
  expected = [0, lack(0.5) - lack(0.25), lack(0.25) - lack(1), lack(1) - lack(0.75)]
  np.testing.assert_allclose(survival(vitals, np.ones(4)), expected, rtol=1e-5)
  assert expected[2] > 0 > expected[1]


def test_death_costs_as_if_all_vitals_were_zero():
  vitals = np.full((3, 3), 0.5)
  now, worst = (3 * 0.5**4) ** (1 / 3), 3 ** (1 / 3)
  np.testing.assert_allclose(survival(vitals, [1, 1, 0])[2], now - worst, rtol=1e-5)
  np.testing.assert_allclose(survival(vitals, [1, 1, 0.75])[2], 0.25 * (now - worst), rtol=1e-5)
  assert survival(vitals, [1, 1, 1])[2] == 0  # truncation is not death


def test_vitals_are_found_among_the_leaves_of_an_observation():
  vital = environment.Vital
  spec = {
    'a': specs.BoundedArray((2, 2), bool, False, True),
    'action_mask': specs.BoundedArray((3,), bool, False, True),
    'b': environment.VitalsSpec((3,), np.float32, 0, 1, [vital('food', 2), vital('heat', 0, 0.5)]),
    'c': environment.VitalsSpec((2,), np.float32, -9, 9, [vital('salt', 1, 2.0)], are_paid=True),
  }
  found = observation.vitals(spec)
  assert found.names == ('food', 'heat', 'salt') and found.are_paid
  np.testing.assert_array_equal(found.indices, [6, 4, 8])
  np.testing.assert_allclose(found.set_points, [1, 0.5, 2])
  assert observation.vitals({'a': spec['a']}) is None
  read = numbers.Numbers(spec)
  values = {
    'a': np.array([[0, 1], [1, 0]], bool),
    'b': np.array([0.1, 0.2, 0.3], np.float32),
    'c': np.array([4.0, -5.0], np.float32),
  }
  picked = read.pick(read.read(values), found.indices)
  np.testing.assert_allclose(picked, [0.3, 0.1, -5.0], rtol=1e-5)


def test_vitals_of_craftax_are_its_intrinsics():
  pytest.importorskip('craftax', reason='of the extra envs')
  env = environments.make('craftax/Craftax-Classic-Symbolic-v1')
  found = observation.vitals(env.observation_spec)
  assert found.names == ('health', 'food', 'drink', 'energy') and found.are_paid
  state, _ = jax.eval_shape(env.reset, jax.random.key(0))
  state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state).env_state
  from craftax.craftax_classic import renderer

  from hephaestus.actors.environments import craftax

  levels = {'player_health': 9, 'player_food': 7, 'player_drink': 5, 'player_energy': 3}
  state = state.replace(**{name: jnp.int32(level) for name, level in levels.items()})
  shown = craftax.show_classic(renderer.render_craftax_symbolic(state))
  flat = observation.join(shown, env.observation_spec)
  np.testing.assert_allclose(flat[found.indices], [0.9, 0.7, 0.5, 0.3], rtol=1e-3)


@pytest.mark.parametrize(
  'vitals, words',
  [
    ([], 'at least one'),
    ([environment.Vital('food', 3)], 'is not in a vector'),
    ([environment.Vital('food', 0), environment.Vital('food', 1)], 'each name once'),
  ],
)
def test_invalid_vitals_are_rejected(vitals, words):
  with pytest.raises(ValueError, match=words):
    environment.VitalsSpec((3,), np.float32, 0, 1, vitals)


def make(env, **changes):
  config = cognition_config.CognitionConfig(**tiny.DREAMER | changes)
  return registry.make_dreamer(config, env.observation_spec, env.action_spec)


def test_survival_needs_vitals_that_the_environment_does_not_reward():
  make(environments.make('catch'))
  for options in ({'alive_reward': 1.0}, {'level_bonus': 0.1}):
    rewarded = oasis.Oasis(**options)
    make(rewarded)
    with pytest.raises(ValueError, match=r'agent\.survival_scale=1: the reward .* count twice'):
      make(rewarded, survival_scale=1.0)
  with pytest.raises(ValueError, match=r'agent\.survival_scale=1: .* names no vitals'):
    make(environments.make('catch'), survival_scale=1.0)
  with pytest.raises(ValueError, match=r'agent\.survival_scale=-1'):
    make(oasis.Oasis(), survival_scale=-1.0)
