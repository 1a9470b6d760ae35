"""The Python interface: training, results, acting and exporting, as a user calls them."""

import http
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import polling
import psutil
import pytest
import runs
import tiny
import untrained

import hephaestus
from hephaestus.actors.environments import catch
from hephaestus.actors.environments.cognition import ice
from hephaestus.launch import config as launch_config
from hephaestus.launch import main
from hephaestus.launch.agents import presets
from hephaestus.launch.files import folder as folder_lib
from hephaestus.launch.interface import exported as exported_lib
from hephaestus.launch.interface import training

# All sizes divide over the eight devices of the tests.
PPO = {
  'agent': {'hidden_size': 16, 'num_layers': 1},
  'actor': {'num_envs': 16, 'sequence_length': 9},
  'learner.num_minibatches': 2, 'evaluator.num_episodes': 8, 'evaluator.final_episodes': 8,
  'tensorboard': False,
}  # fmt: skip


@pytest.fixture(scope='module')
def run(dreamer):
  """A run of the dreamer in one process."""
  return hephaestus.Run(dreamer.folder)


@pytest.fixture(scope='module')
def ppo(in_process, tmp_path_factory):
  """A run of PPO, of an environment that is an instance."""
  folder = tmp_path_factory.mktemp('interface') / 'ppo'
  return hephaestus.train(
    catch.Catch(**tiny.CATCH), steps=300, seed=3, preset='laptop', agent='ppo', run=folder, set=PPO
  )


@pytest.fixture(scope='module')
def policy(run):
  return hephaestus.load(run)


def observations(count):
  """Random boards of `tiny.CATCH`."""
  return np.random.default_rng(0).random((count, 12)) < 0.3


def test_run_equals_one_of_the_command(ppo):
  config = launch_config.load(ppo.folder / 'config.yaml')
  assert config.fused and config.seed == 3 and config.max_environment_steps == 300
  assert config.agent_name == 'ppo' and config.actor.num_envs == 16
  assert pathlib.Path(ppo) == ppo.folder and repr(ppo) == f'Run({str(ppo.folder)!r})'


def test_scores_and_curves_are_arrays_by_name(run):
  scores, curves = run.scores(), run.curves()
  assert scores['environment_step'][-1] >= 300 and scores['final'].tolist()[-1] is True
  assert np.isfinite(scores['episode_return']).all()
  assert len({len(values) for values in curves.values()}) == 1
  assert (np.diff(curves['learner_step']) > 0).all()
  with pytest.raises(ValueError, match=r"node='actor-7': has no metrics .*; choose of evaluator"):
    run.curves('actor-7')


def test_curves_have_nan_where_a_report_lacks_a_value(run, tmp_path):
  folder = tmp_path / 'other'
  folder_lib.open_run(folder, launch_config.load(run.folder / 'config.yaml'))
  (folder / 'metrics' / 'learner.jsonl').write_text(
    '{"time": 1, "a": 1}\n{"time": 2, "b": null, "a": 2}\n{"time": 3, "b": 5, "name": "x"}\n'
  )
  other = hephaestus.Run(folder)
  curves = other.curves()
  assert curves.keys() == {'time', 'a', 'b'}
  np.testing.assert_equal(curves['a'], [1, 2, np.nan])
  np.testing.assert_equal(curves['b'], [np.nan, np.nan, 5])
  assert other.scores() == {} and other.metrics().keys() == {'learner'}
  logged: list = []
  other.log_to(types.SimpleNamespace(write=logged.append))
  assert [row['time'] for row in logged] == [1, 2, 3] and logged[0].keys() == curves.keys()


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'set': {'agent.hiden_size': 3}}, 'agent.hiden_size=3: unknown key; did you mean'),
    ({'env': 5}, 'env=5: give a name, an instance'),
    ({'agent': {}}, '--agent {}: a name is needed'),
    ({'fused': True, 'expose': True}, '--expose: a fused run listens at no port'),
    ({'env': catch.Catch(), 'set': {'environment.rows': 5}}, 'was given as an instance; give one'),
    ({'env': catch.Catch(), 'fused': False}, 'an instance exists only in this process'),
    ({'steps': 'many'}, "steps='many': write a whole number, such as 100000 or 1e5"),
  ],
)
def test_bad_input_is_refused_as_by_the_command(tmp_path, options, words):
  options = {'preset': 'laptop', **options}
  with pytest.raises(ValueError) as raised:
    hephaestus.train(run=tmp_path / 'run', **options)
  assert words in str(raised.value) and '\n' not in str(raised.value)
  assert not (tmp_path / 'run').exists()
  for wrong in ('stepz', 'total_timesteps'):
    with pytest.raises(TypeError, match=f"no option '{wrong}'; did you mean steps"):
      hephaestus.train('catch', **{wrong: 3})


