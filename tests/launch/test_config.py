"""Configs: overrides by path, checks that name the key, and config.yaml."""

import dataclasses
import itertools
import re

import pytest
import yaml

from hephaestus.launch import config, records
from hephaestus.launch.agents import dreamer, presets
from hephaestus.replay import tables

MACHINES = ('laptop', 'gpu', 'tpu-v4-8')


@pytest.fixture
def laptop():
  return presets.laptop('catch')


@pytest.mark.parametrize('agent', records.AGENTS)
@pytest.mark.parametrize('preset', MACHINES)
def test_preset_round_trips_through_config_yaml(preset, agent, tmp_path):
  made = config.of_preset(agent, preset, 'catch')
  assert made.agent_name == ('dreamer' if agent == 'plain' else agent)
  config.save(made, tmp_path / 'config.yaml')
  assert config.load(tmp_path / 'config.yaml') == made


@pytest.mark.parametrize(
  ('changes', 'key'),
  [
    (['learner.fused=true'], 'learner.num_processes=3'),
    ([], 'learner.num_processes=3'),
    (
      ['learner.num_processes=32', 'learner.num_minibatches=64'],
      'learner.num_minibatches=64: .* 16 would',
    ),
    (
      ['learner.num_processes=8', 'learner.max_staleness=1', 'replay.strata[0].max_size=60'],
      'on_policy.max_size=60: .* use at most 55',  # each holds one ahead
    ),
  ],
)
def test_sizes_that_do_not_fit_the_processes_of_ppo_are_refused(changes, key):
  ppo = config.of_preset('ppo', 'laptop', 'catch')
  sizes = [
    'actor.num_envs=64', 'actor.sequence_length=9', 'learner.num_processes=3', 'learner.fused=false',
    'replay.strata[0].max_size=32',
  ]  # fmt: skip
  assert config.override(ppo, [*sizes, 'learner.num_processes=4']).learner.num_processes == 4
  with pytest.raises(ValueError, match=key):
    config.override(ppo, [*sizes, *changes])


def test_override_sets_values_by_path(laptop):
  changed = config.override(
    laptop,
    ['agent.ensemble_size=3', 'environment.rows=7', 'replay.strata[0].max_size=64',
     'max_minutes=2.5', 'agent.starts_per_sequence=null', 'learner.model_learning_rate=1e-3'],
  )  # fmt: skip
  assert changed.agent.ensemble_size == 3
  assert changed.environment == {'name': 'catch', 'rows': 7}
  assert changed.replay.strata[0].max_size == 64
  assert changed.replay.strata[1] == laptop.replay.strata[1]
  assert changed.max_minutes == 2.5
  assert changed.agent.starts_per_sequence is None
  assert changed.learner.model_learning_rate == 1e-3
  assert changed.make_environment().max_steps == 6
  whole = config.override(laptop, ['replay.strata=[{name: all, max_size: 900, share: 1.0}]'])
  assert whole.replay.strata == (tables.Stratum(name='all', max_size=900, share=1.0),)


@pytest.mark.parametrize(
  ('agent', 'assignment', 'words'),
  [
    ('dreamer', 'agent.hiden_size=3', 'unknown key; did you mean agent.hidden_size'),
    ('dreamer', 'replay.strata[7].share=1', ''),
    ('dreamer', 'learner.batch_size=1.5', ''),
    ('dreamer', 'learner.batch_size', 'write it as key=value'),
    ('dreamer', 'learner.num_processes=3', 'does not divide over learner.num_processes=3'),
    ('dreamer', 'learner.stuck_seconds=-1', 'must be positive, or 0'),
    ('dreamer', 'learner.batch_size=1', r'replay.strata.episodic.share=0.5'),
    ('dreamer', 'replay.strata[0].share=0.7', r'replay.strata.share=\[0.7, 0.5\]'),
    ('dreamer', 'replay.strata=[{nam: all}]', r'give a list such as \[{name: episodic'),
    ('dreamer', 'replay.warm_up=4000', 'use at most 512'),
    ('dreamer', 'actor.sequence_length=5000', 'must be at most 1024'),
    ('dreamer', 'actor.sequence_length=4', 'agent.starts_per_sequence=8'),
    ('dreamer', 'agent.latent=cubic', 'choose one of'),
    ('dreamer', 'agent.horizon_min=99', 'agent.horizon_max=16'),
    ('dreamer', 'learner.stuck_seconds=nan', 'must be a finite number'),
    ('ppo', 'agent.starts_per_sequence=3', 'unknown key'),
    ('ppo', 'learner.num_epochs=0', 'must be positive, or null'),
    ('ppo', 'max_minutes=.inf', 'must be a finite number'),
    ('ppo', 'learner.num_minibatches=3000', 'does not divide 256 environments'),
  ],
)
def test_override_names_invalid_key_or_value(agent, assignment, words):
  with pytest.raises(ValueError, match=words or re.escape(assignment.partition('=')[0])):
    config.override(config.of_preset(agent, 'laptop', 'catch'), [assignment])


