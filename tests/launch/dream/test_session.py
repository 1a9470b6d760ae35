"""A steered dream: repetition, branches, members, its real side, and where a dream begins."""

import gymnasium
import jax
import numpy as np
import pytest

from hephaestus.actors import environments
from hephaestus.launch.dream import session as session_lib

ACTIONS = {'catch': [0, 2], 'walk': [1, 2]}


class Walk(gymnasium.Env):
  """Environment of a user: a place in [0, 4], and a mask; the third action ends the episode.

  With `drifts`, each episode begins elsewhere, whatever the seed.
  """

  observation_space = gymnasium.spaces.Box(0.0, 4.0, (2,), np.float32)
  action_space = gymnasium.spaces.Discrete(3)
  drifts = False
  resets = 0

  def _result(self):
    place = np.array([self.place, 4 - self.place], np.float32)
    return place, {'action_mask': np.array([self.place > 0, True, self.place < 4])}

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    Walk.resets += 1
    self.place = float(Walk.resets % 4 if self.drifts else self.np_random.integers(1, 3))
    return self._result()

  def step(self, action):
    self.place += int(action) - 1
    place, info = self._result()
    return place, self.place, bool(self.place >= 4), False, info


def walk():
  return gymnasium.wrappers.TimeLimit(Walk(), 20)


@pytest.fixture(scope='module')
def names():
  return {'walk': environments.register(walk)}


@pytest.fixture
def steer(begin, names):
  """(environment, seed) -> a session, with the names that ACTIONS has."""
  return lambda name='catch', seed=0: begin(names.get(name, name), seed)


def walked(session, actions, at=0, **how):
  for action in actions:
    at = session.act(at, action, **how)
  return at


def path(session, at):
  """The steps that lead to a step, from the first."""
  before = session.show(at)['parent']
  return [at] if before is None else [*path(session, before), at]


def shown(session, at):
  """The shown values of all steps up to one, without the numbers by which a session addresses them."""
  names = {'index', 'parent', 'branch'}
  steps = [session.show(index) for index in path(session, at)]
  return [{name: x for name, x in step.items() if name not in names} for step in steps]


@pytest.mark.parametrize('name', ACTIONS)
def test_same_actions_repeat_the_same_dream(steer, name):
  one, other = steer(name), steer(name)
  first = shown(one, walked(one, ACTIONS[name]))
  assert shown(other, walked(other, ACTIONS[name])) == first
  assert [step['action'] for step in first] == [None, *ACTIONS[name]]
  others = []
  for _ in range(4):  # of which few begin alike
    one.begin()
    others.append(shown(one, walked(one, ACTIONS[name])))
  assert any(each != first for each in others)


@pytest.mark.parametrize('name', ACTIONS)
def test_acting_from_an_earlier_step_begins_a_branch_and_keeps_the_other(steer, name):
  session = steer(name)
  one, other = ACTIONS[name]
  end = walked(session, [one, other, other])
  before = shown(session, end)
  start = path(session, end)[1]
  assert walked(session, [other, other], at=start) == end  # nothing is done twice
  branch = session.act(start, one)
  assert path(session, branch) == [*path(session, start), branch]
  assert session.show(branch)['branch'] == 1 and session.show(start)['branch'] == 0
  assert shown(session, end) == before
  again = steer(name)
  assert shown(again, walked(again, [one, one])) == shown(session, branch)


