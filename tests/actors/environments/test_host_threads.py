"""Environments on the host that are programs: their threads, heartbeats, ends and number of instances."""

import collections
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from typing import ClassVar

import dm_env
import jax
import numpy as np
import pytest
from dm_env import specs

from hephaestus.actors import environments, episodes, rollout
from hephaestus.actors.environments import host
from hephaestus.launch import config as launch_config
from hephaestus.launch.agents import presets
from hephaestus.launch.run import parts as parts_lib
from hephaestus.launch.run import preflight

NUM_ENVS, LENGTH, MAX_STEPS = 3, 4, 5


class Program(dm_env.Environment):
  """Notes each call with its thread; a step may overlap with other instances' steps, or fail."""

  calls: ClassVar = collections.defaultdict(list)  # number of an instance -> its calls
  meeting = None
  failing = None  # called in each step

  def __init__(self):
    self._number = len(Program.calls)
    self._note('make')

  def _note(self, name):
    Program.calls[self._number].append((name, threading.get_ident()))

  def observation_spec(self):
    return specs.BoundedArray((1,), np.float32, 0, 9)

  def action_spec(self):
    return specs.DiscreteArray(2)

  def reset(self):
    self._note('reset')
    return dm_env.restart(np.zeros(1, np.float32))

  def step(self, action):
    self._note('step')
    if Program.failing:
      Program.failing()
    if Program.meeting:
      Program.meeting.wait(timeout=60)
    return dm_env.transition(1.0, np.ones(1, np.float32))

  def close(self):
    self._note('close')


@pytest.fixture(autouse=True)
def program(monkeypatch):
  monkeypatch.setattr(Program, 'calls', collections.defaultdict(list))
  monkeypatch.setattr(Program, 'meeting', None)
  monkeypatch.setattr(Program, 'failing', None)
  monkeypatch.setitem(sys.modules, 'program', sys.modules[__name__])


def make():
  return environments.make('dm_env/program:Program', max_steps=MAX_STEPS)


def make_unroll(environment, should_stop=lambda: False):
  agent = rollout.random_agent(environment.action_spec)
  return rollout.make_unroll(
    environment, agent, num_envs=NUM_ENVS, sequence_length=LENGTH, should_stop=should_stop
  )


def unroll_once(unroll):
  state = unroll.init(jax.random.key(0))
  return unroll.unroll((), jax.random.key(1), state, np.int32(0), np.int32(0))


def is_closed(calls):
  return [name for name, _ in calls].index('close') == len(calls) - 1


@pytest.mark.parametrize('threads', [2, 64])
def test_one_thread_makes_resets_steps_and_closes_each_instance(monkeypatch, threads):
  monkeypatch.setattr(host, 'MAX_THREADS', threads)
  environment = make()
  host.check_values(environment, seed=0, num_steps=7)
  unroll = make_unroll(environment)
  unroll_once(unroll)
  unroll.close()
  play = episodes.Play(environment, rollout.random_agent(environment.action_spec), 2)
  play.evaluate((), jax.random.key(0), 4)
  play.record((), jax.random.key(0))
  play.close()
  assert len(Program.calls) == 2 + NUM_ENVS + 2 + 1
  for calls in Program.calls.values():
    (thread,) = {thread for _, thread in calls}
    assert thread != threading.get_ident()
    assert is_closed(calls)


def test_environments_that_wait_are_stepped_concurrently():
  unroll = make_unroll(make())
  Program.meeting = threading.Barrier(NUM_ENVS)  # which raises if any waits in vain
  unroll_once(unroll)
  unroll.close()


def test_heartbeat_follows_each_host_step_and_can_end_the_unroll():
  beats = []
  unroll = make_unroll(make(), lambda: bool(beats.append(1)) or len(beats) == 10_000)
  unroll_once(unroll)
  assert len(beats) == NUM_ENVS * LENGTH  # LENGTH - 1 steps, and the reset
  unroll.close()
  unroll = make_unroll(make(), lambda: len(Program.calls[len(Program.calls) - 1]) > 2)
  with pytest.raises(rollout.StoppedError):
    unroll_once(unroll)
  unroll.close()


@pytest.mark.parametrize('error', [OSError('lost'), SystemExit(0)])
def test_instances_are_closed_after_an_error_and_sys_exit_is_one(error):
  environment = make()

  def fail():
    raise error

  Program.failing = fail
  with pytest.raises(Exception, match=r'lost|the environment raised SystemExit\(0\)'):
    make()
  with pytest.raises(Exception, match=r'lost|the environment raised SystemExit\(0\)'):
    host.check_values(environment, seed=0)
  assert all(map(is_closed, Program.calls.values()))
  assert len(Program.calls) == 3


def test_a_run_asks_two_instances_for_specs_and_values_and_its_nodes_none():
  config = launch_config.override(
    presets.laptop('dm_env/program:Program'), [f'environment.max_steps={MAX_STEPS}']
  )
  preflight.check_environment(config)
  assert len(Program.calls) == 2
  of_node = pickle.loads(pickle.dumps(config))
  parts = parts_lib.make_parts(of_node)
  assert jax.tree.leaves(parts.sequence_schema) and parts.environment.max_steps == MAX_STEPS
  assert len(Program.calls) == 2
  assert of_node == config


ENDS = """
import os, signal, sys, types
import dm_env, numpy as np
from dm_env import specs
from hephaestus.actors.environments import host

class Program(host.LibraryEnv):
  observation_spec = specs.Array((1,), np.float32)
  action_spec = specs.DiscreteArray(2)
  def reset(self, seed):
    return dm_env.restart(np.zeros(1, np.float32))
  def step(self, action):
    return dm_env.transition(0.0, np.zeros(1, np.float32))
  def close(self):
    print('closed', flush=True)

(instance,) = host.HostEnvironment(Program, 9).make(1)
instance.reset(0)
if os.fork() == 0:  # a child has neither the instance nor its thread
  sys.exit()
os.wait()
"""


def test_open_instances_are_closed_once_at_the_end_of_the_process():
  ended = subprocess.run([sys.executable, '-c', ENDS], capture_output=True, text=True, timeout=60)
  assert (ended.returncode, ended.stdout) == (0, 'closed\nclosed\n'), ended.stderr


def test_sigterm_in_a_check_closes_its_instance(tmp_path):
  (tmp_path / 'killed.py').write_text(
    textwrap.dedent("""
      import os, signal, threading
      import dm_env, numpy as np
      from dm_env import specs

      class Killed(dm_env.Environment):
        def observation_spec(self):
          return specs.Array((1,), np.float32)
        def action_spec(self):
          return specs.DiscreteArray(2)
        def reset(self):
          os.kill(os.getpid(), signal.SIGTERM)
          return dm_env.restart(np.zeros(1, np.float32))
        def step(self, action):
          return dm_env.transition(0.0, np.zeros(1, np.float32))
        def close(self):
          print('closed', flush=True)
    """)
  )
  ended = subprocess.run(
    [sys.executable, '-m', 'hephaestus.launch.main', 'doctor', 'dm_env/killed:Killed'],
    cwd=tmp_path, capture_output=True, text=True, timeout=120,
  )  # fmt: skip
  assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
  assert 'closed' in ended.stdout
