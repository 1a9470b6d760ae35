"""Policies as ONNX files, which onnxruntime runs; most of it where the extra `onnx` can be installed."""

import json
import sys

import jax
import numpy as np
import pytest
import tiny
import untrained

import hephaestus
from hephaestus.launch import main
from hephaestus.launch.interface import exported, onnx_file
from hephaestus.launch.interface import policy as policy_lib

SMALL = [f'agent.{name}={value}' for name, value in tiny.DREAMER.items()]
POLICIES = {
  'dreamer': lambda: hephaestus.load('catch'),
  'view': lambda: hephaestus.load('grid_world'),  # a slice at a position that is observed
  'mask': lambda: hephaestus.load('hackmatrix'),  # PPO, and an observation of several entries
  'recurrent': lambda: untrained.policy('ppo', 'catch', 'agent.recurrent_size=8'),
  'window': lambda: untrained.policy('dreamer', 'catch', *SMALL, 'agent.window=4'),
}


@pytest.mark.parametrize('name', POLICIES)
def test_onnx_acts_as_the_policy(name, tmp_path):
  runtime = pytest.importorskip('onnxruntime')
  policy, file = POLICIES[name](), tmp_path / 'policy.onnx'
  onnx_file.write(policy, file)
  session = runtime.InferenceSession(file)
  metadata = session.get_modelmeta().custom_metadata_map
  assert json.loads(metadata['action_names']) == list(policy.action_names)
  assert metadata['learner_step'] == str(policy.learner_step)

  reset, step = jax.jit(policy.environment.reset), jax.jit(policy.environment.step)
  key, state, actions = jax.random.key(3), policy.initial_state(), set()
  state = state._replace(memory=jax.tree.map(np.zeros_like, state.memory))  # which FIRST clears
  memory = exported.named({'state': state.memory})
  env_state, timestep, action = None, None, None
  for index in range(24):
    first = index == 0 or bool(timestep.last())
    at = jax.random.fold_in(key, index)
    env_state, timestep = reset(at) if first else step(at, env_state, action)
    observation = jax.device_get(timestep.observation)
    noise = jax.tree.map(lambda x: np.asarray(x[0]), policy.agent.noise(at, 1))
    given = exported.named({'observation': observation, 'first': np.array(first), 'noise': noise})
    found = session.run(None, {name: np.asarray(x) for name, x in (given | memory).items()})
    action, state = policy.act(observation, policy.reset(state, first), key=key)
    actions.add(int(action))

    outputs = dict(zip([output.name for output in session.get_outputs()], found, strict=True))
    assert outputs.pop('action') == action
    expected = exported.named({'next_state': state.memory})
    assert outputs.keys() == expected.keys()
    for name, value in outputs.items():
      np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5)
    memory = {name.removeprefix('next_'): value for name, value in outputs.items()}
  assert len(actions) > 1


@pytest.fixture(scope='module')
def counted():
  """An untrained policy of an environment whose numbers begin elsewhere than with 0, and that environment."""
  gymnasium = pytest.importorskip('gymnasium')

  class Counted(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
      seen=gymnasium.spaces.Discrete(3, start=10), level=gymnasium.spaces.Box(0, 9, (1,), np.uint8)
    )
    action_space = gymnasium.spaces.MultiDiscrete([3, 2], start=[-1, 3])

    def reset(self, seed=None, options=None):
      return {'seen': 10, 'level': np.zeros(1, np.uint8)}, {}

    def step(self, action):
      assert action in self.action_space
      return {'seen': 12, 'level': np.ones(1, np.uint8)}, 0.0, False, False, {}

  gymnasium.register('Counted-v0', Counted, max_episode_steps=5)
  return untrained.policy('ppo', 'gymnasium/Counted-v0'), Counted()


def test_policy_takes_and_gives_the_numbers_of_gymnasium(counted, tmp_path):
  policy, env = counted
  folder = tmp_path / 'policy'
  exported.write(policy.exported(policy.params), folder)
  for each in (policy, hephaestus.load(folder)):
    state, observation, actions = each.initial_state(), env.reset()[0], set()
    for key in jax.random.split(jax.random.key(0), 40):
      action, state = each.act(observation, state, key=key)
      observation, *_ = env.step(action)
      actions.add(tuple(action.tolist()))
    assert len(actions) == 6


@pytest.mark.parametrize(
  'wrong, words',
  [
    ({'seen': 1}, r"\['seen'\]: is 1, and should be one of 10 to 12"),
    ({'seen': 13}, r'is 13, and should be one of 10 to 12'),
    ({'seen': 10.9}, r'is 10\.9, and should be one of 10 to 12'),
    ({'level': [0.5]}, r"\['level'\]: is 0\.5, and should be uint8"),
    ({'level': [-1]}, r"\['level'\]: is -1, and should be uint8"),
  ],
)
def test_number_that_the_observation_spec_lacks_is_refused(counted, wrong, words):
  policy, env = counted
  with pytest.raises(ValueError, match=words):
    policy.act(env.reset()[0] | wrong, policy.initial_state(), greedy=True)


def test_onnx_takes_and_gives_the_numbers_of_gymnasium(counted, tmp_path):
  runtime = pytest.importorskip('onnxruntime')
  (policy, env), file = counted, tmp_path / 'policy.onnx'
  onnx_file.write(policy, file)
  session = runtime.InferenceSession(file)
  observation, actions = env.reset()[0], set()
  for key in jax.random.split(jax.random.key(0), 40):
    noise = jax.tree.map(lambda x: np.asarray(x[0]), policy.agent.noise(key, 1))
    given = {'observation': observation, 'first': np.array(False), 'noise': noise}
    arrays = {name: np.asarray(x) for name, x in exported.named(given).items()}
    arrays['observation/seen'] = arrays['observation/seen'].astype(np.int32)
    action, *_ = session.run(['action'], arrays)
    observation, *_ = env.step(action)
    actions.add(tuple(action.tolist()))
  assert len(actions) == 6


def test_command_writes_a_file_once(tmp_path, capsys):
  pytest.importorskip('jax2onnx')
  out = ['--out', f'{tmp_path}/x.onnx']
  command = ['hephaestus', 'export', 'hackmatrix', '--format', 'onnx', *out]
  assert main.run(main.parse(command)) == 0
  assert capsys.readouterr().out.startswith(f'{tmp_path}/x.onnx: update 245, x.onnx (')
  assert main.run(main.parse(command)) == 2
  assert f'--out {tmp_path}/x.onnx: exists; give another name' in capsys.readouterr().err


def test_operation_that_onnx_lacks_is_named(monkeypatch, tmp_path):
  pytest.importorskip('jax2onnx')

  def step(agent, specs, params, noise, state, observation, *, greedy):
    shape = jax.ShapeDtypeStruct((), np.int32)
    return jax.pure_callback(lambda x: np.int32(0), shape, state.first), state

  monkeypatch.setattr(policy_lib, 'step', step)
  with pytest.raises(ValueError, match=r"cannot be written as ONNX .*'pure_callback'"):
    onnx_file.write(untrained.policy('ppo', 'catch'), tmp_path / 'policy.onnx')
  assert not (tmp_path / 'policy.onnx').exists()


def test_missing_extra_is_named(monkeypatch, tmp_path, capsys):
  monkeypatch.setitem(sys.modules, 'jax2onnx', None)
  command = ['hephaestus', 'export', 'catch', '--format', 'onnx', '--out', f'{tmp_path}/x.onnx']
  assert main.run(main.parse(command)) == 2
  assert '--format onnx: needs the extra `onnx`' in capsys.readouterr().err
