"""Links within one process, for tests: the same core, frames and limits as over ZeroMQ, without sockets.

Nodes that share a ``Hub`` reach each other. Each has a thread of its own, as with sockets; a frame is handed over by
putting it into the receiver's queue. A connection breaks when its receiver closes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from transport.link_core import LinkCore
from transport.links import LinkEvents, LinkSettings

RETRY_NS = 5_000_000
"""How often somebody who is not there yet is looked for."""

Work = Callable[[], None]


class Hub:
    """Who can be reached, by name."""

    def __init__(self) -> None:
        self.nodes: dict[str, MemoryLinks] = {}
        self.lock = threading.Lock()
        self.next_peer = count(1).__next__


class MemoryLinks:
    """``Links`` to the other nodes of ``hub``."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        hub: Hub,
        settings: LinkSettings | None = None,
        incarnations: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._node = node
        self._hub = hub
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._core = LinkCore(node, incarnation, settings or LinkSettings(), self, self._wake, incarnations)
        self._connections: dict[str, tuple[bytes, MemoryLinks | None]] = {}  # node → our name there, who it is
        self._callers: dict[bytes, tuple[MemoryLinks, str]] = {}  # name → who connected, and as which node of its own
        self._unsent: dict[str, list[bytes]] = {}  # for nodes that are not there yet
        self._thread = threading.Thread(target=self._run, name=f"links-{node}", daemon=True)
        self.send = self._core.send
        self.consumed = self._core.consumed
        self.require = self._core.require
        self.call = self._core.call

    def start(self, events: LinkEvents) -> None:
        """See ``Links``."""
        with self._hub.lock:
            if self._node in self._hub.nodes:
                raise OSError(f"{self._node} cannot listen: somebody does already")
            self._hub.nodes[self._node] = self
        self._core.begin(events)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """See ``Links``."""
        return dict(self._core.counts)

    def close(self) -> None:
        """See ``Links``."""
        self._core.closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()

    def inject(self, peer: bytes, frame: bytes) -> None:
        """Have somebody who never greeted say ``frame`` to this node."""
        self._work.put(lambda: self._core.on_frame(peer, frame))

    def _wake(self) -> None:
        self._work.put(lambda: None)

    # -- Carrier ------------------------------------------------------------------------------------------------------

    def connect(self, node: str) -> None:
        """See ``Carrier``."""
        self._connections[node] = (b"%d" % self._hub.next_peer(), None)
        self._unsent[node] = []
        self._find(node)

    def disconnect(self, node: str) -> None:
        """See ``Carrier``."""
        name, target = self._connections.pop(node, (b"", None))
        self._unsent.pop(node, None)
        if target is not None:
            target._work.put(lambda: target._callers.pop(name, None) and None)

    def transmit(self, node: str, frame: bytes) -> bool:
        """See ``Carrier``."""
        name, target = self._connections.get(node, (b"", None))
        if target is not None:
            target._work.put(lambda: target._core.on_frame(name, frame))
        elif node in self._unsent:
            self._unsent[node].append(frame)
        return True

    def await_reply(self, node: str) -> None:
        """See ``Carrier``: what ``node`` says comes in by itself."""

    def reply(self, peer: bytes, frame: bytes) -> None:
        """See ``Carrier``."""
        caller = self._callers.get(peer)
        if caller is not None:
            links, node = caller
            links._work.put(lambda: links._hear(node, peer, frame))

    def is_there(self, node: str) -> bool:
        """See ``Carrier``."""
        return node in self._hub.nodes

    # -- this node's thread -------------------------------------------------------------------------------------------

    def _find(self, node: str) -> None:
        """Connect to ``node`` if it is there, and say what waits."""
        name, _ = self._connections[node]
        with self._hub.lock:
            target = self._hub.nodes.get(node)
        if target is None:
            return
        self._connections[node] = (name, target)
        target._work.put(lambda: target._callers.update({name: (self, node)}))
        for frame in self._unsent.pop(node, []):
            self.transmit(node, frame)

    def _hear(self, node: str, name: bytes, frame: bytes) -> None:
        if self._connections.get(node, (b"", None))[0] == name:
            self._core.on_reply(node, frame, time.monotonic_ns())

    def _lose(self, node: str, target: MemoryLinks) -> None:
        if self._connections.get(node, (b"", None))[1] is target:
            self._core.on_broken(node, time.monotonic_ns())

    def _run(self) -> None:
        core = self._core
        flush_until_ns = 0
        core.enter()
        while True:
            now_ns = time.monotonic_ns()
            due_ns = core.service(now_ns)
            if core.closing:
                flush_until_ns = flush_until_ns or now_ns + core.settings.flush_timeout_ms * 1_000_000
                if now_ns >= flush_until_ns or core.is_idle:
                    break
                due_ns = min(due_ns or flush_until_ns, flush_until_ns)
            for node in list(self._unsent):
                self._find(node)
            if self._unsent:
                due_ns = min(due_ns or now_ns + RETRY_NS, now_ns + RETRY_NS)
            if core.has_news:
                due_ns = now_ns
            try:
                self._work.get(timeout=max(0, due_ns - now_ns) / 1e9 if due_ns else None)()
            except queue.Empty:
                continue
        core.end()
        with self._hub.lock:
            del self._hub.nodes[self._node]
            others = list(self._hub.nodes.values())
        for other in others:
            other._work.put(lambda other=other: other._lose(self._node, self))  # type: ignore[misc]
