"""A server on the loopback interface, and its guards, for the pages that commands serve."""

import contextlib
import importlib.util
import os
import pathlib
import secrets
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

from hephaestus.actors.environments import packages

PAGE = pathlib.Path(__file__).parent / 'assets'  # a report uses its style, too
MOST_CONNECTIONS = 100  # a browser has six
PACKAGES = ('starlette', 'uvicorn')  # that a server needs
SHARED = ('elements.js', 'page.css', 'icon.svg')  # files of PAGE that all pages use
HEADERS = {
  'Content-Security-Policy': "default-src 'none'; script-src 'self'; style-src 'self'; "
  "img-src 'self'; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
  "frame-ancestors 'none'",
  'X-Content-Type-Options': 'nosniff',
  'Referrer-Policy': 'no-referrer',  # the token is in the address
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Cross-Origin-Opener-Policy': 'same-origin',
  'Cache-Control': 'no-store',
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
  """An app that rejects requests that have no token, come from another site's page, or may write.

  Args:
    app: the app behind it, whose paths begin with /TOKEN/.
    token: secret that the path of every request must begin with.
    command: the command that prints the address, such as 'dashboard'.
    methods: HTTP methods that are served.
  """

  def __init__(self, app: App, token: str, command: str, methods: Sequence[str] = ('GET', 'HEAD')):
    self._app = app
    self._token = token
    self._command = command
    self._methods = methods

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    from starlette import responses

    if scope['type'] != 'http':
      return
    refusal = self._refusal(scope)

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
      if message['type'] == 'http.response.start':
        own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        message['headers'] = [*message.get('headers', []), *own]
      await send(message)

    if refusal is None:
      await self._app(scope, receive, send_with_headers)
    else:
      status, text = refusal
      await responses.PlainTextResponse(text, status)(scope, receive, send_with_headers)

  def _refusal(self, scope: Scope) -> tuple[int, str] | None:
    headers = [(name, value.decode('latin-1')) for name, value in scope['headers']]
    hosts = [value for name, value in headers if name == b'host']
    origins = [value for name, value in headers if name == b'origin']
    # Against DNS rebinding: another site's name may resolve to this address.
    if len(hosts) != 1 or hosts[0].rsplit(':', 1)[0] not in ('127.0.0.1', 'localhost'):
      return 403, 'only 127.0.0.1 and localhost are served'
    if any(origin != f'http://{hosts[0]}' for origin in origins):
      return 403, 'only requests of the page itself are served'
    if scope['method'] not in self._methods:
      return 405, f'served are only {", ".join(self._methods)}'
    first = scope['path'].split('/')[1]
    if not secrets.compare_digest(first.encode(), self._token.encode()):
      return (
        403,
        f'the token is wrong or missing: open the address that hephaestus {self._command} printed',
      )
    return None


def static(files: Sequence[pathlib.Path]) -> list[Any]:
  """Routes that serve files by their names, index.html at '/'."""
  from starlette import responses, routing

  def route(path: pathlib.Path) -> routing.Route:
    address = '/' if path.name == 'index.html' else f'/{path.name}'
    return routing.Route(address, lambda request: responses.FileResponse(path))

  return list(map(route, files))


def check_packages(extra: str, *names: str) -> None:
  """Raises ValueError if a package of an extra is not installed; names both."""
  for name in names:
    if importlib.util.find_spec(name) is None:
      raise ValueError(
        f'the package {name} is not installed. Install the extra `{extra}`: '
        f'{packages.install(extra)}'
      )


def listen(port: int) -> socket.socket:
  """Opens a socket that listens on the loopback interface at a port, 0 for a free one; ValueError if it cannot."""
  listening = socket.socket()
  listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    listening.bind(('127.0.0.1', port))
    listening.listen()  # requests that arrive before the server has started wait
  except (OSError, OverflowError) as error:
    listening.close()
    reason = getattr(error, 'strerror', None) or error
    raise ValueError(f'--port {port}: cannot be used ({reason}); give another') from None
  return listening


def make_server(app: App) -> Any:
  """Makes a `uvicorn.Server` of an app; its `run` takes the sockets."""
  import uvicorn

  return uvicorn.Server(
    uvicorn.Config(
      app,
      lifespan='off',
      http=_make_protocol(),
      backlog=MOST_CONNECTIONS,  # accepted at once, before any is closed
      ws='none',
      log_level='warning',
      access_log=False,  # it would contain the token
      server_header=False,
      timeout_graceful_shutdown=1,
    )
  )


def _make_protocol() -> Any:
  """Makes uvicorn's class of a connection, of which one too many closes the oldest: it may never ask."""
  from uvicorn.protocols.http import h11_impl

  connections: dict[Any, None] = {}

  class Protocol(h11_impl.H11Protocol):
    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      connections[self] = None
      if len(connections) > MOST_CONNECTIONS:
        oldest = next(iter(connections))
        del connections[oldest]
        oldest.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
      connections.pop(self, None)
      super().connection_lost(exc)

  return Protocol


def serve(make_app: Callable[[str], App], port: int, *, open_browser: bool = False) -> None:
  """Serves an app until Ctrl-C, and prints its address; ValueError if the port cannot be used.

  Args:
    make_app: function from a new token to the app that it guards.
    port: port of 127.0.0.1; 0 for a free one.
    open_browser: whether to open the address in the user's browser, where there is a display.
  """
  with contextlib.closing(listen(port)) as listening:
    token = secrets.token_urlsafe(16)
    address = f'http://127.0.0.1:{listening.getsockname()[1]}/{token}/'
    print(f'{address} (Ctrl-C to stop)', flush=True)
    opened = _opened(address) if open_browser else contextlib.nullcontext()
    with opened, contextlib.suppress(KeyboardInterrupt):
      make_server(make_app(token)).run(sockets=[listening])


@contextlib.contextmanager
def _opened(address: str) -> Iterator[None]:
  """Opens an address in the user's browser, if there is a display; without one, a browser needs the terminal.

  The browser is given a file of this user that leads to the address: other users can read the arguments of
  its process, and would find the token there.
  """
  displays = os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY')
  if not displays and sys.platform != 'darwin':
    yield
    return
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'open.html'
    file.write_text(f'<meta http-equiv="refresh" content="0; url={address}">\n')
    webbrowser.open(file.as_uri())
    yield
