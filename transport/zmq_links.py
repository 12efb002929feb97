"""Links over ZeroMQ: one ROUTER per node that everybody connects to, one DEALER per peer that this node sends to.

One thread owns all sockets. It sleeps in ``zmq.Poller.poll`` and is woken through an eventfd, but only when it sleeps:
while it is busy, others just fill outboxes that it looks at before it sleeps again.

``ipc://`` endpoints are protected by their directory (mode 0700). On ``tcp://`` endpoints every link is encrypted and
authenticated with CURVE: both sides must hold the run's key pair, and a peer that does not is refused by the socket's
authenticator (ZAP, RFC 27), before it can say anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from transport.keys import RunKeys
from transport.link_core import LinkCore
from transport.links import LinkEvents, LinkSettings

FRAMES_PER_ROUND = 64
"""Received from one socket before the others get their turn."""

_BROKEN = zmq.EVENT_DISCONNECTED
_UNAUTHENTICATED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class _Sockets:
    """The carrier: all sockets of a node. Belongs to the links' thread."""

    def __init__(self, endpoint_of: Callable[[str], str], settings: LinkSettings, keys: RunKeys | None) -> None:
        self._endpoint_of = endpoint_of
        self._settings = settings
        self._keys = keys
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()
        self.router = self.context.socket(zmq.ROUTER)
        self.zap: zmq.Socket[bytes] | None = None
        self.dealers: dict[str, zmq.Socket[bytes]] = {}
        self.nodes: dict[object, str] = {}  # dealer → node
        self.monitors: dict[object, str] = {}  # monitor → node
        self.monitor_of: dict[str, zmq.Socket[bytes]] = {}
        self._file: Path | None = None
        self._file_inode = 0

    def bind(self, node: str) -> None:
        """Listen at this node's endpoint; raises ``zmq.ZMQError``."""
        endpoint = self._endpoint_of(node)
        if endpoint.startswith("tcp://"):
            self._authenticate()
        self._prepare(self.router)
        self.router.bind(endpoint)
        if endpoint.startswith("ipc://"):
            self._file = Path(endpoint.removeprefix("ipc://"))
            self._file_inode = self._file.stat().st_ino
        self.poller.register(self.router, zmq.POLLIN)

    def _authenticate(self) -> None:
        if self._keys is None:
            raise OSError("a tcp endpoint needs the run's key file")
        self.zap = self.context.socket(zmq.REP)
        self.zap.linger = 0
        self.zap.bind(_ZAP_ENDPOINT)
        self.poller.register(self.zap, zmq.POLLIN)
        self.router.curve_server = True
        self.router.curve_publickey = self._keys.curve_public.encode()
        self.router.curve_secretkey = self._keys.curve_secret.encode()

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.maxmsgsize = self._settings.frame_bytes_max + 1024
        socket.sndhwm = socket.rcvhwm = 1024
        socket.reconnect_ivl = 20
        socket.reconnect_ivl_max = 200

    def answer_zap(self) -> None:
        """Let a connecting peer in exactly when it proves to hold the run's key pair."""
        assert self.zap is not None and self._keys is not None
        version, request_id, _domain, _address, _identity, mechanism, *credentials = self.zap.recv_multipart()
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        known = key == self._keys.curve_public.encode()
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.zap.send_multipart([version, request_id, code, text, b"", b""])

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
        monitor = dealer.get_monitor_socket(_BROKEN | _UNAUTHENTICATED)
        dealer.connect(endpoint)
        self.dealers[node], self.nodes[dealer] = dealer, node
        self.monitor_of[node], self.monitors[monitor] = monitor, node
        self.poller.register(dealer, zmq.POLLIN)
        self.poller.register(monitor, zmq.POLLIN)

    def disconnect(self, node: str) -> None:
        """See ``Carrier``."""
        dealer = self.dealers.pop(node, None)
        if dealer is None:
            return
        monitor = self.monitor_of.pop(node)
        self.poller.unregister(dealer)
        self.poller.unregister(monitor)
        del self.nodes[dealer], self.monitors[monitor]
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close()

    def transmit(self, node: str, frame: bytes) -> bool:
        """See ``Carrier``."""
        dealer = self.dealers.get(node)
        if dealer is None:
            return False
        try:
            dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.poller.register(dealer, zmq.POLLIN | zmq.POLLOUT)
            return False
        return True

    def reply(self, peer: bytes, frame: bytes) -> None:
        """See ``Carrier``."""
        try:
            self.router.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # the peer is gone, or reads nothing: its next greeting starts afresh

    def close(self, linger_ms: int) -> None:
        """Close everything; what the sockets still hold has ``linger_ms`` to leave."""
        for node in list(self.dealers):
            self.dealers[node].linger = linger_ms
            self.disconnect(node)
        if self.zap is not None:
            self.zap.close()
        self.router.close()
        self._remove_file()
        self.context.term()

    def _remove_file(self) -> None:
        """ZeroMQ leaves the socket's file behind. It may be a successor's by now; then it stays."""
        if self._file is not None:
            with suppress(OSError):
                if self._file.stat().st_ino == self._file_inode:
                    self._file.unlink()


