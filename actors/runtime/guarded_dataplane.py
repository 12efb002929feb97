"""The data plane as roles see it when faults are injected: the injector is asked before every operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.runtime.faults import TornWrite
from actors.runtime.hooks import Injector
from messages.layout import RegionDescriptor
from transport.copy import Pair, coalesce
from transport.dataplane import DataPlane, Strided

Operation = Callable[[str, Sequence[Strided], str, Sequence[Strided]], int]


class GuardedDataPlane:
    """``DataPlane`` that fails, waits or tears where ``injector`` says so. Any thread."""

    def __init__(self, plane: DataPlane, injector: Injector) -> None:
        self._plane = plane
        self._injector = injector
        self.view = plane.view
        self.attach = plane.attach
        self.detach = plane.detach
        self.close = plane.close

    def create_region(self, region_id: str, size_bytes: int) -> RegionDescriptor:
        """See ``DataPlane``."""
        return self._plane.create_region(region_id, size_bytes)

    def write(self, local_region: str, local: Sequence[Strided], remote_region: str, remote: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        return self._run("write", self._plane.write, local_region, local, remote_region, remote)

    def read(self, remote_region: str, remote: Sequence[Strided], local_region: str, local: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        return self._run("read", self._plane.read, remote_region, remote, local_region, local)

    def copy(self, source_region: str, source: Sequence[Strided], target_region: str, target: Sequence[Strided]) -> int:
        """See ``DataPlane``."""
        return self._run("copy", self._plane.copy, source_region, source, target_region, target)

    def _run(
        self,
        name: str,
        operation: Operation,
        source_region: str,
        source: Sequence[Strided],
        target_region: str,
        target: Sequence[Strided],
    ) -> int:
        size_bytes = sum(piece.size_bytes for piece in target)
        try:
            self._injector.on_write(name, target_region, size_bytes)
        except TornWrite as torn:
            pairs = torn_pairs(coalesce(source, target), int(size_bytes * torn.fraction))
            if pairs:
                sources, targets = [Strided(*one) for one, _ in pairs], [Strided(*other) for _, other in pairs]
                operation(source_region, sources, target_region, targets)
            raise
        return operation(source_region, source, target_region, target)


def torn_pairs(pairs: Sequence[Pair], keep_bytes: int) -> list[Pair]:
    """The first ``keep_bytes`` bytes of ``pairs`` (equal runs on both sides), cut at a run unless there is only one."""
    kept: list[Pair] = []
    for source, target in pairs:
        (s_off, run_bytes, count, s_step), (t_off, _, _, t_step) = source, target
        if keep_bytes >= run_bytes * count:
            kept.append((source, target))
            keep_bytes -= run_bytes * count
            continue
        if count == 1:
            run_bytes = keep_bytes
        else:
            count = keep_bytes // run_bytes
        if run_bytes and count:
            kept.append(((s_off, run_bytes, count, s_step), (t_off, run_bytes, count, t_step)))
        break
    return kept
