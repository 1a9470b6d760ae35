"""Acting of the dreamer: legal actions, and the same latents and likelihoods as in training."""

import dataclasses
import functools

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hephaestus.agents.cognition import registry
from hephaestus.agents.dreamer import modules, rssm

FIRST, MID = 0, 1
NUM_ENVS = 3


def arrival_of(step_type, observation):
  return dm_env.TimeStep(step_type, None, None, observation)


@pytest.fixture(scope='module')
def arrive(make_observation):
  """(dreamer, step type, seed) -> the fields of time steps of N environments that `act` reads."""

  def make(dreamer, step_type=FIRST, seed=0):
    observation = make_observation(dreamer, np.random.default_rng(seed), NUM_ENVS)
    return arrival_of(np.full(NUM_ENVS, step_type, np.int32), observation)

  return make


@pytest.fixture(scope='module')
def quiet_dreamer(make_dreamer):
  """(env) -> a Dreamer whose latents are the medians of their beliefs, class by class."""

  @dataclasses.dataclass(frozen=True)
  class Quiet(rssm.RSSM):
    def noise(self, key):
      return jnp.full_like(super().noise(key), 0.5)

  @functools.cache
  def make(env):
    model = make_dreamer(env).model
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(rssm, 'RSSM', Quiet)
      dreamer = registry.make_dreamer(model.config, model.observation_spec, model.action_spec)
      assert isinstance(dreamer.model.rssm, Quiet)  # made at its first use
      return dreamer

  return make


@pytest.fixture(scope='module')
def episode(make_params, make_sequence, act):
  """(dreamer, greedy) -> acting along the streams of conftest, each begun by FIRST."""

  def play(dreamer, greedy):
    params, sequence = make_params(dreamer), make_sequence(dreamer)
    step_type = np.array(sequence.step_type)
    step_type[0] = FIRST
    acting = dreamer.agent.acting_params(params)
    state = jax.device_get(dreamer.agent.initial_policy_state(3))
    states, decisions = [state], []
    for t in range(6):
      observation = jax.tree.map(lambda x, t=t: x[t], sequence.observation)
      arrival = arrival_of(step_type[t], observation)
      state, decision = act(dreamer, acting, jax.random.key(t), state, arrival, greedy)
      states.append(state)
      decisions.append(decision)
    stack = lambda *x: np.stack(x)
    decisions = jax.tree.map(stack, *decisions)
    sequence = sequence._replace(step_type=step_type, action=decisions.action)
    return params, sequence, jax.tree.map(stack, *states), decisions

  return play


@pytest.mark.parametrize('env', ['masked', 'continuous'])
def test_actions_are_valid_given_only_acting_params(quiet_dreamer, make_params, act, arrive, env):
  dreamer = quiet_dreamer(env)
  acting = dreamer.agent.acting_params(make_params(dreamer))
  state, decision = act(
    dreamer, acting, jax.random.key(0), dreamer.agent.initial_policy_state(3), arrive(dreamer)
  )
  spec = dreamer.model.action_spec
  assert decision.action.shape == (NUM_ENVS, *spec.shape)
  assert decision.action.dtype == spec.dtype
  for action in decision.action:
    spec.validate(action)
  assert decision.extras['log_prob'].shape == (NUM_ENVS,)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state, decision)))


def test_acting_params_leave_out_modules_that_do_not_act(make_dreamer, make_params):
  dreamer = make_dreamer('masked')
  acting = dreamer.agent.acting_params(make_params(dreamer))
  assert sorted(acting['world_model']) == [
    'encoder', 'posterior', 'prior', 'recurrence',
  ]  # fmt: skip
  assert sorted(acting['actor_critic']) == ['actor', 'explorer']


def test_explorer_acts_only_in_the_given_environments(make_dreamer, make_params, arrive):
  dreamer = make_dreamer('masked')
  acting = dreamer.agent.acting_params(make_params(dreamer))
  state, arrival = dreamer.agent.initial_policy_state(3), arrive(dreamer)
  act = jax.jit(functools.partial(dreamer.agent.explain, greedy=False))
  log_probs = lambda **options: np.asarray(
    act(acting, jax.random.key(0), state, arrival, **options)[1].extras['log_probs']
  )
  task, some = log_probs(), log_probs(explores=jnp.array([True, False, False]))
  np.testing.assert_allclose(some[1:], task[1:], rtol=1e-6)
  assert np.abs(some[0] - task[0]).max() > 1e-3


