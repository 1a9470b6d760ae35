"""Finished runs that tests of several files read, and training in this process."""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from typing import NamedTuple

import jax
import pytest
import runs
import tiny

from hephaestus.actors import episodes
from hephaestus.actors.environments import host
from hephaestus.launch import config as launch_config
from hephaestus.launch.run import fused, parts
from hephaestus.learner.sources import unrolled


class Finished(NamedTuple):
  """A finished run: its folder, and the lines that the commands on it have printed."""

  folder: pathlib.Path
  lines: list[str]


@pytest.fixture(scope='session')
def dreamer(tmp_path_factory):
  """A run of the default agent, trained, evaluated and inspected where one process is possible.

  It has several checkpoints. Tests that change its folder copy it.
  """
  folder = tmp_path_factory.mktemp('dreamer')
  options = [*tiny.RUN, 'learner.checkpoint_updates=20', 'tensorboard=true']
  program = f"""
    import sys
    for name in {runs.DISTRIBUTED}:
      sys.modules[name] = None
    from hephaestus.launch import main
    for command in {(
      ['train', '--run', 'run', '--preset', 'laptop', '--steps', '300', '--set', *options],
      ['evaluate', 'run', '--episodes', '8', '--json'],
      ['inspect', 'run', '--json'],
    )!r}:
      assert main.run(main.parse(['hephaestus', *command])) == 0
  """  # fmt: skip
  variables = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  ran = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(program)],
    cwd=folder, env=variables, capture_output=True, text=True,
  )  # fmt: skip
  assert ran.returncode == 0, ran.stderr
  return Finished(folder / 'run', ran.stdout.splitlines())


@pytest.fixture(scope='module')
def browser():
  """Chromium, to which evil.example, the name of another site, is this machine; skipped without it."""
  chromium = shutil.which('chromium')
  if chromium is None:
    pytest.skip('needs a browser: install the Debian package chromium')
  sync_api = pytest.importorskip('playwright.sync_api', reason='of the extra browser')
  with sync_api.sync_playwright() as playwright:
    started = playwright.chromium.launch(
      executable_path=chromium,
      args=['--no-sandbox', '--host-resolver-rules=MAP evil.example 127.0.0.1'],
    )
    yield started
    started.close()


@pytest.fixture(scope='module')
def in_process():
  """Lets runs train in this process, where runs with the same programs trace and compile them once."""

  def once(function, key):
    made = {}

    def call(*arguments, **options):
      at = key(*arguments, **options)
      if at not in made:
        # With its arguments, so that no other object gets their identity.
        made[at] = arguments, function(*arguments, **options)
      return made[at][1]

    return call

  def text(config):
    """The config as text, without seed and length, on which programs do not depend."""
    same = dataclasses.replace(config, seed=0)
    if not getattr(config.learner, 'anneal', False):
      same = dataclasses.replace(same, max_environment_steps=10**9)
    return launch_config.to_yaml(same)

  def program(config, made, devices, should_stop=None, fail=None):
    # The capacity of a replay depends on the length of the run.
    replay = None if config.record.on_policy else fused.make_replay(config, len(devices))
    stop = should_stop if isinstance(made.environment, host.HostEnvironment) else None
    return text(config), str(replay), len(devices), stop, stop and fail

  def play(environment, agent, num_envs, *, should_stop=None, **options):
    stop = should_stop if isinstance(environment, host.HostEnvironment) else None
    return id(environment), id(agent), num_envs, stop, *options.items()

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fused, '_prepare_process', lambda: None)
    # Programs of the tests' eight devices, which take longer to compile, are those of tests/learner.
    patch.setattr(jax, 'local_devices', lambda: jax.devices()[:1])
    patch.setattr(parts, 'make_parts', once(parts.make_parts, text))
    patch.setattr(fused, 'build', once(fused.build, program))
    patch.setattr(unrolled.FusedProgram, 'compile', once(unrolled.FusedProgram.compile, id))
    patch.setattr(episodes, 'Play', once(episodes.Play, play))
    yield
