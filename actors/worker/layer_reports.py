"""Who hears, while a step still runs, that a layer's KEY and VALUE are final."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from actors.worker.device import Device
from actors.worker.mirror import HostMirror
from messages.batch import BatchRow
from messages.layout import Namespace

LayerReadyCallback = Callable[[BatchRow, Namespace, int, bool], None]
"""``(row, namespace, layer, is_last_layer)``: this row's KEY and VALUE of that layer are final and synchronised."""


class LayerReports:
    """Tells of layers whose KEY and VALUE are final, for the prefill rows of one step.

    On an accelerator a layer is reported while the next one computes: waiting for each at once would drain the stream.
    """

    def __init__(
        self,
        device: Device,
        mirror: HostMirror | None,
        rows: Sequence[BatchRow],
        on_layer_ready: LayerReadyCallback | None,
    ) -> None:
        self._device, self._mirror = device, mirror
        self._rows = rows
        self._callback = on_layer_ready
        self._waiting: deque[tuple[Namespace, int, bool, Callable[[], None]]] = deque()

    def add(self, namespace: Namespace, layer: int, is_last: bool) -> None:
        """This layer's kernels are launched."""
        if not self._rows:
            return
        if self._mirror is not None:
            for row in self._rows:
                if namespace == "draft":
                    self._mirror.publish_draft(row.block_ids, row.start, len(row.token_ids))
                else:
                    self._mirror.publish_tokens(layer, row.block_ids, row.start, len(row.token_ids))
        self._waiting.append((namespace, layer, is_last, self._device.event()))
        self.flush(keep=0 if self._device.shares_host_memory else 1)

    def flush(self, keep: int = 0) -> None:
        """Report all layers but the ``keep`` latest, once the device has passed them."""
        while len(self._waiting) > keep:
            namespace, layer, is_last, wait = self._waiting.popleft()
            wait()
            for row in self._rows:
                if self._callback is not None and row.push_chunk >= 0:
                    self._callback(row, namespace, layer, is_last)
