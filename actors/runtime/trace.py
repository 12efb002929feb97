"""What a node remembers of its messages: a ring in memory, always; a file that survives ``kill -9``, when asked for.

The ring keeps references, so that recording costs one append. The file (``<trace_dir>/<node>.<incarnation>.trace``)
is a msgpack stream in a memory-mapped file: what is in the mapping belongs to the kernel, so a killed process loses
nothing that it recorded. A record's first byte is written last and unused space is zero, so a reader never takes a
half-written record for a whole one (``trace_file.py`` reads it).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from actors.runtime.config import NodeConfig
from messages.base import Message
from messages.envelope import Envelope

TRACE_VERSION: Final = 1
CONFIG, SENT, HANDLED, FAULT = range(4)
"""Kinds of records, the first field of each."""

RINGS: Final = "rings"
"""The folder of a run directory into which nodes write their rings, when they fail or are asked to."""

GROW_BYTES: Final = 4 << 20

RingEntry = tuple[int, int, int, Envelope | None, str]
"""kind, time in ns, encoded size in bytes, envelope, text (what a fault did)."""

_encode = msgspec.msgpack.Encoder().encode


def trace_path(directory: Path, node: str, incarnation: int) -> Path:
    """Where one life of a node writes its trace."""
    return directory / f"{node}.{incarnation}.trace"


def encode_config(config: NodeConfig) -> bytes:
    """The first record of every trace: who wrote it and how it was configured."""
    return _encode((CONFIG, 0, TRACE_VERSION, _encode(config)))


def encode_record(entry: RingEntry, payloads: bool) -> bytes:
    """One record as msgpack: a flat array, the message itself as opaque bytes, so that readers may skip it."""
    kind, now_ns, size_bytes, envelope, text = entry
    if envelope is None:
        return _encode((kind, now_ns, size_bytes, "", "", "", now_ns, "", "", "", 0, 0, text.encode()))
    message = envelope.message
    return _encode(
        (
            kind,
            now_ns,
            size_bytes,
            envelope.message_id,
            envelope.sender,
            envelope.to,
            envelope.sent_ns,
            type(message).__name__,
            envelope.parent_id,
            envelope.trace_id,
            envelope.epoch,
            envelope.incarnation,
            text.encode() if kind == FAULT else _payload(message) if payloads else b"",
        )
    )


def _payload(message: Message) -> bytes:
    try:
        return _encode(message)
    except Exception:  # inside a node a message may hold what has no bytes; recording it must not fail its sender
        return b""


class RingRecorder:
    """Keeps the newest ``options.trace_ring`` records in memory. Any thread; appends are atomic."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._ring: deque[RingEntry] = deque(maxlen=max(1, config.options.trace_ring))
        self._append = self._ring.append

    def sent(self, envelope: Envelope, size_bytes: int) -> None:
        """A local actor sent ``envelope``."""
        self._append((SENT, envelope.sent_ns, size_bytes, envelope, ""))

    def handled(self, now_ns: int, envelope: Envelope) -> None:
        """A local actor begins to handle ``envelope``."""
        self._append((HANDLED, now_ns, 0, envelope, ""))

    def fault(self, now_ns: int, envelope: Envelope | None, text: str) -> None:
        """The fault injector did ``text`` (to ``envelope``, if to one)."""
        self._append((FAULT, now_ns, 0, envelope, text))

    def entries(self) -> list[RingEntry]:
        """What the ring holds, oldest first."""
        return list(self._ring)

    def dump(self, directory: Path) -> Path:
        """Write the ring as a trace that every trace command reads. Any thread; readers see it whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        path = trace_path(directory, self.config.node, self.config.incarnation)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(encode_config(self.config))
            for entry in self.entries():
                file.write(encode_record(entry, payloads=True))
        part.replace(path)
        return path

    def close(self) -> None:
        """Nothing is pending."""


class NoRing(RingRecorder):
    """Remembers nothing (``trace_ring`` 0): what the ring costs is measured against it."""

    def sent(self, envelope: Envelope, size_bytes: int) -> None:
        """Forget it."""

    def handled(self, now_ns: int, envelope: Envelope) -> None:
        """Forget it."""

    def fault(self, now_ns: int, envelope: Envelope | None, text: str) -> None:
        """Forget it."""


class FileRecorder(RingRecorder):
    """A ring, and the whole trace in a file. Any thread. A full disk ends the file, never the node."""

    def __init__(self, config: NodeConfig, directory: Path) -> None:
        super().__init__(config)
        directory.mkdir(parents=True, exist_ok=True)
        self._payloads = config.options.trace_payloads
        self._lock = threading.Lock()
        self._path = trace_path(directory, config.node, config.incarnation)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        self._base = 0  # file offset of the mapping
        self._end = 0  # first free byte in the mapping
        self.failure = ""
        self._write(encode_config(config))

    def sent(self, envelope: Envelope, size_bytes: int) -> None:
        """A local actor sent ``envelope``."""
        entry = (SENT, envelope.sent_ns, size_bytes, envelope, "")
        self._append(entry)
        self._write(encode_record(entry, self._payloads))

    def handled(self, now_ns: int, envelope: Envelope) -> None:
        """A local actor begins to handle ``envelope``."""
        entry = (HANDLED, now_ns, 0, envelope, "")
        self._append(entry)
        self._write(encode_record(entry, self._payloads))

    def fault(self, now_ns: int, envelope: Envelope | None, text: str) -> None:
        """The fault injector did ``text``."""
        super().fault(now_ns, envelope, text)
        self._write(encode_record((FAULT, now_ns, 0, envelope, text), self._payloads))

    def _write(self, record: bytes) -> None:
        with self._lock:
            if self._file < 0 or self.failure:
                return
            try:
                if self._map is None or self._end + len(record) > len(self._map):
                    self._advance(len(record))
                assert self._map is not None
                start, self._end = self._end, self._end + len(record)
                self._map[start + 1 : self._end] = record[1:]
                self._map[start] = record[0]  # last: from now on the record exists
            except OSError as error:
                self.failure = f"trace of {self.config.node} ends early: {self._path}: {error}"

    def _advance(self, needed_bytes: int) -> None:
        """Map the next piece of the file, starting at a page boundary before the first free byte."""
        free = self._base + self._end
        base = free - free % mmap.ALLOCATIONGRANULARITY
        length = max(GROW_BYTES, free - base + needed_bytes)
        if self._map is not None:
            self._map.close()
            self._map = None
        os.posix_fallocate(self._file, base, length)  # a full disk is an error here, never a signal on a later write
        self._map = mmap.mmap(self._file, length, offset=base)
        self._base, self._end = base, free - base

    def close(self) -> None:
        """Cut the file to what was written. Nothing is recorded afterwards."""
        with self._lock:
            if self._file < 0:
                return
            if self._map is not None:
                self._map.close()
                self._map = None
            os.ftruncate(self._file, self._base + self._end)
            os.close(self._file)
            self._file = -1


def make_recorder(config: NodeConfig) -> RingRecorder:
    """The recorder that ``config.options`` asks for: ring only, ring and file with ``trace_dir``, or none."""
    if config.options.trace_dir:
        return FileRecorder(config, Path(config.options.trace_dir))
    return RingRecorder(config) if config.options.trace_ring else NoRing(config)
