"""Serves live reports to Prometheus."""

import http.server
from typing import Any

from hephaestus.launch.inspect import live
from hephaestus.replay import inspector

DISTRIBUTIONS = tuple(live.DISTRIBUTIONS)


def make_exporter(target: str, port: int) -> http.server.HTTPServer:
  """Makes a web server for Prometheus, in which each GET of /metrics makes a report.

  Args:
    target: see `live.find`.
    port: port to listen at on the loopback interface; 0 for a free one. ValueError if it is in use.
  """
  inspection = live.Inspection(target)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
      # Against DNS rebinding: another site's name may resolve to this address.
      host = self.headers.get('Host', '').rsplit(':', 1)[0]
      if host not in ('127.0.0.1', 'localhost'):
        self.send_error(403, 'only 127.0.0.1 and localhost are served')
        return
      if self.path != '/metrics':
        self.send_error(404, 'only /metrics is served')
        return
      try:
        text = exposition(inspection.report())
      except (ConnectionError, ValueError):
        text = 'hephaestus_up 0\n'
      self.send_response(200)
      self.send_header('Content-Type', 'text/plain; version=0.0.4; charset=utf-8')
      self.end_headers()
      self.wfile.write(text.encode())

    def log_message(self, *unused: Any) -> None:
      pass

  try:
    return http.server.HTTPServer(('127.0.0.1', port), Handler)
  except (OSError, OverflowError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise ValueError(f'--prometheus {port}: cannot be used ({reason}); give another') from None


def exposition(report: live.Report) -> str:
  """Formats a report in Prometheus' text format: tables, strata, states and quantiles are labels.

  A run that is not running has one line only, `hephaestus_up 0`.
  """
  if not report.running:
    return 'hephaestus_up 0\n'
  found = report.to_json()
  del found['time'], found['running']
  lines = ['hephaestus_up 1']
  for shard in found.pop('shards'):
    lines += _samples('shard_up', int(shard['alive']), f'address="{shard["address"]}"')
  for group, label in (('tables', 'table'), ('strata', 'stratum')):
    for name, values in found.pop(group).items():
      lines += _samples(label, values, f'{label}="{name}"')
  for name, value in found.items():
    lines += _samples(name, value)
  return '\n'.join(sorted(lines)) + '\n'


def _samples(name: str, value: Any, *labels: str) -> list[str]:
  """Returns the line of each number in a value, which may be a mapping; other values have none."""
  if not isinstance(value, dict):
    shown = f'{{{",".join(labels)}}}' if labels else ''
    return [f'hephaestus_{name}{shown} {value}'] if isinstance(value, int | float) else []
  lines = []
  for key, each in value.items():
    if name.endswith('worker_time'):
      lines += _samples(name, each, *labels, f'state="{key}"')
    elif name.endswith(DISTRIBUTIONS):
      lines += _samples(name, each, *labels, f'quantile="{inspector.QUANTILES[key]:g}"')
    else:
      lines += _samples(f'{name}_{key}', each, *labels)
  return lines
