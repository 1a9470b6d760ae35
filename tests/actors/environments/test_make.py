import functools
import json
import os
import pickle
import re
import subprocess
import sys

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors import environments
from hephaestus.actors.environments import catch, environment, host, packages, wrappers

MINE = """
from hephaestus.actors.environments import catch

class Mine(catch.Catch):
  pass

class Demanding(catch.Catch):
  def __init__(self, difficulty):
    del difficulty
"""


@pytest.fixture
def my_module(tmp_path, monkeypatch):
  """The name of a module on the import path with environments of a user."""
  (tmp_path / 'my_module.py').write_text(MINE)
  (tmp_path / 'my_broken_module.py').write_text('import a_library_that_is_missing')
  monkeypatch.syspath_prepend(tmp_path)
  yield 'my_module'
  sys.modules.pop('my_module', None)


def test_import_path_makes_a_users_environment(my_module):
  env = environments.make(f'{my_module}:Mine', columns=7)
  assert type(env).__name__ == 'Mine'
  assert env.columns == 7


@pytest.mark.parametrize(
  'name, options, words',
  [
    ('grid_word', {}, ["environment.name='grid_word'", 'did you mean grid_world?', 'catch']),
    ('no_such_module:World', {}, ['no_such_module', 'PYTHONPATH']),
    ('my_module:Mime', {}, ["environment.name='my_module:Mime'", 'did you mean Mine?']),
    ('my_module:Demanding', {}, ['environment.difficulty', 'needs a value']),
    ('catch', {'row': 3}, ['environment.row=3', 'did you mean rows?', 'columns, rows']),
    ('catch', {'rows': 1}, ['environment.rows=1', 'at least 2']),
    ('catch', {'rows': 'ten'}, ["environment.rows='ten'", 'whole number', '10']),
    ('grid_world', {'size': 0}, ['environment.size=0: at least 2 is needed']),
    ('grid_world', {'size': 2, 'num_resources': 4}, ['environment.num_resources=4', '1 to 3']),
    ('gymnaxx/CartPole-v1', {}, ["'gymnaxx/CartPole-v1'", 'did you mean gymnax', 'environments`']),
    *[
      (name, {'max_steps': 0}, ['environment.max_steps=0: at least 1 is needed'])
      for name in (
        'errands',
        'grid_world',
        'hackmatrix',
        'ice',
        'noisy_corridor',
        'oasis',
        'sprites',
      )
    ],
    ('ice', {'slip': 1.5}, ['environment.slip=1.5: a probability from 0 to 1']),
    (
      'noisy_corridor',
      {'pixels': 'grey'},
      ["environment.pixels=grey: choose 'binary' or 'normal'"],
    ),
    ('noisy_corridor', {'open_cells': 21}, ['environment.open_cells=21: from 1 to 20, or null']),
    ('oasis', {'alive_reward': True}, ['environment.alive_reward']),
    ('sprites', {'num_objects': 13}, ['environment.num_objects=13: choose from 1 to 12']),
  ],
)
def test_error_names_field_value_and_remedy(my_module, name, options, words):
  del my_module
  with pytest.raises(ValueError) as error:
    environments.make(name, **options)
  for word in words:
    assert word in str(error.value)


def test_missing_import_of_a_users_module_is_reported_as_it_is(my_module):
  del my_module
  with pytest.raises(ModuleNotFoundError, match='a_library_that_is_missing'):
    environments.make('my_broken_module:World')


