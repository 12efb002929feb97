"""One instance's brain: admission, block and slot accounting, continuous batching, its side of the hand-off.

Theory of operation
===================

A scheduler is composed of parts; each has its own theory in its own file:

    blocks        who owns each block and slot, and until when
    batching      which sequences run in the next step, and what its result makes of them
    intake        what is refused at once
    siblings      samples of one prompt, which is computed once
    local_side    requests of a mixed instance
    prefill_side  requests of a prefill instance: offered, prefilled, handed off
    decode_side   requests of a decode instance: reserved, restored, decoded
    membership    registered, heard, linked with the other role's instances

The machine itself has four states:

    STARTING --EngineReady--> SERVING --Drain--> DRAINING --nothing left--> (Drained is sent)
    SERVING, DRAINING --StepFailed--> BROKEN (the engine ends the node; the supervisor restarts the instance)

Every message goes to the part it is for. Afterwards, whatever it was, the machine advances: the side prepares what it
can (offers, reservations), and if no step is in flight, or one can be sent ahead, the batching core plans one. Nothing
else starts work, so there is one place where all resources are granted.

Invariants: I3 and I4 of the protocol for blocks and slots (``CachePool.check``), a message with a stale epoch or
incarnation changes nothing.
"""

from __future__ import annotations

from enum import Enum

from actors.runtime.machine import Effect, Handlers, StatusRequests, StatusValues
from actors.scheduler.batching import Batcher
from actors.scheduler.blocks import CachePool
from actors.scheduler.decode_side import DecodeSide
from actors.scheduler.intake import Intake
from actors.scheduler.local_side import LocalSide
from actors.scheduler.membership import Membership
from actors.scheduler.outbox import Outbox
from actors.scheduler.peers import Peer, Peers
from actors.scheduler.prefill_side import PrefillSide
from actors.scheduler.report import fail_request
from actors.scheduler.settings import Capacity, SchedulerSettings
from actors.scheduler.side import Side
from messages.base import GATEWAY, Message, control_address
from messages.batch import BatchResult, ExecuteBatch, StepFailed
from messages.cluster import Heartbeat, InstanceInfo
from messages.handoff import AddNewRequest, RequestRefused
from messages.lifecycle import Drain, Drained, EngineReady, NotSent
from messages.requests import CancelRequest, Failed, SubmitRequest
from messages.timers import InstanceTimer, RequestTimer


