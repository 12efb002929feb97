"""A whole cluster in one thread and virtual time: real machines, the real codec, seeded chance.

Theory of operation. One heap of events, ordered by ``(due, sequence)``, drives everything; equal seeds give equal
runs, byte for byte. An event belongs to one *life* of a node (it dies with it, and waits while the node is stalled) or
to the network. An actor's shell is reduced to its meaning: a message is handled when its turn comes, effects are
carried out in order, timers come back as messages from the actor to itself, jobs go to the actor's ``JobExecutor``,
whose simulated version asks ``SimulatedContext.call_later`` for the time that the work takes.

* A message between nodes is encoded at once, travels by ``Links`` and is decoded where it arrives. One inside a node
  only waits in its receiver's mailbox. Mailboxes are first in, first out.
* ``crash`` ends a life: its timers, jobs and mailboxes vanish, what it had sent may still arrive. ``start_node`` under
  a larger incarnation begins the next. As in the real post office, envelopes of an older life are dropped once a newer
  one has spoken, or a message said that it is over (``postoffice.NEWS``); what was sent to a life dies with it
  (its senders get ``PeerLost`` after ``detect_ms``), what is sent while there is none waits for the next one.
* After every step (one handled message) ``on_step`` is called, if there is one.

Nothing here sleeps, reads a clock or depends on the order of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Final

from actors.runtime.config import NodeConfig, Options
from actors.runtime.context import ActorSpec, Done, Emit, JobExecutor
from actors.runtime.hooks import Injector, Recorder
from actors.runtime.machine import Effect, Fail, Job, Machine, Note, Run, Send, StartTimer, StopTimer
from actors.runtime.simulated_links import Links, LinkSettings
from actors.runtime.simulated_nodes import SimulatedActor, SimulatedContext, SimulatedNode, call_function
from actors.runtime.simulated_post import Listener, SimulatedPost
from messages.base import Message
from messages.envelope import MESSAGE_TYPES, Envelope
from messages.lifecycle import StatusReport, StatusRequest

START_NS: Final = 1_000_000_000
EVENTS_PER_LOOK: Final = 16

Factory = Callable[[SimulatedContext], tuple[ActorSpec, ...]]
StepHook = Callable[["SimulatedActor", Envelope, list[Effect]], None]
Event = tuple[int, int, SimulatedNode | None, Callable[[Any, Any], None], Any, Any]
"""(due ns, sequence, the life that it belongs to, function, its two arguments)."""


class SimulationError(AssertionError):
    """A machine raised, or the simulation was used wrongly; says when and at which message."""


class Simulation:
    """The kernel. See the module's theory of operation."""

    def __init__(
        self,
        seed: int = 0,
        links: LinkSettings | None = None,
        *,
        injector: Injector | None = None,
        recorder_for: Callable[[NodeConfig], Recorder] | None = None,
        on_step: StepHook | None = None,
        on_fail: Callable[[SimulatedActor, Fail], None] | None = None,
        notes_max: int = 0,
    ) -> None:
        self.seed = seed
        self.now_ns = START_NS
        self.random = Random(f"work {seed}")
        settings = links or LinkSettings()
        self._link_random = Random(f"links {seed}")  # also how long a message waits in a mailbox
        self.links = Links(settings, self._link_random)
        self.injector = injector
        self.on_step = on_step
        self.on_fail = on_fail
        self.watched: Collection[type[Message]] = MESSAGE_TYPES if injector is not None else ()
        """Types that the injector wants to see."""
        self.on_crash: Callable[[SimulatedNode], None] | None = None
        self.nodes: dict[str, SimulatedNode] = {}
        self._lives: list[SimulatedNode] = []  # all there ever were
        self.step_count = 0
        self.notes: list[tuple[int, str, Note]] = []
        self._notes_max = notes_max
        self._recorder_for = recorder_for
        self.heap: list[Event] = []
        self.next_number = count(1).__next__
        self.office = SimulatedPost(self, self.links, self._link_random)
        self.send_from = self.office.send_from

    # -- building and running ---------------------------------------------------------------------------------

    def start_node(self, config: NodeConfig, factories: Sequence[Factory]) -> SimulatedNode:
        """Begin a life of ``config.node``: build its actors and start them."""
        old = self.nodes.get(config.node)
        if old is not None and old.alive:
            raise SimulationError(f"node {config.node} is alive as incarnation {old.incarnation}")
        recorder = self._recorder_for(config) if self._recorder_for is not None else None
        node = SimulatedNode(config, recorder)
        node.context = SimulatedContext(self, node)
        self.nodes[config.node] = node
        self._lives.append(node)
        for factory in factories:
            for spec in factory(node.context):
                node.add(spec)
        for actor in node.actors.values():
            self._carry_out(actor, actor.machine.start(self.now_ns), "")
        self.office.connect(config.node)
        return node

    def add_machine(
        self, address: str, machine: Machine, executor: JobExecutor | None = None, incarnation: int = 1
    ) -> SimulatedActor:
        """For tests: one machine at ``node/actor``; its node is made when it is new."""
        name, _, actor_name = address.partition("/")
        node = self.nodes.get(name)
        if node is None or not node.alive:
            config = NodeConfig(
                node=name, incarnation=incarnation, run_id="sim", run_dir="", options=Options(), factories=()
            )
            node = self.start_node(config, ())
        actor = node.add(ActorSpec(actor_name, machine, executor))
        self._carry_out(actor, machine.start(self.now_ns), "")
        return actor

    def listen(self, address: str, listener: Listener) -> None:
        """Have ``listener(now_ns, envelope)`` receive what is sent to ``address`` (a stand-in for an actor)."""
        self.office.listeners[address] = listener

    def post(self, sender: str, to: str, message: Message) -> None:
        """Send a message as ``sender``, which need not exist."""
        node = self.nodes.get(sender.partition("/")[0])
        if node is None:
            config = NodeConfig(
                node=sender.partition("/")[0], incarnation=1, run_id="sim", run_dir="", options=Options(), factories=()
            )
            node = self.start_node(config, ())
        self.send_from(node, sender, to, message, "")

    def call_at(self, delay_ms: float, function: Callable[[], None]) -> None:
        """Run ``function`` after ``delay_ms`` of virtual time (a cancel, a crash, a burst of requests)."""
        self.push(self.now_ns + int(delay_ms * 1e6), None, call_function, function, None)

    def run(self, for_ms: float = 1e12, until: Callable[[], bool] | None = None, events_max: int = 50_000_000) -> bool:
        """Run events for ``for_ms`` of virtual time, until nothing is left to do, or until ``until()`` holds.

        Returns whether ``until()`` held (False without one). ``until`` is asked now and then: after every
        ``EVENTS_PER_LOOK`` events, and at the end.
        """
        heap = self.heap
        end_ns = self.now_ns + int(for_ms * 1e6)
        for number in range(events_max):
            if not heap or heap[0][0] > end_ns:
                self.now_ns = max(self.now_ns, end_ns) if for_ms < 1e12 else self.now_ns
                return until is not None and until()
            self.now_ns, _, node, function, first, second = heappop(heap)
            if node is not None and not node.running:
                if node.alive:
                    node.backlog.append((function, first, second))
                continue
            function(first, second)
            if until is not None and number % EVENTS_PER_LOOK == 0 and until():
                return True
        raise SimulationError(f"no end after {events_max} events at {self.now_ns} ns")

    def close(self) -> None:
        """Let go of everything, so that memory is freed at once and not when somebody looks for cycles."""
        self.heap.clear()
        self.on_step = self.on_fail = self.on_crash = self.injector = None
        for node in self._lives:
            for actor in node.actors.values():
                vars(actor.machine).clear()  # its handlers are its own methods
            node.actors.clear()
            node.by_address.clear()
            node.backlog.clear()
            node.context = None
        self._lives.clear()
        self.nodes.clear()
        self.office.listeners.clear()

    @property
    def idle(self) -> bool:
        """Nothing is scheduled."""
        return not self.heap

    # -- faults ---------------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        """End the current life of node ``name`` at once, as ``kill -9`` does."""
        node = self.nodes[name]
        if not node.alive:
            return
        node.alive = node.running = False
        for actor in node.actors.values():
            if actor.executor is not None:
                actor.executor.close()
        if node.context is not None:
            for closer in reversed(node.context.closers):
                closer()
        if node.recorder is not None:
            node.recorder.close()
        self.office.on_death(name)
        if self.on_crash is not None:
            self.on_crash(node)

    def stall(self, name: str) -> None:
        """Stop node ``name`` as SIGSTOP does: nothing of it runs until ``resume``."""
        self.nodes[name].running = False

    def resume(self, name: str) -> None:
        """Let a stalled node go on with what has piled up."""
        node = self.nodes[name]
        node.running = node.alive
        backlog, node.backlog = node.backlog, []
        for function, first, second in backlog:
            self.push(self.now_ns, node, function, first, second)

    def slow(self, name: str, delay_ms: float) -> None:
        """Every job and message of node ``name`` takes ``delay_ms`` longer (0: as before)."""
        self.nodes[name].slow_ns = int(delay_ms * 1e6)

    def partition(self, first: str, second: str, *, both: bool = True, hold: bool = True) -> None:
        """Cut the link from ``first`` to ``second`` (and back); ``hold`` delivers late what was sent meanwhile, else
        it is lost without a word."""
        self.links.block(first, second, hold=hold)
        if both:
            self.links.block(second, first, hold=hold)

    def break_links(self, first: str, second: str) -> None:
        """The links between two nodes break: what is on its way is lost, and whoever had sent there is told so."""
        self.office.break_link(first, second)
        self.office.break_link(second, first)

    def mend(self, first: str, second: str) -> None:
        """Mend the links between two nodes, both ways; what was held back arrives now."""
        for source, target in ((first, second), (second, first)):
            for sender, frame in self.links.unblock(source, target):
                if sender.alive:
                    self.office.dispatch(sender, target, frame)

    def heal(self) -> None:
        """Mend every link, stop random faults, let every stalled or slow node run freely."""
        for source, target in self.links.blocked():
            self.mend(source, target)
        old = self.links.settings
        self.links.change(LinkSettings(latency_us=old.latency_us, local_us=old.local_us, detect_ms=old.detect_ms))
        for node in self.nodes.values():
            node.slow_ns = 0
            if node.stalled:
                self.resume(node.name)

    def push(
        self, due_ns: int, node: SimulatedNode | None, function: Callable[[Any, Any], None], first: Any, second: Any
    ) -> None:
        """Schedule ``function(first, second)`` for a life of a node (None: for the network)."""
        heappush(self.heap, (due_ns, self.next_number(), node, function, first, second))

    # -- handling -------------------------------------------------------------------------------------------------

    def handle(self, actor: SimulatedActor, envelope: Envelope) -> None:
        """The turn of an envelope has come that the injector may want to see."""
        if self.injector is not None:
            node = actor.node
            self.injector.on_handled(self.now_ns, envelope)
            if not node.running:
                if node.alive:
                    node.backlog.append((self.step, actor, envelope))
                return
        self.step(actor, envelope)

    def step(self, actor: SimulatedActor, envelope: Envelope) -> None:
        """One step of one machine."""
        recorder, message = actor.node.recorder, envelope.message
        if recorder is not None:
            recorder.handled(self.now_ns, envelope)
        if type(message) is StatusRequest:
            self._report_status(actor, message, envelope.message_id)
            return
        try:
            effects = actor.handle(self.now_ns, envelope.sender, message)
        except Exception as error:
            raise SimulationError(
                f"seed {self.seed}, step {self.step_count}, {self.now_ns} ns: {actor.address} raised"
                f" {type(error).__name__}: {error} at {repr(envelope.message)[:600]} from {envelope.sender}"
            ) from error
        self.step_count += 1
        if effects:
            self._carry_out(actor, effects, envelope.message_id)
        if self.on_step is not None:
            self.on_step(actor, envelope, effects)

    def _carry_out(self, actor: SimulatedActor, effects: list[Effect], parent_id: str) -> None:
        node = actor.node
        for effect in effects:
            if type(effect) is Send:
                self.send_from(node, actor.address, effect.to, effect.message, parent_id)
            elif type(effect) is StartTimer:
                token = actor.timers[effect.key] = self.next_number()
                due = self.now_ns + int(effect.delay_ms * 1e6)
                timer = (effect, token, parent_id)
                heappush(self.heap, (due, token, node, self._timer_due, actor, timer))
            elif type(effect) is Run:
                self._run_job(actor, effect.job, parent_id)
            elif type(effect) is StopTimer:
                actor.timers.pop(effect.key, None)
            elif type(effect) is Note:
                if self._notes_max:
                    self.note(actor.address, effect)
            elif type(effect) is Fail:
                self._fail(actor, effect)
                return

    def _timer_due(self, actor: SimulatedActor, timer: tuple[StartTimer, int, str]) -> None:
        effect, token, parent_id = timer
        if actor.timers.get(effect.key) == token:
            del actor.timers[effect.key]
            self._tell_self(actor, effect.message, parent_id)

    def _report_status(self, actor: SimulatedActor, request: StatusRequest, parent_id: str) -> None:
        values, requests = actor.machine.status(self.now_ns)
        report = StatusReport(
            address=actor.address,
            incarnation=actor.node.incarnation,
            tag=request.tag,
            values=values,
            requests=requests,
        )
        self.send_from(actor.node, actor.address, request.reply_to, report, parent_id)

    def _tell_self(self, actor: SimulatedActor, message: Message, parent_id: str) -> None:
        if actor.node.alive:
            self.send_from(actor.node, actor.address, actor.address, message, parent_id)

    def _run_job(self, actor: SimulatedActor, job: Job, parent_id: str) -> None:
        if actor.executor is None:
            raise SimulationError(f"{actor.address} asked for {job!r} but has no executor")
        node, address = actor.node, actor.address

        def emit(to: str, message: Message) -> None:
            if node.alive:
                self.send_from(node, address, to, message, parent_id)

        def done(message: Message) -> None:
            self._tell_self(actor, message, parent_id)

        emit_: Emit = emit
        done_: Done = done
        actor.executor.submit(job, emit_, done_)

    def _fail(self, actor: SimulatedActor, effect: Fail) -> None:
        if self.on_fail is not None:
            self.on_fail(actor, effect)
        else:
            self.crash(actor.node.name)

    def note(self, address: str, note: Note) -> None:
        """Keep a machine's line for people (the newest ``notes_max``)."""
        if self._notes_max:
            self.notes.append((self.now_ns, address, note))
            if len(self.notes) > 2 * self._notes_max:
                del self.notes[: -self._notes_max]