def test_unknown_name_or_option_of_a_family_is_rejected():
  pytest.importorskip('gymnax', reason='of the extra envs')
  for name, options, words in (
    ('gymnax/Cartpole-v1', {}, ['did you mean CartPole-v1?', '`hephaestus environments`']),
    ('gymnax/CartPole-v1', {'gravty': 1.0}, ['environment.gravty=1.0', 'did you mean gravity?']),
    ('gymnax/CartPole-v1', {'gravity': 'low'}, ["environment.gravity='low'", 'a number']),
    ('gymnax/CartPole-v1', {'max_steps': 2.5}, ['environment.max_steps=2.5', 'whole number']),
    ('gymnax/CartPole-v1', {'max_steps': 0}, ['environment.max_steps=0', 'at least 1']),
  ):
    with pytest.raises(ValueError) as error:
      environments.make(name, **options)
    for word in words:
      assert word in str(error.value)


def test_options_of_gymnax_take_whole_numbers_and_lists():
  pytest.importorskip('gymnax', reason='of the extra envs')
  from hephaestus.actors.environments import catalogue

  times = [1, 2, 3, 4, 50]
  for name, options in (
    ('BernoulliBandit-misc', {'reward_prob': 0}),
    ('DiscountingChain-bsuite', {'reward_timestep': times}),
  ):
    environment = environments.make(f'gymnax/{name}', **options)
    jax.eval_shape(environment.reset, jax.random.key(0))
    wrappers.check_values(environment, jax.random.key(0))
    json.dumps(catalogue.describe(f'gymnax/{name}'))
  with pytest.raises(ValueError, match=r'environment.reward_timestep=\[1\]: a list of numbers'):
    environments.make('gymnax/DiscountingChain-bsuite', reward_timestep=[1])


def test_first_observation_of_jumanjis_tsp_fits_its_spec():
  pytest.importorskip('jumanji', reason='of the extra envs')
  wrappers.check_values(environments.make('jumanji/TSP-v1'), jax.random.key(0))


@pytest.mark.parametrize(('name', 'costly'), [('Maze-v0', True), ('Snake-v1', False)])
def test_environments_that_generate_levels_have_costly_resets(name, costly):
  pytest.importorskip('jumanji', reason='of the extra envs')
  assert environments.make(f'jumanji/{name}').has_costly_reset == costly


def test_environments_with_several_agents_are_rejected():
  pytest.importorskip('jumanji', reason='of the extra envs')
  with pytest.raises(ValueError, match=r'jumanji/Cleaner-v0.*several agents'):
    environments.make('jumanji/Cleaner-v0')


def test_positions_in_a_matrix_of_bits_are_planes_of_it():
  pytest.importorskip('jumanji', reason='of the extra envs')
  maze = environments.make('jumanji/Maze-v0')
  assert {name: leaf.shape for name, leaf in maze.observation_spec.items()} == {
    'action_mask': (4,), 'step_count': (), 'walls': (10, 10, 3),
  }  # fmt: skip
  _, timestep = maze.reset(jax.random.key(0))
  walls, agent, target = np.moveaxis(np.asarray(timestep.observation['walls']), -1, 0)
  assert walls.sum() > 2 and agent.sum() == target.sum() == 1
  # What the mask says of the first action, up, is what the cell above the agent says.
  ((row, column),) = np.argwhere(agent)
  free = row > 0 and not walls[row - 1, column]
  assert bool(timestep.observation['action_mask'][0]) == free


def test_missing_package_of_a_family_is_named_with_its_command(monkeypatch):
  module = environments.FAMILIES['gymnax']
  monkeypatch.delitem(sys.modules, module, raising=False)
  monkeypatch.setitem(sys.modules, 'gymnax', None)  # which Python takes as not installed
  with pytest.raises(
    ValueError, match=f"need the package 'gymnax'.*{re.escape(packages.install('envs', 'gymnax'))}"
  ):
    environments.make('gymnax/CartPole-v1')


class Still(environment.Environment):
  """A consistent environment; each class below violates one requirement."""

  action_spec = specs.DiscreteArray(2)
  max_steps = 1

  @property
  def observation_spec(self):
    return {'place': specs.Array((2,), np.float32)}

  def reset(self, key):
    del key
    return {'count': jnp.zeros((), jnp.int32)}, environment.restart({'place': jnp.zeros(2)})

  def step(self, key, state, action):
    del key, action
    return state, environment.termination(0.0, {'place': jnp.ones(2)})