@pytest.mark.parametrize(
  ('share', 'num_envs', 'count'),
  [(1.0, 16, 16), (0.3, 16, 4.8), (1.0, 1, 1), (0.25, 1, 0.25)],
)
def test_first_environments_explore_as_many_as_their_share_on_average(
  make_dreamer, make_params, share, num_envs, count
):
  agent = make_dreamer('masked').agent
  acting = agent.acting_params(make_params(make_dreamer('masked')))
  acting |= {'statistics': {'exploring': jnp.float32(share)}}
  keys = jax.random.split(jax.random.key(0), 256)
  explores = np.asarray(jax.vmap(lambda key: agent.exploring(acting, key, num_envs))(keys))
  np.testing.assert_allclose(explores.sum(axis=1).mean(), count, atol=0.1)
  np.testing.assert_array_equal(explores, np.arange(num_envs) < explores.sum(axis=1)[:, None])


def test_agent_without_novelty_has_no_explorer(make_dreamer, make_params):
  dreamer = make_dreamer('masked', novelty_scale=0.0)
  acting = dreamer.agent.acting_params(make_params(dreamer))
  assert dreamer.agent.exploring is None
  assert set(acting['statistics']) == {'world_model'}
  assert sorted(acting['actor_critic']) == ['actor']


def test_policy_state_keeps_its_shapes_and_dtypes(make_dreamer, param_shapes, arrive):
  """A scan requires it."""
  dreamer = make_dreamer('masked', compute_dtype='bfloat16')
  agent = dreamer.agent
  params = agent.acting_params(param_shapes(dreamer))
  before = jax.eval_shape(lambda: agent.initial_policy_state(NUM_ENVS))
  after, _ = jax.eval_shape(
    functools.partial(agent.act, greedy=False), params, jax.random.key(1), before, arrive(dreamer)
  )
  assert jax.tree.structure(before) == jax.tree.structure(after)
  assert jax.tree.leaves(before) == jax.tree.leaves(after)


def test_illegal_action_is_never_taken(make_dreamer, make_params, act, arrive):
  dreamer = make_dreamer('masked')
  params = make_params(dreamer)
  # Action 3 has the largest logit, and is legal in no environment.
  output = params['actor_critic']['actor']['rest']['Dense_0']
  output['bias'] = np.float32([0, 0, 0, 1e6])
  acting, arrival = dreamer.agent.acting_params(params), arrive(dreamer)
  legal = np.array(
    [[True, True, False, False], [False, True, True, False], [False, True] + 2 * [False]]
  )
  arrival = arrival._replace(observation=arrival.observation | {'action_mask': legal})
  state = dreamer.agent.initial_policy_state(3)
  for seed in range(20):
    for greedy in (False, True):
      _, decision = act(dreamer, acting, jax.random.key(seed), state, arrival, greedy)
      assert legal[np.arange(3), decision.action].all()
      np.testing.assert_allclose(decision.extras['log_prob'][2], 0, atol=1e-5)


@pytest.mark.parametrize('env', ['masked', 'continuous'])
def test_greedy_action_depends_on_the_key_only_by_the_latent(
  quiet_dreamer, make_dreamer, make_params, act, arrive, env
):
  def play(dreamer, seed, greedy):
    acting = dreamer.agent.acting_params(make_params(dreamer))
    fresh, arrival = dreamer.agent.initial_policy_state(3), arrive(dreamer)
    return act(dreamer, acting, jax.random.key(seed), fresh, arrival, greedy)

  quiet = quiet_dreamer(env)
  jax.tree.map(np.testing.assert_array_equal, play(quiet, 0, True), play(quiet, 1, True))
  assert len({play(quiet, seed, False)[1].action.tobytes() for seed in range(8)}) > 1
  if env == 'masked':
    states = [play(make_dreamer(env), seed, True)[0] for seed in range(4)]
    assert len({state.recurrent.latent.stochastic.tobytes() for state in states}) == 4


def test_first_step_clears_the_policy_state(make_dreamer, make_params, act, arrive):
  dreamer = make_dreamer('masked')
  acting = dreamer.agent.acting_params(make_params(dreamer))
  state = fresh = dreamer.agent.initial_policy_state(NUM_ENVS)
  for t in range(4):
    arrival = arrive(dreamer, MID if t else FIRST, seed=t)
    state, _ = act(dreamer, acting, jax.random.key(t), state, arrival)
  key, first = jax.random.key(9), arrive(dreamer, FIRST, 9)
  first.observation['action_mask'][:] = True
  mid = arrival_of(np.full_like(first.step_type, MID), first.observation)
  from_fresh, expected = act(dreamer, acting, key, fresh, first)
  from_old, decision = act(dreamer, acting, key, state, first)
  jax.tree.map(np.testing.assert_array_equal, decision, expected)
  jax.tree.map(np.testing.assert_array_equal, from_old.recurrent, from_fresh.recurrent)
  # A MID step keeps the state.
  from_mid, remembered = act(dreamer, acting, key, state, mid)
  latents = from_mid.recurrent.latent.deterministic, from_fresh.recurrent.latent.deterministic
  assert (latents[0] != latents[1]).any(-1).all()
  assert (remembered.extras['log_prob'] != expected.extras['log_prob']).all()


