"""Empowerment: its estimate beside exact values, its gradients, and the input that is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from dm_env import specs

from hephaestus.actors.environments import oasis
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import empowerment, rssm

SIDE = 5
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]], np.float32)
SPECS = (
  specs.BoundedArray((2,), np.float32, 0.0, 1.0),
  specs.DiscreteArray(len(MOVES)),
)


def make(observation_spec, action_spec, **changes):
  changes = {'empowerment_scale': 1.0, 'hidden_size': 64} | changes
  config = dreamer_config.DreamerConfig(**tiny.DREAMER | changes)
  return dreamer_agent.make_dreamer(config, observation_spec, action_spec)


class Grid(rssm.RSSM):
  """A model that knows the rules of a square of 5 x 5 cells, of which `dead` counts for nothing."""

  dead = False

  def imagine(self, params, matrices, recurrent, member, noise):
    action = recurrent.action * (0.0 if self.dead else 1.0)
    place = recurrent.latent.numbers * 8 + action @ MOVES
    moved = jnp.clip(place, 0, SIDE - 1) / 8
    # As in any recurrence, the action is read from the state that follows.
    state = recurrent.latent.deterministic.at[:, : len(MOVES)].set(recurrent.action)
    return recurrent.latent._replace(deterministic=state, numbers=moved), None, None


class DeadGrid(Grid):
  """The same, where no action has an effect."""

  dead = True


def trained(model, *, updates=1500, legal=None):
  """[5, 5] nats of the head after updates from uniformly sampled places."""
  dreamer = make(*SPECS)
  measured = empowerment.Empowerment(model(dreamer.model.networks))
  params = dreamer.model.init(jax.random.key(0))
  optimizer = optax.adam(3e-3)
  num_steps, batch = 8, 32
  legal = np.ones(len(MOVES), bool) if legal is None else np.array(legal)

  def posterior(places):
    state = dreamer.model.rssm.initial(places.shape[0] * places.shape[1]).latent
    state = jax.tree.map(lambda x: x.reshape(*places.shape[:2], *x.shape[1:]), state)
    latent = state._replace(numbers=places / 8)
    previous = jnp.zeros((*places.shape[:2], dreamer.model.networks.previous_size))
    features = dreamer.model.rssm.features(params, latent, previous)
    return rssm.Posterior(latent, features, previous, None, None, None)

  @jax.jit
  def update(params, opt_state, key):
    places, keys = jax.random.split(key)
    places = jax.random.randint(places, (num_steps, batch, 2), 0, SIDE).astype(jnp.float32)

    def loss(params):
      last = jnp.zeros((num_steps, batch), bool)
      allowed = jnp.broadcast_to(legal, (num_steps, batch, len(MOVES)))
      return measured.loss(params, jax.random.split(keys, batch), posterior(places), last, allowed)

    grads, _ = jax.grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state

  opt_state = optimizer.init(params)
  for key in jax.random.split(jax.random.key(1), updates):
    params, opt_state = update(params, opt_state, key)
  cells = np.stack(np.indices((SIDE, SIDE)), axis=-1).astype(np.float32)
  return np.asarray(measured.nats(params, posterior(jnp.asarray(cells)).features))


def exact(legal=None):
  """[5, 5] entropy of the next cell under uniform legal actions; moves do not slip."""
  moves = MOVES if legal is None else MOVES[np.array(legal)]
  values = np.zeros((SIDE, SIDE))
  for row, column in np.ndindex(SIDE, SIDE):
    ends = [tuple(np.clip(np.array([row, column]) + move, 0, SIDE - 1)) for move in moves]
    shares = np.array([ends.count(end) for end in set(ends)]) / len(moves)
    values[row, column] = -np.sum(shares * np.log(shares))
  return values


def test_exact_values_by_hand():
  assert exact()[2, 2] == pytest.approx(np.log(5))
  assert exact()[0, 0] == pytest.approx(-0.6 * np.log(0.6) - 0.4 * np.log(0.2))


def test_head_learns_the_exact_information_of_a_grid():
  np.testing.assert_allclose(trained(Grid), exact(), atol=0.1)


def test_actions_without_effect_give_no_empowerment():
  """Neither the action nor a state that is a function of it may reach the classifier."""
  assert np.abs(trained(DeadGrid, updates=600)).max() < 0.05


def test_illegal_actions_do_not_count():
  legal = [True, True, False, False, False]  # up, down
  np.testing.assert_allclose(trained(Grid, legal=legal, updates=1000), exact(legal), atol=0.1)
  assert exact(legal)[2, 2] == pytest.approx(np.log(2))


def test_world_model_learns_nothing_for_it(make_dreamer, make_sequence):
  """Its networks change no gradient of others; a state that gave the action away would pay."""
  dreamer = make_dreamer('plain', empowerment_scale=1.0)
  model, sequence = dreamer.model, make_sequence(dreamer)
  own = ('inverse', 'empowerment')
  keys = jax.random.split(jax.random.key(2), 3)
  gradient = jax.jit(lambda params: jax.grad(model.loss, has_aux=True)(params, keys, sequence)[0])
  params = model.init(jax.random.key(0))
  changed = params | {name: jax.tree.map(lambda x: x + 0.5, params[name]) for name in own}
  one, other = gradient(params), gradient(changed)
  rest = lambda grads: {name: x for name, x in grads.items() if name not in own}
  jax.tree.map(np.testing.assert_array_equal, rest(one), rest(other))
  assert any(np.any(x) for x in jax.tree.leaves(one['inverse']))


def test_reward_is_a_share_of_the_largest():
  dreamer = make(*SPECS)
  params = dreamer.model.init(jax.random.key(0))
  features = jax.random.normal(jax.random.key(1), (7, dreamer.model.networks.feature_size))
  params['empowerment']['rest']['Dense_0']['bias'] += np.log(5)  # its kernel is 0
  np.testing.assert_allclose(dreamer.model.empowered(params, features), np.ones(7), rtol=1e-5)


def test_empowerment_is_an_intrinsic_reward_with_a_head_of_its_own():
  env = oasis.Oasis()
  make_one = functools.partial(make, env.observation_spec, env.action_spec)
  assert make_one().actor_critic.heads == ('task', 'novelty', 'empowerment')
  off = make_one(empowerment_scale=0.0)
  assert off.actor_critic.heads == ('task', 'novelty')
  assert off.model.empowerment is None
  assert not {'inverse', 'empowerment'} & off.model.networks.modules.keys()


@pytest.mark.parametrize(
  'observation_spec, action_spec, words',
  [
    (SPECS[0], specs.BoundedArray((2,), np.float32, -1, 1), 'one discrete action'),
    (SPECS[0], specs.BoundedArray((2,), np.int32, 0, 3), 'one discrete action'),
    (SPECS[0], specs.DiscreteArray(1), 'at least two choices'),
    (specs.BoundedArray((64, 64, 3), np.uint8, 0, 255), SPECS[1], 'only images'),
  ],
)
def test_empowerment_is_refused_by_name(observation_spec, action_spec, words):
  with pytest.raises(ValueError, match=rf'agent\.empowerment_scale=1: .*{words}'):
    make(observation_spec, action_spec)
  with pytest.raises(ValueError, match=r'agent\.empowerment_scale=-1'):
    make(*SPECS, empowerment_scale=-1.0)
