"""Serves the page of a steered dream on the loopback interface: a session for each tab, as JSON over HTTP."""

import collections
import functools
import json
import pathlib
import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

from hephaestus.launch.bench import dreams
from hephaestus.launch.dream import session as session_lib
from hephaestus.launch.interface import policy as policy_lib
from hephaestus.launch.report import server
from hephaestus.launch.run import variables

PAGE = pathlib.Path(__file__).parent / 'assets'
MOST_SESSIONS = 8  # the one that was used longest ago is closed for another
MEASURED_STEPS = 2_048  # of the environment, to say how long dreams can be trusted
MOST_BYTES = 1 << 16  # of a request

MOVES: dict[str, Callable[..., int]] = {
  'act': session_lib.Session.act,
  'begin_dream': session_lib.Session.begin_dream,
  'begin_episode': session_lib.Session.begin,
}


class Sessions:
  """The sessions of all tabs, by random names. Its methods may be called by several threads.

  Each session has the same seed, so that it begins with the same episode.
  """

  def __init__(self, programs: session_lib.Programs, seed: int):
    self._programs = programs
    self._seed = seed
    self._lock = threading.Lock()
    self._measuring = threading.Lock()
    self._trust: str | None = None
    self._open: collections.OrderedDict[str, session_lib.Session] = collections.OrderedDict()

  def begin(self) -> dict[str, Any]:
    """Begins a session; returns what `describe` does."""
    made = session_lib.Session(self._programs, self._seed)
    name = secrets.token_urlsafe(8)
    with self._lock:
      self._open[name] = made
      oldest = self._open.popitem(last=False)[1] if len(self._open) > MOST_SESSIONS else None
    if oldest is not None:
      oldest.close()
    return self.describe(name)

  def find(self, name: str) -> session_lib.Session:
    """The session of a name; KeyError if there is none, or it was closed for another."""
    with self._lock:
      self._open.move_to_end(name)
      return self._open[name]

  def describe(self, name: str) -> dict[str, Any]:
    """{'session': its name, 'about': see `Programs`, 'steps': all steps, 'repeats': see `Session`}."""
    found = self.find(name)
    steps = [node.shown for node in found.nodes]
    about = self._programs.about
    return {'session': name, 'about': about, 'steps': steps, 'repeats': found.repeats}

  def move(self, name: str, move: str, asked: dict[str, Any]) -> dict[str, Any]:
    """{'step': see `Session.show`, 'repeats'} of the step to which one of MOVES leads, with arguments `asked`.

    KeyError if there is no such session, ValueError for invalid arguments.
    """
    session = self.find(name)
    try:
      index = MOVES[move](session, **asked)
    except TypeError as error:  # unknown or missing entries of the request
      raise ValueError(str(error)) from None
    return {'step': session.show(index), 'repeats': session.repeats}

  def trust(self) -> dict[str, Any]:
    """{'trust': for how many steps the model's dreams can be trusted}; measured by the first call."""
    with self._measuring:
      if self._trust is None and self._programs.has_numbers:
        found = dreams.compare(self._programs.policy, num_steps=MEASURED_STEPS, seed=self._seed)
        self._trust = dreams.trust(found)
    unknown = (
      'The errors of images are not measured, so it is not known how long dreams can be trusted.'
    )
    return {'trust': self._trust or unknown}

  def close(self) -> None:
    """Closes all sessions."""
    for session in self._open.values():
      session.close()


def make_app(sessions: Sessions, token: str) -> server.App:
  """Makes the ASGI app of the page, which answers requests below /`token`/.

  GET /api/trust says how long dreams can be trusted; GET /api/sessions/NAME describes a session; POST
  /api/sessions begins one; POST to one of MOVES below a session takes a JSON object, see `Sessions`. Bad
  input is answered by 400 and one line, an unknown session by 404.
  """
  from starlette import applications, concurrency, exceptions, requests, responses, routing

  async def body(request: requests.Request) -> dict[str, Any]:
    content = b''
    try:
      async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
          raise exceptions.HTTPException(413, f'a request has at most {MOST_BYTES:,} bytes')
      asked = json.loads(content)
    except (ValueError, RecursionError, requests.ClientDisconnect) as error:
      raise exceptions.HTTPException(400, f'the request is not JSON ({error})') from None
    if not isinstance(asked, dict):
      raise exceptions.HTTPException(400, 'the request is no JSON object')
    return asked

  async def answer(function: Callable[..., Any], *arguments: Any) -> responses.Response:
    try:
      return responses.JSONResponse(await concurrency.run_in_threadpool(function, *arguments))
    except KeyError:
      raise exceptions.HTTPException(404, 'this session was closed; load the page again') from None
    except ValueError as error:
      raise exceptions.HTTPException(400, str(error)) from None

  def by(function: Callable[..., Any]) -> Callable[..., Any]:
    async def respond(request: requests.Request) -> responses.Response:
      return await answer(function, *request.path_params.values())

    return respond

  async def move(request: requests.Request) -> responses.Response:
    if request.path_params['move'] not in MOVES:
      raise exceptions.HTTPException(404, 'Not Found')
    return await answer(sessions.move, *request.path_params.values(), await body(request))

  files = [PAGE / name for name in ('index.html', 'dream.css', 'dream.js')]
  files += [server.PAGE / name for name in server.SHARED]
  routes = [
    *server.static(files),
    routing.Route('/api/trust', by(sessions.trust)),
    routing.Route('/api/sessions', by(sessions.begin), methods=['POST']),
    routing.Route('/api/sessions/{name}', by(sessions.describe)),
    routing.Route('/api/sessions/{name}/{move}', move, methods=['POST']),
  ]
  app = applications.Starlette(routes=[routing.Mount(f'/{token}', routes=routes)])
  return server.Guard(app, token, 'dream', ('GET', 'HEAD', 'POST'))


def serve(path: pathlib.Path, checkpoint: str | None, *, seed: int, port: int) -> None:
  """Serves the page until Ctrl-C, and prints its address.

  The agent is given as to `policy.load`, `seed` is that of all sessions, and port 0 a free one. ValueError as
  `policy.load` and `session.Programs`, or if the port cannot be used.
  """
  session_lib.check(path, policy_lib.load_config(path))  # loading takes seconds
  # So that the second start on a machine compiles nothing.
  variables.keep_compiled(least_seconds=0.1)
  programs = session_lib.Programs(policy_lib.load(path, checkpoint))
  print('hephaestus dream: compiles the model', file=sys.stderr, flush=True)
  session = session_lib.Session(programs, seed)
  session.act(0)
  session.close()
  sessions = Sessions(programs, seed)
  try:
    server.serve(functools.partial(make_app, sessions), port, open_browser=True)
  finally:
    sessions.close()