def test_overrides_by_a_mapping_equal_overrides_by_the_command():
  overrides = {
    'agent': {'gamma': np.float32(0.5), 'compute_dtype': 'float32'},
    'max_minutes': None,
    'learner.model_learning_rate': 1e-05,
    'replay.strata': [{'name': 'episodic', 'max_size': 500, 'share': 1.0}],
  }
  config = launch_config.override(presets.laptop('catch'), training._assignments(overrides))
  assert config.agent.gamma == 0.5 and config.agent.compute_dtype == 'float32'
  assert config.max_minutes is None and config.learner.model_learning_rate == 1e-05
  assert [each.max_size for each in config.replay.strata] == [500]
  assert training._assignments(['seed=3']) == ['seed=3']


@pytest.mark.parametrize(
  ('value', 'expected'),
  [
    *((text, text) for text in ('no', '007', '1e3', '12:30', '', '#1', 'a: b', '${oc.env:HOME}')),
    (pathlib.Path('maps/one'), 'maps/one'),
    (np.arange(2), [0, 1]),
    (http.HTTPStatus.OK, 200),
  ],
)
def test_value_of_a_mapping_is_not_parsed(value, expected):
  assignments = training._assignments({'environment.level': value})
  config = launch_config.override(presets.laptop('catch'), assignments)
  assert config.environment['level'] == expected


def test_value_that_no_file_can_hold_is_refused():
  with pytest.raises(ValueError, match=r'environment\.level=<object'):
    training._assignments({'environment.level': object()})


def test_several_processes_run_as_children_of_this_one(monkeypatch, tmp_path, capfd):
  given = tmp_path / 'given'
  fake = tmp_path / 'python'
  more_than_a_pipe_holds = 'head -c 200000 /dev/zero >&2'
  fake.write_text(
    f'#!/bin/sh\necho "$@" > {given}\n{more_than_a_pipe_holds}\necho progress\n'
    'echo "hephaestus train: x: y" >&2; exit 2\n'
  )
  fake.chmod(0o755)
  monkeypatch.setattr(sys, 'executable', str(fake))
  monkeypatch.setattr('hephaestus.launch.run.validation.has_distributed', lambda: True)
  folder = tmp_path / 'run'
  with pytest.raises(ValueError, match=r'^x: y$'):
    hephaestus.train(
      'catch', preset='laptop', run=folder, fused=False, seed=2, set={'actor.num_actors': 2}
    )
  words = f'--preset laptop --env catch --run {folder} --seed 2 --set actor.num_actors=2 --no-fused'
  assert given.read_text() == f'-m hephaestus.launch.main train {words}\n'
  assert capfd.readouterr().out == 'progress\n'


def test_several_processes_end_with_the_one_that_began_them(tmp_path):
  """Stands in for `train`: a command that waits."""
  child = tmp_path / 'child'
  waits = textwrap.dedent(f"""
    import os, pathlib, sys, time
    from hephaestus.launch import main
    def wait(*unused, **unused_too):
      pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))
      os.rename({str(tmp_path / 'new')!r}, {str(child)!r})
      time.sleep(600)
    main.app.run = wait
    main.main()
  """)
  begin = f'from hephaestus.launch.interface import training\ntraining._run([{sys.executable!r}, "-c", {waits!r}], live=True)'
  parent = subprocess.Popen([sys.executable, '-c', begin])
  polling.until(child.exists, 'a child')
  process = psutil.Process(int(child.read_text()))
  parent.kill()
  parent.wait()
  is_over = lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
  polling.until(is_over, 'its end')


def test_act_agrees_with_and_without_a_batch_axis(policy):
  boards, key = observations(3), jax.random.key(1)
  state, one = policy.initial_state(batch=1), policy.initial_state()
  for board in boards:
    action, state = policy.act(board[None], state, key=key)
    other, one = policy.act(board, one, key=key)
    assert isinstance(action, np.ndarray) and action.shape == (1,) and np.shape(other) == ()
    assert action[0] == other and other in range(3)
  assert int(one.num_calls) == 3


