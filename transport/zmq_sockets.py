"""The ZeroMQ sockets of one node: a ROUTER that everybody connects to, a DEALER and its monitor per peer."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils import z85

from transport.keys import RunKeys
from transport.links import LinkSettings

Socket = zmq.Socket[bytes]
Handler = Callable[[], bool]
"""Reads from its socket; True when it stopped before it had read everything."""

NodeHandler = Callable[[str, Socket], bool]
"""The same, for a connection to a node."""

BROKEN = zmq.EVENT_DISCONNECTED
UNAUTHENTICATED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

WARM_NS = 20_000_000
"""How long after a frame was sent its socket is asked for what may have come in meanwhile."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


# Plain integers: arithmetic on pyzmq's flags costs more than what they are used for.
POLLIN, POLLOUT, NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)


def state(socket: Socket) -> int:
    """``POLLIN`` and ``POLLOUT``, as they are now."""
    return int(socket.getsockopt(_EVENTS))


def has_more(socket: Socket) -> bool:
    """Whether the message that is being received has another part."""
    return bool(socket.getsockopt(_RCVMORE))


class Sockets:
    """The carrier: all sockets of a node, and what to wait for. Belongs to the links' thread.

    Waiting is done on the sockets' file descriptors with ``epoll``, a tenth of the cost of ``zmq.Poller``. Such a
    descriptor only tells that a socket has internal work; that work also gets done while something is sent, and then
    nobody is told. So a socket that was sent on is asked for its state again: at once when something is awaited from it
    (it is *hot*), a little later otherwise (it is *warm*; asking after every frame would cost as much as sending it).
    """

    def __init__(
        self,
        endpoint_of: Callable[[str], str],
        settings: LinkSettings,
        keys: RunKeys | None,
        on_frames: Handler,
        on_replies: NodeHandler,
        on_monitor: NodeHandler,
    ) -> None:
        self._endpoint_of = endpoint_of
        self._on_frames = on_frames
        self._on_replies = on_replies
        self._on_monitor = on_monitor
        self._settings = settings
        self._keys = keys
        self.context: zmq.Context[Socket] = zmq.Context()
        self.epoll = select.epoll()
        self.router = self.context.socket(zmq.ROUTER)
        self.dealers: dict[str, Socket] = {}
        self.monitors: dict[str, Socket] = {}
        self.blocked: set[str] = set()  # nodes whose dealer had no room
        self.hot: set[Socket] = set()
        self.warm: set[Socket] = set()
        self.warm_due_ns = 0
        self.handlers: dict[int, tuple[Socket, Handler]] = {}  # file descriptor → socket, who reads it
        self.handler_of: dict[Socket, Handler] = {}
        self._file: Path | None = None
        self._file_inode = 0

    def bind(self, node: str) -> None:
        """Listen at this node's endpoint; raises ``zmq.ZMQError`` or ``OSError``."""
        endpoint = self._endpoint_of(node)
        if endpoint.startswith("tcp://"):
            self._authenticate()
        self._prepare(self.router)
        self.router.bind(endpoint)
        if endpoint.startswith("ipc://"):
            self._file = Path(endpoint.removeprefix("ipc://"))
            self._file_inode = self._file.stat().st_ino
        self._watch(self.router, self._on_frames)

    def _watch(self, socket: Socket, handler: Handler) -> None:
        descriptor = socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self.handlers[descriptor] = (socket, handler)
        self.handler_of[socket] = handler
        self.epoll.register(descriptor, select.EPOLLIN)
        self.hot.add(socket)

    def _forget(self, socket: Socket) -> None:
        descriptor = socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self.epoll.unregister(descriptor)
        del self.handlers[descriptor], self.handler_of[socket]
        self.hot.discard(socket)
        self.warm.discard(socket)

    def _authenticate(self) -> None:
        if self._keys is None:
            raise OSError("a tcp endpoint needs the run's key file")
        zap = self.context.socket(zmq.REP)
        zap.linger = 0
        zap.bind(_ZAP_ENDPOINT)
        self._watch(zap, lambda: self._answer_zap(zap))
        self.router.curve_server = True
        self.router.curve_publickey = self._keys.curve_public.encode()
        self.router.curve_secretkey = self._keys.curve_secret.encode()

    def _answer_zap(self, zap: Socket) -> bool:
        """Let a connecting peer in exactly when it proves to hold the run's key pair."""
        assert self._keys is not None
        while state(zap) & POLLIN:
            version, request_id, _domain, _address, _identity, mechanism, *credentials = zap.recv_multipart()
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            known = key == self._keys.curve_public.encode()
            code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
            zap.send_multipart([version, request_id, code, text, b"", b""])
        return False

    def _prepare(self, socket: Socket) -> None:
        socket.linger = 0
        socket.maxmsgsize = self._settings.frame_bytes_max + 1024
        socket.sndhwm = socket.rcvhwm = 1024
        socket.reconnect_ivl = 20
        socket.reconnect_ivl_max = 200

    def connect(self, node: str) -> None:
        """See ``Carrier``."""
        self.disconnect(node)
        endpoint = self._endpoint_of(node)
        dealer = self.context.socket(zmq.DEALER)
        self._prepare(dealer)
        if endpoint.startswith("tcp://"):
            if self._keys is None:
                raise OSError(f"{endpoint} needs the run's key file")
            dealer.curve_serverkey = dealer.curve_publickey = self._keys.curve_public.encode()
            dealer.curve_secretkey = self._keys.curve_secret.encode()
        monitor = dealer.get_monitor_socket(BROKEN | UNAUTHENTICATED)
        dealer.connect(endpoint)
        self.dealers[node], self.monitors[node] = dealer, monitor
        self._watch(dealer, lambda: self._on_replies(node, dealer))
        self._watch(monitor, lambda: self._on_monitor(node, monitor))

    def disconnect(self, node: str) -> None:
        """See ``Carrier``."""
        dealer = self.dealers.pop(node, None)
        if dealer is None:
            return
        monitor = self.monitors.pop(node)
        self.blocked.discard(node)
        self._forget(dealer)
        self._forget(monitor)
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close()

    def serve(self, descriptor: int) -> None:
        """Call the handler of a descriptor with news, unless its socket was closed meanwhile."""
        found = self.handlers.get(descriptor)
        if found is not None and found[1]():
            self.hot.add(found[0])

    def cool(self, now_ns: int) -> int:
        """Serve every hot socket, and every warm one when it is time; returns when that is, 0 when none is warm."""
        if self.warm and self.warm_due_ns and now_ns >= self.warm_due_ns:
            self.hot |= self.warm
            self.warm.clear()
            self.warm_due_ns = 0
        if self.hot:
            hot, self.hot = self.hot, set()
            for socket in hot:
                handler = self.handler_of.get(socket)
                if handler is not None and handler():
                    self.hot.add(socket)
        if self.warm and not self.warm_due_ns:  # what a hot socket brought may have been answered on another one
            self.warm_due_ns = now_ns + WARM_NS
        return self.warm_due_ns

    def transmit(self, node: str, frame: bytes) -> bool:
        """See ``Carrier``."""
        dealer = self.dealers.get(node)
        if dealer is None:
            return False
        self.warm.add(dealer)
        try:
            dealer.send(frame, NOBLOCK)
        except zmq.Again:
            self.blocked.add(node)
            self.hot.add(dealer)
            return False
        return True

    def await_reply(self, node: str) -> None:
        """See ``Carrier``."""
        dealer = self.dealers.get(node)
        if dealer is not None:
            self.hot.add(dealer)

    def reply(self, peer: bytes, frame: bytes) -> None:
        """See ``Carrier``."""
        self.hot.add(self.router)
        with suppress(zmq.ZMQError):  # the peer is gone, or reads nothing: its next greeting starts afresh
            self.router.send_multipart([peer, frame], NOBLOCK)

    def is_there(self, node: str) -> bool:
        """See ``Carrier``."""
        endpoint = self._endpoint_of(node)
        return not endpoint.startswith("ipc://") or Path(endpoint.removeprefix("ipc://")).exists()

    def close(self, linger_ms: int) -> None:
        """Close everything; what the sockets still hold has ``linger_ms`` to leave."""
        for node in list(self.dealers):
            self.dealers[node].linger = linger_ms
            self.disconnect(node)
        for socket in list(self.handler_of):
            self._forget(socket)
            socket.close()
        self.router.close()
        self.epoll.close()
        self._remove_file()
        self.context.term()

    def _remove_file(self) -> None:
        """ZeroMQ leaves the socket's file behind. It may be a successor's by now; then it stays."""
        if self._file is not None:
            with suppress(OSError):
                if self._file.stat().st_ino == self._file_inode:
                    self._file.unlink()
