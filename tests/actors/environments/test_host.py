"""Environments stepped on the host: conversion of their values, and error messages."""

import sys
import types

import corridor
import dm_env
import jax
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors import environments, episodes, rollout
from hephaestus.actors.environments import host, wrappers
from hephaestus.launch import user_errors

Corridor, LENGTH, MAX_STEPS = corridor.Corridor, corridor.LENGTH, corridor.MAX_STEPS
FIRST, MID, LAST = dm_env.StepType


def make_unroll(environment):
  agent = rollout.random_agent(environment.action_spec)
  return rollout.make_unroll(environment, agent, num_envs=3, sequence_length=6)


@pytest.fixture(scope='module')
def environment():
  return corridor.make('dm_env')


def test_outdated_state_is_rejected(environment):
  unroll = make_unroll(environment)
  old = unroll.init(jax.random.key(0))
  unroll.init(jax.random.key(0))
  with pytest.raises(ValueError, match='newest state'):
    unroll.unroll((), jax.random.key(1), old, np.int32(0), np.int32(0))


def test_compiling_a_host_environment_is_rejected(environment):
  with pytest.raises(ValueError, match='cannot be compiled'):
    jax.eval_shape(make_unroll(environment).init, jax.random.key(0))
  with pytest.raises(ValueError, match='cannot be compiled'):
    environment.reset(jax.random.key(0))
  assert wrappers.reference_returns(environment) is None


def test_exception_of_an_environment_ends_the_unroll():
  class Breaking(Corridor):
    def step(self, action):
      if self._place == 2:
        raise OSError('the game has crashed')
      return super().step(action)

  unroll = make_unroll(wrap(Breaking))
  state = unroll.init(jax.random.key(0))
  words = rf"name='corridor'.*OSError\('the game has crashed'\) \({__file__}:\d+, in step\)"
  with pytest.raises(host.Failure, match=words) as error:
    for key in jax.random.split(jax.random.key(1), 9):
      state, *_ = unroll.unroll((), key, state, np.int32(0), np.int32(0))
  assert isinstance(error.value.__cause__, OSError)  # whose traceback is shown, too


class Thin(host.LibraryEnv):
  """An environment of dm_env without conversion."""

  action_spec = specs.DiscreteArray(3)
  inner = None

  def __init__(self, inner):
    self.inner = self._inner = inner

  @property
  def observation_spec(self):
    return self._inner.observation_spec()

  def reset(self, seed):
    return self._inner.reset()

  def step(self, action):
    return self._inner.step(int(action) - 1)


def wrap(kind, **options):
  return host.HostEnvironment(lambda: Thin(kind(**options)), MAX_STEPS, name='corridor')


class Slipping(Corridor):
  """Violates its spec, from the reset or from the first step on."""

  def __init__(self, at=FIRST, changes=(), **timestep):
    super().__init__()
    self._at, self._changes, self._timestep = at, dict(changes), timestep

  def reset(self):
    return self._slip(super().reset())

  def step(self, action):
    return self._slip(super().step(action))

  def _slip(self, timestep):
    if timestep.step_type < self._at:
      return timestep
    observation = {**timestep.observation, **self._changes}
    observation = {name: value for name, value in observation.items() if value is not None}
    return timestep._replace(observation=observation, **self._timestep)


@pytest.mark.parametrize(
  'options, words',
  [
    ({'changes': {'place': np.zeros(2, int)}}, ["observation['place']", '[1]', 'reset', '[2]']),
    ({'changes': {'place': np.zeros(1)}}, ["observation['place']", 'int32', 'float64']),
    ({'changes': {'wind': np.nan}, 'at': MID}, ["observation['wind']", 'step', 'not finite']),
    ({'changes': {'wind': None}}, ["observation['wind']", 'the spec has it, reset does not']),
    ({'reward': np.zeros(2), 'at': MID}, ['timestep.reward', 'one finite number']),
    ({'step_type': dm_env.StepType.MID}, ['timestep.step_type', 'FIRST is needed']),
  ],
)
def test_environment_that_contradicts_its_specs_is_rejected_by_field(options, words):
  with pytest.raises(ValueError) as error, np.errstate(over='ignore'):
    wrap(Slipping, **options)
  for word in ("environment.name='corridor': ", f'({__file__}:', *words):
    assert word in str(error.value)