@pytest.fixture(scope='module')
def explained(make_dreamer, make_params, act, arrive):
  """Explained decision of a dreamer with empowerment, and the decision of one without."""
  dreamer, plain = make_dreamer('masked', empowerment_scale=1.0), make_dreamer('masked')
  params = make_params(dreamer)
  params['world_model']['empowerment']['rest']['Dense_0']['kernel'][:] = 0
  params['world_model']['empowerment']['rest']['Dense_0']['bias'][:] = 1.25
  acting, state = dreamer.agent.acting_params(params), dreamer.agent.initial_policy_state(3)
  key, arrival = jax.random.key(0), arrive(dreamer)
  explain = jax.jit(functools.partial(dreamer.agent.explain, greedy=False))
  _, explained = explain(acting, key, state, arrival)
  model_params = {name: x for name, x in params['world_model'].items() if name != 'empowerment'}
  acting = plain.agent.acting_params(params | {'world_model': model_params})
  _, decision = act(plain, acting, key, state, arrival, False)
  return jax.device_get(explained), decision


def test_explain_gives_the_same_action_and_all_log_probs(make_dreamer, explained):
  explained, decision = explained
  np.testing.assert_array_equal(explained.action, decision.action)
  log_probs = explained.extras['log_probs']
  chosen = log_probs[np.arange(3), explained.action]
  np.testing.assert_allclose(chosen, explained.extras['log_prob'], rtol=1e-6)
  np.testing.assert_allclose(chosen, decision.extras['log_prob'], rtol=1e-5)
  np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-5)
  assert make_dreamer('continuous').agent.explain is None


def test_explain_gives_the_empowerment_of_the_step(explained):
  """Its parameters are not needed for acting, and the action stays the same."""
  np.testing.assert_allclose(
    explained[0].extras['intrinsic']['empowerment'], np.full(3, 1.25), rtol=1e-6
  )


@pytest.mark.parametrize('env', ['masked', 'continuous'])
def test_training_infers_latents_and_likelihoods_of_acting(quiet_dreamer, episode, env):
  """Both begin with a stored state, also within an episode, and neither has noise."""
  dreamer = quiet_dreamer(env)
  params, sequence, states, decisions = episode(dreamer, True)
  keys = jax.random.split(jax.random.key(0), 3)

  @jax.jit
  def train(params, sequence):
    posterior = dreamer.model.rssm.infer(modules.world(params), keys, sequence)
    mask = sequence.observation['action_mask'] if env == 'masked' else None
    features = posterior.features
    distribution = dreamer.actor_critic.policy(
      params['actor_critic'], features, features.recalled[..., :0], mask
    )
    choice = distribution.mean if env == 'continuous' else sequence.action
    noise = jnp.zeros_like(dreamer.actor_critic.noise(keys[0]))
    mode, _ = dreamer.actor_critic.sample(distribution, noise)
    return posterior.latent, distribution.log_prob(choice), mode

  close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
  for begin in (0, 2):
    cut = lambda tree, begin=begin: jax.tree.map(lambda x: x[begin : begin + 4], tree)
    stored = dreamer.agent.stored_state(jax.tree.map(lambda x, t=begin: x[t], states))
    part = sequence._replace(
      observation=cut(sequence.observation),
      action=cut(sequence.action),
      reward=cut(sequence.reward),
      discount=cut(sequence.discount),
      step_type=cut(sequence.step_type),
      initial_state=stored,
    )
    latent, log_prob, mode = jax.device_get(train(params, part))
    acted = jax.tree.map(lambda x, t=begin: x[t + 1 : t + 5], states.recurrent.latent)
    jax.tree.map(close, latent, acted)
    close(cut(decisions.extras['log_prob']), log_prob)
    close(part.action, mode)


# Keys.


def test_reuse_of_a_key_is_detected():
  def reuse(key):
    return jax.random.normal(key) + jax.random.uniform(key)

  with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
    jax.eval_shape(reuse, jax.random.key(0))  # tracing is enough


def test_acting_uses_no_key_twice(make_dreamer, make_params, arrive):
  dreamer = make_dreamer('masked')
  agent, params = dreamer.agent, make_params(dreamer)
  with jax.debug_key_reuse(True):
    jax.eval_shape(agent.init_params, jax.random.key(0))
    acting, state = agent.acting_params(params), agent.initial_policy_state(NUM_ENVS)
    act = lambda key: agent.act(acting, key, state, arrive(dreamer), greedy=False)
    jax.eval_shape(act, jax.random.key(1))
