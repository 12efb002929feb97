"""What link tests share: nodes that write down what their links report, over each kind of links."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from messages.codec import encode
from messages.envelope import Envelope
from messages.lifecycle import Stop
from transport.keys import RunKeys, make_keys
from transport.links import Links, LinkSettings
from transport.memory_links import Hub, MemoryLinks
from transport.zmq_links import ZmqLinks

WAIT_S = 20.0
KINDS = ["memory", "ipc", "tcp"]


def parcel(text: str) -> bytes:
    """An encoded envelope that carries ``text``."""
    return encode(
        Envelope(message_id="x#1.1", sender="x/one", to="y/other", sent_ns=1, message=Stop(reason=text), incarnation=1)
    )


class TestNode:
    """One node's links and what they reported. Consumes what comes, unless told to hold it."""

    __test__ = False

    def __init__(self, name: str, links: Links, consume: bool = True) -> None:
        self.name = name
        self.links = links
        self.consume = consume
        self.changed = threading.Condition()
        self.texts: list[str] = []
        self.held: list[tuple[int, int]] = []  # session, count
        self.lost: list[tuple[str, str]] = []
        self.known: dict[str, int] = {}
        self.notes: list[tuple[str, dict[str, str | int | float]]] = []
        links.start(self)

    def say(self, node: str, *texts: str) -> None:
        self.links.send(node, [parcel(text) for text in texts])

    def wait(self, condition: Callable[[], object], what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), f"{self.name} never {what}: {self.texts[-3:]} {self.lost}"

    def hears(self, *texts: str) -> None:
        self.wait(lambda: len(self.texts) >= len(texts), f"heard {texts[-1:]}")
        assert self.texts == list(texts)

    def loses(self, node: str, words: str) -> None:
        self.wait(lambda: any(lost == node and words in why for lost, why in self.lost), f"lost {node}: {words}")

    def release(self) -> None:
        """Consume what was held, and everything from now on."""
        with self.changed:
            held, self.held, self.consume = self.held, [], True
        for session, count in held:
            self.links.consumed(session, count)

    # LinkEvents

    def on_envelopes(self, session: int, node: str, envelopes: Sequence[Envelope]) -> None:
        with self.changed:
            self.texts.extend(envelope.message.reason for envelope in envelopes)  # type: ignore[attr-defined]
            consume = self.consume
            if not consume:
                self.held.append((session, len(envelopes)))
            self.changed.notify_all()
        if consume:
            self.links.consumed(session, len(envelopes))

    def on_peer_lost(self, node: str, reason: str) -> None:
        with self.changed:
            self.lost.append((node, reason))
            self.changed.notify_all()

    def on_peer_known(self, node: str, incarnation: int) -> None:
        with self.changed:
            self.known[node] = incarnation
            self.changed.notify_all()

    def on_note(self, level: str, event: str, fields: Mapping[str, str | int | float]) -> None:
        with self.changed:
            self.notes.append((event, dict(fields)))
            self.changed.notify_all()

    def on_links_failed(self, reason: str) -> None:
        raise AssertionError(reason)


class Fabric:
    """Makes nodes of one kind of links that can reach each other, and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub = Hub()
        self.folder = Path(tempfile.mkdtemp(prefix="kvf-"))
        self.keys: RunKeys | None = make_keys() if kind == "tcp" else None
        self.ports: dict[str, int] = {}
        self.lock = threading.Lock()
        self.nodes: list[TestNode] = []

    def endpoint_of(self, node: str) -> str:
        if self.kind == "ipc":
            return f"ipc://{self.folder}/{node}.sock"
        with self.lock:  # asked for by several links' threads
            if node not in self.ports:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    self.ports[node] = free.getsockname()[1]
        return f"tcp://127.0.0.1:{self.ports[node]}"

    def node(
        self,
        name: str,
        incarnation: int = 1,
        *,
        consume: bool = True,
        incarnations: Sequence[tuple[str, int]] = (),
        **settings: int,
    ) -> TestNode:
        links: Links
        if self.kind == "memory":
            links = MemoryLinks(name, incarnation, self.hub, LinkSettings(**settings), incarnations)
        else:
            links = ZmqLinks(name, incarnation, self.endpoint_of, LinkSettings(**settings), self.keys, incarnations)
        made = TestNode(name, links, consume)
        self.nodes.append(made)
        return made

    def close(self) -> None:
        for node in self.nodes:
            node.links.close()
        shutil.rmtree(self.folder)
