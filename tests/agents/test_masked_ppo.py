"""Masked PPO: legal actions, targets by hand, gradients, clipping and delayed parameters."""

import functools
import types

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors.environments import environment
from hephaestus.agents import experience, masked_ppo, returns

FIRST, MID, LAST = (int(step_type) for step_type in dm_env.StepType)
ENVIRONMENTS = {
  'masked': (
    {
      'board': specs.BoundedArray((2, 2), np.float32, 0, 1),
      'purse': specs.Array((), np.int32),
      'action_mask': specs.BoundedArray((4,), bool, False, True),
    },
    specs.DiscreteArray(4),
  ),
  'continuous': (
    specs.Array((5,), np.float32),
    specs.BoundedArray((2,), np.float32, [-1, 0], [1, 4]),
  ),
  # A vector with a view of it; two numbers, and six cells of two.
  'view and board': (
    {
      'board': environment.BoardSpec((14,), np.float32, (2, 3, 2)),
      'seen': environment.ViewSpec((9,), np.float32, 0, 1, lambda x: jnp.square(x[:2])),
    },
    specs.DiscreteArray(3),
  ),
  'view and picture': (
    {
      'picture': specs.Array((8, 9, 29), np.uint8),
      'purse': specs.Array((), np.int32),
      'seen': environment.ViewSpec((9,), np.float32, 0, 1, lambda x: jnp.square(x[:2])),
    },
    specs.DiscreteArray(3),
  ),
  'only a picture': (specs.BoundedArray((9, 8, 29), np.float32, 0, 1), specs.DiscreteArray(3)),
}
VARIANTS = {
  'masked': dict(env='masked'),
  'continuous': dict(env='continuous'),
  'memory': dict(env='masked', recurrent_size=6),
  # Separate networks.
  'view and board': dict(
    env='view and board', shared=False, activation='tanh', layer_norm=False, recurrent_size=6
  ),
  'view and picture': dict(env='view and picture', image_channels=4),
}
NUM_STEPS, BATCH = 6, 3


@functools.cache
def make(env='masked', **changes):
  config = masked_ppo.PPOConfig(**{'hidden_size': 8, 'num_layers': 2} | changes)
  return masked_ppo.make_ppo(config, *ENVIRONMENTS[env])


COMPILED = {}


def compiled(ppo):
  """(act, init, steps, loss with its gradient) of an agent, each jitted once."""
  if id(ppo) not in COMPILED:
    network = ppo.network

    def act(params, key, memory, step_type, observation, greedy):
      timestep = types.SimpleNamespace(step_type=step_type, observation=observation)
      sampled, decided = (
        ppo.agent.act(params, key, memory, timestep, greedy=mode) for mode in (False, True)
      )
      return jax.tree.map(lambda x, y: jnp.where(greedy, y, x), sampled, decided)

    def apply(function):
      program = jax.jit(function)
      return lambda *arguments: jax.device_get(program(*arguments))

    COMPILED[id(ppo)] = (
      ppo,
      types.SimpleNamespace(
        act=apply(act),
        init=apply(ppo.agent.init_params),
        steps=apply(network.steps),
        loss=apply(jax.value_and_grad(network.loss, has_aux=True)),
      ),
    )
  return COMPILED[id(ppo)][1]


def draw_observation(spec, rng, *axes):
  def draw(leaf):
    x = rng.uniform(size=(*axes, *leaf.shape))
    if leaf.dtype == bool:
      return x < 0.5
    return (x if isinstance(leaf, specs.BoundedArray) else 3 * x).astype(leaf.dtype)

  return jax.tree.map(draw, spec)


def act(ppo, params, *, seed=0, observation=None, greedy=False, memory=None, step_type=None):
  """One step of the agent in BATCH environments."""
  rng = np.random.default_rng(seed)
  if observation is None:
    observation = draw_observation(ppo.network.observation_spec, rng, BATCH)
  memory = ppo.agent.initial_policy_state(BATCH) if memory is None else memory
  step_type = np.full(BATCH, MID, np.int32) if step_type is None else step_type
  return compiled(ppo).act(params, jax.random.key(seed), memory, step_type, observation, greedy)