def broken(kind=Still, **attributes):
  """An instance of a sub-class with other attributes; a function of a state is its state after a step."""
  return type('Broken', (kind,), attributes)()


def stepping(state=lambda state: state, **changes):
  """A method `step` with another state, or other fields of the time step."""

  def step(self, key, old, action):
    old, timestep = Still.step(self, key, old, action)
    return state(old), timestep._replace(**changes)

  return step


LONG_MASK = {'action_mask': jnp.ones(3, bool)}
MASKED = {
  'observation_spec': {'action_mask': specs.Array((3,), bool)},
  'reset': lambda self, key: (jnp.zeros(()), environment.restart(LONG_MASK)),
  'step': stepping(observation=LONG_MASK),
}
CONTRADICTIONS = [
  (
    {'step': stepping(lambda state: {'count': jnp.zeros(2, int)})},
    ["['count']", 'int32[]', 'int32[2]'],
  ),
  ({'step': stepping(lambda state: {'count': state['count'] * 0.5})}, ["['count']", 'float32[]']),
  ({'step': stepping(lambda state: {})}, ["state['count']", 'nothing']),
  (
    {'step': stepping(observation={'place': jnp.zeros(3)})},
    ["timestep.observation['place']", 'float32[2]', 'float32[3]'],
  ),
  (
    {'observation_spec': {'place': specs.Array((2,), np.uint8)}},
    ["timestep.observation['place']", 'uint8[2]', 'float32[2]'],
  ),
  ({'step': stepping(reward=jnp.zeros(2))}, ['timestep.reward', 'float32[]', 'float32[2]']),
  (MASKED, ['action_mask', 'bool[2]', 'bool[3]']),
  (
    {**MASKED, 'action_spec': specs.BoundedArray((2,), np.int32, 0, [1, 2])},
    ['action_mask', 'bool[5]', 'bool[3]'],
  ),
  ({'action_spec': specs.DiscreteArray(2, np.int64)}, ['action_spec', 'int64', 'int32']),
  ({'action_spec': specs.BoundedArray((2,), np.int32, 1, 2)}, ['action_spec', 'begins with 0']),
  (
    {'action_spec': specs.BoundedArray((1,), np.float32, -np.inf, np.inf)},
    ['action_spec=', 'finite bounds are needed'],
  ),
  (
    {'action_spec': specs.BoundedArray((1,), np.float32, -3e38, 3e38)},
    ['action_spec=', 'finite difference'],
  ),
  ({'action_names': ('up', 'down', 'left')}, ["action_names=('up', 'down', 'left')", '2 choices']),
  ({'max_steps': None}, ['max_steps=None']),
  (
    {'observation_spec': {'a': specs.Array((10**12,), np.float32)}},
    ["observation_spec['a']: has shape [1000000000000]", 'at most 16,777,216 numbers fit'],
  ),
  (
    {'scripted_action': lambda self, state: state['count'] * 1.0},
    ['scripted_action', 'int32[]', 'float32[]'],
  ),
]


def test_package_of_an_environment_has_its_version():
  pytest.importorskip('gymnax')
  assert re.fullmatch(r'gymnax \d+\.\d+.*', environments.package('gymnax/CartPole-v1'))
  assert environments.package('catch') is environments.package('my/module:Class') is None


def test_consistent_environment_passes_check():
  environment.check(Still())


@pytest.mark.parametrize('attributes, words', CONTRADICTIONS)
def test_check_rejects_a_contradictory_environment_by_field(attributes, words):
  with pytest.raises(ValueError) as error:
    environment.check(broken(**attributes))
  for word in words:
    assert word in str(error.value)


