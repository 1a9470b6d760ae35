"""Untrained policies whose dreams tests steer, with compiled programs that they share."""

import contextlib
import functools
import http.client
import json
import pathlib
import threading

import jax
import pytest
import tiny

from hephaestus.launch import config as launch_config
from hephaestus.launch.dream import pages, session
from hephaestus.launch.interface import exported, policy
from hephaestus.launch.report import server

SIZES = [f'agent.{name}={value}' for name, value in tiny.DREAMER.items()]
OPTIONS = {
  'catch': [f'environment.{name}={value}' for name, value in tiny.CATCH.items()],
  'oasis': ['agent.memory_size=16'],
  'sprites': ['agent.slots=3', 'agent.slot_size=8'],
}


def make_policy(environment, agent='dreamer'):
  """A policy of initial parameters."""
  sizes = SIZES if agent == 'dreamer' else []
  preset = launch_config.of_preset(agent, 'laptop', environment)
  config = launch_config.override(preset, [*sizes, *OPTIONS.get(environment, [])])
  made = config.make_environment()
  specs = made.observation_spec, made.action_spec
  agent = config.record.make(config.agent, *specs).agent
  params = jax.device_get(agent.init_params(jax.random.key(0)))
  described = exported.Exported(config, 0, tuple(made.action_names), *specs, arrays={})
  return policy.Policy(
    pathlib.Path('untrained'), described, agent, agent.acting_params(params),
    all_params=params, environment=made,
  )  # fmt: skip


@functools.cache
def make_programs(environment):
  return session.Programs(make_policy(environment))


@pytest.fixture
def untrained():
  """(environment, agent) -> a policy of initial parameters."""
  return make_policy


@pytest.fixture
def begin():
  """(environment, seed) -> a session."""
  with contextlib.ExitStack() as stack:

    def begin(environment='catch', seed=0):
      made = session.Session(make_programs(environment), seed)
      stack.callback(made.close)
      return made

    yield begin


class Served:
  """The server of sessions of one policy, with a browser's requests."""

  def __init__(self, environment):
    self.sessions = pages.Sessions(make_programs(environment), seed=0)
    self._socket = server.listen(0)
    self.port = self._socket.getsockname()[1]
    self._server = server.make_server(pages.make_app(self.sessions, 'secret'))
    self._thread = threading.Thread(target=self._server.run, kwargs={'sockets': [self._socket]})
    self._thread.start()

  def ask(self, path, content=None, *, token='secret', method=None, **headers):
    """Asks for a path, with content by POST; the status, the content and the headers of the answer."""
    link = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
    body = content if content is None or isinstance(content, bytes) else json.dumps(content)
    method = method or ('GET' if content is None else 'POST')
    link.request(method, f'/{token}/{path}', body, headers)
    response = link.getresponse()
    return response.status, response.read(), response.headers

  def json(self, path, content=None):
    status, answer, _ = self.ask(path, content)
    assert status == 200, answer
    return json.loads(answer)

  def close(self):
    self._server.should_exit = True
    self._thread.join()
    self._socket.close()
    self.sessions.close()


@pytest.fixture
def serve():
  """Environment -> its server."""
  with contextlib.ExitStack() as stack:

    def serve(environment='catch'):
      served = Served(environment)
      stack.callback(served.close)
      return served

    yield serve