def play(ppo, params, step_type, *, seed=0):
  """A Sequence [T, B] of the agent's own actions, along given step types [T, B]."""
  rng = np.random.default_rng(seed)
  observation = draw_observation(ppo.network.observation_spec, rng, *step_type.shape)
  initial = memory = ppo.agent.initial_policy_state(step_type.shape[1])
  decisions = []
  for t, key in enumerate(jax.random.split(jax.random.key(seed), len(step_type))):
    observed = jax.tree.map(lambda x, t=t: x[t], observation)
    memory, decision = compiled(ppo).act(params, key, memory, step_type[t], observed, False)
    decisions.append(decision)
  decisions[-1] = jax.tree.map(np.zeros_like, decisions[-1])  # as an unroll leaves it
  decision = jax.tree.map(lambda *x: np.stack(x), *decisions)
  return experience.Sequence(
    observation=observation,
    action=decision.action,
    reward=rng.normal(size=step_type.shape).astype(np.float32),
    discount=rng.choice(np.float32([0, 1]), size=step_type.shape),
    step_type=step_type,
    extras=decision.extras,
    initial_state=initial,
    identity=np.zeros(step_type.shape[1], np.uint32),
    version=np.zeros(step_type.shape[1], np.int32),
    actor_id=np.zeros(step_type.shape[1], np.int32),
  )


STEP_TYPE = np.array(
  [[FIRST, MID, MID], [MID, MID, LAST], [MID, LAST, FIRST], [LAST, FIRST, MID], [FIRST, MID, MID],
   [MID, MID, MID]], np.int32,
)  # fmt: skip


def normalised(steps):
  return steps._replace(weight=steps.weight / steps.weight.sum())


@functools.cache
def played(variant):
  """(ppo, params, sequence) of a variant; no parameter is zero."""
  ppo = make(**VARIANTS[variant])
  rng = np.random.default_rng(1)
  shapes = jax.eval_shape(ppo.agent.init_params, jax.random.key(0))
  params = jax.tree.map(lambda x: (0.4 * rng.normal(size=x.shape)).astype(np.float32), shapes)
  return ppo, params, play(ppo, params, STEP_TYPE)


# Advantages.


@pytest.mark.parametrize(('discount', 'expected'), [(0.0, 3 - 7), (1.0, 3 + 0.5 * 100 - 7)])
def test_truncated_episode_bootstraps_from_its_last_value(discount, expected):
  column = lambda *values: np.float32(values)
  advantage, return_ = jax.jit(returns.generalised_advantages)(
    column(0, 3, 0, 1e6), column(1, discount, 1, 1), column(7, 100, 1e5, 1e5),
    np.array([False, True, False, False]), gamma=0.5, lambda_=0.95,
  )  # fmt: skip
  np.testing.assert_allclose(advantage[0], expected, rtol=1e-6)
  np.testing.assert_allclose(return_[0], expected + 7, rtol=1e-6)


# Steps.


@pytest.mark.parametrize('variant', VARIANTS)
def test_steps_hold_the_decisions_of_acting(variant):
  ppo, params, sequence = played(variant)
  steps = compiled(ppo).steps(params, sequence)
  (_, metrics), _ = compiled(ppo).loss(params, normalised(steps), sequence.initial_state)
  # The parameters that acted: every ratio is 1, with a memory too.
  assert metrics['approx_kl'] == pytest.approx(0, abs=1e-6)
  assert metrics['clip_fraction'] == 0
  np.testing.assert_array_equal(steps.weight == 0, STEP_TYPE[:-1] == LAST)
  np.testing.assert_allclose(steps.advantage, steps.return_ - steps.value, rtol=1e-5, atol=1e-6)