class Walk(host.LibraryEnv):
  """Its place counts its steps up to `last`, under bounds of 0 to 5; none is legal from `stuck` on."""

  action_spec = specs.DiscreteArray(2)
  observation_spec = {  # noqa: RUF012  as in other environments
    'place': specs.BoundedArray((1,), np.float64, 0, 5),
    'action_mask': specs.BoundedArray((2,), bool, False, True),
  }

  def __init__(self, last=5, stuck=9):
    self._last, self._stuck = last, stuck

  def reset(self, seed):
    self._place = 0
    return dm_env.restart(self._observe())

  def step(self, action):
    assert action == 1 or self._place >= self._stuck
    self._place += 1
    end = dm_env.termination if self._place == self._last else dm_env.transition
    return end(0.0, self._observe())

  def _observe(self):
    legal = np.array([False, self._place < self._stuck])
    return {'place': np.full(1, self._place, float), 'action_mask': legal}


@pytest.mark.parametrize(
  'wrong, words',
  [
    ({'last': 7}, "observation['place']: the spec says 0 to 5, it is 6 when the environment is"),
    ({'stuck': 1}, "observation['action_mask']: no action is legal at 70% of steps"),
  ],
)
def test_broken_host_environment_is_refused_by_random_actions(wrong, words):
  environment = host.HostEnvironment(lambda: Walk(**wrong), 1000)
  with pytest.raises(ValueError) as error:
    host.check_values(environment, 0, num_steps=20)
  assert words in str(error.value)


def test_host_environment_without_ends_is_a_warning():
  short = host.HostEnvironment(lambda: Walk(stuck=5), 1000)  # LAST needs no legal action
  assert host.check_values(short, 0, num_steps=20) == []
  endless = host.HostEnvironment(lambda: Walk(last=-1), 10**9)
  (warning,) = host.check_values(endless, 0, num_steps=4)
  assert 'ended within 4 steps, and the limit is max_steps=1,000,000,000' in warning


@pytest.mark.parametrize(
  'spec, value, dtype, read, num_outside',
  [
    (specs.Array((), np.int64), 2**40, np.float32, 2**40, 0),
    (specs.BoundedArray((), np.uint64, 0, 2**40), 2**40, np.float32, 2**40, 0),
    (specs.BoundedArray((), np.int64, 0, 9), 2**40, np.int32, 2**31 - 1, 2),
    (specs.BoundedArray((), np.uint8, 0, 255), np.int64(-1), np.uint8, 0, 2),
    (specs.BoundedArray((), np.float64, 0, 1), 1.5, np.float32, 1.5, 2),
    (specs.Array((), np.int32), np.int64(-(2**40)), np.int32, -(2**31), 2),
  ],
)
def test_late_values_do_not_wrap_and_those_outside_are_counted_and_logged_once(
  spec, value, dtype, read, num_outside, caplog
):
  field = host._field('', spec)
  with caplog.at_level('WARNING'):
    values = [field.read(value), field.read(value)]
  assert {(x.dtype, float(x)) for x in values} == {(np.dtype(dtype), float(read))}
  assert field.num_outside == num_outside
  assert len(caplog.records) == min(1, num_outside)


@pytest.mark.parametrize('value', [-1, 3, 0.9])
def test_choice_that_does_not_exist_is_an_error(value):
  with pytest.raises(ValueError, match=rf'the spec has 3 values, it is {value}'):
    host._field("['place']", specs.DiscreteArray(3)).read(np.asarray(value))


class Dials(dm_env.Environment):
  """Observes the action, whose parts are from -1 to 1 and from 3 to 4."""

  def observation_spec(self):
    return specs.Array((2,), np.int64)

  def action_spec(self):
    return specs.BoundedArray((2,), np.int8, [-1, 3], [1, 4])

  def reset(self):
    return dm_env.restart(np.zeros(2, int))

  def step(self, action):
    assert action.dtype == np.int8
    return dm_env.transition(0.0, action.astype(int))


def test_actions_of_dm_env_are_within_the_bounds_of_its_own_dtype():
  class Validating(Dials):
    def action_spec(self):
      return specs.BoundedArray((2,), np.float64, -0.4, 0.4)

    def step(self, action):
      self.action_spec().validate(action)
      return super().step(np.sign(action).astype(np.int8))

  (env,) = environments.make(environments.register(Validating), max_steps=MAX_STEPS).make(1)
  env.reset(0)
  timestep = env.step(np.array([-0.4, 0.4], np.float32))
  np.testing.assert_array_equal(timestep.observation, [-1, 1])


