"""Reading traces: one life of a node as a stream of records, a whole directory merged by time.

Streams: a trace of any size is read with little memory. A file that its writer never closed (it was killed, or it still
runs) ends at the first unused byte; a torn or damaged tail ends the stream and is reported, never raised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgpack
import msgspec

from actors.runtime.config import NodeConfig
from actors.runtime.trace import CONFIG, FAULT, HANDLED, SENT, TRACE_VERSION
from messages.base import Message
from messages.envelope import AnyMessage

READ_BYTES = 1 << 20
RECORD_BYTES_MAX = 1 << 28

_decode_message = msgspec.msgpack.Decoder(AnyMessage).decode
_decode_config = msgspec.msgpack.Decoder(NodeConfig).decode


class TraceError(ValueError):
    """A trace that cannot be read, or lacks what was asked for; says which and what to do."""


class Record(NamedTuple):
    """One envelope sent or handled, or one injected fault.

    ``now_ns`` is when it was sent or its handling began. ``sent_ns`` to ``now_ns`` of a handled record is the time on
    the way and in the mailbox. ``payload`` is the encoded message, empty when payloads were not recorded; of a fault,
    the text that says what was done.
    """

    kind: int
    now_ns: int
    size_bytes: int
    message_id: str
    sender: str
    to: str
    sent_ns: int
    type: str
    parent_id: str
    trace_id: str
    epoch: int
    incarnation: int
    payload: bytes

    @property
    def message(self) -> Message | None:
        """The message itself, None when payloads were not recorded."""
        if not self.payload or self.kind == FAULT:
            return None
        message: Message = _decode_message(self.payload)
        return message

    @property
    def text(self) -> str:
        """What a fault did."""
        return self.payload.decode() if self.kind == FAULT else ""

    @property
    def actor(self) -> str:
        """The actor that sent or handled it."""
        return self.to if self.kind == HANDLED else self.sender


class TraceFile:
    """One life of one node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        try:
            first = next(self._raw(), None)
        except OSError as error:
            raise TraceError(f"{path}: {error}") from error
        if first is None or first[0] != CONFIG:
            raise TraceError(f"{path} is not a trace: it does not begin with a node's configuration")
        if first[2] != TRACE_VERSION:
            raise TraceError(f"{path} is a trace of version {first[2]}; this program reads version {TRACE_VERSION}")
        try:
            self.config = _decode_config(first[3])
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}: its configuration cannot be read: {error}") from error

    def _raw(self) -> Iterator[tuple]:  # type: ignore[type-arg]
        self.damage = ""
        with self.path.open("rb") as file:
            unpacker = msgpack.Unpacker(
                file, use_list=False, read_size=READ_BYTES, max_buffer_size=RECORD_BYTES_MAX, strict_map_key=False
            )
            try:
                for record in unpacker:
                    if type(record) is not tuple:
                        if record != 0:
                            self.damage = f"{self.path.name}: unreadable from byte {unpacker.tell()} on"
                        return
                    yield record
            except (ValueError, msgpack.exceptions.UnpackException) as error:
                self.damage = f"{self.path.name}: unreadable from byte {unpacker.tell()} on: {error}"

    def records(self) -> Iterator[Record]:
        """Every record after the configuration, in the order in which it was recorded."""
        make = Record._make
        raw = self._raw()
        next(raw, None)
        for fields in raw:
            if len(fields) != 13:
                self.damage = f"{self.path.name}: a record with {len(fields)} fields"
                return
            yield make(fields)


class Trace:
    """All trace files of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = sorted(directory.glob("*.trace")) if directory.is_dir() else []
        if not paths:
            raise TraceError(
                f"no traces in {directory}: run 'kvferry serve --trace-dir {directory}' (or simulate, demo) first"
            )
        self.files = [TraceFile(path) for path in paths]

    def records(self, keep: Callable[[Record], bool] | None = None) -> Iterator[Record]:
        """Records of all nodes, merged by time; ``keep`` is asked before merging, which makes a narrow search fast."""
        streams = [file.records() if keep is None else filter(keep, file.records()) for file in self.files]
        if len(streams) == 1:
            return streams[0]
        return heapq.merge(*streams, key=itemgetter(1))

    def damage(self) -> list[str]:
        """What could not be read, after a stream came to its end."""
        return [file.damage for file in self.files if file.damage]

    def file_of(self, node: str, incarnation: int = 0) -> TraceFile:
        """The trace of a node's life, the last one when ``incarnation`` is 0."""
        lives = [file for file in self.files if file.config.node == node]
        if incarnation:
            lives = [file for file in lives if file.config.incarnation == incarnation]
        if not lives:
            known = ", ".join(f"{file.config.node} ({file.config.incarnation})" for file in self.files)
            wanted = f"{node} in incarnation {incarnation}" if incarnation else node
            raise TraceError(f"no trace of {wanted} in {self.directory}; there is: {known}")
        return max(lives, key=lambda file: file.config.incarnation)


__all__ = ["FAULT", "HANDLED", "SENT", "Record", "Trace", "TraceError", "TraceFile"]