def test_value_of_the_last_step_is_computed_by_the_learner():
  ppo, params, sequence = played('memory')

  @jax.jit
  def value(params, sequence):
    inputs = ppo.network.flatten(sequence.observation)
    first = sequence.step_type == FIRST
    return ppo.network.apply(params, inputs, first, sequence.initial_state)[2][-1]

  steps = compiled(ppo).steps(params, sequence)
  last = value(params, sequence)
  expected = sequence.reward[-1] + ppo.config.gamma * sequence.discount[-1] * last
  np.testing.assert_allclose(steps.return_[-1], expected, rtol=1e-5)


def test_action_at_last_does_not_change_the_gradient():
  ppo, params, sequence = played('masked')

  def judge(sequence):
    steps = normalised(compiled(ppo).steps(params, sequence))
    return compiled(ppo).loss(params, steps, {})

  last = sequence.step_type == LAST
  spoilt = sequence._replace(
    action=np.where(last, 3 - sequence.action, sequence.action),
    extras=sequence.extras
    | {'log_prob': np.where(last, np.float32(-50), sequence.extras['log_prob'])},
  )
  (loss, _), grads = judge(sequence)
  (same_loss, _), same_grads = judge(spoilt)
  assert loss == same_loss
  jax.tree.map(np.testing.assert_array_equal, grads, same_grads)


def test_first_step_clears_the_memory():
  ppo, params, _ = played('memory')
  rng = np.random.default_rng(0)
  memory = {'shared': rng.normal(size=(BATCH, 6)).astype(np.float32)}
  fresh, _ = act(ppo, params, memory=None, step_type=np.full(BATCH, FIRST, np.int32))
  cleared, _ = act(ppo, params, memory=memory, step_type=np.full(BATCH, FIRST, np.int32))
  kept, _ = act(ppo, params, memory=memory)
  np.testing.assert_array_equal(fresh['shared'], cleared['shared'])
  assert not np.allclose(fresh['shared'], kept['shared'])


# Actions.


def test_agent_takes_legal_actions_for_any_logits():
  ppo, params, _ = played('masked')
  bias = np.float32([np.inf, 1e38, 0, -1])
  actor = jax.tree.map(np.zeros_like, params['actor']) | {'bias': bias}
  observation = draw_observation(ppo.network.observation_spec, np.random.default_rng(0), BATCH)
  observation['action_mask'] = np.array([[0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], bool)
  for greedy in (True, False):
    for seed in range(8):
      _, decision = act(
        ppo, params | {'actor': actor}, seed=seed, observation=observation, greedy=greedy
      )
      assert decision.action[0] == 3
      assert decision.action[1] in (1, 2)
      assert decision.action.dtype == np.int32


def test_without_any_legal_action_gradients_are_finite():
  ppo, params, sequence = played('masked')
  nothing = sequence.observation | {'action_mask': np.zeros((NUM_STEPS, BATCH, 4), bool)}
  steps = normalised(compiled(ppo).steps(params, sequence._replace(observation=nothing)))
  _, grads = compiled(ppo).loss(params, steps, {})
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_continuous_actions_lie_within_their_bounds_and_have_finite_log_probs():
  ppo, params, _ = played('continuous')
  greedy = [
    act(ppo, params, seed=seed, observation=np.ones((3, 5), np.float32), greedy=True)
    for seed in (0, 1)
  ]
  np.testing.assert_array_equal(*(decision.action for _, decision in greedy))
  for seed in range(5):
    _, decision = act(ppo, params, seed=seed)
    action = np.asarray(decision.action)
    assert ((action >= [-1, 0]) & (action <= [1, 4])).all()
    assert decision.extras['raw_action'].shape == (BATCH, 2)
    assert np.isfinite(decision.extras['log_prob']).all()


# Loss.


@pytest.mark.parametrize('variant', VARIANTS)
def test_gradients_reach_every_parameter(variant):
  ppo, params, sequence = played(variant)
  steps = normalised(compiled(ppo).steps(params, sequence))
  _, grads = compiled(ppo).loss(params, steps, sequence.initial_state)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'flat'),
  [
    (1.5, 1.0, True),  # already likelier, and good: clipped
    (1.5, -1.0, False),
    (0.5, 1.0, False),
    (0.5, -1.0, True),
    (1.1, 1.0, False),
    (0.9, -1.0, False),
  ],
)
def test_surrogate_is_flat_where_it_is_clipped(ratio, advantage, flat):
  ppo, params, sequence = played('masked')
  only_actor = make('masked', entropy_scale=0.0, value_scale=0.0)
  steps = compiled(ppo).steps(params, sequence)
  steps = normalised(
    steps._replace(
      log_prob=steps.log_prob - np.log(np.float32(ratio)),
      advantage=np.full_like(steps.advantage, advantage),
    )
  )
  (_, metrics), grads = compiled(only_actor).loss(params, steps, {})
  largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  assert (largest == 0) if flat else (largest > 1e-4)
  assert metrics['clip_fraction'] == pytest.approx(float(abs(ratio - 1) > 0.2))
  assert metrics['approx_kl'] == pytest.approx(ratio - 1 - np.log(ratio), rel=1e-3)
  surrogate = min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
  assert metrics['actor_loss'] == pytest.approx(-surrogate, rel=1e-4)


