"""Unrolls: alignment of time steps, seams of sequences, one trace, and unique keys."""

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from hephaestus.actors import config as actors_config
from hephaestus.actors import environments, episodes, evaluator, rollout
from hephaestus.actors.environments import catch, wrappers
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.agents.dreamer import agent as dreamer_agent
from hephaestus.agents.dreamer import config as dreamer_config

NUM_ENVS, NUM_STEPS = 3, 7
FIRST, LAST = int(dm_env.StepType.FIRST), int(dm_env.StepType.LAST)
TINY = dreamer_config.DreamerConfig(**tiny.DREAMER)


class Traced:
  """An agent that counts traces of `act`, and random parameters for it."""

  def __init__(self, environment):
    agent = dreamer_agent.make_dreamer(
      TINY, environment.observation_spec, environment.action_spec
    ).agent
    self.traces = 0

    def act(*arguments, **options):
      self.traces += 1
      return agent.act(*arguments, **options)

    self.agent = agent._replace(act=act)
    rng = np.random.default_rng(0)
    shapes = agent.acting_params(jax.eval_shape(agent.init_params, jax.random.key(0)))
    draw = lambda x: rng.uniform(0.1, 0.5, x.shape).astype(x.dtype)
    self.params = jax.tree.map(draw, shapes)


@pytest.fixture(scope='module')
def traced():
  return Traced(environments.make('catch', **tiny.CATCH))


@pytest.fixture(scope='module')
def parts(traced):
  environment = environments.make('catch', **tiny.CATCH)
  unroll = rollout.make_unroll(
    environment, traced.agent, num_envs=NUM_ENVS, sequence_length=NUM_STEPS
  )
  return environment, traced.agent, unroll, traced.params


def play(unroll, params, count):
  key = jax.random.key(1)
  state = unroll.init(jax.random.key(2))
  result = []
  for _ in range(count):
    key, unroll_key = jax.random.split(key)
    state, sequence, episodes = unroll.unroll(params, unroll_key, state, np.int32(5), np.int32(9))
    result.append((jax.device_get(sequence), jax.device_get(episodes)))
  return result


def test_adjacent_sequences_share_one_step(parts):
  _, _, unroll, params = parts
  (before, _), (after, _) = play(unroll, params, 2)
  np.testing.assert_array_equal(before.observation[:, -1], after.observation[:, 0])
  np.testing.assert_array_equal(before.reward[:, -1], after.reward[:, 0])
  np.testing.assert_array_equal(before.step_type[:, -1], after.step_type[:, 0])


def test_each_step_follows_from_the_previous_action(parts):
  environment, _, unroll, params = parts
  width = environment.columns
  moves = 0
  for sequence, _ in play(unroll, params, 3):
    paddle = sequence.observation.reshape(NUM_ENVS, NUM_STEPS, -1, width)[:, :, -1].argmax(-1)
    for env in range(NUM_ENVS):
      for t in range(NUM_STEPS - 1):
        # At LAST the ball is in the bottom row too, and FIRST follows from no action.
        if {sequence.step_type[env, t], sequence.step_type[env, t + 1]} & {FIRST, LAST}:
          continue
        expected = np.clip(paddle[env, t] + sequence.action[env, t] - 1, 0, width - 1)
        assert paddle[env, t + 1] == expected
        moves += 1
  assert moves > 5


def test_last_step_keeps_its_reward_and_first_follows(parts):
  _, _, unroll, params = parts
  step_type, reward, discount = (
    np.concatenate([getattr(sequence, name)[:, :-1] for sequence, _ in play(unroll, params, 6)], 1)
    for name in ('step_type', 'reward', 'discount')
  )
  last = step_type == LAST
  assert last.any()
  assert (np.abs(reward[last]) == 1).all() and (reward[~last] == 0).all()
  assert (discount[last] == 0).all() and (discount[~last] == 1).all()
  np.testing.assert_array_equal(step_type[:, 1:] == FIRST, last[:, :-1])


def test_episodes_match_rewards_and_step_types(parts):
  environment, _, unroll, params = parts
  for sequence, ended_episodes in play(unroll, params, 4):
    ended = sequence.step_type[:, 1:].T == LAST
    np.testing.assert_array_equal(ended_episodes.ended, ended)
    np.testing.assert_array_equal(
      ended_episodes.episode_return[ended], sequence.reward[:, 1:].T[ended]
    )
    assert (ended_episodes.episode_length[ended] == environment.max_steps).all()


def test_stored_state_is_the_one_before_the_first_step(parts):
  _, agent, unroll, params = parts
  state = unroll.init(jax.random.key(2))
  fresh = jax.device_get(agent.stored_state(state.policy_state))
  state, first, _ = unroll.unroll(params, jax.random.key(3), state, np.int32(0), np.int32(0))
  carried = jax.device_get(agent.stored_state(state.policy_state))
  _, second, _ = unroll.unroll(params, jax.random.key(4), state, np.int32(0), np.int32(0))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(first.initial_state), fresh)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(second.initial_state), carried)
  assert np.abs(carried.latent.deterministic).max() > 0


def test_sequences_have_version_actor_and_unique_identity(parts):
  _, _, unroll, params = parts
  (first, _), (second, _) = play(unroll, params, 2)
  assert (first.version == 5).all() and (first.actor_id == 9).all()
  assert len({*first.identity.tolist(), *second.identity.tolist()}) == 2 * NUM_ENVS