def test_conflicts_ignore_keys_without_state(laptop):
  longer = config.override(laptop, ['max_environment_steps=7', 'evaluator.num_episodes=3',
                                    'actor.num_actors=2', 'replay.port=4000'])  # fmt: skip
  assert config.conflicts(laptop, longer) == []
  other = config.override(laptop, ['agent.window=4', 'replay.strata[0].max_size=64', 'seed=1'])
  assert config.conflicts(laptop, other) == [
    'agent.window: the folder has 1, you gave 4',
    'replay.strata[0].max_size: the folder has 512, you gave 64',
    'seed: the folder has 0, you gave 1',
  ]


def test_ppo_batch_is_one_unroll_of_all_actors():
  fused = presets.ppo_laptop('catch')
  assert (fused.fused, fused.batch_size) == (True, 256)
  longer = config.override(fused, ['actor.num_actors=2', 'replay.strata[0].max_size=512'])
  apart = config.override(longer, ['learner.fused=false'])
  assert (apart.fused, apart.batch_size) == (False, 512)
  assert config.conflicts(fused, config.override(fused, ['learner.fused=false'])) == [
    'learner.fused: the folder has True, you gave False'
  ]
  assert not presets.laptop('catch').fused


def test_agent_and_learner_must_belong_together(laptop):
  with pytest.raises(ValueError, match='do not belong together'):
    dataclasses.replace(laptop, agent=presets.ppo_laptop('catch').agent)
  with pytest.raises(ValueError, match='this needs the dreamer, but the run has ppo'):
    dreamer.settings(presets.ppo_laptop('catch'))


@pytest.mark.parametrize(
  ('key', 'value'),
  [('seed', True), ('agent.hidden_size', float('inf')), ('learner.log_period', 'x')],
)
def test_value_of_another_type_in_a_file_is_refused_by_its_key(laptop, tmp_path, key, value):
  tree = config.to_tree(laptop)
  section = tree
  *sections, name = key.split('.')
  for each in sections:
    section = section[each]
  section[name] = value
  (tmp_path / 'config.yaml').write_text(yaml.safe_dump(tree))
  with pytest.raises(ValueError, match=rf'config.yaml: .*{key}(: Value .*|=){value}') as error:
    config.load(tmp_path / 'config.yaml')
  assert '\n' not in str(error.value)


def test_invalid_config_file_is_refused(tmp_path):
  path = tmp_path / 'config.yaml'
  for content in ('agent: 3', 'seed: 1', '- a', 'a: {b: ['):
    path.write_text(content)
    with pytest.raises(ValueError, match=r'config.yaml'):
      config.load(path)


@pytest.mark.parametrize('order', itertools.permutations(['horizon_max=32', 'horizon_min=32']))
def test_related_overrides_are_checked_together_in_every_order(laptop, order):
  agent = config.override(laptop, [f'agent.{each}' for each in order]).agent
  assert (agent.horizon_max, agent.horizon_min) == (32, 32)


def test_wandb_is_switched_on_and_named(laptop, tmp_path):
  changed = config.override(laptop, ['wandb=true', 'wandb.tags=[a, b]', 'wandb.project=mine'])
  assert changed.wandb == config.WandbConfig(enabled=True, project='mine', tags=('a', 'b'))
  assert config.conflicts(laptop, changed) == []
  lines = config.to_yaml(laptop).splitlines()
  (tmp_path / 'config.yaml').write_text('\n'.join([*lines[: lines.index('wandb:')], 'wandb: true']))
  assert config.load(tmp_path / 'config.yaml').wandb == config.WandbConfig(enabled=True)
