"""Owner of record of every request, from its admission until its last word is delivered.

Theory of operation
===================

The HTTP side submits a *ticket* of one or more *samples*; each sample is a request of its own to the instances (those
of one prompt are submitted together at first, so that it is computed once; later attempts are made alone). A sample's
record has a state:

    waiting     no instance has it: none is alive, or the last attempt was refused and its backoff runs
    prefill     submitted under epoch ``first_epoch(attempt)`` to a mixed or prefill instance, no token of it yet
    streaming   a token came; whoever sends tokens holds it (the prefill instance until the decode instance speaks)
    closing     a stop string was found in its text, a cancel is out; waits briefly for the figures of its end
    delivering  its last word is on its way to the client

    waiting -> prefill -> streaming -> [closing] -> delivering -> forgotten
    prefill, streaming -> waiting | prefill     a new attempt (below), while attempts remain

Delivery. Token 0 comes from P, the others from D, so they may arrive in any order: a record keeps early tokens and
releases the next index only (I1). A message under an epoch older than the highest seen, or of another attempt than
the current one, changes nothing (I5); its sender is told to cancel, so that nothing decodes for nobody.

A new attempt is made when the holder says ``Failed(retryable)``; when the holder's incarnation leaves the view or is
lost; when a token is missing and does not come within ``GAP_WAIT_MS``; and when nobody holds the request any more,
whatever message was lost on the way (``rollcall.py``: instances are asked about requests that are quiet). It carries
the tokens already delivered (whole steps of the old one) and the same seed, so the stream goes on where it stopped. The
old attempt is cancelled wherever it may be. After ``request_attempts_max`` attempts, or at the request's deadline, the
client gets one error.

An id is in flight from admission until its record is forgotten; a second one is refused with 409. An id used again
later starts at a higher attempt, so that late messages of its former life are stale. So does every id after the front
restarted: its incarnation is part of the first attempt.

Cancel. When the client is gone, every scheduler that may hold the request is told: the prefill instance, and the
decode instance that streams it, or all of them while none has spoken yet. P and D drain and free on their own.
"""

from __future__ import annotations

from actors.gateway.admission import STOPPING, refuse
from actors.gateway.attempts import INSTANCE_WAIT_MS, Attempts, timer
from actors.gateway.book import Book
from actors.gateway.jobs import DeliverTokens, PublishInstances, PublishLoad
from actors.gateway.record import Holder, Record
from actors.gateway.rollcall import RollCall
from actors.gateway.routing import Router
from actors.runtime.config import Options
from actors.runtime.machine import Effect, Handlers, Note, Run, Send, StartTimer, StopTimer
from messages.base import REGISTRY, Message, attempt_of, control_address, first_epoch, instance_of
from messages.cluster import ClusterView, Heartbeat, InstanceLost, ViewRequest
from messages.gateway import ClientCancel, ClientStopped, ClientSubmit, Delivered
from messages.lifecycle import Drain, Drained, NotSent, PeerLost, StatusReport, StatusRequest
from messages.requests import CancelRequest, Failed, Finished, Generation
from messages.timers import InstanceTimer, RequestTimer

GAP_WAIT_MS = 3000.0
"""How long a known token may be missing before the request is attempted again."""
CLOSE_WAIT_MS = 1000.0
"""How long the end of a request whose text hit a stop string waits for its instance's figures."""
QUIET_MS = 5000
"""A request without a sign of life for this long is asked about."""
ROLL_CALL_MS = 1000.0
"""How often quiet requests are looked for while requests are in flight."""

_MS = 1e-6
_QUIET_NS = QUIET_MS * 1_000_000