@pytest.mark.parametrize(
  ('old', 'target', 'flat'),
  [
    (-9.0, 9.0, True),  # far above the old value: the clipped error is the larger
    (-9.0, -30.0, False),
  ],
)
def test_value_clip_stops_the_gradient_beyond_the_clip(old, target, flat):
  ppo, params, sequence = played('masked')
  only_critic = make('masked', entropy_scale=0.0, value_clip=0.5)
  steps = compiled(ppo).steps(params, sequence)
  steps = normalised(
    steps._replace(
      value=np.full_like(steps.value, old),
      return_=np.full_like(steps.value, target),
      advantage=np.zeros_like(steps.value),
    )
  )
  _, grads = compiled(only_critic).loss(params, steps, {})
  largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
  assert (largest == 0) if flat else (largest > 1e-4)


def test_delayed_steps_are_clipped_around_the_newest_policy():
  ppo, params, sequence = played('memory')
  memory = sequence.initial_state
  steps = compiled(ppo).steps(params, sequence)
  program = jax.jit(functools.partial(ppo.network.steps, delayed=True))
  delayed = lambda *arguments: jax.device_get(program(*arguments))
  same = delayed(params, sequence)
  np.testing.assert_allclose(same.importance, 1.0, atol=1e-5)
  np.testing.assert_allclose(same.advantage, steps.advantage, rtol=1e-4, atol=1e-5)

  newest = jax.tree.map(lambda x: np.float32(1.5) * x, params)
  near = delayed(newest, sequence)
  (_, far_metrics), _ = compiled(ppo).loss(newest, normalised(steps), memory)
  (_, metrics), _ = compiled(ppo).loss(newest, normalised(near), memory)
  assert far_metrics['approx_kl'] > 1e-3 and far_metrics['clip_fraction'] > 0
  assert metrics['approx_kl'] == pytest.approx(0, abs=1e-6)
  assert metrics['clip_fraction'] == 0
  # At a ratio of 1, the surrogate is - w A.
  acted = np.asarray(steps.weight > 0)
  ratio = np.exp((near.log_prob - steps.log_prob)[acted])
  importance = np.minimum(ratio, masked_ppo.MOST_IMPORTANCE)
  assert importance.min() < 1 < importance.max()
  np.testing.assert_allclose(near.importance[acted], importance, rtol=1e-5)
  expected = -np.mean(importance * np.asarray(near.advantage)[acted])
  assert metrics['actor_loss'] == pytest.approx(expected, rel=1e-4)


def test_initial_kernels_are_orthogonal_and_the_initial_policy_is_uniform():
  ppo = make('masked')
  params = compiled(ppo).init(jax.random.key(0))
  kernel = params['shared_encoder']['Dense_1']['kernel']
  np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(8), atol=1e-5)
  _, decision = act(ppo, params, observation=None)
  observation = draw_observation(ppo.network.observation_spec, np.random.default_rng(0), BATCH)
  even = -np.log(np.maximum(observation['action_mask'].sum(-1), 1))
  even = np.where(observation['action_mask'].any(-1), even, -np.log(4))
  np.testing.assert_allclose(decision.extras['log_prob'], even, atol=0.05)


