"""Restricts a server's port to this machine, although the server listens on all interfaces.

Reverb's address cannot be configured. But on Linux a listening socket can be bound to an interface
later on. Bound to `lo` it refuses connections from other machines, over IPv4 and IPv6, and also
connections of this machine to its other addresses. Since Linux 5.7 that takes no privileges.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil

_LOOPBACK = b'lo'
_CONNECTED = (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_RECV)
_PROBE_SECONDS = 1.0


def refusal() -> str:
  """Tries, with a free port, whether `keep` can work here; returns the reason if it cannot, else ''."""
  with socket.create_server(('', 0)) as probe:
    try:
      _bind_to_loopback(probe)
    except OSError as error:
      return f'SO_BINDTODEVICE: {error.strerror}'
    port = probe.getsockname()[1]
    for address in _other_addresses():
      with (
        contextlib.suppress(OSError),
        contextlib.closing(socket.create_connection((address, port), timeout=_PROBE_SECONDS)),
      ):
        return f'SO_BINDTODEVICE: has no effect on {address}'
  return ''


def keep(port: int) -> None:
  """Makes a port at which this process listens refuse other machines.

  Raises:
    OSError: the system does not support that.
    RuntimeError: this process does not listen there, or another machine has already connected.
  """
  found = False
  for listening in _listening(port):
    _bind_to_loopback(listening)
    found = True
  if not found:
    raise RuntimeError(f'this process does not listen at port {port}')
  connections: list[Any] = psutil.net_connections('tcp')
  for connection in connections:
    if connection.laddr[1:] != (port,) or connection.status not in _CONNECTED:
      continue
    peer = connection.raddr[0]
    if not _is_loopback(peer):
      raise RuntimeError(f'{peer} connected to port {port} before it was restricted')


def _bind_to_loopback(listening: socket.socket) -> None:
  listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)


def _listening(port: int) -> Iterator[socket.socket]:
  """Yields the sockets of this process that listen at a port, which several may share."""
  for entry in os.listdir('/proc/self/fd'):
    try:
      found = socket.socket(fileno=os.dup(int(entry)))
    except OSError:  # closed meanwhile, or no socket
      continue
    with found:
      if found.family not in (socket.AF_INET, socket.AF_INET6):
        continue
      listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
      if listens and found.getsockname()[1] == port:
        yield found


def _other_addresses() -> list[str]:
  """IPv4 addresses of this machine without those of loopback."""
  return [
    entry.address
    for entries in psutil.net_if_addrs().values()
    for entry in entries
    if entry.family == socket.AF_INET and not _is_loopback(entry.address)
  ]


def _is_loopback(address: str) -> bool:
  parsed = ipaddress.ip_address(address)
  mapped = getattr(parsed, 'ipv4_mapped', None)
  return (mapped or parsed).is_loopback