def make_gymnasium_dials():
  gymnasium = pytest.importorskip('gymnasium')

  class Shown(gymnasium.Env):
    action_space = gymnasium.spaces.MultiDiscrete([3, 2], start=[-1, 3])
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.int64)

    def reset(self, seed=None, options=None):
      return np.zeros(2, int), {}

    def step(self, action):
      assert action in self.action_space
      return action, 0.0, False, False, {}

  if 'Dials-v0' not in gymnasium.registry:
    gymnasium.register('Dials-v0', Shown, max_episode_steps=MAX_STEPS)
  return environments.make('gymnasium/Dials-v0')


@pytest.mark.parametrize('family', ['dm_env', 'gymnasium'])
def test_several_choices_are_shifted_to_begin_with_zero(family, monkeypatch):
  mine = types.ModuleType('mine')
  mine.make = Dials
  monkeypatch.setitem(sys.modules, 'mine', mine)
  dials = environments.make('dm_env/mine:make') if family == 'dm_env' else make_gymnasium_dials()
  spec = dials.action_spec
  assert (spec.shape, spec.dtype) == ((2,), np.int32)
  np.testing.assert_array_equal([spec.minimum, spec.maximum], [[0, 0], [2, 1]])
  (env,) = dials.make(1)
  env.reset(0)
  for action, expected in (([0, 0], [-1, 3]), ([2, 1], [1, 4])):
    timestep = env.step(np.array(action, np.int32))
    np.testing.assert_array_equal(timestep.observation, expected)


def test_function_of_dm_env_that_needs_a_seed_is_seeded_for_each_instance():
  name = environments.register(lambda seed: Corridor(seed))
  instances = environments.make(name, max_steps=MAX_STEPS).make(3)
  first, second, third = (
    instance.reset(seed).observation['wind']
    for instance, seed in zip(instances, (1, 2, 1), strict=True)
  )
  assert first == third != second


def test_function_of_gymnasium_that_needs_a_seed_is_refused():
  gymnasium = pytest.importorskip('gymnasium')
  name = environments.register(lambda seed: gymnasium.make('CartPole-v1'))
  with pytest.raises(ValueError, match=r'environment\.seed.*needs a value'):
    environments.make(name, max_steps=MAX_STEPS)


class Described(Corridor):
  def __init__(self, observation=None, action=None):
    super().__init__()
    self._spec, self._action_spec = observation, action

  def observation_spec(self):
    return self._spec or super().observation_spec()

  def action_spec(self):
    return self._action_spec or super().action_spec()


@pytest.mark.parametrize(
  'options, words',
  [
    ({'observation': {'a': {'b': specs.Array((), float)}}}, ["observation_spec['a']", 'flat dict']),
    ({'observation': specs.StringArray(())}, ['observation_spec=', 'array of numbers']),
    ({'observation': {'action_mask': specs.Array((3,), bool)}}, ['observation_spec', 'is empty']),
    (
      {'observation': {'a': specs.Array((), float), 'action_mask': specs.Array((2,), bool)}},
      ["observation_spec['action_mask']", '[2]', '[3]'],
    ),
    ({'observation': specs.Array((10**6, 10**6), float)}, ['observation_spec: has', 'at most 16']),
    ({'action': specs.BoundedArray((2, 2), int, 0, 1)}, ['action_spec=', 'one axis']),
    ({'action': specs.BoundedArray((2,), int, 0, 1)}, ["['action_mask']", '[3]', '[4]']),
    ({'action': specs.Array((2,), float)}, ['action_spec=', 'DiscreteArray']),
    ({'action': specs.BoundedArray((2,), float, -np.inf, 1)}, ['action_spec=', 'finite bounds']),
    (
      {'action': specs.BoundedArray((1,), np.float32, *np.finfo(np.float32).max * np.c_[[-1, 1]])},
      ['action_spec=', 'finite difference'],
    ),
  ],
)
def test_unsupported_spec_is_rejected(monkeypatch, options, words):
  mine = types.ModuleType('mine')
  mine.make = lambda: Described(**options)
  monkeypatch.setitem(sys.modules, 'mine', mine)
  with pytest.raises(ValueError) as error:
    environments.make('dm_env/mine:make')
  for word in ("environment.name='dm_env/mine:make'", *words):
    assert word in str(error.value)


