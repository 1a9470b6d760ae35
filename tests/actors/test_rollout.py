"""Unrolls: alignment of time steps, seams of sequences, one trace, and unique keys."""

import itertools

import corridor
import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from hephaestus.actors import config as actors_config
from hephaestus.actors import environments, episodes, evaluator, rollout
from hephaestus.actors.environments import catch, host, wrappers
from hephaestus.actors.environments import environment as environment_lib
from hephaestus.agents import agent as agent_lib
from hephaestus.agents import experience

NUM_ENVS, NUM_STEPS = 3, 6
FIRST, MID, LAST = (int(step_type) for step_type in dm_env.StepType)


def make_agent(count_trace=lambda: None):
  """Samples a legal action, or takes the last legal one; its state counts the steps of an episode."""

  def act(params, key, policy_state, timestep, *, greedy):
    count_trace()
    mask = timestep.observation['action_mask']
    logits = jnp.where(mask, params * jnp.arange(3.0), -jnp.inf)
    action = jnp.argmax(logits, -1) if greedy else jax.random.categorical(key, logits)
    action = action.astype(jnp.int32)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
    num_steps = jnp.where(timestep.first(), 0, policy_state) + 1
    return num_steps, experience.Decision(action, {'log_prob': log_prob})

  return agent_lib.Agent(
    init_params=lambda key: jnp.float32(0.1),
    acting_params=lambda params: params,
    initial_policy_state=lambda num_envs: jnp.zeros(num_envs, jnp.int32),
    stored_state=lambda policy_state: policy_state,
    act=act,
  )


PARAMS = jnp.float32(0.1)


def make_unroll(environment, agent=None):
  return rollout.make_unroll(
    environment, agent or make_agent(), num_envs=NUM_ENVS, sequence_length=NUM_STEPS
  )


def play(unroll, seed=1, count=16):
  init_key, *keys = jax.random.split(jax.random.key(seed), count + 1)
  state = unroll.init(init_key)
  result = []
  for key in keys:
    state, sequence, episodes = unroll.unroll(PARAMS, key, state, np.int32(5), np.int32(9))
    result.append((jax.device_get(sequence), jax.device_get(episodes)))
  return result


@pytest.fixture(scope='module', params=['jax', 'dm_env', 'gymnasium'])
def family(request):
  return request.param


@pytest.fixture(scope='module')
def environment(family):
  return corridor.make(family)


@pytest.fixture(scope='module')
def unroll(environment):
  return make_unroll(environment)


@pytest.fixture(scope='module')
def played(unroll):
  return play(unroll)


@pytest.fixture(scope='module')
def stream(played):
  """[N, ...] time steps of all sequences, each once."""
  rows = [
    jax.tree.map(
      lambda x: x[:, :-1],
      (
        sequence.step_type,
        sequence.reward,
        sequence.discount,
        sequence.observation,
        sequence.action,
      ),
    )
    for sequence, _ in played
  ]
  return jax.tree.map(lambda *xs: np.concatenate(xs, axis=1), *rows)


def test_specs_have_dtypes_of_jax(environment, played):
  assert environment.observation_spec['place'].dtype == np.int32
  assert environment.observation_spec['wind'].dtype == np.float32
  assert environment.observation_spec['action_mask'].dtype == bool
  assert environment.action_spec.num_values == 3
  for name, spec in environment.observation_spec.items():
    values = played[0][0].observation[name]
    assert (values.shape, values.dtype) == ((NUM_ENVS, NUM_STEPS, *spec.shape), spec.dtype)


def test_first_follows_last_in_the_next_step(stream):
  step_type, *_ = stream
  assert (step_type[:, 0] == FIRST).all()
  last = step_type[:, :-1] == LAST
  assert last.any(axis=1).all()
  np.testing.assert_array_equal(step_type[:, 1:] == FIRST, last)


def test_end_terminates_and_time_limit_truncates(stream):
  step_type, _, discount, observation, _ = stream
  last = step_type == LAST
  at_end = observation['place'][..., 0] == corridor.LENGTH
  np.testing.assert_array_equal(discount[last] == 0, at_end[last])
  assert (discount[~last] == 1).all()
  assert at_end[last].any() and not at_end[last].all()
  for each in step_type:
    ends = np.flatnonzero(each == LAST)
    assert max(np.diff([-1, *ends])) == corridor.MAX_STEPS + 1


def test_step_follows_from_the_previous_action_and_last_observation_is_kept(stream):
  step_type, reward, _, observation, action = stream
  place = observation['place'][..., 0]
  follows = step_type[:, 1:] != FIRST
  np.testing.assert_array_equal(
    place[:, 1:][follows], (place[:, :-1] + action[:, :-1] - 1)[follows]
  )
  np.testing.assert_array_equal(reward[:, 1:][follows], place[:, 1:][follows])
  assert (reward[step_type == FIRST] == 0).all()
  assert (place[step_type == FIRST] == 1).all()


