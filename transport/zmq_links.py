"""Links over ZeroMQ: one ROUTER per node that everybody connects to, one DEALER per peer that this node sends to.

One thread owns all sockets. It sleeps in ``epoll`` and is woken through an eventfd, but only when it sleeps: while it
is busy, others just fill outboxes that it looks at before it sleeps again.

``ipc://`` endpoints are protected by their directory (mode 0700). On ``tcp://`` endpoints every link is encrypted and
authenticated with CURVE: both sides must hold the run's key pair, and a peer that does not is refused by the socket's
authenticator (ZAP, RFC 27), before it can say anything.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.keys import RunKeys
from transport.link_core import LinkCore
from transport.links import LinkEvents, LinkSettings
from transport.zmq_sockets import NOBLOCK, POLLIN, POLLOUT, UNAUTHENTICATED, Socket, Sockets, has_more, state

FRAMES_PER_ROUND = 64
"""Received from one socket before the others get their turn."""


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
        self._sockets = Sockets(
            endpoint_of, settings, keys, self._receive_frames, self._receive_replies, self._receive_event
        )
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
        self.call = self._core.call

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
        self._sockets.epoll.register(self._wake_file, select.EPOLLIN)
        self._bound.set_result(None)
        try:
            self._serve()
        except Exception as error:
            self._core.closing = True
            if self._events is not None:
                self._events.on_links_failed(f"{type(error).__name__}: {error}")
        finally:
            self._core.end()
            self._sockets.close(self._core.settings.flush_timeout_ms)

    def _serve(self) -> None:
        core, sockets = self._core, self._sockets
        core.enter()
        poll = sockets.epoll.poll
        flush_until_ns = 0
        while True:
            now_ns = time.monotonic_ns()
            due_ns = core.service(now_ns)
            if core.closing:
                flush_until_ns = flush_until_ns or now_ns + core.settings.flush_timeout_ms * 1_000_000
                if now_ns >= flush_until_ns or core.is_idle:
                    return
                due_ns = min(due_ns or flush_until_ns, flush_until_ns)
            warm_due_ns = sockets.cool(now_ns)
            if warm_due_ns:
                due_ns = min(due_ns or warm_due_ns, warm_due_ns)
            timeout_s = max(0.0, (due_ns - now_ns) / 1e9) if due_ns else -1.0
            self._asleep = True
            # What came after service, but before anybody could see that this thread sleeps, woke nobody.
            ready = poll(0.0 if sockets.hot or core.has_news else timeout_s)
            self._asleep = False
            for descriptor, _ in ready:
                if descriptor == self._wake_file:
                    os.eventfd_read(descriptor)
                else:
                    sockets.serve(descriptor)

    def _receive_frames(self) -> bool:
        router, core = self._sockets.router, self._core
        try:
            for _ in range(FRAMES_PER_ROUND):
                peer = router.recv(NOBLOCK)
                core.on_frame(peer, router.recv(NOBLOCK))
                core.make_calls()  # the answer leaves before the socket is asked anything, which is slow
                if has_more(router):  # nobody of ours: links send single frames
                    core.on_frame(peer, b"")
                    while has_more(router):
                        router.recv(NOBLOCK)
                if not state(router) & POLLIN:  # cheaper than the exception for nothing left
                    return False
        except zmq.Again:
            return False
        return True

    def _receive_replies(self, node: str, dealer: Socket) -> bool:
        sockets, core = self._sockets, self._core
        now_ns = time.monotonic_ns()
        for _ in range(FRAMES_PER_ROUND):
            if sockets.dealers.get(node) is not dealer:
                return False  # an earlier reply ended this connection
            events = state(dealer)
            if node in sockets.blocked and events & POLLOUT:
                sockets.blocked.discard(node)
                core.on_writable(node, now_ns)
            if not events & POLLIN:
                return False
            core.on_reply(node, b"".join(dealer.recv_multipart(NOBLOCK)), now_ns)
        return True

    def _receive_event(self, node: str, monitor: Socket) -> bool:
        if not state(monitor) & POLLIN:
            return False
        event = recv_monitor_message(monitor, NOBLOCK)["event"]
        if event & UNAUTHENTICATED:
            self._core.on_refused(node, "authentication failed: both hosts need the same key file")
        else:
            self._core.on_broken(node, time.monotonic_ns())
        return True