class Faulty(Still):
  """Counts up to `last` and terminates; the observation, a mask among them, may be wrong on the way."""

  max_steps = 5
  observation_spec = {  # noqa: RUF012  as in other environments
    'place': specs.BoundedArray((2,), np.float32, 0.0, 1.0),
    'action_mask': specs.BoundedArray((2,), bool, False, True),
  }

  def __init__(self, *, highest=1.0, is_legal=True, last=5, max_steps=5, **third):
    self.highest, self.is_legal, self.last = highest, is_legal, last
    self.max_steps, self.third = max_steps, third

  def reset(self, key):
    del key
    return jnp.zeros((), jnp.int32), environment.restart(self._observe(0))

  def step(self, key, state, action):
    del key, action
    timestep = environment.transition(0.0, self._observe(state + 1))
    is_last = state + 1 == self.last
    step_type = jnp.where(is_last, dm_env.StepType.LAST.value, timestep.step_type)
    for name, value in self.third.items():
      changed = jnp.where(state == 2, jnp.float32(value), getattr(timestep, name))
      timestep = timestep._replace(**{name: changed})
    return state + 1, timestep._replace(step_type=step_type)

  def _observe(self, count):
    place = jnp.where(count == 3, jnp.float32(self.highest), 1.0) * jnp.array([0.0, 1.0])
    legal = jnp.where(count >= 1, self.is_legal, True)
    return {'place': place, 'action_mask': jnp.array([False, True]) & legal}


@pytest.mark.parametrize(
  'wrong, words',
  [
    ({}, None),
    (
      {'highest': 7.0},
      "observation['place']: the spec says 0 to 1, it is 7 when the environment is",
    ),
    ({'highest': np.nan}, "observation['place']: is not always finite"),
    ({'reward': np.inf}, 'reward: is not always finite'),
    ({'discount': 1.5}, 'discount: is not always within [0, 1]'),
    ({'is_legal': False}, "observation['action_mask']: no action is legal at 75% of steps"),
    ({'last': 6}, 'wrappers.TimeLimit would; it has not ended at step 5 when'),
  ],
)
def test_wrong_values_are_refused_by_random_actions(wrong, words):
  env = Faulty(**wrong)
  environment.check(env)
  check = functools.partial(wrappers.check_values, env, jax.random.key(0), num_envs=2, num_steps=8)
  if words is None:
    assert check() == []
    return
  with pytest.raises(ValueError) as error:
    check()
  assert words in str(error.value)


def test_limit_that_no_random_episode_reaches_is_a_warning():
  endless = Faulty(last=-1, max_steps=2**31 - 1)
  (warning,) = wrappers.check_values(endless, jax.random.key(0), num_envs=2, num_steps=8)
  assert 'no episode with random actions ended within 8 steps' in warning
  assert 'max_steps=2,147,483,647' in warning


def test_making_an_environment_initialises_no_device():
  code = "import hephaestus.actors.environments as e; [e.make(name) for name in e.ENVIRONMENTS]; print('made')"
  made = subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, 'JAX_PLATFORMS': 'none_such'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert made.stdout == 'made\n', made.stderr


def test_instance_gets_a_name_that_no_other_has():
  """This holds also after a resumed run has given one a later name."""

  class Mine(catch.Catch):
    pass

  instances = [Mine(), Mine(), Mine()]
  names = [environments.register(instances[0], 'instance:Mine-1')]
  names += [environments.register(each) for each in instances[1:]]
  assert names[0] == 'instance:Mine-1'
  assert all(environments.make(name) is each for name, each in zip(names, instances, strict=True))


@pytest.mark.parametrize('kind', ['function', 'limited', 'made'])
def test_gymnasium_environments_of_a_function_or_of_one_that_was_made(kind):
  gymnasium = pytest.importorskip('gymnasium')
  make = lambda: gymnasium.make('CartPole-v1', max_episode_steps=33)
  given = make() if kind == 'made' else make
  options = {'max_steps': 7} if kind == 'limited' else {}
  env = environments.make(environments.register(given), **options)
  assert isinstance(env, host.HostEnvironment)
  assert env.max_steps == (7 if kind == 'limited' else 33)
  assert env.observation_spec.shape == (4,) and env.action_spec.num_values == 2


