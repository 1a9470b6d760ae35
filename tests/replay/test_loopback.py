"""Ports of real servers, which other machines reach only if they are exposed."""

import contextlib
import os
import resource
import socket
import struct

import polling
import psutil
import pytest
import reverb

from hephaestus.replay import checkpoint, connection, loopback, tables, writer


@pytest.fixture(scope='module')
def outside():
  """An address of this machine other than the loopback address."""
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


def frame(kind, flags, stream, payload):
  """A frame of HTTP/2."""
  return struct.pack('>I', len(payload))[1:] + struct.pack('>BBI', kind, flags, stream) + payload


def reset_request(table):
  """The bytes by which a client of gRPC asks Reverb for `Reset`, with a new connection's preface."""
  path = b'/deepmind.reverb.ReverbService/Reset'
  fields = (b'\x04', path), (b'\x01', b'any'), (b'\x0f\x10', b'application/grpc')
  headers = b'\x83\x86' + b''.join(name + bytes([len(text)]) + text for name, text in fields)
  headers += b'\x00\x02te\x08trailers'
  message = b'\x0a' + bytes([len(table)]) + table.encode()
  data = b'\x00' + struct.pack('>I', len(message)) + message
  parts = frame(4, 0, 0, b''), frame(1, 4, 1, headers), frame(0, 1, 1, data)
  return b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b''.join(parts)


@pytest.mark.parametrize('restricts', [True, False])
def test_request_before_the_restriction_does_not_reach_the_server(
  restricts, restricts_ports, outside, serve, unlimited, schema, make_sequences, tmp_path
):
  """A peer that asks for a reset as soon as the port listens only empties a table of an exposed server."""
  directory, config = str(tmp_path), unlimited()
  first, address = serve(config, directory=directory)
  entry = writer.Writer(address, config.strata, schema)
  entry.write(make_sequences(0, 10), lambda: False)
  checkpoint.save(first.localhost_client(), directory)
  entry.close()
  first.stop()
  made = tables.make_tables(config, schema, batch_size=16, insert_size=10_000)
  with loopback.restricted() if restricts else contextlib.nullcontext() as port:
    server = reverb.Server(made, port=port, checkpointer=checkpoint.checkpointer(directory))
    peer = socket.create_connection((outside, server.port), timeout=5.0)
    peer.sendall(reset_request('episodic'))
  size = lambda: server.localhost_client().server_info(timeout=10)['episodic'].current_size
  with peer:
    if restricts:
      with pytest.raises(ConnectionResetError):
        peer.recv(1)
      assert size() == 10
    else:
      polling.until(lambda: size() == 0, 'the reset')
  server.stop()


def test_restriction_leaks_no_descriptor(restricts_ports, serve, unlimited):
  pipes = [os.pipe() for _ in range(20)]  # which are no sockets
  serve(unlimited(), exposed=False)[0].stop()
  before = len(os.listdir('/proc/self/fd'))
  with contextlib.closing(socket.socket()) as own, loopback.restricted() as port:
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
      own.setsockopt(socket.SOL_SOCKET, option, 1)
    own.bind(('', port))
    own.listen()
  assert len(os.listdir('/proc/self/fd')) <= before
  for pipe in pipes:
    for end in pipe:
      os.close(end)


def test_server_stays_restricted_without_free_descriptors(restricts_ports, outside):
  """A table of descriptors that is full once the server listens hides none of its sockets."""
  limits = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.closing(socket.socket()) as server:
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
      server.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
      with loopback.restricted() as port:
        server.bind(('', port))
        server.listen()
        spare = os.dup(0)  # for the folder of all descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limits[1]))
        os.close(spare)
    finally:
      resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not connects(outside, port)
    assert connects('127.0.0.1', port)


def test_server_that_cannot_be_restricted_is_stopped(monkeypatch, outside, serve, unlimited):
  def refuse(listening):
    raise PermissionError(1, 'Operation not permitted')

  with socket.socket() as probe:
    probe.bind(('', 0))
    port = probe.getsockname()[1]
  monkeypatch.setattr(loopback, '_bind_to_loopback', refuse)
  with pytest.raises(PermissionError) as kept:  # with its traceback, and so the server
    serve(unlimited(), port=port, exposed=False)
  assert not connects(outside, port) and kept


def test_refusal_describes_a_missing_or_ignored_permission(monkeypatch, outside):
  def refuse(listening):
    raise PermissionError(1, 'Operation not permitted')

  monkeypatch.setattr(loopback, '_bind_to_loopback', refuse)
  assert loopback.refusal() == 'SO_BINDTODEVICE: Operation not permitted'
  monkeypatch.setattr(loopback, '_bind_to_loopback', lambda listening: None)
  assert loopback.refusal().startswith('SO_BINDTODEVICE: has no effect on ')


def test_refusal_describes_a_kernel_that_does_not_choose_the_first_socket(monkeypatch):
  monkeypatch.setattr(loopback, '_RETURN_0', struct.pack('HBBI', 0x06, 0, 0, 1))  # the server's
  assert loopback.refusal() == 'SO_ATTACH_REUSEPORT_CBPF: has no effect'
