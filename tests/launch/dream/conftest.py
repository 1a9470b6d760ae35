"""Untrained policies whose dreams tests steer, with compiled programs that they share."""

import contextlib
import functools

import pytest
import served as served_lib
import tiny
import untrained

from hephaestus.launch.dream import pages, session

SIZES = [f'agent.{name}={value}' for name, value in tiny.DREAMER.items()]
OPTIONS = {
  'catch': [f'environment.{name}={value}' for name, value in tiny.CATCH.items()],
  'oasis': ['agent.memory_size=16'],
  'sprites': ['agent.slots=3', 'agent.slot_size=8'],
}


@functools.cache
def make_programs(environment):
  options = OPTIONS.get(environment, [])
  return session.Programs(untrained.policy('dreamer', environment, *SIZES, *options))


@pytest.fixture
def begin():
  """(environment, seed) -> a session."""
  with contextlib.ExitStack() as stack:

    def begin(environment='catch', seed=0):
      made = session.Session(make_programs(environment), seed)
      stack.callback(made.close)
      return made

    yield begin


@pytest.fixture
def serve():
  """Environment -> the server of sessions of its policy, with them as `sessions`."""
  with contextlib.ExitStack() as stack:

    def serve(environment='catch'):
      sessions = pages.Sessions(make_programs(environment), seed=0)
      made = served_lib.Served(functools.partial(pages.make_app, sessions))
      made.sessions = sessions
      stack.callback(sessions.close)
      stack.callback(made.close)
      return made

    yield serve
