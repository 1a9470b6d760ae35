"""Intrinsic motivation: novelty, competence, boredom and the horizon."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import intrinsic
from hephaestus.agents.dreamer import novelty as novelty_lib

CONFIG = cognition_config.CognitionConfig(horizon_max=64, horizon_min=8)


LONGEST = 300


@jax.jit
def scan(novelties):
  def step(state, novelty):
    state, motivation = intrinsic.update(state, novelty, CONFIG)
    return state, motivation

  return jax.lax.scan(step, intrinsic.initial(), novelties)[1]


def run(novelties):
  """The motivation after each batch's novelty, stacked."""
  novelties = np.asarray(novelties, np.float32)
  padded = np.pad(novelties, (0, LONGEST - len(novelties)), mode='edge')
  return jax.tree.map(lambda x: np.asarray(x)[: len(novelties)], scan(padded))


@pytest.mark.parametrize('name', sorted(novelty_lib.NOVELTIES))
def test_one_member_has_no_novelty(name):
  novelty = novelty_lib.NOVELTIES[name](jnp.ones((1, 6, 4)), jnp.ones((1, 6, 4)))
  np.testing.assert_array_equal(novelty, np.zeros(6))


def test_clean_novelty_by_hand():
  # Two coordinates: variance of the means 4 and 1, expected noise (1 + 3) / 2 and (5 + 1) / 2.
  means, variances = jnp.array([[0.0, 1.0], [4.0, 3.0]]), jnp.array([[1.0, 5.0], [3.0, 1.0]])
  np.testing.assert_allclose(novelty_lib.clean_novelty(means, variances), (4 - 2) + 0)


def test_information_gain_by_hand():
  means, variances = jnp.array([[0.0, 1.0], [4.0, 3.0]]), jnp.array([[1.0, 5.0], [3.0, 1.0]])
  expected = 0.5 * (np.log(1 + 4 / 2) + np.log(1 + 1 / 3))
  np.testing.assert_allclose(novelty_lib.information_gain(means, variances), expected, rtol=1e-5)


@pytest.mark.parametrize('name', sorted(novelty_lib.NOVELTIES))
def test_novelty_of_bfloat16_moments_is_computed_in_float32(name):
  # 1000 and 1004 differ in bfloat16; their squares, deviations and variance would not survive it.
  means = jnp.array([[1000.0], [1004.0], [1008.0]], jnp.bfloat16)
  variances = jnp.array([[1.0], [1.0], [1.0]], jnp.bfloat16)
  novelty = novelty_lib.NOVELTIES[name](means, variances)
  assert novelty.dtype == jnp.float32
  exact = np.var([1000.0, 1004.0, 1008.0])
  expected = {
    'clean': exact - 1,
    'information_gain': 0.5 * np.log1p(exact),
  }
  np.testing.assert_allclose(novelty, expected[name], rtol=1e-5)


def test_constant_novelty_has_no_improvement_from_the_first_update_on():
  motivation = run(np.full(LONGEST, 3.0))
  np.testing.assert_allclose(motivation.novelty_slow, 3.0, rtol=1e-4)
  np.testing.assert_allclose(motivation.improvement, 0.0, atol=1e-4)
  np.testing.assert_allclose(motivation.boredom[:12], [*np.arange(0.1, 1.05, 0.1), 1, 1], rtol=1e-5)


def test_falling_novelty_gives_improvement_and_little_boredom_from_the_start():
  motivation = run(0.95 ** np.arange(100))
  assert (motivation.improvement[1:] > 0).all()
  assert (motivation.improvement[10:] > dreamer_config.LEAST_IMPROVEMENT).all()
  assert motivation.boredom.max() < 0.65
  assert (motivation.boredom[10:] == 0).all()
  assert (motivation.horizon[10:] == CONFIG.horizon_max).all()


def test_novelty_that_rises_below_its_maximum_gives_no_improvement():
  motivation = run([*np.full(10, 9.0), *np.full(100, 1.0), *np.linspace(1.0, 3.0, 190)])
  assert motivation.novelty_fast[-1] > motivation.novelty_slow[-1]
  assert motivation.improvement[-1] == 0 and motivation.boredom[-1] == 1


def test_one_member_is_not_bored():
  alone = dataclasses.replace(CONFIG, ensemble_size=1)
  _, motivation = intrinsic.update(intrinsic.initial(), jnp.float32(0.0), alone)
  assert motivation.boredom == 0 and motivation.horizon == alone.horizon_max