class SchedulerState(Enum):
    """See the module's theory."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    BROKEN = "broken"


class SchedulerMachine:
    """See the module's theory. One per instance, on its control node."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.state = SchedulerState.STARTING
        self.out = Outbox()
        self.peers = Peers(unanswered_max=max(1, settings.offer_window // 2))
        self.membership = Membership(
            settings,
            self.peers,
            self.out,
            load=self._load,
            on_lost=self._on_lost,
            on_linked=self._on_linked,
        )
        self.pool: CachePool | None = None
        self.batcher: Batcher | None = None
        self.side: Side | None = None
        self._now_ns = 0
        self._drain_to = ""
        self._handlers: Handlers[None] = self.membership.handlers()
        on = self._handlers.on
        on(EngineReady, self._on_engine_ready)
        on(BatchResult, self._on_batch_result)
        on(StepFailed, self._on_step_failed)
        on(NotSent, self._on_not_sent)
        on(RequestTimer, self._on_request_timer)
        on(InstanceTimer, self._on_instance_timer)
        on(Drain, self._on_drain)
        self._refusals: Handlers[None] = Handlers()  # what is said of requests while nobody here takes them
        self._refusals.on(SubmitRequest, self._refuse)
        self._refusals.on(AddNewRequest, self._refuse_offer)
        self._request_handlers = self._refusals

    def start(self, now_ns: int) -> list[Effect]:
        """Nothing: the engine says when the ranks are ready."""
        return []

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """React to one message, then start what can be started."""
        self._now_ns = now_ns
        handler = self._handlers.get(type(message)) or self._request_handlers.get(type(message))
        if handler is not None:
            handler(now_ns, sender, message)
        self._advance(now_ns)
        return self.out.take()

    def status(self, now_ns: int) -> tuple[StatusValues, StatusRequests]:
        """Gauges, and one row per live request."""
        load = self._load()
        values: list[tuple[str, float | int | str]] = [
            ("role", self.settings.role),
            ("state", self.state.value),
            ("registered", int(self.membership.registered)),
            ("running", load.running),
            ("waiting", load.waiting),
            ("blocks_free", load.blocks_free),
            ("blocks_total", load.blocks_total),
            ("slots_free", load.slots_free),
            ("slots_total", load.slots_total),
            ("steps", self.batcher.step_count if self.batcher is not None else 0),
            ("preempted", self.batcher.preempted_count if self.batcher is not None else 0),
            ("prefilled_tokens", self.batcher.prefilled_tokens if self.batcher is not None else 0),
            ("forked", self.batcher.forked_count if self.batcher is not None else 0),
        ]
        values += [(f"peer.{peer.info.instance}", f"{peer.state.value}{self._remarks(peer)}") for peer in self.peers]
        values += [(f"late.{name}", count) for name, count in sorted(self.out.late.items())]
        return tuple(values), self.side.status() if self.side is not None else ()

    # -- one per message type ------------------------------------------------------------------------------------

    def _on_engine_ready(self, now_ns: int, sender: str, message: EngineReady) -> None:
        if self.state is not SchedulerState.STARTING or message.incarnation != self.settings.incarnation:
            return
        settings = self.settings
        capacity = Capacity.of(settings, message.manifests)
        refusal = capacity.refusal(settings)
        if refusal:
            self.out.fail(refusal, fatal=True)
            return
        self.state = SchedulerState.SERVING
        self.pool = CachePool(
            block_count=capacity.block_count, slot_count=capacity.slot_count, block_size=capacity.block_size
        )
        self.batcher = Batcher(self.pool, capacity.batch_limits(settings), settings.incarnation)
        self.side = self._make_side(capacity, self.pool, self.batcher)
        self._request_handlers = self.side.handlers()
        self.membership.begin(
            InstanceInfo(
                instance=settings.instance,
                incarnation=settings.incarnation,
                role=settings.role,
                tp_size=settings.tp_size,
                max_model_len=min(capacity.max_model_len, capacity.block_count * capacity.block_size),
                block_count=capacity.block_count,
                slot_count=capacity.slot_count,
                manifests=message.manifests,
            )
        )
        self.out.note(
            "info",
            "instance ready",
            role=settings.role,
            blocks=capacity.block_count,
            slots=capacity.slot_count,
            max_model_len=capacity.max_model_len,
        )

    def _make_side(self, capacity: Capacity, pool: CachePool, batcher: Batcher) -> Side:
        settings, out = self.settings, self.out
        match settings.role:
            case "MIX":
                return LocalSide(settings.instance, Intake(settings, capacity, out), batcher, out)
            case "PREFILL":
                return PrefillSide(settings, Intake(settings, capacity, out), pool, batcher, self.peers, out)
            case "DECODE":
                return DecodeSide(settings, capacity, pool, batcher, self.peers, out)

    def _on_batch_result(self, now_ns: int, sender: str, message: BatchResult) -> None:
        if self.batcher is None or self.side is None:
            return
        step = self.batcher.step
        if step is None or message.step != step.number:
            self.out.drop_late(message, "", 0)
            return
        self.side.on_outcomes(now_ns, self.batcher.apply(message))

    def _on_step_failed(self, now_ns: int, sender: str, message: StepFailed) -> None:
        if message.incarnation != self.settings.incarnation or self.state is SchedulerState.BROKEN:
            return
        self.state = SchedulerState.BROKEN
        self._request_handlers = self._refusals
        self.out.note("error", "a step broke, the instance ends", step=message.step, reason=message.reason)

    def _on_not_sent(self, now_ns: int, sender: str, message: NotSent) -> None:
        """A message about a request holds what no bytes can carry: that request fails, and nothing else."""
        if message.what != Failed.__name__:  # said to be failed already; the gateway asks about it before long
            fail_request(self.out, GATEWAY, message.request_id, message.epoch, 500, message.reason)
        if self.side is not None:
            cancel = CancelRequest(request_id=message.request_id, epoch=message.epoch, reason=message.reason)
            self.side.on_cancel_request(now_ns, sender, cancel)

    def _on_request_timer(self, now_ns: int, sender: str, message: RequestTimer) -> None:
        if self.side is not None:
            self.side.on_timer(now_ns, message)

    def _on_instance_timer(self, now_ns: int, sender: str, message: InstanceTimer) -> None:
        if message.purpose == "drain":
            self._on_drain_deadline(now_ns)
        else:
            self.membership.on_timer(message)

    def _on_drain(self, now_ns: int, sender: str, message: Drain) -> None:
        if self.side is not None:
            self.side.drain(f"instance {self.settings.instance} is shutting down")
        if self.state in (SchedulerState.STARTING, SchedulerState.SERVING):
            self.state = SchedulerState.DRAINING
        if not self._drain_to:
            self._drain_to = sender
            own = self.settings
            self.out.start_instance_timer("drain", own.instance, own.incarnation, float(message.deadline_ms))

    def _on_drain_deadline(self, now_ns: int) -> None:
        if self._drain_to and self.side is not None:
            self.side.fail_all(now_ns, f"instance {self.settings.instance} is shutting down")
            self._say_drained()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _advance(self, now_ns: int) -> None:
        """Start whatever can be started now."""
        side, batcher = self.side, self.batcher
        if self.state not in (SchedulerState.SERVING, SchedulerState.DRAINING):
            return
        if side is not None and batcher is not None:
            side.before_step(now_ns)
            self._send_step(now_ns, side, batcher, batcher.plan())
            if batcher.has_room_ahead and not side.waits_for_steps:
                self._send_step(now_ns, side, batcher, batcher.plan_ahead())
        if self._drain_to and (side is None or not side.live_count):
            self._say_drained()

    def _send_step(self, now_ns: int, side: Side, batcher: Batcher, batch: ExecuteBatch | None) -> None:
        if batch is not None:
            side.on_step_started(now_ns, batcher.steps[-1])
            self.out.send(self.settings.engine, batch)
            side.before_step(now_ns)  # what began makes room in the window

    def _say_drained(self) -> None:
        own = self.settings
        self.out.stop_instance_timer("drain", own.instance, own.incarnation)
        self.out.send(self._drain_to, Drained(node=f"{own.instance}.ctl", actor="scheduler"))
        self._drain_to = ""

    def _refuse(self, now_ns: int, sender: str, message: SubmitRequest) -> None:
        reason = f"instance {self.settings.instance} is {self.state.value}"
        fail_request(self.out, message.reply_to, message.request_id, message.epoch, 503, reason, retryable=True)

    def _refuse_offer(self, now_ns: int, sender: str, message: AddNewRequest) -> None:
        own = self.settings
        self.out.send(
            control_address(message.source_instance, "scheduler"),
            RequestRefused(
                request_id=message.request_id,
                epoch=message.epoch,
                instance=own.instance,
                incarnation=own.incarnation,
                code=404,
                reason=f"instance {own.instance} is {self.state.value}",
            ),
        )

    def _on_lost(self, instance: str, incarnation: int) -> None:
        if self.side is not None:
            self.side.on_instance_lost(self._now_ns, instance, incarnation)

    def _on_linked(self) -> None:
        if self.side is not None:
            self.side.on_peer_linked(self._now_ns)

    def _load(self) -> Heartbeat:
        own, pool, side = self.settings, self.pool, self.side
        return Heartbeat(
            instance=own.instance,
            incarnation=own.incarnation,
            running=len(self.batcher.running) if self.batcher is not None else 0,
            waiting=side.waiting_count if side is not None else 0,
            blocks_free=pool.blocks.free_count if pool is not None else 0,
            blocks_total=pool.blocks.count if pool is not None else 0,
            slots_free=pool.slots.free_count if pool is not None else 0,
            slots_total=pool.slots.count if pool is not None else 0,
            view_version=self.membership.view_version,
            links=tuple(report for peer in self.peers if (report := peer.link_report()) is not None),
        )

    @staticmethod
    def _remarks(peer: Peer) -> str:
        remarks = [word for word, holds in (("silent", peer.silent), ("unlisted", not peer.listed)) if holds]
        return f" ({', '.join(remarks)})" if remarks else ""