@pytest.mark.parametrize('name', ACTIONS)
def test_real_side_is_the_environment_stepped_directly(steer, name):
  session = steer(name, seed=3)
  actions = [*ACTIONS[name], ACTIONS[name][0]]
  walked(session, actions[1:])  # which an environment on the host has to undo
  end = walked(session, actions)
  key = jax.random.split(jax.random.fold_in(jax.random.key(3), 0), 3)[0]
  spec = session._programs.environment.action_spec
  if name == 'catch':
    environment = session._programs.environment
    state, timestep = environment.reset(key)
    steps = [timestep]
    for t, action in enumerate(actions):
      state, timestep = environment.step(jax.random.fold_in(key, t + 1), state, np.int32(action))
      steps.append(timestep)
  else:
    (instance,) = session._programs.environment.make(1)
    steps = [instance.reset(int(jax.random.bits(key)))]
    steps += [instance.step(np.asarray(action, spec.dtype)) for action in actions]
    instance.close()
  nodes = [session.nodes[index] for index in path(session, end)]
  for node, timestep in zip(nodes, steps, strict=True):
    jax.tree.map(np.testing.assert_array_equal, node.real.timestep, timestep)
  assert session.repeats
  total = sum(float(timestep.reward) for timestep in steps)
  assert session.show(end)['real']['return'] == pytest.approx(total, rel=1e-3)


def test_continuous_actions_are_repeated_after_a_rewind(steer):
  session = steer('gymnasium/Pendulum-v1')
  walked(session, [[0.5], [-1.5]])
  end = walked(session, [[-1.5], [0.5]])
  assert session.repeats and session.show(end)['branch'] == 1
  assert session.show(end)['action'] == [0.5]
  with pytest.raises(ValueError, match='1 numbers from -2 to 2 should be given'):
    session.act(0, [2.5])


def test_environment_that_does_not_repeat_is_noticed_after_a_rewind(steer, monkeypatch):
  monkeypatch.setattr(Walk, 'drifts', True)
  session = steer('walk')
  walked(session, [1, 1])
  assert session.repeats
  session.act(0, 2 if session.show(0)['real']['mask'][2] else 0)
  assert not session.repeats


@pytest.mark.parametrize('name', ['catch', 'walk'])
def test_dream_begins_from_the_posterior(steer, name):
  session = steer(name)
  end = walked(session, ACTIONS[name], member=1)
  begun = session.begin_dream(end)
  assert begun != end and session.begin_dream(begun) == begun == session.begin_dream(end)
  step, before = session.show(begun), session.show(end)
  assert step['begins'] == step['step'] == before['step'] and before['begins'] == 0
  assert (step['parent'], step['action']) == (before['parent'], before['action'])
  assert step['real'] == before['real'] and step['dream']['return'] == step['real']['return']
  for name in ('values', 'novelty', 'policy'):
    assert step['dream'][name] == step['real'][name]
  # The state holds the observed numbers.
  np.testing.assert_allclose(step['dream']['numbers'], step['real']['numbers'], atol=1e-3)


def test_members_and_samples_predict_differently(steer):
  session = steer('walk')
  ways = [
    {'member': 0}, {'member': 1}, {'member': None}, {'member': 0, 'sampled': False},
    {'member': 1, 'sampled': False},
  ]  # fmt: skip
  ends = [session.act(session.act(0, 1, **way), 1, **way) for way in ways]
  dreams = [str(session.show(end)['dream']['numbers']) for end in ends]
  assert len(set(dreams)) == len(ways)
  observed = {str(session.show(end)['real']['numbers']) for end in ends}
  assert len(observed) == 1
  assert any(x > 0 for x in session.show(ends[0])['dream']['disagreement'])
  assert session._programs.imagine._cache_size() == 1  # another way compiles nothing


def test_policy_acts_by_what_it_reads(steer):
  session = steer('catch')
  for reads in (session_lib.REAL, session_lib.DREAM):
    at = session.act(0, reads=reads)
    taken = session.show(at)['action']
    assert taken == session.nodes[0].choices[reads]
    assert sum(session.show(at)[reads]['policy']) == pytest.approx(1.0, abs=1e-2)


def test_dream_continues_beyond_the_real_episode(steer):
  session = steer('catch')
  end = walked(session, [1, 1, 1])
  assert session.show(end)['last'] and session.show(end)['real']['continues'] == 0.0
  beyond = walked(session, [None, 0], at=end)
  step = session.show(beyond)
  assert step['real'] is None and step['step'] == 5 and step['dream']['frame']
  with pytest.raises(ValueError, match='the real episode has ended before'):
    session.begin_dream(beyond)


