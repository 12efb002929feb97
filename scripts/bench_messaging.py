"""How fast actors talk: round trip and one-way rate between two node processes, next to bare pyzmq in the same run.

Both sides move the same number of bytes per message between two processes over ``ipc://``. Ours are two real nodes: a
machine in one sends ``Generation`` messages to a machine in the other, through shells, post offices and links. The bare
pair is what anybody would write first: a DEALER, a ROUTER, one frame per message, blocking calls, no actors.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from actors.runtime.config import NodeConfig, Options
from actors.runtime.context import ActorSpec, NodeContext
from actors.runtime.machine import Effect, Send
from actors.runtime.node import Node
from messages.base import SUPERVISOR, Message, actor_of, node_of
from messages.codec import encode
from messages.envelope import Envelope
from messages.lifecycle import NodeFailed, NodeReady, StatusReport, Stop
from messages.requests import Generation

PING, ECHO = "bench.a/ping", "bench.b/echo"
TASK = "task"
"""Request id of the message that tells the ping actor how much to do."""
WARM_UP = 200
WINDOW = 4096
"""One-way messages under way at most: a sender that waits for nothing would only measure its outbox."""
ACKNOWLEDGE_EVERY = 512
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0

M = TypeVar("M", bound=Message)

Rows = tuple[tuple[str, int, str, str, int], ...]
Values = tuple[tuple[str, float | int | str], ...]


def message(index: int) -> Generation:
    """What is sent: as large as a streamed token with its ids."""
    return Generation(request_id="request-0123456789", epoch=0, first_index=index, token_ids=(index,) * 4)


def payload_bytes() -> int:
    """Encoded size of one envelope, for the bare pair."""
    envelope = Envelope(
        message_id="bench.a#1.100000", sender=PING, to=ECHO, sent_ns=time.monotonic_ns(), message=message(100_000)
    )
    return len(encode(envelope))


class EchoMachine:
    """Sends everything back in the round-trip phase (epoch 0); counts and acknowledges in the one-way phase."""

    def __init__(self) -> None:
        self.received = 0

    def start(self, now_ns: int) -> list[Effect]:
        """Nothing to do."""
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """Echo, or count."""
        if not isinstance(message, Generation):
            return []
        if message.epoch == 0:
            return [Send(sender, message)]
        self.received += 1
        if self.received % ACKNOWLEDGE_EVERY == 0:
            return [Send(sender, msgspec.structs.replace(message, first_index=self.received))]
        return []

    def status(self, now_ns: int) -> tuple[Values, Rows]:
        """Nothing of interest."""
        return (), ()


class PingMachine:
    """Makes as many round trips as its task says, one after the other, then sends one-way messages."""

    def __init__(self) -> None:
        self.round_trips = 0
        self.one_way = 0
        self.trip_ns: list[int] = []
        self.trip_start_ns = 0
        self.sent = 0
        self.one_way_start_ns = 0
        self.one_way_ns = 0

    def start(self, now_ns: int) -> list[Effect]:
        """Wait for the supervisor's word."""
        return []

    def handle(self, now_ns: int, sender: str, message_: Message) -> list[Effect]:
        """The task, or one answer: note its time, send the next."""
        if isinstance(message_, Generation) and message_.request_id == TASK:
            self.round_trips = message_.first_index + WARM_UP
            self.one_way = max(1, message_.token_ids[0] // ACKNOWLEDGE_EVERY) * ACKNOWLEDGE_EVERY
            return [Send(ECHO, message(0))]
        if isinstance(message_, Generation) and message_.epoch == 0:
            if self.trip_start_ns:
                self.trip_ns.append(now_ns - self.trip_start_ns)
            if len(self.trip_ns) < self.round_trips:
                self.trip_start_ns = now_ns
                return [Send(ECHO, message(len(self.trip_ns)))]
            self.one_way_start_ns = now_ns
            return self._send_up_to(WINDOW)
        if isinstance(message_, Generation):
            if message_.first_index == self.one_way:
                self.one_way_ns = now_ns - self.one_way_start_ns
                return [Send(SUPERVISOR, StatusReport(address=PING, incarnation=1, values=self.status(now_ns)[0]))]
            return self._send_up_to(message_.first_index + WINDOW)
        return []

    def _send_up_to(self, count: int) -> list[Effect]:
        count = min(count, self.one_way)
        one = msgspec.structs.replace(message(100_000), epoch=1)
        effects: list[Effect] = [Send(ECHO, one)] * (count - self.sent)
        self.sent = count
        return effects

    def status(self, now_ns: int) -> tuple[Values, Rows]:
        """The results."""
        if not self.one_way_ns:
            return (), ()
        trips_us = [ns / 1e3 for ns in self.trip_ns[WARM_UP:]]
        return tuple(figures(trips_us, self.one_way / (self.one_way_ns / 1e9)).items()), ()


def build_ping(context: NodeContext) -> tuple[ActorSpec, ...]:
    """Factory of the measuring actor's node."""
    return (ActorSpec("ping", PingMachine()),)


def build_echo(context: NodeContext) -> tuple[ActorSpec, ...]:
    """Factory of the answering actor's node."""
    return (ActorSpec("echo", EchoMachine()),)


# -- ours: two node processes, and this process as their supervisor ---------------------------------------------------


class _Cluster:
    """Two nodes and the supervisor's node, whose mailbox is a queue that the measuring thread reads."""

    def __init__(self, run_dir: Path, options: Options) -> None:
        self._run_dir = run_dir
        self._options = options
        self._mail: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._root = Node(self._config(node_of(SUPERVISOR), ""))
        self._processes: list[subprocess.Popen[bytes]] = []

    def _config(self, node: str, factory: str) -> NodeConfig:
        return NodeConfig(
            node=node,
            incarnation=1,
            run_id=f"bench{os.getpid()}",
            run_dir=str(self._run_dir),
            options=self._options,
            factories=(factory,) if factory else (),
        )

    def _accept(self, session: int, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            self._mail.put(envelope.message)
        self._root.office.consumed(session, len(envelopes))

    def start(self) -> None:
        """Start everything; returns once both nodes are ready."""
        self._root.office.register(actor_of(SUPERVISOR), self._accept)
        self._root.start()
        for node, factory in ((node_of(PING), "build_ping"), (node_of(ECHO), "build_echo")):
            path = self._run_dir / f"{node}.json"
            path.write_bytes(msgspec.json.encode(self._config(node, f"scripts.bench_messaging:{factory}")))
            command = [sys.executable, "-m", "actors.runtime.node", str(path)]
            self._processes.append(subprocess.Popen(command))
        for _ in self._processes:
            self._expect(NodeReady, START_TIMEOUT_S)

    def _expect(self, kind: type[M], timeout_s: float) -> M:
        """The next message of this kind; health is ignored, a failed node or silence ends the run."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                message_ = self._mail.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no {kind.__name__} within {timeout_s} s") from None
            if isinstance(message_, NodeFailed):
                raise RuntimeError(f"{message_.node} failed: {message_.reason}")
            if isinstance(message_, kind):
                return message_

    def measure(self, round_trips: int, one_way: int) -> dict[str, float]:
        """Have the ping actor do its work; returns its figures."""
        task = Generation(request_id=TASK, epoch=0, first_index=round_trips, token_ids=(one_way,))
        self._root.post(actor_of(SUPERVISOR), PING, task)
        report = self._expect(StatusReport, RUN_TIMEOUT_S)
        return {name: float(value) for name, value in report.values}

    def stop(self) -> None:
        """End both nodes and this process's own."""
        for node in (node_of(PING), node_of(ECHO)):
            self._root.post(actor_of(SUPERVISOR), f"{node}/node", Stop(reason="the benchmark is over"))
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._root.close()


def run_actors(round_trips: int, one_way: int, options: Options) -> dict[str, float]:
    """Figures of two real nodes."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        cluster = _Cluster(Path(folder), options)
        try:
            cluster.start()
            return cluster.measure(round_trips, one_way)
        finally:
            cluster.stop()


# -- bare pyzmq ------------------------------------------------------------------------------------------------------


def serve_bare(endpoint: str, round_trips: int, one_way: int) -> None:
    """The answering process: echo every round trip, then count, then answer once."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        for _ in range(round_trips):
            router.send_multipart(router.recv_multipart())
        for _ in range(one_way - 1):
            router.recv_multipart()
        router.send_multipart(router.recv_multipart())


def run_bare(round_trips: int, one_way: int, size_bytes: int) -> dict[str, float]:
    """Figures of a DEALER in this process and a ROUTER in another."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        endpoint = f"ipc://{folder}/bare.sock"
        command = [sys.executable, "-m", "scripts.bench_messaging", endpoint, str(round_trips + WARM_UP), str(one_way)]
        answering = subprocess.Popen(command)
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.rcvtimeo = dealer.sndtimeo = int(RUN_TIMEOUT_S * 1000)
                dealer.connect(endpoint)
                return _measure_bare(dealer, round_trips, one_way, bytes(size_bytes))
        finally:
            answering.kill()
            answering.wait()


def _measure_bare(dealer: zmq.Socket[bytes], round_trips: int, one_way: int, payload: bytes) -> dict[str, float]:
    trips_us = []
    for _ in range(round_trips + WARM_UP):
        start_ns = time.monotonic_ns()
        dealer.send(payload)
        dealer.recv()
        trips_us.append((time.monotonic_ns() - start_ns) / 1e3)
    start_ns = time.monotonic_ns()
    for _ in range(one_way):
        dealer.send(payload)
    dealer.recv()
    elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
    return figures(trips_us[WARM_UP:], one_way / elapsed_s)


def figures(trips_us: list[float], one_way_per_s: float) -> dict[str, float]:
    """What is reported of either side."""
    trips_us = sorted(trips_us)
    return {
        "round_trip_us_median": statistics.median(trips_us),
        "round_trip_us_p99": trips_us[int(len(trips_us) * 0.99)],
        "one_way_per_s": one_way_per_s,
    }


def run(
    round_trips: int = 5000, one_way: int = 200_000, repeats: int = 3, options: Options | None = None
) -> dict[str, Any]:
    """Measure both, ``repeats`` times in turn (so that a busy machine is busy for both); medians of each figure.

    Returns ``actors`` and ``bare`` (``round_trip_us_median``, ``round_trip_us_p99``, ``one_way_per_s``),
    ``payload_bytes``, ``round_trip_ratio`` (ours / bare, small is good) and ``one_way_ratio`` (large is good).
    """
    size = payload_bytes()
    options = options or Options(log_level="error")
    ours, bare = [], []
    for _ in range(repeats):
        bare.append(run_bare(round_trips, one_way, size))
        ours.append(run_actors(round_trips, one_way, options))
    medians = [
        {name: round(statistics.median(one[name] for one in side), 1) for name in side[0]} for side in (ours, bare)
    ]
    return {
        "actors": medians[0],
        "bare": medians[1],
        "payload_bytes": size,
        "round_trip_ratio": round(medians[0]["round_trip_us_median"] / medians[1]["round_trip_us_median"], 2),
        "one_way_ratio": round(medians[0]["one_way_per_s"] / medians[1]["one_way_per_s"], 3),
    }


if __name__ == "__main__":
    if len(sys.argv) == 4:
        serve_bare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(run(), indent=2))
