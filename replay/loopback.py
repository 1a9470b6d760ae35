"""Restricts a server's port to this machine, although the server listens on all interfaces.

Reverb's address cannot be configured. But on Linux a listening socket can be bound to an interface
later on. Bound to `lo` it refuses connections from other machines, over IPv4 and IPv6, and also
connections of this machine to its other addresses. Since Linux 5.7 that takes no privileges.

Until then, sockets that listen at the same port before the server does (SO_REUSEPORT, which gRPC
sets, too) get all its connections: a filter of the kernel chooses the first socket of such a group.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import select
import socket
import struct
from collections.abc import Iterator

import psutil

_LOOPBACK = b'lo'
_SO_ATTACH_REUSEPORT_CBPF = 51  # of asm-generic/socket.h; Python has no name for it
_RETURN_0 = struct.pack('HBBI', 0x06, 0, 0, 0)  # a classic BPF program: BPF_RET | BPF_K, 0
_PROBE_SECONDS = 1.0


def refusal() -> str:
  """Tries, with a free port, whether `restricted` can work here; returns the reason if it cannot, else ''."""
  addresses = _other_addresses()
  with contextlib.ExitStack() as stack:
    try:
      with restricted() as port:
        probe = stack.enter_context(_listen(socket.AF_INET, port))
        for address in ('127.0.0.1', *addresses):
          _connects(address, port)
    except OSError as error:
      return f'SO_BINDTODEVICE: {error.strerror}'
    waiting = select.poll()  # unlike select.select, for descriptors above 1,023 too
    waiting.register(probe, select.POLLIN)
    if waiting.poll(0):
      return 'SO_ATTACH_REUSEPORT_CBPF: has no effect'
    for address in addresses:
      if _connects(address, port):
        return f'SO_BINDTODEVICE: has no effect on {address}'
  return ''


@contextlib.contextmanager
def restricted(port: int = 0) -> Iterator[int]:
  """Restricts a port to this machine for a server of this process that begins to listen within the context.

  Within the context, no connection reaches the server. Connections made meanwhile are reset at its end.

  Args:
    port: number of the port; 0 for a free one.

  Yields:
    The number of the port.

  Raises:
    OSError: the system does not support that, or the port is in use.
    RuntimeError: no socket of this process has begun to listen there.
  """
  with contextlib.ExitStack() as stack:
    own = []
    # The server has one of these: gRPC uses IPv4 where it finds no IPv6.
    for family in (socket.AF_INET6, socket.AF_INET):
      try:
        own.append(stack.enter_context(_listen(family, port, first=True)))
      except OSError:
        if family == socket.AF_INET:
          raise
        continue
      port = own[-1].getsockname()[1]
    yield port
    found = False
    for listening in _listening(port):
      _bind_to_loopback(listening)
      found = found or not any(
        os.path.sameopenfile(each.fileno(), listening.fileno()) for each in own
      )
  if not found:
    raise RuntimeError(f'this process does not listen at port {port}')


def _listen(family: socket.AddressFamily, port: int, first: bool = False) -> socket.socket:
  """Listens at a port that sockets of this user share; if `first`, it gets all connections."""
  listening = socket.socket(family, socket.SOCK_STREAM)
  try:
    if family == socket.AF_INET6:
      listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # as gRPC does
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
      listening.setsockopt(socket.SOL_SOCKET, option, 1)
    listening.bind(('', port))
    listening.listen()
    if first:
      code = ctypes.create_string_buffer(_RETURN_0)
      program = struct.pack('HP', 1, ctypes.addressof(code))  # struct sock_fprog
      listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
  except BaseException:
    listening.close()
    raise
  return listening


def _connects(address: str, port: int) -> bool:
  with (
    contextlib.suppress(OSError),
    socket.create_connection((address, port), timeout=_PROBE_SECONDS),
  ):
    return True
  return False


def _bind_to_loopback(listening: socket.socket) -> None:
  listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)


def _listening(port: int) -> Iterator[socket.socket]:
  """Yields the sockets of this process that listen at a port, which several may share."""
  for entry in os.listdir('/proc/self/fd'):
    try:
      found = socket.socket(fileno=int(entry))  # not a duplicate, which fails if there are too many
    except OSError as error:
      if error.errno in (errno.EBADF, errno.ENOTSOCK):  # closed meanwhile, or no socket
        continue
      raise
    try:
      if found.family in (socket.AF_INET, socket.AF_INET6):
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and found.getsockname()[1] == port:
          yield found
    finally:
      found.detach()  # it is the server's


def _other_addresses() -> list[str]:
  """IPv4 addresses of this machine, without loopback addresses."""
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