def test_difference_and_disagreement_are_marked_in_the_picture(steer):
  session = steer('catch')
  end = walked(session, [0, 0])
  start, *steps = [session.show(index) for index in path(session, end)]
  assert start['real']['frame'] == start['dream']['frame'] and not start['difference']
  assert all(step['real']['frame'] != step['dream']['frame'] for step in steps)  # untrained
  assert all(step['difference'] for step in steps)
  same = np.zeros((20, 20, 3), np.uint8)
  other = same.copy()
  other[5:15, 5:15] = 255
  assert session_lib._png(session_lib._outline(same, same)) is None
  marked = session_lib._outline(same, other)[..., 3] > 0
  assert marked[5:15, 5:15].sum() == marked.sum() == 10**2 - 4**2


@pytest.mark.parametrize(
  ('name', 'asked', 'message'),
  [
    ('catch', {'at': 7}, 'at=7: there are steps 0 to 0'),
    ('catch', {'at': '0'}, "at='0': there are"),
    ('catch', {'at': 0, 'action': 3}, 'action=3: a whole number from 0 to 2 should be given'),
    ('catch', {'at': 0, 'action': 0.5}, 'action=0.5: a whole number'),
    ('catch', {'at': 0, 'member': 2}, 'member=2: there are members 0 to 1'),
    ('catch', {'at': 0, 'reads': 'mind'}, "reads='mind': choose real or dream"),
  ],
)
def test_wrong_request_is_refused(steer, name, asked, message):
  with pytest.raises(ValueError, match=message):
    steer(name).act(**asked)


def test_illegal_action_is_refused(steer):
  session = steer('walk')
  at = walked(session, [0, 0] if session.show(0)['real']['numbers'][0] == 2 else [0])
  assert session.show(at)['real']['mask'] == [False, True, True]
  with pytest.raises(ValueError, match='action=0: is not legal at this step'):
    session.act(at, 0)


def test_session_that_is_full_asks_for_a_new_episode(steer, monkeypatch):
  session = steer('catch')
  monkeypatch.setattr(session_lib, 'MOST_STEPS', 2)
  session.act(0, 1)
  with pytest.raises(ValueError, match='the session has 2 steps; begin a new episode'):
    session.act(1, 1)
  assert session.begin() == 0 and len(session.nodes) == 1


def test_vitals_have_names_and_places_among_the_numbers(begin):
  session = begin('oasis')
  described, numbers = session._programs.about['vitals'], session.show(0)['real']['numbers']
  assert [vital['name'] for vital in described] == ['food', 'water', 'energy']
  vitals = session.nodes[0].real.timestep.observation['vitals']
  assert [numbers[vital['position']] for vital in described] == pytest.approx(vitals, abs=1e-3)
  assert all(vital['most'] == 1 and 0 < vital['set_point'] <= 1 for vital in described)
  assert begin('catch')._programs.about['vitals'] == []


def test_real_steps_show_what_the_episodic_memory_recalls(begin, monkeypatch):
  programs = begin('oasis')._programs
  memory = programs._steering.dreamer.model.networks.memory
  first = begin('oasis').nodes[0].real.timestep.observation
  statistics = programs.params['statistics']
  ring = dict(statistics['memory'])
  ring['key'] = ring['key'].at[3].set(memory.key(first))
  ring['action'] = ring['action'].at[3, 2].set(1)
  ring['return_'], ring['written'] = ring['return_'].at[3].set(2.5), ring['written'].at[3].set(1)
  monkeypatch.setattr(
    programs, 'params', programs.params | {'statistics': statistics | {'memory': ring}}
  )
  session = begin('oasis')
  recalled = session.show(0)['real']['recalled']
  assert recalled['evidence'] == pytest.approx([0, 0, 1, 0, 0], abs=1e-3)
  assert recalled['value'] == pytest.approx([0, 0, 2.5, 0, 0], abs=1e-3)
  assert 'recalled' not in session.show(0)['dream']
  assert begin('catch').show(0)['real']['recalled'] is None