def test_class_of_another_library_is_refused_with_the_name_of_its_family(monkeypatch):
  mine = types.ModuleType('mine')
  mine.Cart = pytest.importorskip('gymnasium.envs.classic_control.cartpole').CartPoleEnv
  mine.Corridor = Corridor
  monkeypatch.setitem(sys.modules, 'mine', mine)
  for name, remedy in (
    ('mine:Cart', 'gymnasium/mine:ID'),
    ('mine:Corridor', 'dm_env/mine:Corridor'),
  ):
    with pytest.raises(ValueError, match=remedy):
      environments.make(name)


@pytest.mark.parametrize(
  'name, options, words',
  [
    ('dm_env/corridor', {}, ['dm_env/package.module:callable']),
    ('dm_env/no_such_module:make', {}, ["'dm_env/no_such_module:make'", 'PYTHONPATH']),
    ('dm_env/corridor:Corridor', {'sed': 1}, ['environment.sed=1', 'did you mean seed?']),
    ('dm_env/corridor:Corridor', {'max_steps': 0}, ['max_steps=0', 'at least 1']),
    (
      'dm_env/corridor:Corridor',
      {'seed': 3},
      ['environment.seed=3', "the run's --seed gives each"],
    ),
    ('dm_env/os:getcwd', {}, ["os is Python's own and has no environment"]),
    ('os:system', {'command': ':'}, ["os is Python's own and has no environment"]),
    (
      'dm_env/hephaestus.actors.environments.names:Iterable',
      {},
      ["Iterable is Python's own and no environment"],
    ),
    ('dm_env/numpy:get_include', {}, ['a dm_env.Environment is needed']),
    ('gymnasium/CartPol-v1', {}, ["'gymnasium/CartPol-v1'", 'did you mean CartPole-v1']),
    ('gymnasium/CartPole-v1', {'gravty': 1}, ["'gymnasium/CartPole-v1'", 'gravty']),
    ('gymnasium/CartPole-v1', {'max_episode_steps': 9}, ['=9: use environment.max_steps']),
    ('gymnasium/CartPole-v1', {'disable_env_checker': True}, ['=True: ', 'is always off']),
    ('gymnasium/Blackjack-v1', {}, ['give environment.max_steps']),
    ('gymnasium/Blackjack-v1', {'max_steps': 9}, ['observation_space=Tuple', 'flat Dict']),
  ],
)
def test_error_names_the_argument_and_the_remedy(name, options, words):
  if name.startswith('gymnasium'):
    pytest.importorskip('gymnasium')
  with pytest.raises(ValueError) as error:
    environments.make(name, **options)
  for word in words:
    assert word in str(error.value)


def test_spaces_of_gymnasium_become_specs():
  gymnasium = pytest.importorskip('gymnasium')
  spaces = gymnasium.spaces

  class Steered(gymnasium.Env):
    observation_space = spaces.Discrete(3, start=5)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float64)

    def reset(self, seed=None, options=None):
      return 6, {}

    def step(self, action):
      assert self.action_space.contains(action)
      return 7, 1.0, False, action[0] > 0.5, {}

  class Tuned(Steered):
    action_space = spaces.MultiBinary(2)

  for name, kind in (('Steered-v0', Steered), ('Tuned-v0', Tuned)):
    if name not in gymnasium.registry:
      gymnasium.register(name, kind)
  environment = environments.make('gymnasium/Steered-v0', max_steps=3)
  assert environment.action_spec == specs.BoundedArray((1,), np.float32, [-1.0], [1.0])
  (env,) = environment.make(1)
  assert environment.observation_spec == specs.DiscreteArray(3, np.int32)  # counted from 0
  assert (env.reset(0).observation, env.step(np.zeros(1, np.float32)).observation) == (1, 2)
  truncated = env.step(np.full(1, 1.0000001, np.float32))
  assert truncated.last() and truncated.discount == 1.0
  assert env.step(np.zeros(1, np.float32)).first()
  with pytest.raises(ValueError, match='action_space=MultiBinary'):
    environments.make('gymnasium/Tuned-v0', max_steps=3)


