"""The server of a page in a thread of this process, with requests as of a browser."""

import http.client
import json
import threading

from hephaestus.launch.report import server


class Served:
  """Serves the app that `make_app` makes of the token 'secret', until it is closed."""

  def __init__(self, make_app):
    self.socket = server.listen(0)
    self.port = self.socket.getsockname()[1]
    self._server = server.make_server(make_app('secret'))
    self._thread = threading.Thread(target=self._server.run, kwargs={'sockets': [self.socket]})
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
    self.socket.close()