def test_actions_are_legal(stream):
  step_type, _, _, observation, action = stream
  legal = np.take_along_axis(observation['action_mask'], action[..., None], -1)[..., 0]
  assert legal[step_type != LAST].all()
  assert not observation['action_mask'].all()


def test_adjacent_sequences_share_one_step(played):
  for (before, _), (after, _) in itertools.pairwise(played):
    for name in ('observation', 'reward', 'discount', 'step_type'):
      jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[:, -1], y[:, 0]),
        getattr(before, name), getattr(after, name),
      )  # fmt: skip


def test_episodes_match_rewards_and_step_types(stream, played):
  step_type, reward, *_ = stream
  ended, episode_return, episode_length = (
    np.concatenate([getattr(episodes, name) for _, episodes in played]).T
    for name in ('ended', 'episode_return', 'episode_length')
  )
  for n in range(NUM_ENVS):
    begin = 0
    for end in np.flatnonzero(step_type[n] == LAST):
      assert ended[n, end - 1]
      assert episode_return[n, end - 1] == reward[n, begin : end + 1].sum()
      assert episode_length[n, end - 1] == end - begin
      begin = end + 1


def test_stored_state_is_the_one_before_the_first_step(played):
  assert (played[0][0].initial_state == 0).all()
  since_first = lambda types: NUM_STEPS - 1 - np.flatnonzero(types[:-1] == FIRST).max(initial=0)
  (before, _), (after, _) = played[:2]
  np.testing.assert_array_equal(after.initial_state, [since_first(n) for n in before.step_type])


def test_sequences_have_version_actor_and_unique_identity(played):
  sequences = [sequence for sequence, _ in played]
  assert all((s.version == 5).all() and (s.actor_id == 9).all() for s in sequences)
  identities = {identity for s in sequences for identity in s.identity.tolist()}
  assert len(identities) == len(sequences) * NUM_ENVS


def test_trajectory_depends_on_the_key_and_not_on_threads(environment, unroll, played, monkeypatch):
  again = play(unroll, count=4)
  monkeypatch.setattr(host, 'MAX_THREADS', 2)
  elsewhere = play(make_unroll(environment), count=4)
  other = play(unroll, seed=2, count=4)
  jax.tree.map(np.testing.assert_array_equal, again, played[:4])
  jax.tree.map(np.testing.assert_array_equal, elsewhere, played[:4])
  wind = lambda run: run[0][0].observation['wind'][:, 0]
  assert len({*wind(other).tolist(), *wind(again).tolist()}) == 2 * NUM_ENVS


def test_policy_is_traced_once(environment):
  traces = []
  unroll = make_unroll(environment, make_agent(lambda: traces.append(1)))
  play(unroll, count=1)
  after_one = len(traces)
  play(unroll, count=2)
  assert len(traces) == after_one > 0


def test_no_key_of_the_corridor_is_used_twice(environment):
  with jax.debug_key_reuse(True):
    play(make_unroll(environment), count=1)


def test_schema_matches_a_stored_sequence_without_stepping(environment, played):
  before = corridor.Corridor.num_steps
  schema = rollout.sequence_schema(make_unroll(environment), jax.eval_shape(lambda: PARAMS))
  assert corridor.Corridor.num_steps == before
  stored = jax.tree.map(lambda x: x[0], played[0][0])
  abstract = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert abstract(schema) == abstract(stored)


def test_whole_episodes_are_scored_over_several_unrolls(environment, monkeypatch):
  for length in ('UNROLL_LENGTH', 'HOST_UNROLL_LENGTH'):
    monkeypatch.setattr(episodes, length, 3)
  best = episodes.Play(environment, make_agent(), 4).evaluate(PARAMS, jax.random.key(0), 8)
  # One step to the right each time: 2, 3, 4.
  assert best == episodes.Evaluation(9.0, 3.0, None)
  staying = episodes.Play(environment, make_agent(), 4).evaluate(-PARAMS, jax.random.key(0), 4)
  assert staying.episode_length == corridor.MAX_STEPS


def test_video_has_a_frame_for_every_step(environment, family):
  frames = episodes.Play(environment, make_agent(), 2).record(PARAMS, jax.random.key(0)).frames
  places = frames and [frame[0, 0, 0] for frame in frames]
  assert places == ([1, 2, 3, 4] if family == 'gymnasium' else None)


