"""Empowerment: its estimate against exact values, its gradients, and the input that is refused."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from dm_env import specs

from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import empowerment, registry
from hephaestus.agents.dreamer import modules, rssm

SIDE = 5
ALL = [True] * 5
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]], np.float32)
SPECS = (
  specs.BoundedArray((2,), np.float32, 0.0, 1.0),
  specs.DiscreteArray(len(MOVES)),
)


def make(observation_spec, action_spec, **changes):
  changes = {'empowerment_scale': 1.0, 'hidden_size': 64} | changes
  config = cognition_config.CognitionConfig(**tiny.DREAMER | changes)
  return registry.make_dreamer(config, observation_spec, action_spec)


@dataclasses.dataclass(frozen=True)
class Grid(rssm.RSSM):
  """A model that knows the rules of a square of 5 x 5 cells; moves are multiplied by `reach`."""

  reach: Any = 1.0

  def imagine(self, params, matrices, recurrent, member, noise):
    place = recurrent.latent.numbers * 8 + self.reach * recurrent.action @ MOVES
    moved = jnp.clip(place, 0, SIDE - 1) / 8
    # As in any recurrence, the action is read from the state that follows.
    state = recurrent.latent.deterministic.at[:, : len(MOVES)].set(recurrent.action)
    latent = recurrent.latent._replace(deterministic=state, numbers=moved)
    return rssm.Step(latent, None, None, None, None, None)


@pytest.fixture(scope='module')
def train():
  """(updates, reach, legal actions) -> [5, 5] nats of the head after so many updates.

  Trains from uniformly sampled places, with a rate that falls to 0. Only classifier and head learn.
  """
  dreamer = make(*SPECS)
  optimizer = optax.scale_by_adam()
  num_steps, batch = 8, 32
  own = (empowerment.INVERSE, empowerment.HEAD)

  def posterior(params, places):
    state = dreamer.model.rssm.initial(places.shape[0] * places.shape[1]).latent
    state = jax.tree.map(lambda x: x.reshape(*places.shape[:2], *x.shape[1:]), state)
    latent = state._replace(numbers=places / 8)
    previous = jnp.zeros((*places.shape[:2], dreamer.model.networks.previous_size))
    features = dreamer.model.rssm.features(params, latent, previous)
    return rssm.Step(latent, features, previous, None, None, None)

  @jax.jit
  def train(updates, reach, legal):
    measured = empowerment.Empowerment(Grid(dreamer.model.networks, reach))
    params, statistics = dreamer.model.init(jax.random.key(0))
    whole = params | statistics

    def update(i, carry):
      params, opt_state = carry
      places, keys = jax.random.split(jax.random.fold_in(jax.random.key(1), i))
      places = jax.random.randint(places, (num_steps, batch, 2), 0, SIDE).astype(jnp.float32)

      def loss(params):
        allowed = jnp.broadcast_to(legal, (num_steps, batch, len(MOVES)))
        zeros = jnp.zeros((num_steps, batch))
        steps = types.SimpleNamespace(
          reward=zeros, step_type=zeros + 1, observation={'action_mask': allowed}
        )
        seen, keys_ = posterior(whole, places), jax.random.split(keys, batch)
        return measured.loss(whole | params, keys_, seen, steps, zeros)

      grads, _ = jax.grad(loss, has_aux=True)(params)
      changes, opt_state = optimizer.update(grads, opt_state)
      rate = 3e-3 * (1 - i / updates)
      return jax.tree.map(lambda x, change: x - rate * change, params, changes), opt_state

    params = {name: whole[name] for name in own}
    params, _ = jax.lax.fori_loop(0, updates, update, (params, optimizer.init(params)))
    cells = jnp.asarray(np.stack(np.indices((SIDE, SIDE)), axis=-1), jnp.float32)
    return measured.nats(whole | params, posterior(whole, cells).features)

  def run(updates, reach=1.0, legal=ALL):
    return np.asarray(train(updates, np.float32(reach), np.array(legal)))

  return run


def exact(legal=None):
  """[5, 5] entropy of the next cell under uniform legal actions; moves do not slip."""
  moves = MOVES if legal is None else MOVES[np.array(legal)]
  values = np.zeros((SIDE, SIDE))
  for row, column in np.ndindex(SIDE, SIDE):
    ends = [tuple(np.clip(np.array([row, column]) + move, 0, SIDE - 1)) for move in moves]
    shares = np.array([ends.count(end) for end in set(ends)]) / len(moves)
    values[row, column] = -np.sum(shares * np.log(shares))
  return values


def test_head_learns_the_exact_information_of_a_grid(train):
  np.testing.assert_allclose(train(700), exact(), atol=0.1)


def test_actions_without_effect_give_no_empowerment(train):
  """Neither the action nor a state that is a function of it may reach the classifier."""
  assert np.abs(train(400, reach=0.0)).max() < 0.05


def test_illegal_actions_do_not_count(train):
  legal = [True, True, False, False, False]  # up, down
  np.testing.assert_allclose(train(400, legal=legal), exact(legal), atol=0.1)
  assert exact(legal)[2, 2] == pytest.approx(np.log(2))


def test_world_model_learns_nothing_for_it(make_dreamer, make_params, make_sequence, judge):
  """No other network nor a latent gets a gradient; a state that gave the action away would be rewarded."""
  dreamer = make_dreamer('masked', empowerment_scale=1.0)
  params, sequence = modules.world(make_params(dreamer)), make_sequence(dreamer)
  reward = dreamer.model.rewards[empowerment.NAME]
  without = make_dreamer('masked').model
  own = (empowerment.INVERSE, empowerment.HEAD)
  keys = jax.random.split(jax.random.key(2), 3)
  rest = {name: x for name, x in params.items() if name not in own}
  posterior = judge(without, rest, keys, sequence).posterior

  @jax.jit
  def gradient(params, latent, features, sequence):
    def loss(params, latent, features):
      seen = posterior._replace(latent=latent, features=features)
      return reward.loss(params, keys, seen, sequence, seen.latent.numbers)[0]

    return jax.grad(loss, argnums=(0, 1, 2))(params, latent, features)

  grads, *others = jax.device_get(gradient(params, posterior.latent, posterior.features, sequence))
  size = lambda tree: sum(np.abs(x).sum() for x in jax.tree.leaves(tree))
  assert {name for name in params if size(grads[name])} == set(own)
  assert size(others) == 0


def test_reward_is_a_share_of_the_largest(make_dreamer, make_params):
  dreamer = make_dreamer('masked', empowerment_scale=1.0)
  params = modules.world(make_params(dreamer))
  output = params[empowerment.HEAD]['rest']['Dense_0']
  output['kernel'][:], output['bias'][:] = 0, np.log(4)
  features = jax.tree.map(jnp.ones_like, dreamer.model.networks.empty_features(7))
  step = rssm.Step(None, features, None, None, None, None)
  empowered = jax.jit(dreamer.model.rewards[empowerment.NAME].reward)(params, step, step)
  np.testing.assert_allclose(empowered, np.ones(7), rtol=1e-5)


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
