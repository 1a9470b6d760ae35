"""Serves a read-only web page of runs on the loopback interface."""

import functools
import importlib.util
import json
import pathlib
import sys
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from hephaestus.launch.files import history, metrics
from hephaestus.launch.report import groups as groups_lib
from hephaestus.launch.report import panels, server

MOST_VIDEOS = 6  # newest videos of a run that are shown
READ_SECONDS = 0.04  # longest time to read files per request; the page asks again for the rest


class Dashboard:
  """Makes the answers of the page's server from the runs' files.

  Its methods may be called from several threads. A run is named by its index in the order of the groups;
  `len` is the number of runs.

  Attributes:
    left_out: a line for each folder that is not shown, with the reason.
  """

  def __init__(self, folders: Sequence[pathlib.Path]):
    """Reads the configs of runs, finished or running, and no metrics yet; ValueError if there is no run."""
    self._groups, self.left_out = groups_lib.read(folders)
    self._histories = [run for group in self._groups for run in group.runs]
    self._lock = threading.Lock()
    self._drawn: dict[tuple[str, int], tuple[list[int], dict[str, Any]]] = {}

  def runs(self) -> dict[str, Any]:
    """Describes all runs, see `panels.overview`, with their 'x_axes' {KEY: label}."""
    with self._lock:
      self._read()
      shown = list(map(self._shown, range(len(self))))
      return panels.overview(self._groups, shown) | {'x_axes': history.X_AXES}

  def curves(self, x: str, known: str = '') -> str | None:
    """Returns all curves as JSON; reads new rows of metrics first.

    Args:
      x: the x-axis, one of history.X_AXES.
      known: the 'version' that the page has already; '' for none.

    Returns:
      None if the page has the newest version. Else the JSON text of {'version', 'unread': bytes of
      metrics that are still to be read, 'groups': a result of `panels.to_json` for each group, 'charts':
      see `panels.charts`}. 'groups' is None while much is still to be read.
    """
    with self._lock:
      unread = self._read()
      if unread > history.CHUNK:
        return json.dumps({'version': '', 'unread': unread, 'groups': None, 'charts': []})
      version = '-'.join([x, str(unread), *(str(each.version) for each in self._histories)])
      if version == known:
        return None
      groups = [self._draw(x, index) for index in range(len(self._groups))]
      charts = panels.charts(key for each in groups for key in each)
      return json.dumps({'version': version, 'unread': unread, 'groups': groups, 'charts': charts})

  def video(self, index: int, name: str) -> pathlib.Path | None:
    """Path of a video of a run by its name; None if there is none."""
    return next((each.path for each in self._videos(index) if each.path.name == name), None)

  def __len__(self) -> int:
    return len(self._histories)

  def _videos(self, index: int) -> list[panels.Video]:
    return panels.videos(self._histories[index].folder)

  def _shown(self, index: int) -> list[dict[str, Any]]:
    """The newest videos of a run for the page; the address changes while the file is being written."""
    return [
      {
        'source': f'video/{index}/{urllib.parse.quote(each.path.name)}?written={each.written}',
        'name': each.path.name,
        'update': each.update,
        'dream': each.dream,
      }
      for each in self._videos(index)[:MOST_VIDEOS]
    ]

  def _read(self) -> int:
    deadline = time.monotonic() + READ_SECONDS
    for each in self._histories:
      each.read(deadline)
    return sum(each.unread for each in self._histories)

  def _draw(self, x: str, index: int) -> dict[str, Any]:
    """All curves of a group, as on the page; cached until one of its runs has new metrics."""
    members = self._groups[index].runs
    version = [each.version for each in members]
    known = self._drawn.get((x, index))
    if known is None or known[0] != version:
      known = self._drawn[x, index] = version, panels.to_json(panels.drawn(members, x))
    return known[1]


def make_app(dashboard: Dashboard, token: str) -> server.App:
  """Makes the ASGI app of the page, which answers GET requests below /TOKEN/, a secret."""
  from starlette import applications, exceptions, requests, responses, routing

  def runs(request: requests.Request) -> responses.Response:
    return responses.Response(metrics.to_json(dashboard.runs()), media_type='application/json')

  def curves(request: requests.Request) -> responses.Response:
    x = request.query_params.get('x', 'environment_step')
    if x not in history.X_AXES:
      raise exceptions.HTTPException(404, f'x={x}: choose one of {", ".join(history.X_AXES)}')
    text = dashboard.curves(x, request.query_params.get('known', ''))
    if text is None:
      return responses.Response(status_code=204)
    return responses.Response(text, media_type='application/json')

  def video(request: requests.Request) -> responses.Response:
    run, name = request.path_params['run'], request.path_params['name']
    is_known = run in map(str, range(len(dashboard)))
    path = dashboard.video(int(run), name) if is_known else None
    if path is None:
      raise exceptions.HTTPException(404, f'run {run}, {name}: no such video')
    return responses.FileResponse(path, media_type=panels.VIDEOS[path.suffix])

  routes = [
    *server.static(files()),
    routing.Route('/api/runs', runs),
    routing.Route('/api/curves', curves),
    routing.Route('/video/{run}/{name}', video),
  ]
  app = applications.Starlette(routes=[routing.Mount(f'/{token}', routes=routes)])
  return server.Guard(app, token, 'dashboard')


def files() -> list[pathlib.Path]:
  """The page and the files that it refers to by their names."""
  found = importlib.util.find_spec('uplot')  # without importing its package
  assert found is not None and found.submodule_search_locations is not None
  uplot = pathlib.Path(found.submodule_search_locations[0]) / 'static'
  own = [server.PAGE / name for name in ('index.html', 'page.js', *server.SHARED)]
  return [*own, uplot / 'uPlot.iife.js', uplot / 'uPlot.min.css']


def serve(folders: Sequence[pathlib.Path], port: int) -> None:
  """Serves the page until Ctrl-C at a port of 127.0.0.1, see `server.serve`.

  Folders that are not of runs are named on stderr and left out; ValueError if none is a run's, or a package of
  the extra `dashboard` is not installed.
  """
  server.check_packages('dashboard', *server.PACKAGES, 'uplot')
  dashboard = Dashboard(folders)
  for reason in dashboard.left_out:
    print(f'hephaestus dashboard: {reason}', file=sys.stderr)
  server.serve(functools.partial(make_app, dashboard), port)
