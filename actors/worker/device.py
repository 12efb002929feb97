"""The only place that knows which device a rank computes on: cpu, cuda, or npu (torch_npu, imported only for it)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from actors.runtime.config import ConfigError


class Device:
    """A rank's device. ``index`` picks one of several accelerators of the host."""

    def __init__(self, kind: str, index: int = 0) -> None:
        """Raises ``ConfigError`` when this host has no such device."""
        self.kind = kind
        if kind == "cpu":
            self.torch_device = torch.device("cpu")
            self._runtime: Any = None
            return
        if kind == "npu":
            try:
                importlib.import_module("torch_npu")
            except ImportError as error:
                raise ConfigError(
                    f"device npu needs torch_npu and CANN on this host: {error} (option: device)"
                ) from error
        runtime = getattr(torch, kind, None)
        if runtime is None or not runtime.is_available():
            raise ConfigError(f"device {kind} is not available on this host; use cpu (option: device)")
        count = runtime.device_count()
        self.torch_device = torch.device(kind, index % count)
        runtime.set_device(self.torch_device)
        self._runtime = runtime

    @property
    def shares_host_memory(self) -> bool:
        """Whether kernels work directly on the registered host buffer."""
        return self.kind == "cpu"

    def event(self) -> Callable[[], None]:
        """Mark this point of the default stream; calling the result waits until the device has passed it.

        On the CPU every point is passed already.
        """
        if self._runtime is None:
            return _passed
        event = self._runtime.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait


def _passed() -> None:
    """The CPU has passed every point."""