@pytest.mark.parametrize(
  ('given', 'options', 'words'),
  [
    (5, {}, r'env=5: give a name, an instance of .*, or a class or function'),
    (lambda: 5, {}, "'instance:lambda-.': gives 5; an environment of gymnasium or dm_env is"),
    (catch.Catch, {'rose': 4}, 'environment.rose=4: .* has no such option; did you mean rows'),
  ],
)
def test_object_that_makes_no_environment_is_refused(given, options, words):
  with pytest.raises(ValueError, match=words):
    environments.make(environments.register(given), **options)


def test_gymnasium_instance_without_a_spec_is_refused():
  gymnasium = pytest.importorskip('gymnasium')
  env = gymnasium.make('CartPole-v1').unwrapped
  env.spec = None
  with pytest.raises(ValueError, match=r'is one instance, .*; give its class, or a function'):
    environments.register(env)


@pytest.mark.parametrize(
  'spec, field',
  [
    (environment.ViewSpec((2,), np.float32, 0.0, 1.0, np.cos), 'view'),
    (environment.BoardSpec((24,), np.float32, (2, 3, 4)), 'board_shape'),
    (environment.BoardSpec((26,), np.float32, (2, 3, 4), player=(0, 1)), 'player'),
    (
      environment.VitalsSpec(
        (2,), np.float32, 0.0, 1.0, [environment.Vital('food', 1)], are_paid=True
      ),
      'vitals',
    ),
  ],
)
def test_copied_spec_keeps_its_own_field(spec, field):
  for copy in (pickle.loads(pickle.dumps(spec)), spec.replace(name='other')):
    assert type(copy) is type(spec) and copy == spec
    assert getattr(copy, field) == getattr(spec, field)
    assert getattr(copy, 'are_paid', True)


def test_board_larger_than_its_vector_is_rejected():
  with pytest.raises(ValueError, match=r'board_shape=\(2, 3, 4\)'):
    environment.BoardSpec((23,), np.float32, (2, 3, 4))
  with pytest.raises(ValueError, match=r'player=\(0, 2\)'):
    environment.BoardSpec((26,), np.float32, (2, 3, 4), player=(0, 2))
  with pytest.raises(ValueError, match=r'player=\(0, 1\): .* no bool'):
    environment.BoardSpec((26,), bool, (2, 3, 4), player=(0, 1))


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('catch', {'rows': 10**9}),
    ('catch', {'cell_pixels': 10**5}),
    ('grid_world', {'size': 10**5}),
    ('noisy_corridor', {'length': 10**9}),
  ],
)
def test_observation_that_no_memory_holds_is_refused(name, options):
  (option,) = options
  with pytest.raises(
    ValueError,
    match=rf'environment\.(.*, environment\.)?{option}=1.*: at most 16,777,216 numbers fit',
  ):
    environments.make(name, **options)


def test_craftax_shows_where_the_player_looks_in_the_middle_of_its_map():
  pytest.importorskip('craftax', reason='of the extra envs')
  from hephaestus.actors.environments import craftax

  size = 7 * 9 * 21
  observation = np.zeros(size + 22, np.float32)
  observation[[0, size - 1, size + 16 + 2]] = (
    1  # first and last feature of the cells, the third direction
  )
  observation[size + 20] = 0.75  # light
  shown = craftax.show_classic(jnp.asarray(observation))
  np.testing.assert_array_equal(np.argwhere(shown['map']), [(0, 0, 0), (3, 4, 23), (6, 8, 20)])
  np.testing.assert_array_equal(shown['status'], 0.75 * (np.arange(18) == 16))