def test_schema_matches_a_stored_sequence(parts):
  _, _, unroll, params = parts
  schema = rollout.sequence_schema(unroll, jax.eval_shape(lambda: params))
  stored = jax.tree.map(lambda x: x[0], play(unroll, params, 1)[0][0])
  assert jax.tree.map(lambda x: (x.shape, x.dtype), schema) == jax.tree.map(
    lambda x: (x.shape, x.dtype), stored
  )


def test_unroll_is_traced_once(parts, traced):
  _, _, unroll, params = parts
  play(unroll, params, 1)
  after_one = traced.traces
  play(unroll, jax.tree.map(lambda x: x + 1, params), 3)
  assert traced.traces == after_one > 0


def test_explorer_acts_only_in_unrolls_that_collect_experience(parts):
  """An evaluation, which does not ask for it, follows the policy of the task everywhere."""
  environment, agent, *_ = parts

  def act(params, key, policy_state, timestep, *, greedy, explores=None):
    policy_state, decision = agent.act(params, key, policy_state, timestep, greedy=greedy)
    action = jnp.zeros_like(decision.action) if explores is None else jnp.where(explores, 2, 1)
    return policy_state, decision._replace(action=action.astype(decision.action.dtype))

  exploring = lambda params, num_envs: jnp.arange(num_envs) < num_envs - 1
  exploring_agent = agent._replace(act=act, exploring=exploring)
  actions, roles = {}, {}
  for explore in (False, True):
    unroll = rollout.make_unroll(
      environment, exploring_agent, num_envs=NUM_ENVS, sequence_length=NUM_STEPS, explore=explore
    )
    ((sequence, ended_episodes),) = play(unroll, parts[-1], 1)
    actions[explore], roles[explore] = sequence.action[:, :-1], ended_episodes.explores
  assert (actions[False] == 0).all() and not roles[False].any()
  assert (actions[True] == np.array([[2], [2], [1]])).all()
  np.testing.assert_array_equal(roles[True], [True, True, False])


@pytest.mark.parametrize('env', ['catch', 'grid_world'])
def test_no_key_is_used_twice(env):
  options = {'size': 4, 'num_resources': 3} if env == 'grid_world' else {}
  environment = environments.make(env, **options)
  agent = dreamer_agent.make_dreamer(
    TINY, environment.observation_spec, environment.action_spec
  ).agent
  unroll = rollout.make_unroll(environment, agent, num_envs=2, sequence_length=3)
  with jax.debug_key_reuse(True):
    init = lambda key: agent.acting_params(agent.init_params(key))
    params = jax.eval_shape(init, jax.random.key(0))  # tracing detects it
    state = jax.eval_shape(unroll.init, jax.random.key(1))
    jax.eval_shape(unroll.unroll, params, jax.random.key(2), state, np.int32(0), np.int32(0))


def test_first_episode_of_each_environment_is_scored_over_several_unrolls(parts, monkeypatch):
  monkeypatch.setattr(episodes, 'UNROLL_LENGTH', 2)
  environment, agent, _, params = parts
  result = episodes.Play(environment, agent, 4).evaluate(params, jax.random.key(0), 8)
  assert result.episode_length == environment.max_steps
  wins = (8 * result.episode_return + 8) / 2  # of eight episodes, each won or lost by 1
  assert wins == round(wins) and 0 <= wins <= 8


class Endless(catch.Catch):
  """Never ends, and has no time limit; each step has reward 1."""

  @property
  def max_steps(self):
    return int(np.iinfo(np.int32).max)

  def step(self, key, state, action):
    del key, action
    observation = jnp.zeros(self.observation_spec.shape, self.observation_spec.dtype)
    return state, environment_lib.transition(1.0, observation)


@pytest.fixture(scope='module')
def endless(traced):
  """Plays in two endless environments, unrolled by five steps and for six at most."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(episodes, 'UNROLL_LENGTH', 5)
    patch.setattr(episodes, 'MOST_STEPS', 6)
    patch.setattr(wrappers, '_MOST_STEPS', 6)
    yield episodes.Play(Endless(**tiny.CATCH), traced.agent, 2)


def test_endless_episodes_count_as_they_stand_after_a_limit(endless, traced):
  evaluated = endless.evaluate(traced.params, jax.random.key(0), 4)
  assert evaluated == episodes.Evaluation(8.0, 8.0, None)
  assert len(endless.record(traced.params, jax.random.key(0)).frames) == 6


def test_evaluation_of_endless_episodes_stops_at_a_signal(endless, traced):
  asked = iter([False, True])
  assert endless.evaluate(traced.params, jax.random.key(0), 2, lambda: next(asked)) is None
  assert next(asked, 'asked twice') == 'asked twice'


def test_evaluation_is_due_by_steps_where_asked():
  schedule = evaluator.Schedule(actors_config.EvaluatorConfig(period=1e9, period_steps=100))
  assert schedule.is_due(30)
  schedule.begin(30)
  assert [schedule.is_due(step) for step in (30, 99, 100, 250)] == [False, False, True, True]
  schedule.begin(250)
  assert [schedule.is_due(step) for step in (250, 299, 300)] == [False, False, True]
  by_time = evaluator.Schedule(actors_config.EvaluatorConfig(period=1e9))
  assert by_time.is_due(0)
  by_time.begin(0)
  assert not by_time.is_due(10**9)
  with pytest.raises(ValueError, match=r'evaluator\.period_steps=0: must be at least 1'):
    actors_config.EvaluatorConfig(period_steps=0)
