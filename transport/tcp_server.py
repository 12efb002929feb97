"""The serving side of the TCP data plane: peers' reads and writes of this node's regions, a thread per connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from transport.copy import Bytes, check_ranges
from transport.dataplane import DataPlaneError
from transport.stream import discard, joined, new_scratch, receive_ranges, send_ranges
from transport.tcp_wire import (
    OK,
    READ,
    REFUSED,
    SIZE,
    WRITE,
    Request,
    encode_answer,
    greet_as_server,
    receive_request,
)

CONNECTIONS_MAX = 128
GREETING_TIMEOUT_S = 5.0
IO_TIMEOUT_S = 30.0
"""A peer that stops in the middle of an operation is dropped after this time; between operations it may rest."""


class TcpServer:
    """Accepts, authenticates and serves. ``find(region_id)`` gives a region's bytes or raises ``DataPlaneError``."""

    def __init__(self, host: str, secret: bytes, find: Callable[[str], Bytes]) -> None:
        self._secret = secret
        self._find = find
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self.refused = 0  # connections without the run's secret, or beyond the limit
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=CONNECTIONS_MAX)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name=f"data-{self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = dict(self._connections)
        _shut(self._listener)
        for connection in connections:
            _shut(connection)
        for thread in (self._thread, *connections.values()):
            thread.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    if self._closed:
                        return
                    continue  # a connection that was gone before it was accepted
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"data-{self.address}", daemon=True)
        with self._lock:
            if self._closed or len(self._connections) >= CONNECTIONS_MAX:
                self.refused += 1
                connection.close()
                return
            self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(GREETING_TIMEOUT_S)
                try:
                    greet_as_server(connection, self._secret)
                except DataPlaneError:
                    self.refused += 1
                    return
                self._serve_requests(connection)
        except (OSError, ValueError):
            return  # the peer is gone, or says what this protocol does not know: its connection ends
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _serve_requests(self, connection: socket.socket) -> None:
        scratch = new_scratch()
        while True:
            connection.settimeout(None)
            if not connection.recv(1, socket.MSG_PEEK):
                return
            connection.settimeout(IO_TIMEOUT_S)
            request = receive_request(connection)
            try:
                buffer = self._find(request.region_id)
                check_ranges(request.region_id, buffer.size, request.ranges)
            except DataPlaneError as error:
                if request.operation == WRITE:  # its bytes are on their way; they go nowhere
                    discard(connection, sum(piece.run_bytes * piece.count for piece in request.ranges), scratch)
                connection.sendall(encode_answer(REFUSED, str(error), 0))
                continue
            self._carry_out(connection, request, buffer, scratch)

    def _carry_out(self, connection: socket.socket, request: Request, buffer: Bytes, scratch: Bytes) -> None:
        if request.operation == SIZE:
            connection.sendall(encode_answer(OK, "", buffer.size))
            return
        ranges = joined(request.ranges)
        total = sum(piece.size_bytes for piece in ranges)
        if request.operation == WRITE:
            receive_ranges(connection, buffer, ranges, scratch)
            connection.sendall(encode_answer(OK, "", total))
        elif request.operation == READ:
            connection.sendall(encode_answer(OK, "", total))
            send_ranges(connection, buffer, ranges, scratch)


def _shut(connection: socket.socket) -> None:
    """End a connection that another thread may be using; that thread sees it end and closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it had ended already