def test_boredom_does_not_rise_during_warm_up():
  state = intrinsic.initial()
  for _ in range(20):
    state, motivation = intrinsic.update(state, jnp.float32(2.0), CONFIG, trained=False)
  assert motivation.boredom == 0


def test_competence_by_hand():
  motivation = run([2.0, 1.0])
  fast = (0.9 * 0.1 * 2 + 0.1 * 1) / (1 - 0.9**2)
  slow = (0.995 * 0.005 * 2 + 0.005 * 1) / (1 - 0.995**2)
  np.testing.assert_allclose(motivation.improvement[1], (slow - fast) / slow, rtol=1e-3)
  np.testing.assert_allclose(motivation.novelty_slow[1], slow, rtol=1e-4)


def differences(reward, discount, gamma):
  """Of steps [T], to all of which a transition leads."""
  reward, discount = (np.asarray(x, np.float32)[:, None] for x in (reward, discount))
  follows = np.ones_like(reward, bool)
  found = intrinsic.return_differences(reward, discount, follows, lambda x: x, gamma=gamma)
  return np.asarray(found)[:, 0]


def test_returns_that_do_not_differ():
  """A reward of -1 at every step, without termination, tells nothing; the constant critic is exact."""
  for gamma in (0.99, 1.0):
    np.testing.assert_array_equal(differences(np.full(6, -1.0), np.ones(6), gamma), 0)


def test_difference_of_returns_by_hand():
  # One of four steps is rewarded, and terminates: v = 0.25 / (1 - 0.5 * 0.75) = 0.4.
  found = differences([0, 0, 0, 1], [1, 1, 1, 0], 0.5)
  np.testing.assert_allclose(found, [-0.2, -0.2, -0.2, 0.6], rtol=1e-6)
  # The reward is 1 at every step, and only termination differs: v = 1 / (1 - 0.5 * 0.75) = 1.6.
  found = differences([1, 1, 1, 1], [1, 1, 1, 0], 0.5)
  np.testing.assert_allclose(found, [0.2, 0.2, 0.2, -0.6], rtol=1e-6)


def test_steps_that_nothing_led_to_do_not_count():
  reward, discount = np.float32([[5.0], [0.0], [1.0]]), np.ones((3, 1), np.float32)
  follows = np.array([[False], [True], [True]])
  found = intrinsic.return_differences(reward, discount, follows, lambda x: x, gamma=0.5)
  np.testing.assert_allclose(found[:, 0], [0, -0.5, 0.5], rtol=1e-6)


def test_many_small_rewards_are_as_much_evidence_as_a_large_one():
  follows = np.ones((4, 2), bool)
  follows[2, 1] = False  # the first step of another episode
  small = np.where(follows, 0.5, 0).astype(np.float32)
  found = intrinsic.discounted(small, follows, 0.5)
  np.testing.assert_allclose(found, [[0.875, 0.5], [0.75, 0], [0.5, 0.5]])


def test_evidence_rises_slowly_with_the_largest_difference_and_never_falls():
  config = cognition_config.CognitionConfig(return_floor=2.0)
  evidence, found = jnp.zeros(()), []
  for largest in (0.0, 0.1, 0.0, 7.0):  # a tenth of the floor is enough
    evidence = intrinsic.evidence(evidence, jnp.float32(largest), config)
    found.append(float(evidence))
  np.testing.assert_allclose(found, [0, 0.005, 0.005, 0.005 + 0.01 * 0.995], rtol=1e-5)
  for _ in range(1000):
    evidence = intrinsic.evidence(evidence, jnp.float32(7.0), config)
  assert 0.999 < evidence <= 1


def test_usual_differences_count_as_noise_of_the_information_gain():
  means, variances = np.float32([[1.0], [-1.0]]), np.float32([[0.5], [0.5]])
  of = lambda *usual: float(novelty_lib.information_gain(means, variances, *usual))
  np.testing.assert_allclose(of(), 0.5 * np.log(1 + 1 / 0.5), rtol=1e-4)
  np.testing.assert_allclose(of(1.0), 0.5 * np.log(1 + 1 / 1.5), rtol=1e-4)
  groups = ((means, variances, 0.0), (means, variances, 1.0))
  np.testing.assert_allclose(
    novelty_lib.novelty_of('information_gain', groups), of() + of(1.0), rtol=1e-5
  )


