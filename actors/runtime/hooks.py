"""Where tracing and fault injection attach to a node: two small interfaces and the versions that do nothing.

The post office and the shells call a ``Recorder`` for every envelope they send and every one an actor has handled, and
an ``Injector`` for every envelope that is about to leave and every write of the data plane. ``actors/runtime/trace.py``
(``make_recorder(config)``) and ``actors/runtime/faults.py`` (``make_injector(config)``) provide the real ones.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from messages.envelope import Envelope


class Recorder(Protocol):
    """Sees every envelope. All methods may be called from any thread and must be cheap: they are on every path."""

    def sent(self, envelope: Envelope, size_bytes: int) -> None:
        """A local actor sent ``envelope``. ``size_bytes`` is its encoded size, 0 when it stayed inside the node."""
        ...

    def handled(self, now_ns: int, envelope: Envelope) -> None:
        """A local actor begins to handle ``envelope`` at ``now_ns`` (the very time that its machine is given)."""
        ...

    def close(self) -> None:
        """Write what is pending. Nothing is recorded afterwards; later calls do no harm."""
        ...


class Delivery(NamedTuple):
    """One thing to do with an envelope that is about to leave: hand it over after ``delay_ms``.

    ``corrupt``: its bytes are damaged on the way, so that its receiver cannot decode it. ``swap``: it goes right behind
    the next message of its link (``swaps.py``), after ``delay_ms`` at the latest.
    """

    delay_ms: float
    envelope: Envelope
    corrupt: bool = False
    swap: bool = False


class Injector(Protocol):
    """Decides what goes wrong. Methods may be called from any thread."""

    def on_send(self, now_ns: int, envelope: Envelope) -> tuple[Delivery, ...]:
        """What becomes of ``envelope``: one immediate delivery (normal), none (dropped), several (duplicated), …"""
        ...

    def on_handled(self, now_ns: int, envelope: Envelope) -> None:
        """Called before an actor handles ``envelope``. May kill, stop or slow this process."""
        ...

    def on_write(self, operation: str, region_id: str, size_bytes: int) -> None:
        """Called before a data-plane operation ("write", "read", "copy") that targets ``region_id``.

        May raise ``transport.dataplane.DataPlaneError``, or return late.
        """
        ...


class NoRecorder:
    """Records nothing."""

    def sent(self, envelope: Envelope, size_bytes: int) -> None:
        """Ignore it."""

    def handled(self, now_ns: int, envelope: Envelope) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing is pending."""


class NoInjector:
    """Everything goes as it should."""

    def on_send(self, now_ns: int, envelope: Envelope) -> tuple[Delivery, ...]:
        """One immediate, undamaged delivery."""
        return (Delivery(0.0, envelope),)

    def on_handled(self, now_ns: int, envelope: Envelope) -> None:
        """Let it be handled."""

    def on_write(self, operation: str, region_id: str, size_bytes: int) -> None:
        """Let it happen."""
