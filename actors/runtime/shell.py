"""The shell around a machine: a Pykka actor that feeds it and carries out its effects.

Everything the machine sees comes out of the mailbox as an envelope, in order: what others sent, timers that are due,
and results of its jobs (both from the actor to itself). ``StatusRequest`` is answered here, from ``machine.status()``.

Pykka's failure rules differ by where an exception happens (a failing ``on_start`` calls no hook at all), so this shell
lets none reach Pykka: whatever the machine or an executor raises ends in ``Services.actor_died``, once, and the actor
handles nothing more.
"""

from __future__ import annotations

import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import pykka

from actors.runtime.context import ActorSpec
from actors.runtime.hooks import Injector, Recorder
from actors.runtime.log import Log
from actors.runtime.machine import Effect, Fail, Note, Run, Send, StartTimer, StopTimer
from actors.runtime.postoffice import Accept, PostOffice
from actors.runtime.timers import Timer, Timers
from messages.base import Message
from messages.envelope import Envelope
from messages.lifecycle import StatusReport, StatusRequest

Key = tuple[str | int, ...]


ITEMS_PER_TURN: Final = 32
"""An actor handles this many items of its mailbox before others have their turn."""


class Services(Protocol):
    """What a shell needs of its node."""

    office: PostOffice
    timers: Timers
    recorder: Recorder
    injector: Injector
    log_writer: Log

    def actor_started(self, actor: str) -> None:
        """The machine's first effects are carried out. Called on the node's thread."""
        ...

    def actor_died(self, actor: str, reason: str, fatal: bool) -> None:
        """The actor failed: its node must end. Any thread; must not block."""
        ...


class Delivered(NamedTuple):
    """Envelopes for this actor; they count against the credit of ``session`` (0: none) until handled."""

    session: int
    envelopes: Sequence[Envelope]


class Due(NamedTuple):
    """Timer ``key`` is due, unless it was stopped or replaced since (its number tells)."""

    key: Key
    number: int


class Begin(NamedTuple):
    """Start the machine, unless a message was faster."""


class _Running(NamedTuple):
    """A timer of this actor: what it will say, and the message whose handling started it."""

    timer: Timer
    number: int
    message: Message
    cause: Envelope | None


class Activity:
    """What other threads may know of an actor: what message it is handling, and since when; 0: it is idle."""

    __slots__ = ("busy_since_ns", "handling")

    def __init__(self) -> None:
        self.busy_since_ns = 0
        self.handling: Message | None = None

    @property
    def message(self) -> str:
        """The type of the message; "" while the machine starts."""
        return "" if self.handling is None else type(self.handling).__name__


def mailbox(actor: pykka.ActorRef[MachineActor], office: PostOffice) -> Accept:
    """What puts envelopes into an actor's mailbox. A dead actor's mail is dropped."""

    def accept(session: int, envelopes: Sequence[Envelope]) -> None:
        try:
            actor.tell(Delivered(session, envelopes))
        except pykka.ActorDeadError:
            office.consumed(session, len(envelopes))

    return accept


class Mailbox:
    """Pykka's inbox, without waiting: whoever puts something in has the owner take its turn on the node's thread.

    ``put`` may be called by any thread; everything else belongs to the node's.
    """

    __slots__ = ("_items", "_left", "_scheduled", "schedule")

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._left = 0
        self._scheduled = False
        self.schedule: Callable[[], object] = bool  # does nothing; the owner replaces it

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)
        if not self._scheduled:
            self._scheduled = True
            self.schedule()

    def begin_turn(self, items_max: int) -> None:
        """Let ``get`` return this many items at most."""
        self._scheduled = False  # what is put in from now on may be seen in this turn, or in the next
        self._left = items_max

    def get(self) -> Any:
        """The next item; raises ``queue.Empty`` when there is none, or the turn is over."""
        if self._left and self._items:
            self._left -= 1
            return self._items.popleft()
        if self._items and not self._scheduled:
            self._scheduled = True
            self.schedule()
        raise queue.Empty

    def empty(self) -> bool:
        """Whether nothing is in it."""
        return not self._items


