"""Prints the tables of a running server: python -m replay.inspector HOST:PORT."""

from __future__ import annotations

import sys
from typing import Any

import rich
import rich.table

from replay import connection
from replay import tables as tables_lib


def tables(
  address: str, config: tables_lib.ReplayConfig | None = None, timeout_seconds: float = 5.0
) -> dict[str, Any]:
  """The tables of a running server and its replay ratio, without touching what they count.

    achieved = sequences sampled from all strata / max(1, inserted − warm-up)

  with `inserted` and the warm-up as the limited stratum has them; sequences that readers hold
  ahead count as sampled, so the figure runs ahead by their number, and settles with time.

  Args:
    address: HOST:PORT of the server.
    config: tells the configured ratio; without it, the limiter's samples per insert divided by the
      limited stratum's part of what was sampled, None before the first sample.
    timeout_seconds: whole seconds, at least 1.

  Returns:
    {'tables': {NAME: {'size', 'max_size', 'inserted', 'sampled', 'unique_sampled'}},
     'replay_ratio': {'configured', 'achieved'}}

  Raises:
    ConnectionError: nothing answered in time.
  """
  infos = connection.Connection(address, 'inspector', timeout_seconds=timeout_seconds + 1).info(
    timeout_seconds
  )
  if infos is None:
    raise ConnectionError(f'no replay server answered at {address} within {timeout_seconds:g} s')
  rows = {
    name: {
      'size': info.current_size,
      'max_size': info.max_size,
      'inserted': info.rate_limiter_info.insert_stats.completed,
      'sampled': info.rate_limiter_info.sample_stats.completed,
      'unique_sampled': info.num_unique_samples,
    }
    for name, info in infos.items()
  }
  strata = [name for name in rows if name != tables_lib.PARAMS]
  if not strata:
    return {'tables': rows, 'replay_ratio': {'configured': None, 'achieved': 0.0}}
  limited = min(strata, key=lambda name: infos[name].rate_limiter_info.max_diff)
  limiter = infos[limited].rate_limiter_info
  sampled = sum(rows[name]['sampled'] for name in strata)
  configured: float | None = None
  if config is not None:
    configured = config.replay_ratio
  elif rows[limited]['sampled']:
    configured = limiter.samples_per_insert * sampled / rows[limited]['sampled']
  after_warm_up = max(1, rows[limited]['inserted'] - limiter.min_size_to_sample)
  return {
    'tables': rows,
    'replay_ratio': {'configured': configured, 'achieved': sampled / after_warm_up},
  }


def main(arguments: list[str]) -> int:
  """Prints a table of the server's tables; 1 when there is no server, 2 without an address."""
  if len(arguments) != 1:
    print('usage: python -m replay.inspector HOST:PORT', file=sys.stderr)
    return 2
  try:
    report = tables(arguments[0])
  except ConnectionError as error:
    print(error, file=sys.stderr)
    return 1
  ratio = report['replay_ratio']
  configured = '?' if ratio['configured'] is None else f'{ratio["configured"]:.2f}'
  view = rich.table.Table(
    title=arguments[0],
    caption=f'replay ratio {ratio["achieved"]:.2f}, configured {configured}',
  )
  for heading in ('table', 'size', 'max size', 'inserted', 'sampled', 'unique sampled'):
    view.add_column(heading, justify='left' if heading == 'table' else 'right')
  for name, row in sorted(report['tables'].items()):
    view.add_row(name, *(f'{value:,}' for value in row.values()))
  rich.print(view)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