def test_explorer_acts_only_in_unrolls_that_collect_experience():
  """An evaluation, which does not ask for it, follows the policy of the task everywhere."""
  environment = environments.make('catch')

  def act(params, key, policy_state, timestep, *, greedy, explores=None):
    del params, key, greedy
    action = jnp.zeros(NUM_ENVS, int) if explores is None else jnp.where(explores, 2, 1)
    return policy_state, experience.Decision(action, extras={})

  exploring = lambda params, key, num_envs: jnp.arange(num_envs) < num_envs - 1
  agent = rollout.random_agent(environment.action_spec)._replace(act=act, exploring=exploring)
  actions, roles = {}, {}
  for explore in (False, True):
    unroll = rollout.make_unroll(
      environment, agent, num_envs=NUM_ENVS, sequence_length=NUM_STEPS, explore=explore
    )
    ((sequence, ended_episodes),) = play(unroll, count=1)
    actions[explore], roles[explore] = sequence.action[:, :-1], ended_episodes.explored.any(0)
  assert (actions[False] == 0).all() and not roles[False].any()
  assert (actions[True] == np.array([[2], [2], [1]])).all()
  np.testing.assert_array_equal(roles[True], [True, True, False])


def test_episode_in_which_the_explorer_acted_in_an_earlier_unroll_is_not_reported(environment):
  act = make_agent().act
  agent = make_agent()._replace(
    act=lambda *arguments, explores, **options: act(*arguments, **options),
    exploring=lambda params, key, num_envs: (params > 1) & (jnp.arange(num_envs) < num_envs - 1),
  )
  unroll = rollout.make_unroll(
    environment, agent, num_envs=NUM_ENVS, sequence_length=3, greedy=True, explore=True
  )
  state, reported = unroll.init(jax.random.key(0)), []
  for seed, params in enumerate((2.0, 1.0, 1.0, 1.0)):  # explores in the first unroll only
    state, _, played = unroll.unroll(jnp.float32(params), jax.random.key(seed), state, 0, 0)
    reported.append(np.asarray(played.reported).tolist())
  # Each episode has three steps, and one that resets.
  none, every = [False] * NUM_ENVS, [True] * NUM_ENVS
  assert reported == [[none, none], [[False, False, True], none], [none, none], [every, none]]


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
def endless():
  """Plays in two endless environments, unrolled by five steps and for six at most."""
  environment = Endless(**tiny.CATCH)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(episodes, 'UNROLL_LENGTH', 5)
    patch.setattr(episodes, 'MOST_STEPS', 6)
    patch.setattr(wrappers, '_MOST_STEPS', 6)
    yield episodes.Play(environment, rollout.random_agent(environment.action_spec), 2)


def test_endless_episodes_count_as_they_stand_after_a_limit(endless):
  evaluated = endless.evaluate((), jax.random.key(0), 4)
  assert evaluated == episodes.Evaluation(8.0, 8.0, None)
  assert len(endless.record((), jax.random.key(0)).frames) == 6


def test_evaluation_of_endless_episodes_stops_at_a_signal(endless):
  asked = iter([False, True])
  assert endless.evaluate((), jax.random.key(0), 2, lambda: next(asked)) is None
  assert next(asked, 'asked twice') == 'asked twice'


def test_evaluation_is_due_by_steps_where_asked():
  schedule = evaluator.Schedule(actors_config.EvaluatorConfig(period=1e9, period_steps=100), 1000)
  assert schedule.is_due(30)
  schedule.begin(30)
  assert [schedule.is_due(step) for step in (30, 99, 100, 250)] == [False, False, True, True]
  schedule.begin(250)
  assert [schedule.is_due(step) for step in (250, 299, 300)] == [False, False, True]
  by_time = evaluator.Schedule(actors_config.EvaluatorConfig(period=1e9), 1000)
  assert by_time.is_due(0)
  by_time.begin(0)
  assert not by_time.is_due(10**9)
  after_long = evaluator.Schedule(actors_config.EvaluatorConfig(period=1e-9), 10**9)
  after_long.begin(0)
  assert after_long.is_due(1)
  after_long.wait(1e9)
  assert not after_long.is_due(1)
  with pytest.raises(ValueError, match=r'evaluator\.period_steps=0: must be at least 1'):
    actors_config.EvaluatorConfig(period_steps=0)


@pytest.mark.parametrize(('seconds', 'count'), [(0.01, 30), (0.2, 14), (8.0, 3)])
def test_evaluations_of_a_fast_run_give_thirty_points_and_take_a_tenth_of_its_time(
  monkeypatch, seconds, count
):
  clock = [0.0]
  monkeypatch.setattr(evaluator.time, 'monotonic', lambda: clock[0])
  schedule = evaluator.Schedule(actors_config.EvaluatorConfig(period=20.0), 1200)
  found = 0
  for step in range(1200):  # in 24 seconds
    clock[0] += 0.02
    if schedule.is_due(step):
      schedule.begin(step)
      clock[0] += seconds if found else 5.0  # the first compiles
      schedule.end()
      found += 1
  assert abs(found - count) <= 1