def earn(of_task, of_explorer, count=512):
  """What both actors earned in `count` sequences each, which differ by 1."""
  noise = np.where(np.arange(count) % 2, 0.5, -0.5).astype(np.float32)
  found = np.concatenate([of_task + noise, of_explorer + noise])[None]
  explores, is_new = np.arange(2 * count) >= count, np.ones(2 * count, bool)
  return intrinsic.earned(intrinsic.nothing_earned(), found, explores, is_new, lambda x: x)


def settled(earned, evidence=1.0):
  """The share that explores after many updates."""
  share = jnp.ones(())
  step = jax.jit(lambda share: intrinsic.exploring(share, earned, jnp.float32(evidence)))
  for _ in range(1500):
    share = step(share)
  return float(share)


def test_all_explore_until_returns_are_known_to_differ():
  assert settled(earn(1.0, 0.0), evidence=0.0) == 1.0
  few = intrinsic.exploring(jnp.ones(()), earn(1.0, 0.0), jnp.float32(1.0))
  assert 0.99 < few < 1  # and fewer only slowly


@pytest.mark.parametrize(
  ('of_task', 'of_explorer', 'share'),
  [(0.0, 0.0, 0.25), (2.0, 0.0, 0.125), (0.0, 2.0, 0.875)],
)
def test_environments_go_to_the_actor_that_earns_more(of_task, of_explorer, share):
  assert settled(earn(of_task, of_explorer)) == pytest.approx(share, abs=1e-3)
  assert settled(earn(of_task, of_explorer, count=8)) == pytest.approx(0.25, abs=1e-3)  # too few


def test_what_was_earned_long_ago_is_forgotten():
  earned = earn(2.0, 0.0)
  nothing, is_new = np.zeros((1, 64), np.float32), np.ones(64, bool)
  for index in range(100):
    explores = np.full(64, index % 2 == 0)
    earned = intrinsic.earned(earned, nothing, explores, is_new, lambda x: x)
  np.testing.assert_allclose(earned.total / earned.number, 0, atol=0.02)
  assert (earned.number > 16).all()


def test_sequences_that_are_not_new_do_not_count():
  found = intrinsic.earned(
    intrinsic.nothing_earned(),
    np.ones((3, 4), np.float32),
    np.array([False, False, True, True]),
    np.array([True, False, True, True]),
    lambda x: x,
  )
  np.testing.assert_array_equal(found.number, [1, 2])
  np.testing.assert_array_equal(found.total, [3, 6])
  np.testing.assert_array_equal(found.square, [9, 18])


def test_boredom_falls_twice_as_fast_as_it_rises():
  motivation = run([*np.full(10, 1.0), 0.5, 0.5])
  np.testing.assert_allclose(motivation.boredom[9:], [1.0, 0.8, 0.6], rtol=1e-5)


def test_horizon_falls_from_longest_to_shortest_as_boredom_rises():
  motivation = run(np.full(30, 1.0))
  assert motivation.horizon.dtype == jnp.int32
  np.testing.assert_array_equal(motivation.horizon[:3], [58, 53, 47])  # 64 - 5.6, - 11.2, - 16.8
  assert (np.diff(motivation.horizon) <= 0).all()
  assert motivation.horizon[-1] == CONFIG.horizon_min


@pytest.mark.parametrize(('evidence', 'horizon'), [(0.0, 8), (0.5, 36), (1.0, 64)])
def test_boredom_does_not_shorten_dreams_where_real_returns_differ(evidence, horizon):
  bored = intrinsic.initial()._replace(boredom=jnp.float32(1.0), largest=jnp.float32(9.0))
  _, motivation = intrinsic.update(bored, jnp.float32(2.0), CONFIG, evidence=jnp.float32(evidence))
  assert motivation.boredom == 1 and motivation.horizon == horizon


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.lists(st.floats(0, 1e4, width=32), min_size=8, max_size=8))
def test_motivation_keeps_its_bounds(novelties):
  motivation = run(novelties)
  assert all(np.isfinite(x).all() for x in motivation)
  assert (motivation.boredom >= 0).all() and (motivation.boredom <= 1).all()
  assert (motivation.improvement >= 0).all() and (motivation.improvement <= 1.001).all()
  assert (motivation.horizon >= CONFIG.horizon_min).all()
  assert (motivation.horizon <= CONFIG.horizon_max).all()