def test_act_remembers_until_the_state_is_reset(policy):
  first, second = observations(2)
  _, before = policy.act(first, policy.initial_state(), greedy=True)
  _, after = policy.act(second, before, greedy=True)
  fresh = policy.initial_state()._replace(num_calls=before.num_calls)
  _, fresh = policy.act(second, fresh, greedy=True)
  _, reset = policy.act(second, policy.reset(before, True), greedy=True)
  differ = lambda a, b: any(
    not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
  assert not differ(reset, fresh) and differ(after, fresh)
  _, state = policy.act(observations(2), policy.initial_state(batch=2), greedy=True)
  assert state.first.tolist() == [False, False]
  assert policy.reset(state, [False, True]).first.tolist() == [False, True]


def test_one_key_gives_other_noise_at_each_step(policy):
  board, state = observations(64), policy.initial_state(batch=64)
  one, later = policy.act(board, state, key=jax.random.key(0))
  again, _ = policy.act(board, state, key=jax.random.key(0))
  other, _ = policy.act(board, state._replace(num_calls=later.num_calls), key=jax.random.key(0))
  assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_act_can_be_compiled_into_a_loop(policy):
  def step(state, board):
    action, state = policy.act(board, state, greedy=True)
    return state, action

  boards = observations(3)
  _, actions = jax.lax.scan(step, policy.initial_state(), jnp.asarray(boards))
  state, expected = policy.initial_state(), []
  for board in boards:
    action, state = policy.act(board, state, greedy=True)
    expected.append(action)
  assert actions.tolist() == expected


def test_wrong_observations_and_lacking_keys_are_refused(policy):
  state = policy.initial_state(batch=2)
  with pytest.raises(ValueError, match=r'shape \(12,\), and should have \(2, 12\).*batch=2'):
    policy.act(observations(1)[0], state, greedy=True)
  with pytest.raises(ValueError, match='observation: should be one array'):
    policy.act({'board': observations(2)}, state, greedy=True)
  with pytest.raises(ValueError, match='key=None: sampled actions need a key'):
    policy.act(observations(2), state)
  with pytest.raises(ValueError, match='batch=0: must be at least 1'):
    policy.initial_state(batch=0)


def test_checkpoints_are_chosen(run, policy):
  steps = sorted(
    int(path.name) for path in (run.folder / 'checkpoints').iterdir() if path.name.isdigit()
  )
  assert policy.learner_step == steps[-1] and len(steps) > 1
  assert hephaestus.load(str(run.folder), steps[0]).learner_step == steps[0]
  assert run.policy('best').learner_step in steps
  with pytest.raises(ValueError, match='--checkpoint 1: is not the update of a checkpoint'):
    run.policy(1)
  with pytest.raises(ValueError, match='is not the folder of a run'):
    hephaestus.load(run.folder.parent)


def test_exported_policy_acts_as_the_run(run, policy, tmp_path, capsys, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS')
  out = tmp_path / 'policy'
  command = ['hephaestus', 'export', str(run.folder), '--out', str(out)]
  assert main.run(main.parse(command)) == 0
  printed = capsys.readouterr().out
  assert os.environ['JAX_PLATFORMS'] == 'cpu'  # accelerators are left to the run, which may go on
  assert printed.startswith(f'{out}: update {policy.learner_step:,}, params.safetensors (')
  assert {path.name for path in out.iterdir()} == {'params.safetensors', 'policy.json'}
  loaded = hephaestus.load(out)
  assert loaded.observation_spec == policy.observation_spec
  assert loaded.action_spec == policy.action_spec and loaded.action_names == policy.action_names
  boards, key = observations(4), jax.random.key(2)
  (one, state), (other, same) = (
    each.act(boards, each.initial_state(batch=4), key=key) for each in (policy, loaded)
  )
  assert np.array_equal(one, other)
  jax.tree.map(np.testing.assert_array_equal, state, same)

  assert main.run(main.parse(command)) == 2
  assert f'--out {out}: is not an empty folder' in capsys.readouterr().err
  with pytest.raises(ValueError, match=r'--checkpoint best: .* is exported'):
    hephaestus.load(out, 'best')


def test_exported_policy_has_any_text_of_its_config(policy, tmp_path):
  exported = policy.exported(policy.params)
  named = launch_config.override(exported.config, ['wandb.name=walk 🚀'])
  exported_lib.write(exported._replace(config=named), tmp_path / 'policy')
  assert exported_lib.read(tmp_path / 'policy').config == named


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda content: content.update(format=1), 'its format is 1, this version reads 2'),
    (lambda content: content['config']['agent'].update(hidden_size=17), 'should be float32'),
    (lambda content: content.pop('action_spec'), "'action_spec'"),
    (lambda content: content.update(action_spec=None), 'is not an exported policy'),
    (lambda content: content['observation_spec'].update(dtype='U3'), 'is not an exported policy'),
    (lambda content: content.update(learner_step={}), 'learner_step={} is no whole number'),
  ],
)
def test_exported_folder_that_does_not_fit_is_refused(policy, tmp_path, change, words):
  out = tmp_path / 'policy'
  exported_lib.write(policy.exported(policy.params), out)
  content = json.loads((out / 'policy.json').read_text())
  change(content)
  (out / 'policy.json').write_text(json.dumps(content))
  with pytest.raises(ValueError, match=words) as raised:
    hephaestus.load(out)
  assert '\n' not in str(raised.value)


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
  exported_lib.write(policy.exported(policy.params), folder)
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


