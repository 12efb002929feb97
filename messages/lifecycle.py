"""The conversation between the supervisor and its nodes: start, readiness, health, status, stop."""

from __future__ import annotations

from messages.base import Message
from messages.layout import Manifest


class NodeReady(Message, frozen=True, kw_only=True):
    """Node → supervisor: all actors of this node are started."""

    node: str
    incarnation: int
    pid: int
    detail: str = ""  # the front says the URL it listens on


class NodeProgress(Message, frozen=True, kw_only=True):
    """Node → supervisor: a long start-up step (loading weights), for the person who waits."""

    node: str
    incarnation: int
    what: str
    done: int
    total: int


class NodeFailed(Message, frozen=True, kw_only=True):
    """Node → supervisor: an actor died or start-up was refused; the node exits after this."""

    node: str
    incarnation: int
    actor: str
    reason: str
    fatal: bool = False  # a configuration error: restarting cannot help


class NodeHealth(Message, frozen=True, kw_only=True):
    """Node → supervisor, about once a second: alive, and so are its actors, as they share the thread that sends it."""

    node: str
    incarnation: int
    rss_bytes: int
    cpu_percent: float
    threads: int


class WorkerReady(Message, frozen=True, kw_only=True):
    """Worker → its node's transfer → engine: weights loaded, caches allocated and registered.

    On the way the transfer actor of a decode rank adds the staging region to the manifest.
    """

    rank: int
    incarnation: int
    manifest: Manifest


class ModelLoaded(Message, frozen=True, kw_only=True):
    """Worker to itself: the weights are there, the caches registered under this manifest."""

    manifest: Manifest


class LoadFailed(Message, frozen=True, kw_only=True):
    """Worker to itself: it cannot serve. ``fatal``: a configuration error, which a restart cannot help."""

    reason: str
    fatal: bool = False


class EngineReady(Message, frozen=True, kw_only=True):
    """Engine → scheduler: every rank is ready; their manifests agree on capacities."""

    incarnation: int
    manifests: tuple[Manifest, ...]


class Drain(Message, frozen=True, kw_only=True):
    """Supervisor → gateway, schedulers: take no new requests, finish or fail what is there within ``deadline_ms``."""

    deadline_ms: int


class Drained(Message, frozen=True, kw_only=True):
    """Gateway or scheduler → supervisor."""

    node: str
    actor: str


class Stop(Message, frozen=True, kw_only=True):
    """Supervisor → node: stop every actor and exit."""

    reason: str


class StatusRequest(Message, frozen=True, kw_only=True):
    """Anyone → any actor: say how you are. Answered with ``StatusReport`` to ``reply_to``."""

    reply_to: str
    tag: str = ""


class StatusReport(Message, frozen=True, kw_only=True):
    """``values`` are plain counters and gauges; ``requests`` has one row per live request."""

    address: str
    incarnation: int
    tag: str = ""
    values: tuple[tuple[str, float | int | str], ...] = ()
    requests: tuple[tuple[str, int, str, str, int], ...] = ()  # id, epoch, state, waits_for, since_ns


class PeerLost(Message, frozen=True, kw_only=True):
    """Post office → local actors that sent there: the link to ``node`` broke or its outbox overflowed."""

    node: str
    reason: str


class NotSent(Message, frozen=True, kw_only=True):
    """Post office → the local actor that sent it: no bytes can carry your message about this request, it is lost.

    ``what`` is the message's type, ``to`` whom it was for. Whoever owns the request fails it with ``reason``; for
    anybody else it is one more lost message.
    """

    request_id: str
    epoch: int
    what: str
    to: str
    reason: str


class ProcessStarted(Message, frozen=True, kw_only=True):
    """Shell of the supervisor → supervisor: the operating system runs this node now."""

    node: str
    incarnation: int
    pid: int


class ProcessExited(Message, frozen=True, kw_only=True):
    """Shell of the supervisor → supervisor: this node's process is gone and reaped.

    ``exit_code`` is negative for a signal (-9: killed) and ``None`` when it could not even be started. ``fatal``: its
    exit code says that its configuration cannot work. ``last_words`` is the end of what it wrote to stderr.
    """

    node: str
    incarnation: int
    exit_code: int | None = None
    fatal: bool = False
    last_words: str = ""


class ProcessSignalled(Message, frozen=True, kw_only=True):
    """Shell of the supervisor → supervisor: the signal it asked for was sent (or the process was gone already)."""

    node: str
    incarnation: int


class UnitCleaned(Message, frozen=True, kw_only=True):
    """Shell of the supervisor → supervisor: sockets and shared memory of a dead unit ("": of the run) are removed."""

    unit: str
    removed: int = 0


class TreeReady(Message, frozen=True, kw_only=True):
    """Supervisor → console: every node is up, every instance registered and linked, for the first time: a request sent
    now is served and not refused first."""

    url: str


class TreeEnded(Message, frozen=True, kw_only=True):
    """Supervisor → console: no process, socket or segment of this run is left. ``failed``: nobody asked for it."""

    reason: str
    failed: bool = False
