"""The data plane between hosts without special hardware: one-sided reads and writes over authenticated TCP.

Every node serves its regions (``tcp_server``); an operation takes a connection to the region's node from a small pool,
sends one request for all its ranges, and waits for the answer. When an operation breaks off on this side, its
connection is closed for sending and then waited for: the server closes it once it writes nothing more, so that after
a ``DataPlaneError`` no late byte lands in the target (unless the peer cannot be reached at all; it then drops the
operation by itself within ``IO_TIMEOUT_S``).
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from messages.layout import RegionDescriptor
from transport.copy import Bytes, check_pairs, check_ranges, copy_ranges
from transport.dataplane import DataPlaneError, Strided
from transport.stream import joined, new_scratch, receive_ranges, send_ranges
from transport.tcp_server import GREETING_TIMEOUT_S, IO_TIMEOUT_S, TcpServer
from transport.tcp_wire import (
    READ,
    SIZE,
    WRITE,
    Unauthenticated,
    encode_request,
    greet_as_client,
    receive_answer,
)

BACKEND = "tcp"
CONNECTIONS_PER_PEER = 8


class _Peer:
    """Connections to one node's server: those at rest, and room for more."""

    def __init__(self, location: str, secret: bytes) -> None:
        host, _, port = location.rpartition(":")
        self._address = (host, int(port))
        self._secret = secret
        self._room = threading.BoundedSemaphore(CONNECTIONS_PER_PEER)
        self._lock = threading.Lock()
        self._resting: list[tuple[socket.socket, Bytes]] = []
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[tuple[socket.socket, Bytes]]:
        """A connection and its scratch buffer, for one operation. A refusal leaves it usable, anything else ends it."""
        with self._room:
            with self._lock:
                pair = self._resting.pop() if self._resting else None
            if pair is None:
                pair = self._connect(), new_scratch()
            try:
                yield pair
            except DataPlaneError:
                self._rest(pair)
                raise
            except BaseException:
                _finish(pair[0])
                raise
            self._rest(pair)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=GREETING_TIMEOUT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet_as_client(connection, self._secret)
            connection.settimeout(IO_TIMEOUT_S)
        except BaseException:
            connection.close()
            raise
        return connection

    def _rest(self, pair: tuple[socket.socket, Bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._resting.append(pair)
                return
        pair[0].close()

    def close(self) -> None:
        """Close what rests; what is in use is closed when it comes back."""
        with self._lock:
            self._closed = True
            resting, self._resting = self._resting, []
        for connection, _ in resting:
            connection.close()


def _finish(connection: socket.socket) -> None:
    """End a connection in the middle of an operation; returns once the server has let go of it (or is unreachable)."""
    with connection:
        try:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        except OSError:
            return


class TcpDataPlane:
    """``DataPlane`` over TCP. ``host`` is the address that peers reach this node at; ``secret`` is the run's."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._local: dict[str, Bytes] = {}
        self._remote: dict[str, RegionDescriptor] = {}
        self._peers: dict[str, _Peer] = {}
        self._closed = False
        self._server = TcpServer(host, secret, self._find_local)

    def create_region(self, region_id: str, size_bytes: int) -> RegionDescriptor:
        """See ``DataPlane``."""
        if size_bytes < 1:
            raise DataPlaneError(f"region {region_id}: {size_bytes} bytes asked for; at least 1")
        with self._lock:
            self._check_open(region_id)
            if region_id in self._local:
                raise DataPlaneError(f"region {region_id} exists already")
            try:
                self._local[region_id] = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
            except (OSError, ValueError, OverflowError) as error:
                raise DataPlaneError(
                    f"region {region_id}: no {size_bytes} bytes of memory ({error}); "
                    "lower cache_memory_mb, block_count or staging_mb"
                ) from error
        return RegionDescriptor(
            region_id=region_id, size_bytes=size_bytes, backend=BACKEND, location=self._server.address
        )

    def view(self, region_id: str) -> memoryview:
        """See ``DataPlane``."""
        return self._find_local(region_id).data

    def attach(self, descriptor: RegionDescriptor) -> None:
        """See ``DataPlane``. Asks the region's node, so that a wrong address or secret shows here."""
        region_id = descriptor.region_id
        if descriptor.backend != BACKEND:
            raise DataPlaneError(f"region {region_id}: backend {descriptor.backend}, but this node uses {BACKEND}")
        with self._lock:
            self._check_open(region_id)
            if self._remote.get(region_id) == descriptor:
                return
        size = self._ask(descriptor, SIZE, (), lambda connection, scratch: None)
        if size != descriptor.size_bytes:
            raise DataPlaneError(f"region {region_id}: published {descriptor.size_bytes} bytes, its node has {size}")
        with self._lock:
            self._remote[region_id] = descriptor

    def detach(self, region_id: str) -> None:
        """See ``DataPlane``."""
        with self._lock:
            gone = self._remote.pop(region_id, None)
            if gone is None or any(kept.location == gone.location for kept in self._remote.values()):
                return
            peer = self._peers.pop(gone.location, None)
        if peer is not None:
            peer.close()

    def write(self, local_region: str, local: Sequence[Strided], remote_region: str, remote: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        buffer, descriptor = self._ends(local_region, remote_region)
        if descriptor is None:
            return self.copy(local_region, local, remote_region, remote)
        self._check(buffer, descriptor, local_region, local, remote)
        if not local:
            return 0
        gathered = joined(local)

        def send(connection: socket.socket, scratch: Bytes) -> None:
            send_ranges(connection, buffer, gathered, scratch)

        return self._ask(descriptor, WRITE, remote, send)

    def read(self, remote_region: str, remote: Sequence[Strided], local_region: str, local: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        buffer, descriptor = self._ends(local_region, remote_region)
        if descriptor is None:
            return self.copy(remote_region, remote, local_region, local)
        self._check(buffer, descriptor, local_region, local, remote)
        if not local:
            return 0
        scattered = joined(local)

        def receive(connection: socket.socket, scratch: Bytes) -> None:
            receive_ranges(connection, buffer, scattered, scratch)

        return self._ask(descriptor, READ, remote, lambda connection, scratch: None, receive)

    def copy(self, source_region: str, source: Sequence[Strided], target_region: str, target: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        source_buffer, target_buffer = self._find_local(source_region), self._find_local(target_region)
        check_ranges(source_region, source_buffer.size, source)
        check_ranges(target_region, target_buffer.size, target)
        return copy_ranges(source_buffer, source, target_buffer, target)

    def close(self) -> None:
        """See ``DataPlane``."""
        with self._lock:
            self._closed = True
            self._local.clear()
            self._remote.clear()
            peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
        self._server.close()

    def _check_open(self, region_id: str) -> None:
        if self._closed:
            raise DataPlaneError(f"region {region_id}: this data plane is closed")

    def _find_local(self, region_id: str) -> Bytes:
        with self._lock:
            self._check_open(region_id)
            buffer = self._local.get(region_id)
        if buffer is None:
            raise DataPlaneError(f"region {region_id} is not registered here")
        return buffer

    def _ends(self, local_region: str, remote_region: str) -> tuple[Bytes, RegionDescriptor | None]:
        """The local buffer, and the peer's region; None when that is one of this process too."""
        buffer = self._find_local(local_region)
        with self._lock:
            if remote_region in self._local:
                return buffer, None
            descriptor = self._remote.get(remote_region)
        if descriptor is None:
            raise DataPlaneError(f"region {remote_region} is not attached")
        return buffer, descriptor

    def _check(
        self,
        buffer: Bytes,
        descriptor: RegionDescriptor,
        local_region: str,
        local: Sequence[Strided],
        remote: Sequence[Strided],
    ) -> None:
        check_ranges(local_region, buffer.size, local)
        check_ranges(descriptor.region_id, descriptor.size_bytes, remote)
        check_pairs(local, remote)

    def _ask(
        self,
        descriptor: RegionDescriptor,
        operation: int,
        ranges: Sequence[Strided],
        send: Callable[[socket.socket, Bytes], None],
        receive: Callable[[socket.socket, Bytes], None] | None = None,
    ) -> int:
        """One request and its answer. Raises ``DataPlaneError`` for a refusal and for a connection that broke."""
        with self._lock:
            self._check_open(descriptor.region_id)
            peer = self._peers.get(descriptor.location)
            if peer is None:
                peer = self._peers[descriptor.location] = _Peer(descriptor.location, self._secret)
        head = encode_request(operation, descriptor.region_id, joined(ranges))
        try:
            with peer.connection() as (connection, scratch):
                connection.sendall(head)
                send(connection, scratch)
                moved = receive_answer(connection)
                if receive is not None:
                    receive(connection, scratch)
                return moved
        except Unauthenticated as error:
            raise DataPlaneError(f"region {descriptor.region_id} at {descriptor.location}: {error}") from error
        except OSError as error:
            raise DataPlaneError(
                f"region {descriptor.region_id}: connection to {descriptor.location} broke: {error or type(error)}"
            ) from error
