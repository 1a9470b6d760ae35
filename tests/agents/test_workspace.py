"""Workspace: which candidates are open, what the actor cannot read, and what moves the gates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from dm_env import specs

from hephaestus.actors import episodes, rollout
from hephaestus.actors.environments import environment, errands
from hephaestus.agents import experience
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config
from hephaestus.agents.dreamer import (
  context,
  dream,
  examination,
  fidelity,
  intrinsic,
  rssm,
  workspace,
)

N = errands.NUM_ERRANDS
BATCH = 64


@functools.cache
def make(**changes):
  """The dreamer of `errands`, with one candidate open."""
  changes = {'workspace_size': 1, 'memory_size': 16} | changes
  config = dreamer_config.DreamerConfig(**tiny.DREAMER | changes)
  env = errands.Errands()
  return dreamer_agent.make_dreamer(config, env.observation_spec, env.action_spec)


@pytest.fixture(scope='module')
def dreamer():
  return make(memory_size=0)


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


def features_of(made, params, seed, *axes):
  """[..., F] features of random states of errands, [..., 8] their countdowns, and [..., 8] buttons."""
  rng = np.random.default_rng(seed)
  countdown = rng.permuted(np.broadcast_to(np.arange(N), (*axes, N)), axis=-1)
  wanted = rng.integers(0, errands.NUM_BUTTONS, (*axes, N))
  one_hot = np.eye(errands.NUM_BUTTONS)[wanted]
  observation = dict(
    zip(
      errands.NAMES,
      np.moveaxis(np.concatenate([countdown[..., None] / 8, one_hot], axis=-1), -2, 0),
      strict=True,
    )
  )
  networks = made.model.networks
  normal = lambda size: jnp.asarray(rng.normal(size=(*axes, size)), jnp.float32)
  recalled = normal(networks.recalled_size) if networks.recalled_size else None
  latent = rssm.Latent(
    normal(networks.config.deterministic_size),
    normal(networks.latent_size),
    networks.numbers.read(jax.tree.map(jnp.asarray, observation)),
    recalled,
  )
  previous = normal(networks.previous_size)
  features = made.model.rssm.features(params['world_model'], latent, previous)
  return features, countdown, wanted


def history_of(module, bonus):
  shape = bonus.shape[:-1]
  before = workspace.Past(jnp.zeros(bonus.shape), jnp.ones(bonus.shape), jnp.ones(shape))
  return workspace.History(before, jnp.asarray(bonus, jnp.float32))


def with_candidate(module, features, candidate, noise):
  """Features with other contents of one candidate."""
  networks = module.networks
  begin = networks.memory_size - networks.recalled_size
  places = begin + np.flatnonzero(module._owner == candidate)
  return features.at[..., places].add(noise)


# Gates.


@pytest.mark.parametrize(
  ('size', 'cost', 'expected'),
  [(1, 0.0, [0, 1, 0, 0]), (2, 0.0, [0, 1, 0, 1]), (3, 2.0, [0, 1, 0, 1]), (4, 0.0, [1, 1, 1, 1])],
)
def test_largest_scores_above_the_cost_are_open(size, cost, expected):
  module = make(workspace_size=size, workspace_cost=cost).actor_critic.workspace
  gate = module.gate(jnp.array([1.0, 3.0, 2.0, 3.0]))  # of equals, the first
  np.testing.assert_array_equal(gate, expected)


def test_gate_is_exactly_0_or_1_and_follows_its_score_and_that_of_its_rival():
  module = make().actor_critic.workspace
  scores = jnp.array([1.0, 2.5, -1.0])
  jacobian = np.asarray(jax.jacobian(module.gate)(scores))
  slope = lambda x: np.exp(-x) / (1 + np.exp(-x)) ** 2
  expected = [
    [slope(1.5), -slope(1.5), 0],
    [-slope(1.5), slope(1.5), 0],
    [0, -slope(3.5), slope(3.5)],
  ]
  np.testing.assert_allclose(jacobian, expected, rtol=1e-5)


def test_candidates_are_leaves_and_what_is_recalled(make_dreamer):
  assert make().actor_critic.workspace.names == (*errands.NAMES, 'recall')
  module = make_dreamer('masked', workspace_size=2).actor_critic.workspace
  assert module.names == ('board', 'purse')  # the mask is no candidate


@pytest.mark.parametrize('name', ['masked', 'grid', 'view'])
def test_each_leaf_owns_the_inputs_that_change_with_it(name, make_dreamer, make_params):
  made = make_dreamer(name)
  numbers = made.model.networks.numbers
  statistics = make_params(made)['world_model']['statistics']
  rng = np.random.default_rng(0)
  random = lambda leaf: rng.uniform(0.1, 0.9, leaf.shape).astype(np.float32)
  observation = jax.tree.map(random, numbers.spec)
  leaves, tree = jax.tree.flatten(observation)
  inputs = lambda leaves: numbers.inputs(numbers.read(jax.tree.unflatten(tree, leaves)), statistics)
  names = jax.tree.leaves({k: k for k in observation} if isinstance(observation, dict) else 'all')
  leaf = 0
  for i, each in enumerate(names):
    if each == 'action_mask':
      continue
    changed = [x if j != i else 1 - x for j, x in enumerate(leaves)]
    moved = np.asarray(inputs(leaves) != inputs(changed))
    assert moved.any() and (numbers.leaves[moved] == leaf).all(), each
    leaf += 1


# Inputs of the actor.


def test_closed_contents_and_belief_leave_logits_bitwise_equal(make_params):
  made = make()
  policy, module, params = made.actor_critic, made.actor_critic.workspace, make_params(made)
  features, *_ = features_of(made, params, 0, 1, BATCH)
  bonus = np.zeros((1, BATCH, N + 1))
  bonus[..., 2] = (
    6.0  # enough to stay open, and not so much that a soft gate would close the others
  )
  history = history_of(module, bonus)

  @jax.jit
  def log_probs(features):
    pooled = module.pool(params['actor_critic'], history, features)
    return policy.policy(params['actor_critic'], features, pooled, None).log_probs

  before = log_probs(features)
  for candidate in range(N + 1):
    changed = log_probs(with_candidate(module, features, candidate, 0.7))
    if candidate == 2:
      assert (np.asarray(changed) != np.asarray(before)).any(axis=-1).all()
    else:
      np.testing.assert_array_equal(changed, before, err_msg=str(candidate))
  belief = made.model.networks.config.deterministic_size
  np.testing.assert_array_equal(log_probs(features.at[..., :belief].add(0.5)), before)


def test_contents_stay_in_their_places(dreamer, params):
  module = dreamer.actor_critic.workspace
  features, *_ = features_of(dreamer, params, 0, 1, BATCH)
  for candidate in (1, 6):
    history = history_of(module, 100.0 * np.eye(N)[[[candidate] * BATCH]])
    pooled = np.asarray(module.pool(params['actor_critic'], history, features))[0]
    contents, gates = np.split(pooled, [len(module._owner)], axis=-1)
    np.testing.assert_array_equal(gates, np.eye(N)[[candidate] * BATCH])
    expected = np.where(module._owner == candidate, module._contents(features)[0], 0)
    np.testing.assert_array_equal(contents, expected)


def test_critic_reads_what_is_closed(dreamer, params):
  policy, module = dreamer.actor_critic, dreamer.actor_critic.workspace
  features, *_ = features_of(dreamer, params, 0, BATCH)
  closed = jnp.zeros((BATCH, module.size))
  value = lambda features: policy.values(params['actor_critic'], features, closed)[ac.TASK].mean()
  for candidate in range(N):
    changed = value(with_candidate(module, features, candidate, 0.7))
    assert np.abs(changed - value(features)).max() > 1e-4


def loss_of(policy, params, features, history, choice, advantage):
  shape = choice.shape
  steps = ac.Steps(features, history, choice, jnp.ones((*shape, errands.NUM_BUTTONS), bool))
  zeros = {name: jnp.zeros(shape) for name in policy.heads}
  weight = jnp.full(shape, 1 / np.prod(shape))
  targets = ac.Targets(zeros, jnp.asarray(advantage, jnp.float32), zeros, weight)
  return policy.loss(params, steps, targets)


@pytest.fixture(scope='module')
def learned(dreamer):
  """Gates [B, 8] and countdowns of random steps, after learning from rewards of single steps."""
  policy, module = dreamer.actor_critic, dreamer.actor_critic.workspace
  all_params = dreamer.agent.init_params(jax.random.key(0))
  optimizer = optax.adam(1e-2)

  @jax.jit
  def update(params, opt_state, key, features, due, history):
    mask = jnp.ones((*due.shape, errands.NUM_BUTTONS), bool)
    pooled = module.pool(params, history, features)
    policy_ = policy.policy(params, features, pooled, mask)
    noise = jax.vmap(jax.vmap(policy.noise))(jax.random.split(key, due.size).reshape(due.shape))
    choice = policy_.sample(noise)
    reward = jnp.where(choice == due, 1.0, -1.0)
    loss = lambda params: loss_of(policy, params, features, history, choice, reward - reward.mean())
    grads, _ = jax.grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, grads

  params = all_params['actor_critic']
  opt_state = optimizer.init(params)
  first = None
  for i in range(400):
    features, countdown, wanted = features_of(dreamer, all_params, i, 1, BATCH)
    due = np.take_along_axis(wanted, countdown.argmin(-1)[..., None], -1)[..., 0]
    rng = np.random.default_rng(i)
    history = history_of(module, 0.3 * rng.uniform(size=(1, BATCH, N)))  # in place of visits
    params, opt_state, grads = update(
      params, opt_state, jax.random.key(i), features, jnp.asarray(due), history
    )
    first = grads if first is None else first
  features, countdown, _ = features_of(dreamer, all_params, 1000, 1, 512)
  gates = module.gates(params, history_of(module, np.zeros((1, 512, N))), features)
  return np.asarray(gates[0]), countdown[0], first


def test_router_has_a_gradient_through_the_gate(learned):
  *_, grads = learned
  for name in ('query', 'key', 'actor'):
    assert optax.global_norm(grads[name]) > 1e-6, name


def test_gate_moves_with_the_errand_that_is_due(learned):
  gates, countdown, _ = learned
  is_due = countdown == 0
  found = [gates[is_due[:, i], i].mean() for i in range(N)]
  assert np.mean(found) > 0.5, found  # of a random gate 1/8
  share = gates.mean(axis=0)
  entropy = -np.sum(share * np.log(np.maximum(share, 1e-8)))
  assert entropy > 0.8 * np.log(N)


# Scores.


def terms_of(rng, *axes):
  draw = lambda scale: jnp.asarray(scale * rng.uniform(size=(*axes, N)), jnp.float32)
  return workspace.Terms(draw(1.0), draw(1.0), draw(1.0))


@pytest.mark.parametrize('term', ['learned', 'novelty', 'lack', 'change', 'visits'])
def test_permuting_a_term_over_candidates_changes_choices(dreamer, term):
  module = dreamer.actor_critic.workspace
  rng = np.random.default_rng(0)
  terms = terms_of(rng, BATCH)
  opened = jnp.asarray(rng.integers(1, 9, (BATCH, N)), jnp.float32)
  memory = workspace.Past(terms_of(rng, BATCH).novelty, opened, opened.sum(axis=-1))
  gates = lambda terms, memory: module._step(memory, terms, jnp.zeros(BATCH, bool))[2]
  roll = lambda x: jnp.roll(x, 3, axis=-1)
  other, before = terms, memory
  if term == 'change':
    before = memory._replace(novelty=roll(memory.novelty))
  elif term == 'visits':
    before = memory._replace(opened=roll(memory.opened))
  else:
    other = terms._replace(**{term: roll(getattr(terms, term))})
  moved = (gates(terms, memory) != gates(other, before)).any(axis=-1)
  assert moved.mean() > 0.1


def test_scores_are_those_of_the_formula(dreamer):
  module = dreamer.actor_critic.workspace
  row = lambda *x: jnp.array([x], jnp.float32)
  memory = workspace.Past(row(0.5, 0.0), row(4, 1), jnp.array([9.0]))
  terms = workspace.Terms(row(7, 7), row(1.0, 0.2), row(0.0, 2.0))
  visits = np.sqrt(np.log(9) / np.array([4, 1]))
  expected = [1.0 + 0.6 * 0.5 + 0.4 * visits[0], 0.2 + 0.6 * 0.2 + 0.4 * visits[1] + 1.5 * 2.0]
  np.testing.assert_allclose(module._bonus(memory, terms)[0], expected, rtol=1e-5)


def test_members_that_differ_about_a_leaf_make_it_novel(dreamer, params):
  """The estimate is through 32 random directions, so that others are a little novel, too."""
  module, numbers = dreamer.actor_critic.workspace, dreamer.model.networks.numbers
  features, *_ = features_of(dreamer, params, 0, 2)
  difference = np.zeros((2, 2, numbers.input_size), np.float32)  # [K, B, I]
  for row, leaf in enumerate((3, 6)):
    difference[0, row, numbers.leaves == leaf] = 1.0
  mean = jnp.asarray(difference @ numbers._directions)
  change = rssm.numbers_lib.Change(mean, jnp.full(mean.shape, 0.05))
  state = jnp.zeros((2, numbers.size))
  novelty = module.terms(params['actor_critic'], features, state, change).novelty
  assert np.argmax(novelty, axis=-1).tolist() == [3, 6]


def test_lack_is_that_of_the_vitals_of_a_leaf():
  vitals = (environment.Vital('food', 0), environment.Vital('heat', 2))
  spec = {
    'body': environment.VitalsSpec((3,), np.float32, 0, 1, vitals),
    'eye': specs.Array((2,), np.float32),
  }
  config = dreamer_config.DreamerConfig(**tiny.DREAMER, workspace_size=1)
  made = dreamer_agent.make_dreamer(config, spec, specs.DiscreteArray(3))
  observation = {'body': jnp.array([[0.5, 0.9, 1.0]]), 'eye': jnp.ones((1, 2))}
  lack = made.actor_critic.workspace._lack(made.model.networks.numbers.read(observation))
  np.testing.assert_allclose(lack, [[0.5 ** (4 / 3), 0.0]], rtol=1e-5)


@pytest.mark.parametrize('kind', ['source', 'random', 'fixed'])
def test_baselines_have_no_network(kind):
  made = make(memory_size=0, workspace_score=kind)
  module = made.actor_critic.workspace
  assert module.modules() == {}
  steps = jnp.arange(1.0, 41.0)
  memory = workspace.Past(jnp.zeros((40, N)), jnp.ones((40, N)), steps)
  terms = workspace.Terms(*jnp.zeros((3, 40, N)))
  gates = np.asarray(module._step(memory, terms, jnp.zeros(40, bool))[2])
  if kind == 'random':
    assert (gates.sum(axis=1) == 1).all() and (gates.sum(axis=0) > 0).all()
  elif kind == 'fixed':
    np.testing.assert_array_equal(gates[:, 0], 1)
  else:  # the most novel one, and the one that was open least
    novel = terms._replace(novelty=jnp.eye(N)[np.arange(40) % N])
    gates = np.asarray(module._step(memory, novel, jnp.zeros(40, bool))[2])
    np.testing.assert_array_equal(gates.argmax(axis=1), np.arange(40) % N)
    visited = memory._replace(opened=1 + 9 * (1 - novel.novelty), steps=steps + 1)
    gates = np.asarray(module._step(visited, terms, jnp.zeros(40, bool))[2])
    np.testing.assert_array_equal(gates.argmax(axis=1), np.arange(40) % N)


# Read by others.


@pytest.mark.parametrize(
  'changes, expected',
  [
    ({'workspace_score': 'fixed'}, ['errand_0']),
    ({'workspace_score': 'fixed', 'workspace_size': 2}, ['errand_0', 'errand_1']),
    ({'workspace_cost': 1e6}, []),
  ],
)
def test_played_steps_name_what_is_open(changes, expected):
  made = make(memory_size=0, **changes)
  params = made.agent.acting_params(made.agent.init_params(jax.random.key(0)))
  play = episodes.Play(errands.Errands(max_steps=3), made.agent, 1)
  *acted, last = [played.gates for played in play.steps(params, jax.random.key(1))]
  assert acted == [{name: name in expected for name in errands.NAMES}] * 3 and last is None


def test_workspace_is_examined_and_dreams_beside_its_environment(dreamer):
  """As any agent: by the doctor, by `watch --dream` and by `bench dreams`."""
  params = jax.jit(dreamer.agent.init_params)(jax.random.key(0))
  unroll = rollout.make_unroll(
    errands.Errands(max_steps=5), dreamer.agent, num_envs=3, sequence_length=8
  )
  state, zero = unroll.init(jax.random.key(1)), np.int32(0)
  _, sequence, _ = unroll.unroll(params, jax.random.key(2), state, zero, zero)
  sequence = experience.time_major(sequence)
  examined = jax.jit(functools.partial(examination.examine, dreamer))(
    params, jax.random.key(3), sequence
  )
  assert all(x.shape == (8, 3) and np.isfinite(x).all() for x in examined)
  measured = jax.jit(functools.partial(fidelity.measure, dreamer), static_argnums=3)(
    params, jax.random.key(4), sequence, 3
  )
  assert np.isfinite(jax.tree.leaves(measured.imagined)).all()
  episode = jax.tree.map(lambda x: x[:, 0], (sequence.observation, sequence.action))
  foreseen = jax.jit(dreamer.agent.foresee)(params, jax.random.key(5), *episode, 2)
  assert foreseen.observation['errand_7'].shape == (8, 5)


# Along steps.


def test_steps_one_by_one_are_those_of_a_history(dreamer, params):
  """And an episode that begins forgets what was open before."""
  policy, module = dreamer.actor_critic, dreamer.actor_critic.workspace
  rng = np.random.default_rng(1)
  features, *_ = features_of(dreamer, params, 3, 6, 4)
  terms = terms_of(rng, 6, 4)._replace(learned=module._learned(params['actor_critic'], features))
  begins = jnp.zeros((6, 4), bool).at[0].set(True).at[3, 1].set(True)
  history = module.replayed(features, terms, begins)
  pooled = module.pool(params['actor_critic'], history, features)
  memory = module.initial(4)
  for t in range(6):
    at = lambda tree, t=t: jax.tree.map(lambda x: x[t], tree)
    known = module.memory_at(history, jnp.full(4, t), jnp.arange(4))
    tail = module.imagined(
      known, features[t:], jax.tree.map(lambda x, t=t: x[t:], terms), begins[t]
    )
    if not begins[t + 1 :].any():
      np.testing.assert_array_equal(tail.bonus, history.bonus[t:])
    memory, found = module.advance(
      params['actor_critic'], memory, features[t], at(terms), begins[t]
    )
    np.testing.assert_array_equal(found, pooled[t])
  assert memory.steps.tolist() == [7, 4, 7, 7]
  np.testing.assert_array_equal(memory.opened.sum(axis=-1), N + memory.steps - 1)
  assert isinstance(policy.critic_context, context.NoContext)


def test_imagination_opens_and_counts(make_params):
  """The gates of the loss are those by which the rollout acted."""
  made = make()
  policy, module, params = made.actor_critic, made.actor_critic.workspace, make_params(made)
  model, horizon = made.model, 4
  features, *_ = features_of(made, params, 0, 2, 3)
  networks = model.networks
  sizes = lambda *axes: jnp.zeros((*axes, networks.latent_size))
  deterministic = features[..., : networks.config.deterministic_size]
  recalled = features[..., networks.memory_size - networks.recalled_size : networks.memory_size]
  numbers = jax.random.uniform(jax.random.key(0), (2, 3, networks.numbers.size))
  latent = rssm.Latent(deterministic, sizes(2, 3), numbers, recalled)
  previous, first = jnp.zeros((2, 3, networks.previous_size)), jnp.zeros((2, 3), bool)
  priors = model.rssm.prior(params['world_model'], deterministic, previous, first)
  features = model.rssm.features(params['world_model'], latent, previous)
  posterior = rssm.Posterior(latent, features, previous, None, priors, first)
  novelty = intrinsic.novelty_of('information_gain', priors.moments())
  start, _ = dream.starts(
    policy, params['actor_critic'], posterior, first, novelty,
    jax.random.split(jax.random.key(1), 3), num_steps=None,
  )  # fmt: skip
  slow = params['actor_critic']['critic']
  dreamt = jax.jit(functools.partial(dream.rollout, model, policy))(
    params, slow, start, jnp.int32(horizon)
  )
  history = dream.history(policy, dreamt)
  gates = module.gates(params['actor_critic'], history, dreamt.features)
  assert np.isin(gates, (0, 1)).all() and (gates.sum(axis=-1) <= 1).all() and gates.any()
  np.testing.assert_array_equal(history.before.steps[:, 0], [1, 2, 3, 4])
  np.testing.assert_array_equal(history.before.steps[:, 3], [2, 3, 4, 5])  # a start at step 1
  opened = np.cumsum(gates, axis=0)
  np.testing.assert_array_equal(history.before.opened[1:, :3], 1 + opened[:-1, :3])
  assert np.abs(np.diff(dreamt.context_inputs.novelty[: horizon + 1], axis=0)).max() > 0


# Refusals.


@pytest.mark.parametrize(
  ('env', 'size', 'words'),
  [
    ('plain', 1, r'agent\.workspace_size=1: .* a dictionary, or set agent\.workspace_size=0'),
    ('pictures', 1, r'agent\.workspace_size=1: .* image.* set agent\.workspace_size=0'),
    ('grid', 3, r'agent\.workspace_size=3: .* 2 candidates \(alive, cells\); set at most '),
  ],
)
def test_observations_without_candidates_are_refused(env, size, words, make_dreamer):
  with pytest.raises(ValueError, match=words):
    make_dreamer(env, workspace_size=size)