@pytest.mark.parametrize(
  'shape, dtype, axis, expected',
  [
    ((4, 84, 84), np.uint8, 1, (84, 84, 4)),
    ((84, 84), np.uint8, 0, (84, 84, 1)),
    ((4, 96, 96, 3), np.uint8, 1, (96, 96, 12)),
    ((3, 64, 64), np.float64, 1, (64, 64, 3)),
    ((210, 160, 3), np.uint8, None, (210, 160, 3)),
    ((84, 84), np.float32, None, (84, 84)),
    ((10, 10, 27), np.float32, None, (10, 10, 27)),
    ((8, 8, 111), np.uint8, None, (8, 8, 111)),
  ],
)
def test_images_with_channels_first_and_stacks_of_frames_have_channels_last(
  shape, dtype, axis, expected
):
  shown = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
  field = host._field('', specs.BoundedArray(shape, dtype, 0, 255))
  read = field.read(shown)
  assert read.shape == field.spec.shape == expected
  if axis is None:
    np.testing.assert_array_equal(read, shown)
  else:
    channels = np.moveaxis(shown, (axis, axis + 1), (-2, -1)).reshape(-1, *expected[:2])
    np.testing.assert_array_equal(read, np.stack(list(channels), -1))


@pytest.mark.parametrize('form', ['flat', 'tuple', 'method'])
def test_mask_of_several_choices_of_gymnasium_is_flat_or_a_tuple_or_a_method(form):
  gymnasium = pytest.importorskip('gymnasium')
  masks = np.array([0, 1, 1], np.int8), np.array([1, 0], np.int8)

  class Several(gymnasium.Env):
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)

    def reset(self, seed=None, options=None):
      return np.zeros(2, np.float32), self._info()

    def step(self, action):
      assert tuple(action) in ((1, 0), (2, 0))
      return np.zeros(2, np.float32), 0.0, False, False, self._info()

    def _info(self):
      flat = np.concatenate(masks)
      return {} if form == 'method' else {'action_mask': masks if form == 'tuple' else flat}

  if form == 'method':  # as masked PPO of sb3-contrib reads it
    Several.action_masks = lambda self: np.concatenate(masks).astype(bool)
  gymnasium.register(f'Several{form}-v0', Several, max_episode_steps=MAX_STEPS)
  environment = environments.make(f'gymnasium/Several{form}-v0')
  host.check_values(environment, 0, num_steps=20)
  assert environment.observation_spec['action_mask'].shape == (5,)
  (instance,) = environment.make(1)
  mask = instance.reset(0).observation['action_mask']
  np.testing.assert_array_equal(mask, [False, True, True, True, False])


@pytest.mark.parametrize(
  'reset, step, words',
  [
    ((0, {}), (0, 0.0, False, {}), ['step must return 5 values', 'it returns 4 values']),
    (0, (0, 0.0, False, False, {}), ['reset must return 2 values', 'it returns int']),
    ((0, {}), (0, 0.0, False, False, {'action_mask': np.ones(2)}), ['first reset gave none']),
    (
      (0, {'action_mask': np.ones(2, bool)}),
      (0, 0.0, False, False, {}),
      ['every reset and step has to'],
    ),
  ],
)
def test_old_interface_and_mask_of_step_or_reset_only_are_refused(reset, step, words):
  gymnasium = pytest.importorskip('gymnasium')

  class Old(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
      return reset

    def step(self, action):
      return step

  gymnasium.registry.pop('Old-v0', None)
  gymnasium.register('Old-v0', Old, max_episode_steps=MAX_STEPS)
  with pytest.raises(ValueError) as error:
    environments.make('gymnasium/Old-v0')
  for word in ("environment.name='gymnasium/Old-v0'", *words):
    assert word in str(error.value)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'reward': np.nan}, r'timestep\.reward: is nan after 3 steps of an episode'),
    ({'discount': 2.0}, r'timestep\.discount: is 2.0, and must be within \[0, 1\]'),
    ({'observation': {'wind': np.inf}}, r"\['wind'\]: has a number that is not finite"),
    ({'observation': {}}, r"observation\['.*'\]: the spec has it, this observation does not"),
  ],
)
def test_late_fault_names_the_environment_and_its_file_and_line(changes, words):
  class Late(Corridor):
    def step(self, action):
      self.count = getattr(self, 'count', 0) + 1
      timestep = super().step(action)
      if self.count < 3:
        return timestep
      wrong = changes.get('observation', {})
      observation = (
        {**timestep.observation, **wrong} if wrong or 'observation' not in changes else {}
      )
      return timestep._replace(**{**changes, 'observation': observation})

  (instance,) = wrap(Late).make(1)
  instance.reset(0)
  with pytest.raises(host.Failure, match=words) as error:
    for _ in range(3):
      instance.step(np.int32(1))
  line = Late.step.__code__.co_firstlineno
  assert str(error.value).startswith("environment.name='corridor': ")
  assert str(error.value).endswith(f' ({__file__}:{line}, step)')
  assert user_errors.line(error.value) == str(error.value)  # the one line that a command prints