class GatewayMachine:
    """See the module's theory. One per cluster, on the front node."""

    def __init__(self, *, node: str, incarnation: int, options: Options, address: str) -> None:
        self._node = node
        self._options = options
        self._address = address
        self._router = Router()
        self._view = (-1, -1)
        self._book = Book(incarnation)
        self._attempts = Attempts(self._router, options, address)
        self._roll_call = RollCall()
        self._roll_call_timed = False
        self._drain_asked_by = ""
        self._drained = False
        self._stale_count = 0
        self._handlers: Handlers[list[Effect]] = Handlers()
        on = self._handlers.on
        on(ClientSubmit, self._on_client_submit)
        on(ClientCancel, self._on_client_cancel)
        on(ClientStopped, self._on_client_stopped)
        on(Delivered, self._on_delivered)
        on(Generation, self._on_generation)
        on(Finished, self._on_finished)
        on(Failed, self._on_failed)
        on(ClusterView, self._on_cluster_view)
        on(InstanceLost, self._on_instance_lost)
        on(Heartbeat, self._on_heartbeat)
        on(StatusReport, self._on_status_report)
        on(PeerLost, self._on_peer_lost)
        on(NotSent, self._on_not_sent)
        on(RequestTimer, self._on_request_timer)
        on(InstanceTimer, self._on_roll_call_timer)
        on(Drain, self._on_drain)

    def start(self, now_ns: int) -> list[Effect]:
        """Ask for the view: the registry may have announced it before the gateway listened."""
        return [Send(REGISTRY, ViewRequest())]

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """React to one message; unknown and late ones change nothing."""
        handler = self._handlers.get(type(message))
        return handler(now_ns, sender, message) if handler is not None else []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """Counters, and one row per request that is not delivered yet."""
        values: tuple[tuple[str, float | int | str], ...] = (
            ("requests", len(self._book)),
            ("instances", len(self._router.instances)),
            ("retries", self._attempts.retry_count),
            ("stale_messages", self._stale_count),
            ("draining", int(bool(self._drain_asked_by))),
        )
        rows = tuple(
            (record.request_id, record.epoch, record.state, record.awaited(), record.progress_ns)
            for record in self._book.all()
        )
        return values, rows

    # -- the client's side -------------------------------------------------------------------------------------------

    def _on_client_submit(self, now_ns: int, sender: str, message: ClientSubmit) -> list[Effect]:
        if (refusal := refuse(message, self._book, self._router, draining=bool(self._drain_asked_by))) is not None:
            fields = (("request", message.request_id), ("code", refusal.code), ("reason", refusal.message))
            return [Run(refusal), Note("info", "request refused", fields)]
        effects: list[Effect] = []
        records = self._book.admit(now_ns, message)
        effects += [timer(record, "deadline", float(self._options.request_timeout_ms)) for record in records]
        effects += self._attempts.place_all(now_ns, records)
        if not self._roll_call_timed:
            effects.append(self._time_roll_call())
        return effects

    def _on_client_cancel(self, now_ns: int, sender: str, message: ClientCancel) -> list[Effect]:
        effects: list[Effect] = []
        for record in self._book.of_ticket(message.ticket):
            if record.state != "delivering":
                effects += self._attempts.withdraw(record, message.reason)
                effects += self._attempts.end(now_ns, record, "cancelled")
        return effects

    def _on_client_stopped(self, now_ns: int, sender: str, message: ClientStopped) -> list[Effect]:
        record = self._book.find(message.ticket, message.sample)
        if record is None or record.state in ("closing", "delivering"):
            return []
        record.stopped_at = message.token_count
        if record.finished is not None or record.state == "waiting":
            return self._attempts.end(now_ns, record, "stop")
        record.state = "closing"
        return [*self._attempts.withdraw(record, "stop string"), timer(record, "close", CLOSE_WAIT_MS)]

    def _on_delivered(self, now_ns: int, sender: str, message: Delivered) -> list[Effect]:
        record = self._book.find(message.ticket, message.sample)
        if record is None or record.state != "delivering":
            return []
        self._book.forget(record)
        return self._drained_if_empty()

    # -- the instances' side -----------------------------------------------------------------------------------------

    def _on_generation(self, now_ns: int, sender: str, message: Generation) -> list[Effect]:
        record = self._current(message.request_id, message.epoch)
        if record is None:
            return self._on_stale_generation(sender, message)
        self._heard_from(now_ns, record, sender)
        if record.state == "closing":
            return []
        record.state = "streaming"
        effects: list[Effect] = []
        released = record.accept(message)
        if released is not None:
            waited_ns = now_ns - (record.last_token_ns or record.arrived_ns)
            record.first_token_ns = record.first_token_ns or now_ns
            record.last_token_ns = now_ns
            job = DeliverTokens(
                ticket=record.ticket,
                sample=record.index,
                first_index=released.first_index,
                token_ids=released.token_ids,
                logprobs=released.logprobs,
                prompt_logprobs=released.prompt_logprobs,
                waited_ms=waited_ns * _MS,
            )
            effects.append(Run(job))
        return effects + self._after_tokens(now_ns, record)

    def _on_stale_generation(self, sender: str, message: Generation) -> list[Effect]:
        """Nobody wants these tokens: tell their sender, unless they are of an older offer of the current attempt."""
        self._stale_count += 1
        record = self._book.get(message.request_id)
        if record is not None and attempt_of(message.epoch) >= record.attempt:
            return []
        cancel = CancelRequest(request_id=message.request_id, epoch=message.epoch, reason="not wanted any more")
        return [Send(sender, cancel)]

    def _on_finished(self, now_ns: int, sender: str, message: Finished) -> list[Effect]:
        record = self._current(message.request_id, message.epoch)
        if record is None:
            self._stale_count += 1
            return []
        self._heard_from(now_ns, record, sender)
        if record.state == "closing":
            record.finished = message
            return self._attempts.end(now_ns, record, "stop")
        if message.reason == "cancelled":
            instance = instance_of(sender)
            return self._attempts.again(now_ns, record, f"{instance} cancelled it on its own", instance)
        record.finished = message
        return self._after_tokens(now_ns, record)

    def _on_failed(self, now_ns: int, sender: str, message: Failed) -> list[Effect]:
        record = self._current(message.request_id, message.epoch)
        if record is None:
            self._stale_count += 1
            return []
        if record.state == "closing":
            return self._attempts.end(now_ns, record, "stop")
        instance = instance_of(sender)
        if message.retryable:
            return self._attempts.again(now_ns, record, message.message, instance, code=message.code)
        effects = self._attempts.withdraw(record, message.message, besides=instance)
        return effects + self._attempts.end(now_ns, record, "error", message.code, message.message)

    def _current(self, request_id: str, epoch: int) -> Record | None:
        """The record that a message of this epoch may change."""
        record = self._book.get(request_id)
        if record is None or record.state == "delivering" or not record.is_current(epoch):
            return None
        return record

    def _heard_from(self, now_ns: int, record: Record, sender: str) -> None:
        """Whoever else than the prefill instance speaks is the decode instance; the prefill instance then is done."""
        record.progress_ns = now_ns
        instance = instance_of(sender)
        if record.prefill is not None and record.prefill.instance == instance:
            return
        if record.decode is None or record.decode.instance != instance:
            info = self._router.instances.get(instance)
            record.decode = Holder(instance, info.incarnation if info is not None else -1)
            self._attempts.unload(record)

    def _after_tokens(self, now_ns: int, record: Record) -> list[Effect]:
        """End it when all is there; see that a missing token is not awaited for ever."""
        if record.has_gap():
            if record.gap_timed:
                return []
            record.gap_timed = True
            return [timer(record, "gap", GAP_WAIT_MS)]
        effects: list[Effect] = [StopTimer(("gap", record.request_id))] if record.gap_timed else []
        record.gap_timed = False
        if record.finished is not None:
            return self._attempts.end(now_ns, record, "length" if record.finished.reason == "length" else "stop")
        return effects

    # -- the cluster -------------------------------------------------------------------------------------------------

    def _on_cluster_view(self, now_ns: int, sender: str, message: ClusterView) -> list[Effect]:
        version = (message.registry_incarnation, message.version)
        if version <= self._view:
            return []
        self._view = version
        self._router.follow(message)
        return self._after_change(now_ns, "left the view")

    def _on_instance_lost(self, now_ns: int, sender: str, message: InstanceLost) -> list[Effect]:
        info = self._router.instances.get(message.instance)
        if info is None or info.incarnation > message.incarnation:
            return []
        self._router.lose(message.instance)
        return self._after_change(now_ns, f"was lost: {message.reason}")

    def _after_change(self, now_ns: int, what: str) -> list[Effect]:
        """Attempt again what a vanished instance held; place what waited for an instance."""
        effects: list[Effect] = [self._publish()]
        waiting: list[Record] = []
        for record in self._book.all():
            if record.state in ("prefill", "streaming", "closing"):
                effects += self._check_holder(now_ns, record, what)
            elif record.state == "waiting" and record.waits_for == "an instance":
                waiting.append(record)
        effects += self._attempts.place_all(now_ns, waiting)
        if self._roll_call.keep(control_address(name, "scheduler") for name in sorted(self._router.instances)):
            effects += self._conclude_roll_call(now_ns)
        return effects

    def _publish(self) -> Run:
        """What the HTTP side may say of the cluster."""
        live = sorted(self._router.instances.items())
        return Run(
            PublishInstances(
                instances=tuple((name, info.role, info.max_model_len) for name, info in live),
                missing=STOPPING if self._drain_asked_by else self._router.missing(),
                length_max=self._router.length_max(),
            )
        )

    def _check_holder(self, now_ns: int, record: Record, what: str) -> list[Effect]:
        holder = record.decode or record.prefill
        if holder is None:
            return []
        if self._router.is_alive(holder.instance, holder.incarnation):
            info = self._router.instances[holder.instance]
            if record.state == "streaming" and record.decode is None and info.role == "PREFILL":
                # Its decode instance, not known yet, may be the one that vanished: ask soon who holds it.
                record.suspect(now_ns - _QUIET_NS)
            return []
        if record.state == "closing":
            return self._attempts.end(now_ns, record, "stop")
        why = f"instance {holder.instance} {what}"
        return self._attempts.again(now_ns, record, why, holder.instance, at_once=True)

    def _on_heartbeat(self, now_ns: int, sender: str, message: Heartbeat) -> list[Effect]:
        effects: list[Effect] = []
        if message.view_version not in (-1, self._view[1]):
            effects.append(Send(REGISTRY, ViewRequest()))
        if self._router.is_alive(message.instance, message.incarnation):
            effects.append(Run(PublishLoad(heartbeat=message)))
        return effects

    def _on_peer_lost(self, now_ns: int, sender: str, message: PeerLost) -> list[Effect]:
        """Messages to or from that node may be lost: ask soon who holds its requests."""
        for record in self._book.all():
            holders = {holder.instance for holder in (record.prefill, record.decode) if holder is not None}
            if instance_of(message.node) in holders:
                record.suspect(now_ns - _QUIET_NS)
        return []

    def _on_not_sent(self, now_ns: int, sender: str, message: NotSent) -> list[Effect]:
        """Something about this request cannot be said, now or later: another attempt would not help."""
        record = self._current(message.request_id, message.epoch)
        if record is None:
            return []
        effects = self._attempts.withdraw(record, message.reason)
        return effects + self._attempts.end(now_ns, record, "error", 500, message.reason)

    # -- time --------------------------------------------------------------------------------------------------------

    def _on_request_timer(self, now_ns: int, sender: str, message: RequestTimer) -> list[Effect]:
        if message.purpose == "drain":
            return self._on_drain_deadline(now_ns)
        record = self._book.get(message.request_id)
        if record is None or record.state == "delivering" or attempt_of(message.epoch) < record.first_attempt:
            return []
        if message.purpose == "deadline":
            text = f"not finished within {self._options.request_timeout_ms} ms (request_timeout_ms)"
            effects = self._attempts.withdraw(record, "deadline")
            return effects + self._attempts.end(now_ns, record, "error", 504, text)
        if attempt_of(message.epoch) != record.attempt:
            return []
        if message.purpose == "close" and record.state == "closing":
            return self._attempts.end(now_ns, record, "stop")
        if message.purpose == "gap" and record.has_gap():
            holder = record.decode or record.prefill
            why = f"token {len(record.tokens)} did not arrive"
            return self._attempts.again(now_ns, record, why, holder.instance if holder else "", at_once=True)
        if message.purpose == "wait" and record.state == "waiting":
            if record.waits_for == "backoff":
                return self._attempts.place(now_ns, record)
            text = f"no instance that can serve it came back within {INSTANCE_WAIT_MS:.0f} ms"
            return self._attempts.end(now_ns, record, "error", 503, text)
        return []

    def _time_roll_call(self) -> StartTimer:
        self._roll_call_timed = True
        return StartTimer(("roll call",), ROLL_CALL_MS, InstanceTimer(instance="", incarnation=0, purpose="roll call"))

    def _on_roll_call_timer(self, now_ns: int, sender: str, message: InstanceTimer) -> list[Effect]:
        self._roll_call_timed = False
        if not self._book:
            return []
        effects: list[Effect] = [self._time_roll_call()]
        quiet = any(self._is_quiet(now_ns, record) for record in self._book.all())
        if not quiet or self._roll_call.is_open(now_ns):
            return effects
        schedulers = [control_address(name, "scheduler") for name in sorted(self._router.instances)]
        tag = self._roll_call.begin(now_ns, schedulers)
        return effects + [Send(to, StatusRequest(reply_to=self._address, tag=tag)) for to in schedulers]

    def _on_status_report(self, now_ns: int, sender: str, message: StatusReport) -> list[Effect]:
        return self._conclude_roll_call(now_ns) if self._roll_call.answer(message) else []

    def _conclude_roll_call(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for record in self._book.all():
            if record.progress_ns >= self._roll_call.started_ns or not self._is_quiet(now_ns, record):
                continue
            if not self._roll_call.is_claimed(record.request_id, first_epoch(record.attempt)):
                effects += self._attempts.again(now_ns, record, "no instance knows it any more", "", at_once=True)
        return effects

    @staticmethod
    def _is_quiet(now_ns: int, record: Record) -> bool:
        return record.state in ("prefill", "streaming") and now_ns - record.progress_ns >= _QUIET_NS

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _on_drain(self, now_ns: int, sender: str, message: Drain) -> list[Effect]:
        self._drain_asked_by = sender
        due = RequestTimer(request_id="", epoch=0, purpose="drain")
        timer = StartTimer(("drain",), float(message.deadline_ms), due)
        return [timer, self._publish(), *self._drained_if_empty()]

    def _on_drain_deadline(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for record in self._book.all():
            if record.state != "delivering":
                effects += self._attempts.withdraw(record, STOPPING)
                text = f"{STOPPING} and its drain deadline has passed"
                effects += self._attempts.end(now_ns, record, "error", 503, text)
        return effects

    def _drained_if_empty(self) -> list[Effect]:
        if not self._drain_asked_by or self._book or self._drained:
            return []
        self._drained = True
        return [StopTimer(("drain",)), Send(self._drain_asked_by, Drained(node=self._node, actor="gateway"))]
