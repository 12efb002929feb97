"""Caches that live on an accelerator, kept in step with the host region that peers read and write.

Transfers move bytes of the registered host region. On the CPU that region is the cache. On an accelerator the kernels
work on caches of their own in device memory, and this module copies the parts that change hands: what a prefill has
produced goes to the host before it is reported, what a hand-off has restored goes to the device before it is read.
Nothing is copied for plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.worker.caches import DeltaCache, KVCache, RankCaches


class HostMirror:
    """``device`` and ``host`` are the same caches in two places, of equal shapes. One thread."""

    def __init__(self, device: RankCaches, host: RankCaches) -> None:
        self._pairs = list(zip((*device.layers, *device.draft), (*host.layers, *host.draft), strict=True))
        self._layer_count = len(device.layers)
        self._block_size = device.block_size
        self._columns = device.conv_columns
        self._checkpoints = device.speculative_tokens + 1

    def publish_tokens(self, place: int, blocks: Sequence[int], start: int, count: int) -> None:
        """Copy KEY and VALUE of tokens ``[start, start + count)`` to the host, for the target layer ``place``."""
        device, host = self._pairs[place]
        assert isinstance(device, KVCache) and isinstance(host, KVCache)
        rows = torch.tensor(
            [
                blocks[position // self._block_size] * self._block_size + position % self._block_size
                for position in range(start, start + count)
            ]
        )
        for source, target in ((device.key, host.key), (device.value, host.value)):
            target.index_copy_(0, rows, source.index_select(0, rows.to(source.device)).to(target.device))

    def publish_draft(self, blocks: Sequence[int], start: int, count: int) -> None:
        """The same for every draft layer."""
        for place in range(self._layer_count, len(self._pairs)):
            self.publish_tokens(place, blocks, start, count)

    def publish_slot(self, slot: int) -> None:
        """Copy the recurrent state of ``slot``, all layers, to the host."""
        self._copy_slot(slot, to_host=True)

    def fetch(self, blocks: Sequence[int], slot: int) -> None:
        """Copy what a hand-off has put into ``blocks`` and ``slot`` to the device."""
        self._copy_slot(slot, to_host=False)
        index = torch.tensor(blocks, dtype=torch.int64)
        for device, host in self._pairs:
            if isinstance(device, KVCache) and isinstance(host, KVCache):
                for source, target in ((host.key, device.key), (host.value, device.value)):
                    width = self._block_size * source.shape[1]
                    moved = source.view(-1, width).index_select(0, index).to(target.device)
                    target.view(-1, width).index_copy_(0, index.to(target.device), moved)

    def _copy_slot(self, slot: int, *, to_host: bool) -> None:
        for device, host in self._pairs:
            if isinstance(device, DeltaCache) and isinstance(host, DeltaCache):
                source, target = (device, host) if to_host else (host, device)
                conv = slice(slot * self._columns, (slot + 1) * self._columns)
                ssm = slice(slot * self._checkpoints, (slot + 1) * self._checkpoints)
                target.conv[conv].copy_(source.conv[conv])
                target.ssm[ssm].copy_(source.ssm[ssm])