class ZmqLinks:
    """``Links`` over ZeroMQ. ``endpoint_of(node)`` tells where a node listens; ``keys`` are needed for tcp."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        endpoint_of: Callable[[str], str],
        settings: LinkSettings | None = None,
        keys: RunKeys | None = None,
        incarnations: Sequence[tuple[str, int]] = (),
    ) -> None:
        settings = settings or LinkSettings()
        self._node = node
        self._sockets = _Sockets(endpoint_of, settings, keys)
        self._core = LinkCore(node, incarnation, settings, self._sockets, self._wake, incarnations)
        self._wake_file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asleep = False
        self._bound: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"links-{node}", daemon=True)
        self._events: LinkEvents | None = None
        self._close_lock = threading.Lock()
        self._file_open = True
        self.send = self._core.send
        self.consumed = self._core.consumed
        self.require = self._core.require

    def start(self, events: LinkEvents) -> None:
        """See ``Links``."""
        self._events = events
        self._core.begin(events)
        self._thread.start()
        try:
            self._bound.result()
        except zmq.ZMQError as error:
            raise OSError(f"{self._node} cannot listen at its endpoint: {error}") from error

    def counters(self) -> dict[str, int]:
        """See ``Links``."""
        return dict(self._core.counts)

    def close(self) -> None:
        """See ``Links``."""
        with self._close_lock:
            self._core.closing = True
            self._asleep = True  # whatever it is doing
            self._wake()
            if self._thread.ident is not None:
                self._thread.join()
            elif self._file_open:
                self._sockets.close(0)
            if self._file_open:
                self._file_open = False
                os.close(self._wake_file)

    def _wake(self) -> None:
        if self._asleep and self._file_open:
            self._asleep = False
            os.eventfd_write(self._wake_file, 1)

    # -- the links' thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._sockets.bind(self._node)
        except (zmq.ZMQError, OSError) as error:
            self._sockets.close(0)
            self._bound.set_exception(error)
            return
        self._sockets.poller.register(self._wake_file, zmq.POLLIN)
        self._bound.set_result(None)
        try:
            self._serve()
        except Exception as error:
            self._core.closing = True
            if self._events is not None:
                self._events.on_links_failed(f"{type(error).__name__}: {error}")
        finally:
            self._sockets.close(self._core.settings.flush_timeout_ms)

    def _serve(self) -> None:
        core, poller = self._core, self._sockets.poller
        flush_until_ns = 0
        while True:
            now_ns = time.monotonic_ns()
            due_ns = core.service(now_ns)
            if core.closing:
                flush_until_ns = flush_until_ns or now_ns + core.settings.flush_timeout_ms * 1_000_000
                if now_ns >= flush_until_ns or core.is_idle:
                    return
                due_ns = min(due_ns or flush_until_ns, flush_until_ns)
            timeout_ms = max(0, (due_ns - now_ns) // 1_000_000 + 1) if due_ns else None
            self._asleep = True
            # What came after service, but before anybody could see that this thread sleeps, woke nobody.
            ready = poller.poll(0 if core.has_news else timeout_ms)
            self._asleep = False
            for socket, flags in ready:
                self._on_ready(socket, flags)

    def _on_ready(self, socket: object, flags: int) -> None:
        sockets = self._sockets
        if socket is sockets.router:
            self._receive_frames()
        elif socket == self._wake_file:
            os.eventfd_read(self._wake_file)
        elif socket in sockets.nodes:
            self._receive_replies(sockets.nodes[socket], flags)
        elif socket in sockets.monitors:
            self._on_monitor(sockets.monitors[socket])
        elif socket is sockets.zap:
            sockets.answer_zap()

    def _receive_frames(self) -> None:
        router, on_frame = self._sockets.router, self._core.on_frame
        try:
            for _ in range(FRAMES_PER_ROUND):
                peer = router.recv(zmq.NOBLOCK)
                frame = router.recv(zmq.NOBLOCK)
                if router.rcvmore:  # not one of ours: links send single frames
                    frame = b""
                    while router.rcvmore:
                        router.recv(zmq.NOBLOCK)
                on_frame(peer, frame)
        except zmq.Again:
            return

    def _receive_replies(self, node: str, flags: int) -> None:
        sockets = self._sockets
        dealer = sockets.dealers[node]
        now_ns = time.monotonic_ns()
        if flags & zmq.POLLOUT:
            sockets.poller.register(dealer, zmq.POLLIN)
            self._core.on_writable(node, now_ns)
        try:
            for _ in range(FRAMES_PER_ROUND):
                if sockets.dealers.get(node) is not dealer:
                    return  # an earlier reply ended this connection
                self._core.on_reply(node, b"".join(dealer.recv_multipart(zmq.NOBLOCK)), now_ns)
        except zmq.Again:
            return

    def _on_monitor(self, node: str) -> None:
        monitor = self._sockets.monitor_of[node]
        event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        if event & _UNAUTHENTICATED:
            self._core.on_refused(node, "authentication failed: both hosts need the same key file")
        else:
            self._core.on_broken(node, time.monotonic_ns())