def test_action_space_that_changes_is_refused():
  gymnasium = pytest.importorskip('gymnasium')

  class Growing(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
      self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
      return 0, {}

    def step(self, action):
      self.action_space.n += 1
      return 1, 0.0, True, False, {}

  gymnasium.register('Growing-v0', Growing, max_episode_steps=MAX_STEPS)
  (instance,) = environments.make('gymnasium/Growing-v0').make(1)
  instance.reset(0)
  instance.step(np.int32(0))
  with pytest.raises(
    host.Failure, match=r"'gymnasium/Growing-v0': action_space: was Discrete\(2\)"
  ):
    instance.step(np.int32(0))


@pytest.mark.parametrize('takes_mode', [True, False])
def test_render_mode_is_set_only_where_frames_are_wanted(takes_mode):
  gymnasium = pytest.importorskip('gymnasium')
  modes = []

  class Drawn(gymnasium.Env):
    metadata = {'render_modes': ['rgb_array']}  # noqa: RUF012  as in other environments
    action_space = observation_space = gymnasium.spaces.Discrete(2)
    render_mode = None

    def __init__(self, **options):
      modes.append(options.get('render_mode'))
      if options and not takes_mode:
        raise TypeError('__init__() got an unexpected keyword argument')
      self.render_mode = options.get('render_mode')

    def reset(self, seed=None, options=None):
      return 0, {}

    def step(self, action):
      return 1, 0.0, True, False, {}

    canvas = np.zeros((2, 2, 3), np.uint8)

    def render(self):
      self.canvas += 1
      return self.canvas  # the same array each time

  gymnasium.registry.pop('Drawn-v0', None)
  gymnasium.register('Drawn-v0', Drawn, max_episode_steps=MAX_STEPS)
  environment = environments.make('gymnasium/Drawn-v0')
  agent = rollout.random_agent(environment.action_spec)
  play = episodes.Play(environment, agent, 2)
  play.evaluate((), jax.random.key(0), 2)
  assert set(modes) == {None}
  frames = play.record((), jax.random.key(0)).frames
  play.close()
  assert (frames is not None) == takes_mode and modes[-1] == 'rgb_array'
  assert not takes_mode or (frames[0] != frames[1]).all()


@pytest.mark.parametrize('wrapper', ['NormalizeObservation', 'NormalizeReward'])
def test_wrapper_with_statistics_of_its_own_is_refused_unless_they_are_fixed(wrapper):
  gymnasium = pytest.importorskip('gymnasium')

  def make(is_fixed=False):
    inner = gymnasium.wrappers.TimeLimit(gymnasium.make('CartPole-v1').unwrapped, MAX_STEPS)
    env = getattr(gymnasium.wrappers, wrapper)(inner)
    env.update_running_mean = not is_fixed
    return gymnasium.wrappers.ClipReward(env, -1.0, 1.0)

  name = environments.register(make)
  with pytest.raises(ValueError, match=f'{wrapper} keeps running statistics.*leave it out'):
    environments.make(name)
  assert environments.make(name, is_fixed=True).max_steps == MAX_STEPS


def test_vector_environment_is_refused(monkeypatch):
  gymnasium = pytest.importorskip('gymnasium')
  make = lambda: gymnasium.make_vec('CartPole-v1', 2)
  mine = types.ModuleType('mine')
  mine.Vector = gymnasium.vector.SyncVectorEnv
  monkeypatch.setitem(sys.modules, 'mine', mine)
  for attempt in (
    lambda: environments.register(make()),
    lambda: environments.register(gymnasium.vector.SyncVectorEnv),
    lambda: environments.make(environments.register(make)),
    lambda: environments.make('mine:Vector'),
  ):
    with pytest.raises(ValueError, match=r'is a vector of environments; .* set actor\.num_envs'):
      attempt()