class MachineActor(pykka.Actor):
    """One machine and one mailbox. All actors of a node take turns on one thread, which is that of its links: so from
    a frame that came, through several actors, to the frame that leaves no thread has to be woken.

    Machines never block, and what takes long is a job, so an actor has no need for a thread of its own.
    """

    actor_inbox: Mailbox

    def __init__(self, spec: ActorSpec, services: Services, activity: Activity) -> None:
        super().__init__()
        self._name = spec.name
        self._machine = spec.machine
        self._executor = spec.executor
        self._services = services
        self._office = services.office
        self.address = f"{services.office.node}/{spec.name}"
        self._basket = services.office.basket(self.address)
        self._recorder = services.recorder
        self._injector = services.injector
        self._timers: dict[Key, _Running] = {}
        self._timer_count = 0
        self._started = False
        self._dead = False
        self._activity = activity
        self._accept = mailbox(self.actor_ref, self._office)
        self.actor_inbox.schedule = partial(self._office.call, self._take_turn)

    # -- how Pykka runs it -------------------------------------------------------------------------------------------

    @staticmethod
    def _create_actor_inbox() -> Mailbox:
        return Mailbox()

    @staticmethod
    def _create_future() -> pykka.Future[Any]:
        return pykka.ThreadingFuture()

    def _start_actor_loop(self) -> None:
        """Nothing runs before something is in the mailbox."""

    def _take_turn(self) -> None:
        """Pykka's receive loop, for what is in the mailbox, and a bounded part of it: the links want their turn too."""
        if self.actor_stopped.is_set():
            return
        inbox = self.actor_inbox
        inbox.begin_turn(ITEMS_PER_TURN)
        try:
            self._actor_loop_running()
        except queue.Empty:
            return
        inbox.begin_turn(sys.maxsize)
        self._actor_loop_teardown()

    # -- on the node's thread ----------------------------------------------------------------------------------------

    def on_receive(self, message: Any) -> Any:
        """One item of the mailbox."""
        if self._dead:
            if type(message) is Delivered:
                self._office.consumed(message.session, len(message.envelopes))
            return None
        try:
            if not self._started:
                self._start()
            if type(message) is Delivered:
                for envelope in message.envelopes:
                    self._handle(envelope)
                self._basket.flush()  # before the bookkeeping: somebody waits for it
                self._office.consumed(message.session, len(message.envelopes))
            elif type(message) is Due:
                self._on_due(message)
            self._basket.flush()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"
            self._services.log_writer.write(self._name, "error", "actor_failed", {"trace": traceback.format_exc()})
            self._die(reason, fatal=False)
        self._activity.busy_since_ns = 0
        return None

    def on_stop(self) -> None:
        """Release timers. The executor is the node's to close: that may wait, and this thread must not."""
        self._dead = True
        for running in self._timers.values():
            self._services.timers.cancel(running.timer)
        self._timers.clear()

    def _start(self) -> None:
        self._started = True
        now_ns = self._activity.busy_since_ns = time.monotonic_ns()
        self._carry_out(self._machine.start(now_ns), None)
        self._services.actor_started(self._name)

    def _handle(self, envelope: Envelope) -> None:
        if self._dead:
            return
        now_ns = self._activity.busy_since_ns = time.monotonic_ns()
        self._injector.on_handled(now_ns, envelope)
        self._recorder.handled(now_ns, envelope)
        message = self._activity.handling = envelope.message
        if type(message) is StatusRequest:
            self._report_status(now_ns, message, envelope)
        else:
            self._carry_out(self._machine.handle(now_ns, envelope.sender, message), envelope)

    def _carry_out(self, effects: list[Effect], cause: Envelope | None) -> None:
        for effect in effects:
            if type(effect) is Send:
                self._basket.put(effect.to, effect.message, cause)
            else:
                self._carry_out_other(effect, cause)

    def _carry_out_other(self, effect: Effect, cause: Envelope | None) -> None:
        match effect:
            case StartTimer():
                self._start_timer(effect, cause)
            case StopTimer(key):
                running = self._timers.pop(key, None)
                if running is not None:
                    self._services.timers.cancel(running.timer)
            case Run():
                self._run_job(effect, cause)
            case Note(level, event, fields):
                self._services.log_writer.write(self._name, level, event, dict(fields))
            case Fail(reason, fatal):
                self._die(reason, fatal)
            case _:
                raise TypeError(f"{self.address}: {type(effect).__name__} is not an effect")

    def _die(self, reason: str, fatal: bool) -> None:
        if not self._dead:
            self._dead = True
            self._basket.flush()
            self._services.actor_died(self._name, reason, fatal)

    def _report_status(self, now_ns: int, request: StatusRequest, envelope: Envelope) -> None:
        values, requests = self._machine.status(now_ns)
        report = StatusReport(
            address=self.address,
            incarnation=self._office.incarnation,
            tag=request.tag,
            values=values,
            requests=requests,
        )
        self._basket.put(request.reply_to, report, envelope)

    # -- timers and jobs -----------------------------------------------------------------------------------------------

    def _start_timer(self, effect: StartTimer, cause: Envelope | None) -> None:
        replaced = self._timers.get(effect.key)
        if replaced is not None:
            self._services.timers.cancel(replaced.timer)
        self._timer_count += 1
        due = Due(effect.key, self._timer_count)
        timer = self._services.timers.start(effect.delay_ms, lambda: self._tell(due))
        self._timers[effect.key] = _Running(timer, due.number, effect.message, cause)

    def _tell(self, due: Due) -> None:
        """Called on the timers' thread."""
        if self.actor_ref.is_alive():
            self.actor_ref.tell(due)

    def _on_due(self, due: Due) -> None:
        running = self._timers.get(due.key)
        if running is None or running.number != due.number:
            return  # stopped or replaced after it fired
        del self._timers[due.key]
        self._handle(self._to_self(running.message, running.cause))

    def _to_self(self, message: Message, cause: Envelope | None) -> Envelope:
        envelope = self._office.stamp(self.address, self.address, message, cause)
        self._recorder.sent(envelope, 0)
        return envelope

    def _run_job(self, effect: Run, cause: Envelope | None) -> None:
        if self._executor is None:
            raise TypeError(f"{self.address} has no executor for {type(effect.job).__name__}")
        self._basket.flush()  # a job may take long, or run right here: what was said before it is not kept waiting

        def emit(to: str, message: Message) -> None:
            self._office.post(self.address, to, message, cause)

        def done(result: Message) -> None:
            self._accept(0, (self._to_self(result, cause),))

        self._executor.submit(effect.job, emit, done)