@pytest.mark.parametrize('name', ['catch', 'hackmatrix', 'noisy_corridor'])
def test_specs_survive_json(name):
  environment = launch_config.override(presets.laptop(name), []).make_environment()
  for spec in (environment.observation_spec, environment.action_spec):
    content = json.loads(json.dumps(exported_lib._spec_to_json(spec), allow_nan=False))
    restored = exported_lib._spec_from_json(content)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b and type(a) is type(b), spec, restored))
  # A view is a function, so it is left to the environment.
  assert exported_lib._spec_to_json(ice.Ice().observation_spec) is None


def test_ppo_acts_in_an_environment_that_was_an_instance(ppo, tmp_path):
  policy = ppo.policy()
  known = policy.config.environment['name']
  assert policy.config.agent_name == 'ppo' and known.startswith('instance:Catch-')
  assert training._register(catch.Catch(**tiny.CATCH), ppo.folder) == known
  hephaestus.export(ppo, tmp_path / 'policy')
  loaded = hephaestus.load(tmp_path / 'policy')
  for each in (policy, loaded):
    action, _ = each.act(observations(1)[0], each.initial_state(), greedy=True)
    assert action in range(3)


def script(text, folder, **variables):
  """The output of a program in a process of its own, on one device."""
  kept = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  ran = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(text)],
    cwd=folder, env=kept | variables, capture_output=True, text=True,
  )  # fmt: skip
  assert ran.returncode == 0, ran.stderr
  return ran.stdout


def test_import_loads_no_library(tmp_path):
  text = """
    import sys
    before = set(sys.modules)
    import hephaestus
    assert {'train', 'load', 'Run'} <= set(dir(hephaestus)) and hephaestus.__version__
    print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
  """
  assert script(text, tmp_path) == "['hephaestus']\n"


def test_acting_needs_no_process_and_no_instance_of_the_environment(run, ppo, tmp_path):
  hephaestus.export(run, tmp_path / 'policy')
  text = f"""
    import sys
    for name in {runs.DISTRIBUTED!r}:
      sys.modules[name] = None
    import numpy as np
    import hephaestus
    for path in ('policy', {str(run.folder)!r}):
      policy = hephaestus.load(path)
      action, state = policy.act(np.zeros((1, 12)), policy.initial_state(batch=1), greedy=True)
      print(action.shape, 'hephaestus.learner.checkpoint' in sys.modules, 'hephaestus.learner.loop' in sys.modules)
    try:
      hephaestus.load({str(ppo.folder)!r})
    except ValueError as error:
      print(error)
    from hephaestus.actors.environments import catch
    print(hephaestus.load({str(ppo.folder)!r}, environment=catch.Catch(rows=4, columns=3)))
  """
  light, heavy, refused, loaded = script(text, tmp_path).splitlines()
  assert light == '(1,) False False' and heavy == '(1,) True False'
  assert 'was given as an instance, in another process; give it again' in refused
  assert re.match(r'Policy\(ppo for instance:Catch-\d+, update ', loaded)
