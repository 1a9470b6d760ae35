"""Workspace: which candidates are open, what the actor cannot read, and what moves the gates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from dm_env import specs
from small_dreamer import read_of, starts_of

from hephaestus.actors.environments import environment
from hephaestus.actors.environments.cognition import errands
from hephaestus.agents import observation as observation_lib
from hephaestus.agents.cognition import config as cognition_config
from hephaestus.agents.cognition import registry, workspace
from hephaestus.agents.dreamer import actor_critic as ac
from hephaestus.agents.dreamer import dream, modules, rssm
from hephaestus.agents.dreamer import novelty as novelty_lib
from hephaestus.agents.dreamer import numbers as numbers_lib

N = errands.NUM_ERRANDS
BATCH = 64


@functools.cache
def make(**changes):
  """The dreamer of `errands`, with one candidate open."""
  changes = {'workspace_size': 1, 'memory_size': 16} | changes
  config = cognition_config.CognitionConfig(**tiny.DREAMER | changes)
  env = errands.Errands()
  return registry.make_dreamer(config, env.observation_spec, env.action_spec)


@pytest.fixture(scope='module')
def dreamer():
  return make(memory_size=0)


@pytest.fixture(scope='module')
def params(dreamer, make_params):
  return make_params(dreamer)


def observations_of(seed, *axes):
  """Random observations [..., ] of errands, [..., 8] their countdowns, and [..., 8] buttons."""
  rng = np.random.default_rng(seed)
  countdown = rng.permuted(np.broadcast_to(np.arange(N), (*axes, N)), axis=-1)
  wanted = rng.integers(0, errands.NUM_BUTTONS, (*axes, N))
  one_hot = np.eye(errands.NUM_BUTTONS)[wanted]
  leaves = np.concatenate([countdown[..., None] / 8, one_hot], axis=-1).astype(np.float32)
  return dict(zip(errands.NAMES, np.moveaxis(leaves, -2, 0), strict=True)), countdown, wanted


compiled = {}


def features_from(made):
  """The function `make_features`, made once for each dreamer."""
  if id(made) not in compiled:
    compiled[id(made)] = make_features(made)
  return compiled[id(made)]


def make_features(made):
  """(statistics, generator, observations) -> features of random states that observe them."""
  networks = made.model.networks

  @jax.jit
  def features(statistics, normal, observation):
    sizes = (
      networks.config.deterministic_size,
      networks.latent_size,
      networks.recalled_size,
      networks.previous_size,
    )
    parts = jnp.split(normal, np.cumsum(sizes), axis=-1)[:4]
    deterministic, stochastic, recalled, previous = parts
    recalled = recalled if networks.recalled_size else None
    numbers = networks.numbers.read(observation)
    latent = rssm.Latent(deterministic, stochastic, numbers, recalled)
    return made.model.rssm.features({'numbers': statistics}, latent, previous)

  def draw(statistics, rng, observation):
    axes = observation[errands.NAMES[0]].shape[:-1]
    normal = rng.normal(size=(*axes, 1000)).astype(np.float32)
    return jax.device_get(features(statistics, normal, observation))

  return draw


def features_of(made, params, seed, *axes):
  """Features [..., ...] of random states of errands."""
  observation, *_ = observations_of(seed, *axes)
  statistics = params['statistics']['world_model']['numbers']
  return features_from(made)(statistics, np.random.default_rng(seed), observation)


def read_with(features, bonus):
  """What is read at first steps of episodes, whose scores have a bonus, given as novelty."""
  zeros, ones = 0 * bonus, np.ones(bonus.shape, np.float32)
  past = workspace.Past(zeros, ones, ones[..., 0])
  return read_of(features, past, workspace.Terms(zeros, bonus, zeros))


def with_candidate(module, features, candidate, noise):
  """Features with other contents of one candidate."""
  size = module.networks.recalled_size
  changed = np.where(module._owner == candidate, noise, 0).astype(np.float32)
  return features._replace(
    recalled=features.recalled + changed[:size], numbers=features.numbers + changed[size:]
  )


# Gates.


@pytest.mark.parametrize(
  ('size', 'shift', 'expected'),
  [(1, 0, [0, 1, 0, 0]), (3, 2, [0, 1, 0, 1]), (4, 0, [1, 1, 1, 1]), (1, 9, [0, 0, 0, 0])],
)
def test_largest_scores_above_0_are_open(size, shift, expected):
  module = make(workspace_size=size).actor_critic.context
  gate = jax.jit(module.gate)(np.float32([1.0, 3.0, 2.0, 3.0]) - shift)  # of equals, the first
  np.testing.assert_array_equal(gate, expected)


def test_gate_is_exactly_0_or_1_and_follows_its_own_and_its_rivals_score():
  module = make().actor_critic.context
  jacobian = np.asarray(jax.jit(jax.jacobian(module.gate))(np.float32([1.0, 2.5, -1.0])))
  slope = lambda x: np.exp(-x) / (1 + np.exp(-x)) ** 2
  expected = [
    [slope(1.5), -slope(1.5), 0],
    [-slope(1.5), slope(1.5), 0],
    [0, -slope(3.5), slope(3.5)],
  ]
  np.testing.assert_allclose(jacobian, expected, rtol=1e-5)


def test_candidates_are_leaves_and_what_is_recalled(make_dreamer):
  assert make().actor_critic.context.names == (*errands.NAMES, 'recall')
  module = make_dreamer('masked', workspace_size=2).actor_critic.context
  assert module.names == ('board', 'purse')  # the mask is no candidate


def test_slots_are_candidates_with_their_own_numbers(make_dreamer):
  """An image that slots read is no candidate itself, and neither with numbers of its own."""
  made = make_dreamer('frames', slots=3, slot_size=4, workspace_size=1, memory_size=16)
  module = made.actor_critic.context
  assert module.names == ('slot_0', 'slot_1', 'slot_2', 'recall')
  features = jax.tree.map(jnp.ones_like, made.model.networks.empty_features(4))
  read = np.asarray(jax.jit(module._read)(features, jnp.eye(4)))[:, : -len(module.names)]
  size = made.model.networks.recalled_size
  expected = np.concatenate([np.repeat([3], size), np.repeat(np.arange(3), 4)])
  np.testing.assert_array_equal(read, expected == np.arange(4)[:, None])


SQUARES = environment.ViewSpec((3,), np.float32, -4, 4, lambda x: jnp.square(x[1:]))


@pytest.mark.parametrize(
  'spec',
  [
    {
      'action_mask': specs.BoundedArray((4,), bool, False, True),
      'alive': specs.Array((2,), bool),
      'board': specs.BoundedArray((2, 2), np.float32, 0, 1),
      'purse': specs.Array((), np.int32),
      'view': SQUARES,
    },
    SQUARES,
  ],
)
def test_each_part_owns_the_inputs_that_change_with_it(spec):
  """The view of a single array, which changes with several parts, is a part of its own."""
  numbers, parts = numbers_lib.Numbers(spec), observation_lib.parts(spec)
  owner = workspace.parts_of_inputs(numbers)
  statistics = jax.device_get(numbers.initial_statistics())

  @jax.jit
  def inputs(flat):
    observation = observation_lib.to_observation(flat, [], spec)
    return numbers.inputs(numbers.read(observation), statistics)

  flat = np.random.default_rng(0).uniform(0.1, 0.9, len(parts.owner)).astype(np.float32)
  for part in np.unique(parts.owner):
    changed = np.where(parts.owner == part, 1 - flat, flat)
    moved = np.asarray(inputs(flat)) != np.asarray(inputs(changed))
    others = {len(parts.names) - 1} if not isinstance(spec, dict) else set()
    assert set(owner[moved]) - others == {part}, parts.names[part]
  assert len(parts.names) == max(owner) + 1


# Inputs of the actor.


def test_closed_contents_and_belief_leave_logits_bitwise_equal(make_params):
  made = make()
  policy, module, params = made.actor_critic, made.actor_critic.context, make_params(made)
  features = features_of(made, params, 0, 1, BATCH)
  bonus = np.zeros((1, BATCH, N + 1))
  bonus[..., 2] = (
    6.0  # enough to stay open, and not so much that a soft gate would close the others
  )

  @jax.jit
  def read(params, features):
    pooled = module.pool(params, read_with(features, bonus))
    return policy.policy(params, features, pooled, None).log_probs

  log_probs = lambda features: np.asarray(read(params['actor_critic'], features))
  before = log_probs(features)
  for candidate in range(N + 1):
    changed = log_probs(with_candidate(module, features, candidate, 0.7))
    if candidate == 2:
      assert (changed != before).any(axis=-1).all()
    else:
      np.testing.assert_array_equal(changed, before, err_msg=str(candidate))
  features = features._replace(state=features.state + 0.5)
  np.testing.assert_array_equal(log_probs(features), before)


def test_contents_stay_in_their_places(dreamer, params):
  module = dreamer.actor_critic.context
  features = features_of(dreamer, params, 0, 1, BATCH)
  pool = jax.jit(lambda params, read: (module.pool(params, read), module._contents(read.features)))
  for candidate in (1, 6):
    read = read_with(features, 100.0 * np.eye(N)[[[candidate] * BATCH]])
    pooled, every = jax.device_get(pool(params['actor_critic'], read))
    contents, gates = np.split(pooled[0], [len(module._owner)], axis=-1)
    np.testing.assert_array_equal(gates, np.eye(N)[[candidate] * BATCH])
    expected = np.where(module._owner == candidate, every[0], 0)
    np.testing.assert_array_equal(contents, expected)


def test_critic_reads_what_is_closed(dreamer, params):
  policy, module = dreamer.actor_critic, dreamer.actor_critic.context
  features = features_of(dreamer, params, 0, BATCH)

  @jax.jit
  def value(features):
    closed = jnp.zeros((BATCH, module.size))
    return policy.values(params['actor_critic'], features, closed)[ac.TASK].mean()

  before = np.asarray(value(features))
  for candidate in range(N):
    changed = value(with_candidate(module, features, candidate, 0.7))
    assert np.abs(changed - before).max() > 1e-4


def loss_of(policy, params, read, choice, advantage):
  shape = choice.shape
  mask = jnp.ones((*shape, errands.NUM_BUTTONS), bool)
  log_prob = policy.policy(params, read.features, policy.context.pool(params, read), mask).log_prob(
    choice
  )
  steps = ac.ImaginedSteps(read, choice, jax.lax.stop_gradient(log_prob), mask)
  zeros = {name: jnp.zeros(shape) for name in policy.heads}
  weight = jnp.full(shape, 1 / np.prod(shape))
  targets = ac.Targets(zeros, advantage, weight)
  return policy.loss(params, steps, targets)


@pytest.fixture(scope='module')
def learned(params):
  """Gates [B, 8] and countdowns of random steps, after learning from rewards of single steps.

  Also the gradient of the first update. Without novelty all of them are the actor's.
  """
  dreamer = make(memory_size=0, novelty_scale=0.0)
  policy, module = dreamer.actor_critic, dreamer.actor_critic.context
  statistics = params['statistics']['world_model']['numbers']
  optimizer = optax.adam(1e-2)

  def random_steps(seed, *axes):
    rng = np.random.default_rng(seed)
    observation, countdown, wanted = observations_of(seed, *axes)
    features = features_from(dreamer)(statistics, rng, observation)
    due = np.take_along_axis(wanted, countdown.argmin(-1)[..., None], -1)[..., 0]
    bonus = 0.3 * rng.uniform(size=(*axes, N)).astype(np.float32)  # in place of visits
    return features, due.astype(np.int32), bonus, countdown

  def update(carry, inputs):
    params, opt_state = carry
    key, features, due, bonus = inputs
    read = read_with(features, bonus)
    mask = jnp.ones((*due.shape, errands.NUM_BUTTONS), bool)
    pooled = module.pool(params, read)
    policy_ = policy.policy(params, features, pooled, mask)
    noise = jax.vmap(jax.vmap(policy.noise))(jax.random.split(key, due.size).reshape(due.shape))
    choice = policy_.sample(noise)
    reward = jnp.where(choice == due, 1.0, -1.0)
    loss = lambda params: loss_of(policy, params, read, choice, reward - reward.mean())
    grads, _ = jax.grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), {
      name: optax.global_norm(grads[name]) for name in ('query', 'key', 'actor')
    }

  @jax.jit
  def learn(key, features, due, bonus):
    params = policy.init(key)
    keys = jax.random.split(key, len(due))
    carry, norms = jax.lax.scan(
      update, (params, optimizer.init(params)), (keys, features, due, bonus)
    )
    return carry[0], norms

  features, due, bonus, _ = random_steps(0, 400, 1, BATCH)
  params, norms = learn(jax.random.key(0), features, due, bonus)
  features, _, _, countdown = random_steps(1, 1, 512)
  gates = jax.jit(module.gates)(params, read_with(features, np.zeros((1, 512, N))))
  return np.asarray(gates[0]), countdown[0], {name: float(x[0]) for name, x in norms.items()}


def test_router_has_a_gradient_through_the_gate(learned):
  *_, norms = learned
  for name in ('query', 'key', 'actor'):
    assert norms[name] > 1e-6, name


def test_gate_moves_with_the_errand_that_is_due(learned):
  gates, countdown, _ = learned
  is_due = countdown == 0
  found = [gates[is_due[:, i], i].mean() for i in range(N)]
  assert np.mean(found) > 0.5, found  # of a random gate 1/8
  share = gates.mean(axis=0)
  entropy = -np.sum(share * np.log(np.maximum(share, 1e-8)))
  assert entropy > 0.8 * np.log(N)


@pytest.fixture(scope='module')
def learn_from(params):
  """Trains scores by `gain` for 600 updates on random actions; no actor is trained.

  (whether the action is of the errand that is due, generator -> errors of the critic; learning rate) ->
  (learned terms, gates, countdowns) of 512 steps, each [512, N].
  """
  dreamer = make(memory_size=0, workspace_score='gain')
  policy, module = dreamer.actor_critic, dreamer.actor_critic.context
  statistics, optimizer = params['statistics']['world_model']['numbers'], optax.scale_by_adam()
  count, num_updates = errands.NUM_BUTTONS, 600

  def random_steps(error_of, seed, *axes):
    rng = np.random.default_rng(seed)
    observation, countdown, wanted = observations_of(seed, *axes)
    features = features_from(dreamer)(statistics, rng, observation)
    due = np.take_along_axis(wanted, countdown.argmin(-1)[..., None], -1)[..., 0]
    action = rng.integers(0, count, axes)
    error = error_of(action == due, rng).astype(np.float32)
    return features, np.eye(count)[action].astype(np.float32), error, countdown

  @jax.jit
  def learn(key, rate, *inputs):
    def update(carry, inputs):
      params, opt_state = carry
      loss = lambda params: module.loss(params, read_of(inputs[0]), *inputs[1:]).mean()
      updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state)
      params = jax.tree.map(lambda x, change: x - rate * change, params, updates)
      return (params, opt_state), None

    first = policy.init(key)
    return jax.lax.scan(update, (first, optimizer.init(first)), inputs)[0][0], first

  @jax.jit
  def look(params, features):
    read = read_with(features, np.zeros((1, 512, N)))
    return module._learned(params, features)[0], module.gates(params, read)[0]

  def run(error_of, rate):
    *steps, _ = random_steps(error_of, 0, num_updates, BATCH)
    learned, first = jax.device_get(learn(jax.random.key(0), rate, *steps))
    jax.tree.map(np.testing.assert_array_equal, learned['actor'], first['actor'])
    features, _, _, countdown = random_steps(error_of, 1, 1, 512)
    return *jax.device_get(look(learned, features)), countdown[0]

  return run


@pytest.mark.slow
def test_gain_opens_the_candidate_that_explains_errors_of_the_critic(learn_from):
  """The errand that is due is rewarded, with noise as large."""
  _, gates, countdown = learn_from(
    lambda right, rng: np.where(right, 1.0, -1.0) + rng.normal(size=right.shape), 1e-2
  )
  assert gates[countdown == 0].mean() > 0.8  # of a random gate 1/8


@pytest.mark.slow
def test_gain_prefers_no_candidate_where_the_critic_does_not_err(learn_from):
  """The optimizer normalises gradients, so without `EVENNESS` scores drift apart by several units, and
  without a common level all of them may fall below the cost."""
  scores, _, _ = learn_from(lambda right, rng: 0.01 * rng.normal(size=right.shape), 1e-3)
  np.testing.assert_allclose(scores, 0.0, atol=0.3)


def test_gain_is_of_all_rewards_that_the_actor_seeks(params):
  """Errors of the explorer's critic have no part in the loss, whose candidates the task's actor reads."""
  made = make(memory_size=0, workspace_score='gain', empowerment_scale=1.0)
  policy, axes = made.actor_critic, (3, BATCH)
  features = features_of(made, params, 0, *axes)
  rewards = {name: np.zeros(axes, np.float32) for name in (ac.TASK, 'novelty', 'empowerment')}
  steps = ac.Replayed(
    read_with(features, np.zeros((*axes, N), np.float32)),
    rewards,
    discount=np.ones(axes, np.float32),
    last=np.zeros(axes, bool),
    action=np.zeros((*axes, errands.NUM_BUTTONS), np.float32),
    explores=np.zeros(axes, bool),
  )
  loss = jax.jit(functools.partial(policy.context_loss, policy.init(jax.random.key(0))))
  rewarded = lambda name: float(loss(steps._replace(rewards=rewards | {name: rewards[name] + 2})))
  base = float(loss(steps))
  assert rewarded('novelty') == base
  assert rewarded('empowerment') == rewarded(ac.TASK) > base + 0.1


# Scores.


def terms_of(rng, *axes):
  return workspace.Terms(*rng.uniform(size=(3, *axes, N)).astype(np.float32))


@pytest.fixture(scope='module')
def step(dreamer):
  """(memory, terms) -> which candidates are opened, compiled once."""
  advance = jax.jit(dreamer.actor_critic.context.advance)
  return lambda memory, terms: advance(read_of((), memory, terms)).opened - memory.opened


@pytest.mark.parametrize('term', ['learned', 'novelty', 'lack', 'change', 'visits'])
def test_permuting_a_term_over_candidates_changes_choices(step, term):
  rng = np.random.default_rng(0)
  terms = terms_of(rng, BATCH)
  opened = rng.integers(1, 9, (BATCH, N)).astype(np.float32)
  memory = workspace.Past(terms_of(rng, BATCH).novelty, opened, opened.sum(axis=-1))
  gates = lambda terms, memory: np.asarray(step(memory, terms))
  roll = lambda x: np.roll(x, 3, axis=-1)
  other, before = terms, memory
  if term == 'change':
    before = memory._replace(novelty=roll(memory.novelty))
  elif term == 'visits':
    before = memory._replace(opened=roll(memory.opened))
  else:
    other = terms._replace(**{term: roll(getattr(terms, term))})
  moved = (gates(terms, memory) != gates(other, before)).any(axis=-1)
  assert moved.mean() > 0.1


def test_scores_equal_the_formula(dreamer):
  module = dreamer.actor_critic.context
  row = lambda *x: np.array([x], np.float32)
  memory = workspace.Past(row(0.5, 0.0), row(4, 1), np.float32([9]))
  terms = workspace.Terms(row(7, 7), row(1.0, 0.2), row(0.0, 2.0))
  visits = np.sqrt(np.log(9) / np.array([4, 1]))
  expected = [1.0 + 0.6 * 0.5 + 0.4 * visits[0], 0.2 + 0.6 * 0.2 + 0.4 * visits[1] + 1.5 * 2.0]
  np.testing.assert_allclose(jax.jit(module._bonus)(memory, terms)[0], expected, rtol=1e-5)


def test_members_that_differ_about_a_leaf_make_it_novel(dreamer, params):
  """The estimate is through 32 random directions, so that others are a little novel, too."""
  module, numbers = dreamer.actor_critic.context, dreamer.model.networks.numbers
  features = features_of(dreamer, params, 0, 2)
  difference = np.zeros((2, 2, numbers.input_size), np.float32)  # [K, B, I]
  for row, leaf in enumerate((3, 6)):
    difference[0, row, workspace.parts_of_inputs(numbers) == leaf] = 1.0
  mean = difference @ numbers.directions
  change = numbers_lib.Change(mean, np.full(mean.shape, 0.05, np.float32))
  state = np.zeros((2, numbers.size), np.float32)
  latent, priors = rssm.Latent(None, None, state), rssm.Prior(None, change)
  step = rssm.Step(latent, features, None, None, priors, None)
  novelty = jax.jit(module.inputs)(params['actor_critic'], step, None).novelty
  assert np.argmax(novelty, axis=-1).tolist() == [3, 6]


def test_lack_is_computed_from_the_vitals_of_a_leaf():
  vitals = (environment.Vital('food', 0), environment.Vital('heat', 2))
  spec = {
    'body': environment.VitalsSpec((3,), np.float32, 0, 1, vitals),
    'eye': specs.Array((2,), np.float32),
  }
  config = cognition_config.CognitionConfig(**tiny.DREAMER, workspace_size=1)
  made = registry.make_dreamer(config, spec, specs.DiscreteArray(3))
  observation = {'body': np.float32([[0.5, 0.9, 1.0]]), 'eye': np.ones((1, 2), np.float32)}
  read, lack_of = made.model.networks.numbers.read, made.actor_critic.context._lack
  lack = jax.jit(lambda observation: lack_of(read(observation)))(observation)
  np.testing.assert_allclose(lack, [[0.5 ** (4 / 3), 0.0]], rtol=1e-5)


# Read by others.


# Along steps.


def test_memory_counts_the_steps_of_an_episode(dreamer):
  """The first step of an episode resets the gates."""
  policy, terms = dreamer.actor_critic, terms_of(np.random.default_rng(1), 6, 4)
  first = np.zeros((6, 4), bool)
  first[0], first[3, 1] = True, True

  @jax.jit
  def step(memory, inputs):
    terms, first = inputs
    memory = policy._cleared(memory, first)
    return policy.context.advance(read_of((), memory, terms)), memory

  _, memory = jax.device_get(jax.lax.scan(step, policy.context.initial(4), (terms, first)))
  np.testing.assert_array_equal(memory.steps.T[:2], [[1, 2, 3, 4, 5, 6], [1, 2, 3, 1, 2, 3]])
  np.testing.assert_array_equal(memory.opened.sum(axis=-1), N + memory.steps - 1)
  follows = memory.steps[1:] > 1
  np.testing.assert_array_equal(memory.novelty[1:][follows], terms.novelty[:-1][follows])


def test_imagination_opens_and_counts(make_params):
  """The gates of the loss are those by which the rollout acted."""
  made = make()
  policy, module, params = made.actor_critic, made.actor_critic.context, make_params(made)
  model, horizon = made.model, 4
  features = features_of(made, params, 0, 2, 3)
  numbers = np.random.default_rng(0).uniform(size=(2, 3, model.networks.numbers.size))

  @jax.jit
  def imagine(params, features, numbers):
    networks, first = model.networks, jnp.zeros((2, 3), bool)
    deterministic = features.state
    stochastic = jnp.zeros((2, 3, networks.latent_size))
    latent = rssm.Latent(deterministic, stochastic, numbers, features.recalled)
    previous = jnp.zeros((2, 3, networks.previous_size))
    priors = model.rssm.prior(modules.world(params), deterministic, previous, first)
    features = model.rssm.features(modules.world(params), latent, previous)
    posterior = rssm.Step(latent, features, previous, None, priors, first)
    novelty = novelty_lib.novelty_of('information_gain', priors.moments())
    keys = jax.random.split(jax.random.key(1), 3)
    of_policy = params['actor_critic']
    start = starts_of(policy, of_policy, posterior, first, novelty, keys, num_steps=None)
    dreamt = dream.rollout(
      model, policy, params, policy.critics(of_policy), start, jnp.int32(horizon)
    )
    gates = module.gates(of_policy, dreamt.read)
    return dreamt.read.memory, gates, dreamt.read.own.novelty

  before, gates, novelty = jax.device_get(imagine(params, features, numbers.astype(np.float32)))
  assert np.isin(gates, (0, 1)).all() and (gates.sum(axis=-1) <= 1).all() and gates.any()
  np.testing.assert_array_equal(before.steps[:, 0], [1, 2, 3, 4])
  np.testing.assert_array_equal(before.steps[:, 3], [2, 3, 4, 5])  # a start at step 1
  opened = np.cumsum(gates, axis=0)
  np.testing.assert_array_equal(before.opened[1:, :3], 1 + opened[:-1, :3])
  assert np.abs(np.diff(novelty[:horizon], axis=0)).max() > 0


# Refusals.


@pytest.mark.parametrize(
  ('env', 'size', 'words'),
  [
    ('continuous', 6, r'agent\.workspace_size=6: .* 5 candidates \(chunk_0, .*\); set at most '),
    ('pictures', 1, r'agent\.workspace_size=1: .* image.* set agent\.workspace_size=0'),
    ('masked', 3, r'agent\.workspace_size=3: .* 2 candidates \(board, purse\); set at most '),
  ],
)
def test_observations_without_candidates_are_refused(env, size, words, make_dreamer):
  with pytest.raises(ValueError, match=words):
    make_dreamer(env, workspace_size=size)
