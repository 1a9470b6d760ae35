"""Serves live reports to Prometheus."""

import http.server
from typing import Any

from hephaestus.launch import config as launch_config
from hephaestus.launch.inspect import live
from hephaestus.launch.inspect import report as report_lib
from hephaestus.replay import inspector


def make_exporter(target: str, port: int) -> http.server.HTTPServer:
  """Makes a web server for Prometheus, in which each GET of /metrics makes a report.

  Args:
    target: a run's folder, or HOST:PORT of a replay server.
    port: port to listen at on the loopback interface; 0 for a free one.

  Returns:
    A server that listens already; `serve_forever` answers the requests.

  Raises:
    ValueError: the target is not valid, or the port is in use.
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


def exposition(report: report_lib.Report) -> str:
  """Formats a report in Prometheus' text format, with a line for each number.

  Tables, strata, states and quantiles become labels. A run that is not running has one line only,
  `hephaestus_up 0`.

  Args:
    report: the report.
  """
  if not report.running:
    return 'hephaestus_up 0\n'
  lines = ['hephaestus_up 1']
  nested = ('tables', 'time', 'shards', 'strata', 'running', 'saved')
  found = report.to_json()
  rest = {key: value for key, value in found.items() if key not in nested}
  for key, value in launch_config.flatten(rest).items():
    lines += _sample(key.replace('.', '_'), '', value)
  for shard in report.shards:
    lines += _sample('shard_up', f'{{address="{shard["address"]}"}}', int(shard['alive']))
  for table, row in report.tables.items():
    for key, value in row.items():
      if key == 'worker_time':
        for state, share in value.items():
          lines += _sample('table_worker_time', f'{{table="{table}",state="{state}"}}', share)
      else:
        lines += _sample(f'table_{key}', f'{{table="{table}"}}', value)
  for stratum, row in found['strata'].items():
    for key, value in row.items():
      if key in report_lib.DISTRIBUTIONS:
        for name, each in (value or {}).items():
          labels = f'{{stratum="{stratum}",quantile="{inspector.QUANTILES[name]:g}"}}'
          lines += _sample(f'stratum_{key}', labels, each)
      else:
        lines += _sample(f'stratum_{key}', f'{{stratum="{stratum}"}}', value)
  return '\n'.join(sorted(lines)) + '\n'


def _sample(name: str, labels: str, value: Any) -> list[str]:
  """Returns the line of a number; no line for other values."""
  return [f'hephaestus_{name}{labels} {value}'] if isinstance(value, int | float) else []
