"""The equations of an update: what three updates change in each part, as kept in `update_digests.json`.

A refactoring must leave these numbers; a change of the agent's equations or of the networks' initial
parameters renews them, on purpose, by

    RENEW_DIGESTS=1 .venv/bin/python -m pytest tests/learner/test_update_digests.py
"""

import json
import os
import pathlib

import jax
import numpy as np
import pytest
from dm_env import specs
from jax import flatten_util
from small_dreamer import BATCH, NUM_STEPS, PIXELS, RATES, make_batch, make_dreamer
from trainer import Trainer

from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.learner import dreamer_update

KEPT = pathlib.Path(__file__).with_name('update_digests.json')
NUM_UPDATES = 3
TOLERANCE = 2e-3
"""A share of the part's norm; XLA's optimisations, which sum in another order, change a tenth of it at most."""


def pictures():
  """Images and real numbers, continuous actions, a Gaussian latent, salience, and a memory."""
  config = make_dreamer(latent='gaussian', window=3, memory_size=64, image_channels=4).config
  observation_spec = {
    'pixels': specs.BoundedArray(PIXELS, np.uint8, 0, 255),
    'real': specs.Array((2,), np.float32),
  }
  action_spec = specs.BoundedArray((2,), np.float32, [-1, 0], [1, 4])
  return registry.make_dreamer(config, observation_spec, action_spec)


def grids():
  """A grid of bits, and real numbers."""
  observation_spec = {
    'bits': specs.BoundedArray((4, 4, 2), bool, False, True),
    'real': specs.Array((2,), np.float32),
  }
  return registry.make_dreamer(make_dreamer().config, observation_spec, specs.DiscreteArray(3))


def batch_of(dreamer, seed):
  """A batch for the dreamer, whose sequences begin in random states."""
  batch, random = make_batch(dreamer, seed), np.random.default_rng(seed)
  normal = lambda x: random.normal(size=x.shape).astype(x.dtype)
  if 'pixels' in dreamer.model.observation_spec:
    pixels = random.integers(0, 256, (BATCH, NUM_STEPS, *PIXELS)).astype(np.uint8)
    observation = {'pixels': pixels, 'real': batch.observation['real']}
    batch = batch._replace(observation=observation)
    if not dreamer.actor_critic.discrete:
      action = random.uniform([-1, 0], [1, 4], (BATCH, NUM_STEPS, 2)).astype(np.float32)
      batch = batch._replace(action=action)
  if 'bits' in dreamer.model.observation_spec:
    bits = random.uniform(size=(BATCH, NUM_STEPS, 4, 4, 2)) < 0.3
    batch = batch._replace(observation={'bits': bits, 'real': batch.observation['real']})
  return batch._replace(
    initial_state=jax.tree.map(normal, batch.initial_state),
    version=np.full(BATCH, seed, np.int32),
  )


def digest(before, after):
  """The norm of a part's change, and its product with a fixed vector, which tells its direction."""
  change = flatten_util.ravel_pytree(jax.tree.map(np.subtract, after, before))[0]
  change = np.asarray(change, np.float64)
  return [np.linalg.norm(change), change @ np.cos(np.arange(len(change)))]


def digests(dreamer, trainer):
  """Digests of the change of each part's parameters, and of the first moments of its gradients."""
  before = trainer.arrays()
  for seed in range(NUM_UPDATES):
    trainer.step(batch_of(dreamer, seed))
  after = trainer.arrays()
  pairs = {'slow_critic': (before.slow_critic, after.slow_critic)}
  for kind in ('params', 'statistics'):
    trees = getattr(before, kind), getattr(after, kind)
    for part, of_part in trees[0].items():
      for name in of_part if isinstance(of_part, dict) else [None]:
        pick = lambda tree, part=part, name=name: tree[part] if name is None else tree[part][name]
        pairs[f'{part}/{name}' if name else part] = pick(trees[0]), pick(trees[1])
  trained = {
    'world_model': (before.params['world_model'], after.model_opt_state),
    'actor_critic': (before.params['actor_critic'], after.policy_opt_state),
  }
  for part, (params, state) in trained.items():
    moments = next(x for x in jax.tree.leaves(state) if x.ndim == 1)
    unravel = flatten_util.ravel_pytree(params)[1]
    for name, moment in unravel(moments).items():
      pairs[f'{part}/{name} gradient'] = jax.tree.map(np.zeros_like, moment), moment
  return {name: digest(*pair) for name, pair in sorted(pairs.items())}


@pytest.mark.parametrize('name', ['default', 'pictures', 'grids'])
def test_updates_change_each_part_as_they_did(name, one_device, monkeypatch):
  """A workspace and slots choose by comparing numbers, which rounding changes on another processor."""
  monkeypatch.setattr(dreamer_config, 'MOST_STEPS_PER_CHUNK', 2)  # several chunks of a tiny rollout
  if name == 'default':
    dreamer, trainer = make_dreamer(), one_device.begin()
  else:
    dreamer = {'pictures': pictures, 'grids': grids}[name]()
    trainer = Trainer(dreamer_update.make_update(dreamer, RATES))
  found, kept = digests(dreamer, trainer), json.loads(KEPT.read_text())
  if os.environ.get('RENEW_DIGESTS'):
    rounded = {part: [float(f'{x:.5g}') for x in each] for part, each in found.items()}
    KEPT.write_text(json.dumps(kept | {name: rounded}, indent=0) + '\n')
    pytest.skip('renewed')
  assert found.keys() == kept[name].keys()
  for part, (norm, product) in kept[name].items():
    assert found[part] == pytest.approx([norm, product], abs=TOLERANCE * norm), part
