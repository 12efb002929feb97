"""Prefill side: the pushes of this instance, opened and closed on all of its ranks.

    (new) --OpenPush--> on every rank --ClosePush--> CLOSING --every rank closed--> (gone, PushClosed)

A rank keeps a push until it is told to close it, and while a write of it is in flight, so ``ClosePush`` is repeated to
the ranks that have not confirmed. A failed push is only passed on: the decode instance learns of it as well, and gives
the attempt up.
"""

from __future__ import annotations

from actors.runtime.machine import Effect, Handlers, Send, StartTimer, StopTimer
from messages.base import control_address, rank_address
from messages.timers import RequestTimer
from messages.transfer import ClosePush, OpenPush, PushClosed, PushFailed

PURPOSE = "close push"


class Pushes:
    """See the module's theory."""

    def __init__(self, instance: str, tp_size: int, *, resend_ms: float) -> None:
        self._scheduler = control_address(instance, "scheduler")
        self._transfers = tuple(rank_address(instance, rank, "transfer") for rank in range(tp_size))
        self._resend_ms = resend_ms
        self._closing: dict[tuple[str, int], set[int]] = {}  # (request id, epoch) → ranks that have not confirmed

    def handlers(self) -> Handlers[list[Effect]]:
        """What is done with messages about pushes."""
        handlers: Handlers[list[Effect]] = Handlers()
        on = handlers.on
        on(OpenPush, self._on_open_push)
        on(PushFailed, self._on_push_failed)
        on(ClosePush, self._on_close_push)
        on(PushClosed, self._on_push_closed)
        return handlers

    @property
    def closing_count(self) -> int:
        """Pushes that not every rank has closed."""
        return len(self._closing)

    def on_timer(self, now_ns: int, sender: str, message: RequestTimer) -> list[Effect]:
        """Ranks have not confirmed in time."""
        return self._ask(message.request_id, message.epoch)

    def _on_open_push(self, now_ns: int, sender: str, message: OpenPush) -> list[Effect]:
        return [Send(transfer, message) for transfer in self._transfers]

    def _on_push_failed(self, now_ns: int, sender: str, message: PushFailed) -> list[Effect]:
        return [Send(self._scheduler, message)]

    def _on_close_push(self, now_ns: int, sender: str, message: ClosePush) -> list[Effect]:
        self._closing[(message.request_id, message.epoch)] = set(range(len(self._transfers)))
        return self._ask(message.request_id, message.epoch)

    def _ask(self, request_id: str, epoch: int) -> list[Effect]:
        """Tell the ranks that have not confirmed, and again later."""
        key = (request_id, epoch)
        missing = self._closing.get(key)
        if not missing:
            return []
        close = ClosePush(request_id=request_id, epoch=epoch)
        due = RequestTimer(request_id=request_id, epoch=epoch, purpose=PURPOSE)
        asked: list[Effect] = [Send(self._transfers[rank], close) for rank in sorted(missing)]
        return [*asked, StartTimer((PURPOSE, *key), self._resend_ms, due)]

    def _on_push_closed(self, now_ns: int, sender: str, message: PushClosed) -> list[Effect]:
        key = (message.request_id, message.epoch)
        missing = self._closing.get(key)
        if missing is None:
            return []
        missing.discard(message.rank)
        if missing:
            return []
        del self._closing[key]
        closed = PushClosed(request_id=message.request_id, epoch=message.epoch, rank=-1)
        return [StopTimer((PURPOSE, *key)), Send(self._scheduler, closed)]
