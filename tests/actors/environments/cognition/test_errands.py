import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.actors.environments.cognition import errands

ENV = errands.Errands()
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
WANTED = (3, 1, 2, 0, 1, 0, 3, 2)


def state_of(countdown=IN_ORDER, step_count=0):
  countdown, wanted = np.array(countdown, np.int32), np.array(WANTED, np.int32)
  return errands.State(countdown, wanted, np.int32(step_count))


@jax.jit
def compiled_outcomes(state, action):
  keys = jax.random.split(jax.random.key(0), 1024)
  return jax.vmap(ENV.step, (0, None, None))(keys, state, action)


def outcomes(state, action):
  """1,024 random outcomes of a step."""
  return jax.device_get(compiled_outcomes(state, action))


@pytest.mark.parametrize('countdown, button', [(IN_ORDER, 3), ((8, 7, 6, 5, 0, 3, 2, 1), 1)])
def test_button_of_the_errand_that_is_due_is_rewarded(countdown, button):
  for action in range(4):
    _, timesteps = outcomes(state_of(countdown), action)
    assert set(timesteps.reward.tolist()) == {1.0 if action == button else -1.0}


@pytest.mark.parametrize(
  'countdown, others, restarted',
  [
    (IN_ORDER, (0, 1, 2, 3, 4, 5, 6), {7, 8}),
    ((0, 1, 2, 4, 5, 6, 7, 8), (0, 1, 3, 4, 5, 6, 7), {2, 8}),  # 2 would be missing
    ((0, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7), {0}),  # no other is due next
  ],
)
def test_countdowns_fall_by_one_and_the_errand_due_gets_a_free_one(countdown, others, restarted):
  states, _ = outcomes(state_of(countdown), 0)
  assert {tuple(rest) for rest in states.countdown[:, 1:].tolist()} == {others}
  restarts = states.countdown[:, 0].tolist()
  assert set(restarts) == restarted
  for value in restarted:
    assert restarts.count(value) / len(restarts) == pytest.approx(1 / len(restarted), abs=0.1)


@pytest.mark.parametrize('action', [3, 0])  # right or wrong
def test_only_the_errand_that_was_due_gets_a_random_button(action):
  states, _ = outcomes(state_of(), action)
  assert {tuple(rest) for rest in states.wanted[:, 1:].tolist()} == {WANTED[1:]}
  shares = np.bincount(states.wanted[:, 0], minlength=4) / 1024
  np.testing.assert_allclose(shares, 0.25, atol=0.05)
  both = np.stack([states.wanted[:, 0], states.countdown[:, 0]], axis=-1)
  assert len(set(map(tuple, both.tolist()))) == 4 * 2  # each button with each countdown


def test_episodes_begin_in_any_order_with_any_button():
  reset = jax.jit(lambda key: jax.vmap(ENV.reset)(jax.random.split(key, 4096)))
  states, _ = reset(jax.random.key(0))
  np.testing.assert_array_equal(np.sort(states.countdown), np.tile(np.arange(8), (4096, 1)))
  assert len({tuple(order) for order in states.countdown.tolist()}) > 3500  # of 8! = 40,320
  for values in (states.countdown.T, states.wanted.T):
    for errand in np.asarray(values):
      shares = np.bincount(errand) / 4096
      np.testing.assert_allclose(shares, 1 / len(shares), atol=0.04)


@pytest.fixture(scope='module')
def episodes():
  """[64, 50, 8] countdowns under the random policy, the reset's included."""

  def play(key):
    reset_key, *keys = jax.random.split(key, 50)
    state, _ = ENV.reset(reset_key)
    advance = lambda state, key: (ENV.step(key, state, jnp.int32(0))[0],) * 2
    _, states = jax.lax.scan(advance, state, jnp.stack(keys))
    return jnp.concatenate([state.countdown[None], states.countdown])

  return np.asarray(jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(1), 64)))


def test_exactly_one_errand_is_due_at_each_step(episodes):
  np.testing.assert_array_equal((episodes == 0).sum(-1), 1)
  assert (np.diff(np.sort(episodes), axis=-1) > 0).all()
  assert episodes.max() == 8


def test_countdown_says_when_an_errand_is_due(episodes):
  for step in range(50 - 8):
    due = step + episodes[:, step]  # [64, 8]
    then = np.take_along_axis(episodes, due[:, None], axis=1)
    assert (then == 0).all()


def test_order_is_no_rotation(episodes):
  due = episodes.argmin(-1)
  again = (due[:, 8:] == due[:, :-8]).mean()  # always 1 in a rotation
  assert 0.15 < again < 0.4


def test_observation_has_a_leaf_for_each_errand():
  _, timesteps = outcomes(state_of((0, 1, 2, 4, 5, 6, 7, 8)), 0)
  observation = jax.tree.map(lambda x: x[:1], timesteps.observation)
  assert sorted(observation) == [f'errand_{index}' for index in range(8)]
  assert observation['errand_1'].tolist() == [[0, 0, 1, 0, 0]]
  assert observation['errand_7'].tolist() == [[7 / 8, 0, 0, 1, 0]]
