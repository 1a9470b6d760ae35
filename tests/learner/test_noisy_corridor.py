"""Noise that cannot be learned is hardly novel, and does not attract the agent."""

import dataclasses

import dm_env
import jax
import numpy as np
import pytest

from hephaestus.actors import rollout
from hephaestus.actors.environments.cognition import noisy_corridor
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import modules
from hephaestus.agents.dreamer import novelty as novelty_lib
from hephaestus.learner import config as learner_config
from hephaestus.learner import devices, dreamer_update

NUM_WORLDS, NUM_ROWS, BATCH = 64, 8, 64
UPDATES_PER_UNROLL, PUBLISH_PERIOD = 8, 4
FIRST_UNROLLS = 20  # played before the first update
AGENT = cognition_config.CognitionConfig(
  deterministic_size=48, latent='categorical', stochastic_size=8, classes=8, hidden_size=64,
  encoder_layers=1, num_bins=15, bin_limit=6.0, horizon_max=8, horizon_min=4, starts_per_sequence=2,
  policy_layers=1, window=4, entropy_scale=0.03, return_floor=0.3,
  warm_up_updates=200, novelty_scale=1.0, compute_dtype='float32',
)  # fmt: skip
RATES = learner_config.LearnerConfig(
  batch_size=BATCH, model_learning_rate=2e-3, policy_learning_rate=1e-3
)
OPEN = noisy_corridor.NoisyCorridor(length=20, first_noisy=8, num_noisy=4)
SHUT = dataclasses.replace(OPEN, open_cells=16)


def is_noisy(place):
  return (place >= OPEN.first_noisy) & (place < OPEN.first_noisy + OPEN.num_noisy)


def places(sequence):
  return np.asarray(sequence.observation)[..., : OPEN.length].argmax(-1)


class Run:
  """Actor, replay and learner of one agent, alternating in one process."""

  def __init__(self, world, config, seed):
    self.dreamer = registry.make_dreamer(config, world.observation_spec, world.action_spec)
    self._rng = np.random.default_rng(seed)
    update = dreamer_update.make_update(self.dreamer, RATES)
    state_key, worlds_key, self._key = jax.random.split(jax.random.key(seed), 3)
    self._state = jax.tree.map(lambda x: x[None], jax.jit(update.init)(state_key))
    self._update = jax.pmap(
      update.update, devices.DEVICES, devices=jax.devices()[:1], donate_argnums=0
    )
    self._unroll = rollout.make_unroll(
      world, self.dreamer.agent, num_envs=NUM_WORLDS, sequence_length=NUM_ROWS, explore=True
    )
    self._worlds = self._unroll.init(worlds_key)
    self._publish()
    self.memory = []

  @property
  def params(self):
    return jax.tree.map(lambda x: x[0], agent_lib.all_params(self._state))

  def learn(self, num_updates):
    for _ in range(FIRST_UNROLLS):
      self._play()
    for step in range(1, num_updates + 1):
      if step % UPDATES_PER_UNROLL == 1:
        self._play()
      self._state, _ = self._update(self._state, self._sample())
      if step % PUBLISH_PERIOD == 0:
        self._publish()

  def _publish(self):
    self._acting = self.dreamer.agent.acting_params(self.params)

  def _play(self):
    self._key, key = jax.random.split(self._key)
    self._worlds, sequence, _ = self._unroll.unroll(self._acting, key, self._worlds, 0, 0)
    self.memory.append(jax.device_get(sequence))

  def _sample(self):
    """Half of it from the newest unrolls, half from all, as two strata would give."""
    newest = max(0, len(self.memory) - 8)
    unrolls = self._rng.integers(np.repeat([newest, 0], BATCH // 2), len(self.memory))
    worlds = self._rng.integers(0, NUM_WORLDS, BATCH)
    pairs = zip(unrolls, worlds, strict=True)
    rows = [jax.tree.map(lambda x, n=n: x[n], self.memory[i]) for i, n in pairs]
    return jax.tree.map(lambda *x: np.stack(x)[None], *rows)


def walk_by_chance(dreamer, world, seed):
  """[B, T, ...] short random walks that begin in every cell."""
  unroll = rollout.make_unroll(world, dreamer.agent, num_envs=1024, sequence_length=NUM_ROWS)
  key = jax.random.key(seed)
  acting = dreamer.agent.acting_params(dreamer.agent.init_params(key))
  _, sequence, _ = unroll.unroll(acting, key, unroll.init(key), 0, 0)
  return sequence


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.timeout(1200)
@pytest.mark.parametrize('seed', [0, 1, 2])
@pytest.mark.parametrize('pixels', ['binary', 'normal'])
def test_novelty_is_lower_at_noise_than_in_unvisited_cells(pixels, seed):
  """Novelty of transitions between true observations, by region."""
  config = dataclasses.replace(AGENT, warm_up_updates=10**9)  # a random policy
  run = Run(dataclasses.replace(SHUT, pixels=pixels), config, seed)
  run.learn(800)
  assert max(places(sequence).max() for sequence in run.memory) == SHUT.open_cells - 1

  world = dataclasses.replace(OPEN, pixels=pixels)
  walks = walk_by_chance(run.dreamer, world, seed + 100)

  @jax.jit
  def novelty_of(params, keys, sequence):
    posterior = run.dreamer.model.rssm.infer(params, keys, experience.time_major(sequence))
    return novelty_lib.novelty_of('information_gain', posterior.priors.moments()).T

  keys = jax.random.split(jax.random.key(seed), len(walks.identity))
  novelty = np.asarray(novelty_of(modules.world(run.params), keys, walks))[:, 1:]
  place, shut = places(walks), SHUT.open_cells
  before, after = place[:, :-1], place[:, 1:]
  within = np.asarray(walks.step_type)[:, 1:] != dm_env.StepType.FIRST
  regions = {
    'known': within & ~is_noisy(before) & ~is_noisy(after) & (before < shut) & (after < shut),
    'noise': within & is_noisy(after),
    'unvisited': within & (before >= shut) & (after >= shut),
  }
  mean = {name: novelty[rows].mean() for name, rows in regions.items()}
  ratios = mean['unvisited'] / mean['noise'], mean['unvisited'] / mean['known']
  print(
    f'\n{pixels}, seed {seed}:', *(f'{name} {value:.4f}' for name, value in mean.items()), end=' '
  )
  print('unvisited / noise {:.2f}, unvisited / known {:.1f}'.format(*ratios), flush=True)
  assert ratios[0] >= 2
  assert ratios[1] >= 5


@pytest.mark.slow
@pytest.mark.usefixtures('full_optimization')
@pytest.mark.timeout(1200)
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_agent_does_not_stay_at_the_noise(seed):
  """Members must first learn that it is noise, and without other rewards the agent returns at times."""
  num_updates = 4800
  run = Run(OPEN, AGENT, seed)
  run.learn(num_updates)
  uniform = OPEN.num_noisy / OPEN.length
  share = [is_noisy(places(sequence)).mean() / uniform for sequence in run.memory]
  ends = FIRST_UNROLLS + np.arange(400, num_updates, 400) // UPDATES_PER_UNROLL
  by_400 = [part.mean() for part in np.split(share, ends)]
  print(f'\nseed {seed}: time at the noise over uniform, by 400 updates:', end=' ')
  print(*(f'{value:.2f}' for value in by_400), flush=True)
  assert np.mean(by_400[2 * len(by_400) // 3 :]) <= 1.5
