"""The data plane within one host: a region is a file in ``/dev/shm`` (mode 0600) that peers map and copy directly.

Segment names start with the run's id, so that the supervisor can remove whatever is left of a run, even after
``kill -9``: ``unlink_run_segments``. Files are opened directly rather than with ``multiprocessing.shared_memory``,
whose resource tracker would unlink a segment when any process that attached it ends.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from messages.layout import RegionDescriptor
from transport.copy import Bytes, check_ranges, copy_ranges
from transport.dataplane import DataPlaneError, Strided

SHM_FOLDER = Path("/dev/shm")
BACKEND = "shm"


def run_prefix(run_id: str) -> str:
    """What the name of every segment of this run starts with."""
    return f"kvferry-{re.sub(r'[^A-Za-z0-9_]', '_', run_id)}-"


def run_segments(run_id: str) -> list[str]:
    """Names of the segments of this run that exist now."""
    prefix = run_prefix(run_id)
    return sorted(entry.name for entry in os.scandir(SHM_FOLDER) if entry.name.startswith(prefix))


def unlink_run_segments(run_id: str) -> list[str]:
    """Remove every segment of this run, whoever made it; returns the names removed. Existing mappings stay valid."""
    removed = []
    for name in run_segments(run_id):
        try:
            (SHM_FOLDER / name).unlink()
        except FileNotFoundError:
            continue  # its owner was faster
        removed.append(name)
    return removed


def _map(descriptor: int, size_bytes: int) -> Bytes:
    """The whole file as a writable array. The mapping lives as long as the array or a view of it.

    Pages are mapped at once: page faults during a copy would cost a third of its speed.
    """
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(descriptor, size_bytes, flags), dtype=np.uint8)


class ShmDataPlane:
    """``DataPlane`` over POSIX shared memory. Any thread; copies release the GIL."""

    def __init__(self, run_id: str) -> None:
        self._prefix = run_prefix(run_id)
        self._lock = threading.Lock()
        self._local: dict[str, Bytes] = {}
        self._remote: dict[str, tuple[RegionDescriptor, Bytes]] = {}
        self._segments: list[Path] = []
        self._closed = False

    def create_region(self, region_id: str, size_bytes: int) -> RegionDescriptor:
        """See ``DataPlane``. Memory is reserved now, so that a full host refuses here and not in a later write."""
        if size_bytes < 1:
            raise DataPlaneError(f"region {region_id}: {size_bytes} bytes asked for; at least 1")
        path = SHM_FOLDER / (self._prefix + re.sub(r"[^A-Za-z0-9_.#-]", "_", region_id))
        with self._lock:
            if self._closed:
                raise DataPlaneError(f"region {region_id}: this data plane is closed")
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                raise DataPlaneError(f"region {region_id} exists already ({path})") from None
            try:
                os.posix_fallocate(file, 0, size_bytes)
                buffer = _map(file, size_bytes)
            except (OSError, ValueError, OverflowError) as error:
                path.unlink(missing_ok=True)
                raise DataPlaneError(
                    f"region {region_id}: no {size_bytes} bytes of shared memory ({error}); "
                    "lower cache_memory_mb, block_count or staging_mb"
                ) from error
            finally:
                os.close(file)
            self._local[region_id] = buffer
            self._segments.append(path)
        return RegionDescriptor(region_id=region_id, size_bytes=size_bytes, backend=BACKEND, location=path.name)

    def view(self, region_id: str) -> memoryview:
        """See ``DataPlane``."""
        return self._buffer(region_id, local=True).data

    def attach(self, descriptor: RegionDescriptor) -> None:
        """See ``DataPlane``. Only segments of this run are mapped, and only at the size that was published."""
        region_id = descriptor.region_id
        if descriptor.backend != BACKEND:
            raise DataPlaneError(f"region {region_id}: backend {descriptor.backend}, but this node uses {BACKEND}")
        if not descriptor.location.startswith(self._prefix) or "/" in descriptor.location:
            raise DataPlaneError(f"region {region_id}: {descriptor.location} is not a segment of this run")
        with self._lock:
            if self._closed:
                raise DataPlaneError(f"region {region_id}: this data plane is closed")
            known = self._remote.get(region_id)
            if known is not None and known[0] == descriptor:
                return
            self._remote[region_id] = (descriptor, self._open(descriptor))

    def _open(self, descriptor: RegionDescriptor) -> Bytes:
        try:
            file = os.open(SHM_FOLDER / descriptor.location, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DataPlaneError(f"region {descriptor.region_id}: cannot open its segment: {error}") from error
        try:
            size = os.fstat(file).st_size
            if size != descriptor.size_bytes:
                raise DataPlaneError(
                    f"region {descriptor.region_id}: published {descriptor.size_bytes} bytes, its segment has {size}"
                )
            return _map(file, size)
        except (OSError, ValueError) as error:
            raise DataPlaneError(f"region {descriptor.region_id}: cannot map its segment: {error}") from error
        finally:
            os.close(file)

    def detach(self, region_id: str) -> None:
        """See ``DataPlane``. The mapping goes with the last operation that still uses it."""
        with self._lock:
            self._remote.pop(region_id, None)

    def write(self, local_region: str, local: Sequence[Strided], remote_region: str, remote: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        return self._copy(local_region, True, local, remote_region, False, remote)

    def read(self, remote_region: str, remote: Sequence[Strided], local_region: str, local: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        return self._copy(remote_region, False, remote, local_region, True, local)

    def copy(self, source_region: str, source: Sequence[Strided], target_region: str, target: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        return self._copy(source_region, True, source, target_region, True, target)

    def _copy(
        self,
        source_region: str,
        source_local: bool,
        source: Sequence[Strided],
        target_region: str,
        target_local: bool,
        target: Sequence[Strided],
    ) -> int:
        source_buffer = self._buffer(source_region, source_local)
        target_buffer = self._buffer(target_region, target_local)
        check_ranges(source_region, source_buffer.size, source)
        check_ranges(target_region, target_buffer.size, target)
        return copy_ranges(source_buffer, source, target_buffer, target)

    def _buffer(self, region_id: str, local: bool) -> Bytes:
        """The region's bytes; a "remote" region may also be one of this process."""
        with self._lock:
            if self._closed:
                raise DataPlaneError(f"region {region_id}: this data plane is closed")
            buffer = self._local.get(region_id)
            if buffer is None and not local:
                attached = self._remote.get(region_id)
                buffer = attached[1] if attached else None
        if buffer is None:
            raise DataPlaneError(f"region {region_id} is not {'registered here' if local else 'attached'}")
        return buffer

    def close(self) -> None:
        """See ``DataPlane``. Unlinks this process's segments; mappings go with the last view that uses them."""
        with self._lock:
            self._closed = True
            self._local.clear()
            self._remote.clear()
            segments, self._segments = self._segments, []
        for path in segments:
            path.unlink(missing_ok=True)