def test_bfloat16_network_returns_float32():
  ppo = make('masked', compute_dtype='bfloat16')
  _, params, sequence = played('masked')
  steps = jax.eval_shape(ppo.network.steps, params, sequence)
  loss = jax.value_and_grad(ppo.network.loss, has_aux=True)
  found = jax.eval_shape(loss, params, steps, {})
  floats = jax.tree.leaves((found, steps._replace(mask=None, first=None, choice=None)))
  assert {leaf.dtype for leaf in floats} == {np.dtype('float32')}


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'hidden_size': 0}, r'agent.hidden_size=0: must be at least 1'),
    ({'activation': 'gelu'}, r"agent.activation='gelu': choose one of"),
    ({'levels': 1}, r'agent.levels=1'),
    ({'image_channels': -1}, r'agent.image_channels=-1: must be 0'),
    ({'recurrent_size': -1}, r'agent.recurrent_size=-1'),
    ({'compute_dtype': 'float16'}, r"agent.compute_dtype='float16'"),
    ({'gamma': 0}, r'agent.gamma=0'),
    ({'lambda_': 1.5}, r'agent.lambda_=1.5'),
    ({'clip': 1.0}, r'agent.clip=1.0'),
    ({'value_clip': 0.0}, r'agent.value_clip=0.0'),
    ({'entropy_scale': -1}, r'agent.entropy_scale=-1'),
  ],
)
def test_invalid_config_names_its_field(changes, words):
  with pytest.raises(ValueError, match=words):
    masked_ppo.PPOConfig(**changes)


def test_view_is_read_with_its_vector_in_place_of_levels():
  spec = environment.ViewSpec((9,), np.float32, 0, 1, lambda x: jnp.square(x[:2]))
  config = masked_ppo.PPOConfig(hidden_size=8, levels=5)
  network = masked_ppo.make_ppo(config, spec, specs.DiscreteArray(3)).network
  observation = np.linspace(0, 0.8, 9, dtype=np.float32)[None]
  (flat,) = jax.jit(network.flatten)(observation)
  np.testing.assert_allclose(flat[0, :9], np.log1p(observation[0]), rtol=1e-6)
  np.testing.assert_allclose(flat[0, 9:], [0, 0.01], atol=1e-6)


def test_picture_without_numbers_is_read():
  network = make('only a picture', image_channels=4, levels=3, recurrent_size=6).network
  observation = jax.ShapeDtypeStruct((5, 2, 9, 8, 29), np.float32)

  def value(observation):
    memory = network.initial_memory(2)
    inputs = network.flatten(observation)
    params, first = network.init(jax.random.key(0)), jnp.zeros((5, 2), bool)
    return network.apply(params, inputs, first, memory)[2]

  assert jax.eval_shape(value, observation).shape == (5, 2)


def test_bits_stay_bool_until_encoded_and_give_the_same_outputs():
  rng = np.random.default_rng(0)
  bits = rng.uniform(size=(3, 4, 2)) < 0.5
  as_bits, as_numbers = (
    masked_ppo.make_ppo(
      make().config, specs.BoundedArray((4, 2), dtype, 0, 1), specs.DiscreteArray(3)
    ).network
    for dtype in (bool, np.float32)
  )

  @jax.jit
  def apply(bits, numbers):
    params, outputs = as_bits.init(jax.random.key(0)), []
    for network, x in ((as_bits, bits), (as_numbers, numbers)):
      (flat,) = network.flatten(x)
      assert (flat.dtype == bool) == (network is as_bits)
      outputs.append(network.apply(params, (flat,), jnp.zeros(3, bool), {})[1:])
    return outputs

  for found, expected in zip(*apply(bits, np.float32(bits)), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
