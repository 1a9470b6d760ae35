"""Ports of real servers, which other machines reach only if they are exposed."""

import contextlib
import socket

import psutil
import pytest

from hephaestus.replay import connection, loopback


@pytest.fixture(scope='module')
def outside():
  """An address of this machine other than that of loopback."""
  addresses = [
    entry.address
    for entries in psutil.net_if_addrs().values()
    for entry in entries
    if entry.family == socket.AF_INET and not entry.address.startswith('127.')
  ]
  if not addresses:
    pytest.skip('this machine has only the address of loopback')
  return addresses[0]


@pytest.fixture
def restricts_ports():
  if refusal := loopback.refusal():
    pytest.skip(f'this system cannot restrict ports to the machine: {refusal}')


def connects(address, port):
  with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5.0):
    return True
  return False


def test_unexposed_server_refuses_other_addresses(restricts_ports, outside, serve, unlimited):
  exposed, _ = serve(unlimited())
  assert connects(outside, exposed.port)
  server, address = serve(unlimited(), exposed=False)
  assert not connects(outside, server.port)
  assert connects('127.0.0.1', server.port)
  assert connection.Connection(address, 'test').info() is not None


def test_earlier_connection_of_another_machine_is_detected(restricts_ports, outside):
  with socket.create_server(('', 0)) as server:
    port = server.getsockname()[1]
    with socket.create_connection((outside, port)):
      with pytest.raises(RuntimeError, match=f'{outside} connected to port {port}'):
        loopback.keep(port)
      assert not connects(outside, port)
    loopback.keep(port)


def test_port_without_listener_raises():
  with socket.socket() as bound:
    bound.bind(('', 0))
    with pytest.raises(RuntimeError, match='does not listen'):
      loopback.keep(bound.getsockname()[1])


def test_refusal_describes_a_missing_or_ignored_permission(monkeypatch, outside):
  def refuse(listening):
    raise PermissionError(1, 'Operation not permitted')

  monkeypatch.setattr(loopback, '_bind_to_loopback', refuse)
  assert loopback.refusal() == 'SO_BINDTODEVICE: Operation not permitted'
  monkeypatch.setattr(loopback, '_bind_to_loopback', lambda listening: None)
  assert loopback.refusal().startswith('SO_BINDTODEVICE: has no effect on ')
