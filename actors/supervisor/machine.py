"""The supervisor: starts the tree of processes, watches it, restarts what fails, and stops it without leftovers.

Theory of operation
===================

A *unit* is what fails as a whole: the front (gateway and registry), or one instance with its control node and all its
ranks, because a lost rank means a broken collective. A unit lives many lives, each with the next incarnation number:

    STARTING --all nodes ready; an instance also registered--> RUNNING
    STARTING, RUNNING --a process ended, NodeFailed, hang, start took too long--> FAILING      (SIGKILL to all of it)
    FAILING --every process of it has ended--> CLEANING   (InstanceLost is said now: nothing of it writes any more)
    CLEANING --its sockets and shared memory are gone--> WAITING --backoff--> STARTING, incarnation + 1

``InstanceLost`` is a promise on which other instances free memory, so it is said only after the last process of the
incarnation was reaped. A front that starts again is told all losses, because the old one may have missed some.

A hang is a RUNNING node without ``NodeHealth`` for ``hang_timeout_ms``: a machine that is stuck in one message silences
its whole node. Time in which this process itself was stopped does not count. While a unit starts only
``start_timeout_ms`` does.

The tree itself goes through these phases, and never back:

    STARTING --every unit RUNNING, every link of a prefill with a decode instance made or refused--> SERVING
    STARTING, SERVING --Stop--> DRAINING GATEWAY --Drained--> DRAINING SCHEDULERS --Drained--> STOPPING
    DRAINING --the deadline, a second Stop, the front's death--> STOPPING
    STOPPING (Stop to each node, SIGKILL after a while) --every process ended--> CLEANING --> ENDED

The gateway drains first: a scheduler that refuses new work would break requests that are still on their way through
prefill and decode. A unit that dies while the tree stops is not restarted.

The supervisor gives up, with the same way out and a deadline of zero (every request fails with a clear error at once),
when a node says its configuration cannot work, when a unit failed more than ``restarts_max`` times within
``restart_window_ms``, or when at the start all links of a prefill instance were refused: it could serve nobody.

Messages from a life that is over change nothing, with one exception: a ``NodeFailed`` that arrives after its process
was seen to end still tells why, and whether a restart can help.
"""

from __future__ import annotations

from enum import Enum

from actors.runtime.machine import Effect, Handlers, Note, Run, Send, StartTimer, StopTimer
from actors.supervisor.jobs import CleanUnit, SignalProcess, StartProcess
from actors.supervisor.linking import Linking
from actors.supervisor.units import (
    FRONT,
    Node,
    TreePlan,
    Unit,
    UnitState,
    describe_exit,
    make_units,
    node_config,
    unit_of,
)
from messages.base import GATEWAY, REGISTRY, Message, control_address
from messages.cluster import ClusterView, InstanceLost, InstanceSilent, ViewRequest
from messages.lifecycle import (
    Drain,
    Drained,
    NodeFailed,
    NodeHealth,
    NodeProgress,
    NodeReady,
    ProcessExited,
    ProcessStarted,
    Stop,
    TreeEnded,
    TreeReady,
    UnitCleaned,
)
from messages.timers import InstanceTimer

CONSOLE = "supervisor/console"
NODE_ACTOR = "node"
"""The actor of every node that receives ``Stop``."""

VIEW_POLL_MS = 100.0
LINK_POLL_MS = 10.0
"""When only links are awaited, which take a few ms each."""
LINK_POLL_GROWTH = 1.25
"""Links that take long are asked for ever less often, down to once in ``VIEW_POLL_MS``."""
STOP_GRACE_MS = 5_000.0
BACKOFF_MAX_MS = 30_000.0
DRAIN_MARGIN_MS = 1_000.0
"""The gateway fails what is left at the deadline itself; only then, a little later, the supervisor stops waiting."""


class Phase(Enum):
    """Where the tree stands."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING_GATEWAY = "draining gateway"
    DRAINING_SCHEDULERS = "draining schedulers"
    STOPPING = "stopping"
    CLEANING = "cleaning"
    ENDED = "ended"


_UP = (Phase.STARTING, Phase.SERVING)
_DRAINING = (Phase.DRAINING_GATEWAY, Phase.DRAINING_SCHEDULERS)
_ALIVE = (UnitState.STARTING, UnitState.RUNNING)


class SupervisorMachine:
    """See the module's theory. One per cluster, in the process of the command line."""

    def __init__(self, plan: TreePlan) -> None:
        self._plan = plan
        self._options = plan.options
        self._units = make_units(plan.topology)
        self._linking = Linking(plan.topology)
        self._phase = Phase.STARTING
        self._url = ""
        self._lost: dict[str, InstanceLost] = {}
        self._waiting_drained: set[str] = set()
        self._end_reason = ""
        self._end_failed = False
        self._restarts = 0
        self._check_due_ns = 0
        self._link_poll_ms = LINK_POLL_MS
        self._handlers: Handlers[list[Effect]] = Handlers()
        on = self._handlers.on
        on(ProcessStarted, self._on_process_started)
        on(ProcessExited, self._on_process_exited)
        on(NodeReady, self._on_node_ready)
        on(NodeProgress, self._on_node_progress)
        on(NodeFailed, self._on_node_failed)
        on(NodeHealth, self._on_node_health)
        on(ClusterView, self._on_cluster_view)
        on(InstanceSilent, self._on_instance_silent)
        on(UnitCleaned, self._on_unit_cleaned)
        on(Drained, self._on_drained)
        on(Stop, self._on_stop)
        on(InstanceTimer, self._on_instance_timer)

    def start(self, now_ns: int) -> list[Effect]:
        """Start every unit at once; links between nodes wait for each other by themselves."""
        effects: list[Effect] = [Note("info", f"starting {self._plan.topology.describe()}")]
        for unit in self._units.values():
            unit.begin_life(now_ns)
        for unit in self._units.values():
            effects += self._launch(unit)
        return [*effects, self._next_check(now_ns), self._timer("view", VIEW_POLL_MS)]

    def handle(self, now_ns: int, sender: str, message: Message) -> list[Effect]:
        """React to one message; late ones change nothing."""
        handler = self._handlers.get(type(message))
        return handler(now_ns, sender, message) if handler is not None else []

    def status(
        self, now_ns: int
    ) -> tuple[tuple[tuple[str, float | int | str], ...], tuple[tuple[str, int, str, str, int], ...]]:
        """``phase``, ``url``, …; per unit ``unit.p0.state``, …; per node ``node.p0.r0.rss_bytes``, …."""
        values: list[tuple[str, float | int | str]] = [
            ("phase", self._phase.value),
            ("topology", self._plan.topology.text),
            ("url", self._url),
            ("run_id", self._plan.run_id),
            ("restarts", self._restarts),
            ("links_awaited", ", ".join(self._linking.pending) if self._phase is Phase.STARTING else ""),
        ]
        for unit in self._units.values():
            values += unit.status(now_ns)
        return tuple(values), ()

    # -- one per message type ----------------------------------------------------------------------------------------

    def _on_process_started(self, now_ns: int, sender: str, message: ProcessStarted) -> list[Effect]:
        node = self._node(message.node, message.incarnation)
        if node is None:
            return []
        node.pid = message.pid
        return [Note("debug", f"{node.name} started", (("pid", node.pid), ("incarnation", message.incarnation)))]

    def _on_process_exited(self, now_ns: int, sender: str, message: ProcessExited) -> list[Effect]:
        unit, node = self._units.get(unit_of(message.node)), self._node(message.node, message.incarnation)
        if unit is None or node is None or not node.alive:
            return []
        node.alive = False
        effects: list[Effect] = []
        if unit.state in _ALIVE and self._phase in (*_UP, *_DRAINING):
            effects += self._fail(unit, f"{node.name} {describe_exit(message)}", message.fatal)
        if not unit.alive_nodes() and unit.state in (*_ALIVE, UnitState.FAILING):
            effects += self._bury(unit)
        return effects

    def _on_node_ready(self, now_ns: int, sender: str, message: NodeReady) -> list[Effect]:
        node = self._node(message.node, message.incarnation)
        if node is None or not node.alive or node.ready:
            return []
        node.ready, node.heard_ns = True, now_ns
        effects: list[Effect] = [Note("info", f"{node.name} ready", (("pid", message.pid),))]
        if node.kind == "front":
            self._url = message.detail or self._url
            effects += [Send(REGISTRY, lost) for lost in self._lost.values() if lost.instance != FRONT]
        return effects + self._update_states()

    def _on_node_progress(self, now_ns: int, sender: str, message: NodeProgress) -> list[Effect]:
        return [Send(CONSOLE, message)] if self._node(message.node, message.incarnation) else []

    def _on_node_failed(self, now_ns: int, sender: str, message: NodeFailed) -> list[Effect]:
        unit = self._units.get(unit_of(message.node))
        if unit is None or unit.incarnation != message.incarnation:
            return []
        reason = f"{message.node}/{message.actor}: {message.reason}"
        if unit.state in _ALIVE:
            return self._fail(unit, reason, message.fatal) if self._phase in (*_UP, *_DRAINING) else []
        unit.reason = reason
        if message.fatal and not unit.fatal:
            unit.fatal = True
            if unit.state is UnitState.WAITING:
                return self._give_up(unit)
        return []

    def _on_node_health(self, now_ns: int, sender: str, message: NodeHealth) -> list[Effect]:
        node = self._node(message.node, message.incarnation)
        if node is None or not node.alive:
            return []
        node.health, node.heard_ns = message, now_ns
        return []

    def _on_cluster_view(self, now_ns: int, sender: str, message: ClusterView) -> list[Effect]:
        for info in message.instances:
            unit = self._units.get(info.instance)
            if unit is not None and unit.incarnation == info.incarnation:
                unit.registered = True
        refused: list[Effect] = [
            Note("error", f"link of {source} with {target} refused: {why}", (("prefill", source), ("decode", target)))
            for source, target, why in self._linking.follow(message)
        ]
        return refused + self._update_states()

    def _on_instance_silent(self, now_ns: int, sender: str, message: InstanceSilent) -> list[Effect]:
        unit = self._units.get(message.instance)
        if unit is None or unit.incarnation != message.incarnation or unit.state is not UnitState.RUNNING:
            return []
        return [Note("warning", f"{unit.name} sends no heartbeats and gets no work", (("ms", message.silent_ms),))]

    def _on_unit_cleaned(self, now_ns: int, sender: str, message: UnitCleaned) -> list[Effect]:
        if message.unit == "":
            if self._phase is not Phase.CLEANING:
                return []
            self._phase = Phase.ENDED
            return [Send(CONSOLE, TreeEnded(reason=self._end_reason, failed=self._end_failed))]
        unit = self._units.get(message.unit)
        if unit is None or unit.state is not UnitState.CLEANING:
            return []
        unit.state = UnitState.WAITING
        if self._phase not in _UP:
            unit.state = UnitState.DOWN
            return self._clean_when_all_ended()
        return self._restart_later(now_ns, unit)

    def _on_drained(self, now_ns: int, sender: str, message: Drained) -> list[Effect]:
        self._waiting_drained.discard(f"{message.node}/{message.actor}")
        return self._drain_on() if self._phase in _DRAINING and not self._waiting_drained else []

    def _on_stop(self, now_ns: int, sender: str, message: Stop) -> list[Effect]:
        if self._phase in _UP:
            return self._wind_down(message.reason, self._options.drain_timeout_ms, failed=False)
        if self._phase in _DRAINING:
            return [Note("warning", "stopping at once"), *self._stop_nodes()]
        return []

    def _on_instance_timer(self, now_ns: int, sender: str, message: InstanceTimer) -> list[Effect]:
        unit = self._units.get(message.instance)
        match message.purpose:
            case "check":
                return self._check_hangs(now_ns)
            case "view":
                return self._ask_for_view()
            case "drain" if self._phase in _DRAINING:
                return [Note("warning", "drain deadline passed"), *self._stop_nodes()]
            case "kill" if self._phase is Phase.STOPPING:
                return self._kill_stragglers()
        if unit is None or unit.incarnation != message.incarnation or self._phase not in _UP:
            return []
        match message.purpose:
            case "start" if unit.state is UnitState.STARTING:
                missing = [node.name for node in unit.nodes.values() if not node.ready] or ["its registration"]
                limit = self._options.start_timeout_ms
                reason = f"not ready after {limit} ms, waiting for {', '.join(missing)} (option: start_timeout_ms)"
                return self._fail(unit, reason, fatal=False)
            case "restart" if unit.state is UnitState.WAITING:
                return self._relaunch(now_ns, unit)
        return []

    # -- a unit's life -----------------------------------------------------------------------------------------------

    def _launch(self, unit: Unit) -> list[Effect]:
        known = tuple((node, other.incarnation) for other in self._units.values() for node in other.nodes)
        starts: list[Effect] = [
            Run(StartProcess(config=node_config(self._plan, unit, node, known, self._url), forked=node.kind == "rank"))
            for node in unit.nodes.values()
        ]
        return [*starts, self._timer("start", float(self._options.start_timeout_ms), unit)]

    def _relaunch(self, now_ns: int, unit: Unit) -> list[Effect]:
        unit.begin_life(now_ns)
        self._restarts += 1
        note = Note("info", f"{unit.name} starts again", (("incarnation", unit.incarnation),))
        return [note, *self._launch(unit), self._timer("view", VIEW_POLL_MS)]

    def _update_states(self) -> list[Effect]:
        """Move units that have everything to RUNNING, and the tree to SERVING when all have and are linked."""
        effects: list[Effect] = []
        for unit in self._units.values():
            complete = all(node.ready for node in unit.nodes.values()) and (unit.registered or unit.role == "")
            if unit.state is UnitState.STARTING and complete:
                unit.state = UnitState.RUNNING
                effects.append(StopTimer(("start", unit.name)))
                detail = f" at {self._url}" if unit.role == "" else f" ({unit.role} TP{unit.tp_size})"
                effects.append(Note("info", f"{unit.name} running{detail}", (("incarnation", unit.incarnation),)))
        if self._phase is not Phase.STARTING or any(u.state is not UnitState.RUNNING for u in self._units.values()):
            return effects
        if hopeless := self._linking.hopeless:
            return effects + self._wind_down(hopeless, 0, failed=True)
        if self._linking.pending:
            delay_ms = self._link_poll_ms
            self._link_poll_ms = min(VIEW_POLL_MS, delay_ms * LINK_POLL_GROWTH)
            return [*effects, self._timer("view", delay_ms)]
        self._phase = Phase.SERVING
        return [*effects, Send(CONSOLE, TreeReady(url=self._url))]

    def _fail(self, unit: Unit, reason: str, fatal: bool) -> list[Effect]:
        """Kill the whole unit; what follows happens when the last process is gone."""
        unit.state, unit.reason, unit.fatal = UnitState.FAILING, reason, fatal
        effects: list[Effect] = [
            Note("error", f"{unit.name} failed: {reason}", (("incarnation", unit.incarnation),)),
            StopTimer(("start", unit.name)),
        ]
        effects += [self._kill(unit, node) for node in unit.alive_nodes()]
        return effects

    def _bury(self, unit: Unit) -> list[Effect]:
        """Every process of this life has ended: say so, and clean up after it."""
        unit.state = UnitState.CLEANING
        lost = InstanceLost(instance=unit.name, incarnation=unit.incarnation, reason=unit.reason)
        self._lost[unit.name] = lost
        effects: list[Effect] = [Run(CleanUnit(unit=unit.name, nodes=tuple(unit.nodes)))]
        if self._phase not in (*_UP, *_DRAINING):
            return effects  # everybody is going
        if unit.role == "":
            effects += [Send(address, lost) for address in self._scheduler_addresses()]
            return effects + (self._stop_nodes() if self._phase in _DRAINING else [])
        effects.append(Send(REGISTRY, lost))
        waited_for = control_address(unit.name, "scheduler")
        if waited_for in self._waiting_drained:
            self._waiting_drained.remove(waited_for)
            effects += [] if self._waiting_drained else self._drain_on()
        return effects

    def _restart_later(self, now_ns: int, unit: Unit) -> list[Effect]:
        if unit.fatal:
            return self._give_up(unit)
        count = unit.count_failure(now_ns, self._options.restart_window_ms)
        if count > self._options.restarts_max:
            return self._give_up(unit)
        delay_ms = min(self._options.restart_backoff_ms * 2 ** (count - 1), BACKOFF_MAX_MS)
        return [self._timer("restart", delay_ms, unit)]

    def _give_up(self, unit: Unit) -> list[Effect]:
        why = f"{unit.name} cannot start: {unit.reason}"
        if not unit.fatal:
            why = (
                f"{unit.name} failed {len(unit.failures_ns)} times within {self._options.restart_window_ms} ms, more "
                f"than restarts_max ({self._options.restarts_max}) allows; last: {unit.reason}"
            )
        unit.state = UnitState.DOWN
        return self._wind_down(why, 0, failed=True)

    def _check_hangs(self, now_ns: int) -> list[Effect]:
        if self._phase not in (*_UP, *_DRAINING):
            return []
        limit_ms = self._options.hang_timeout_ms
        effects: list[Effect] = []
        late_ns = now_ns - self._check_due_ns
        if late_ns > self._options.heartbeat_ms * 1_000_000:  # we were stopped, and so perhaps was everybody
            for unit in self._units.values():
                unit.excuse(now_ns, late_ns)
        for unit in self._units.values():
            hangs = [why for node in unit.alive_nodes() if (why := node.hang(now_ns, limit_ms))]
            if hangs and unit.state is UnitState.RUNNING:
                effects += self._fail(unit, f"{hangs[0]} (option: hang_timeout_ms, {limit_ms})", fatal=False)
        return [*effects, self._next_check(now_ns)]

    def _next_check(self, now_ns: int) -> Effect:
        self._check_due_ns = now_ns + self._options.heartbeat_ms * 1_000_000
        return self._timer("check", float(self._options.heartbeat_ms))

    def _ask_for_view(self) -> list[Effect]:
        """While an instance is not known to be registered, or to be linked, ask the registry again and again."""
        registering = any(u.role and u.state is UnitState.STARTING for u in self._units.values())
        waiting = registering or self._phase is Phase.STARTING
        if self._phase not in _UP or not waiting:
            return []
        ask: list[Effect] = [Send(REGISTRY, ViewRequest())] if self._units[FRONT].state in _ALIVE else []
        return [*ask, self._timer("view", VIEW_POLL_MS)]

    # -- the end -----------------------------------------------------------------------------------------------------

    def _wind_down(self, reason: str, deadline_ms: int, failed: bool) -> list[Effect]:
        """Begin the end: drain the gateway if there is one to drain."""
        self._end_reason, self._end_failed = reason, failed
        effects: list[Effect] = [Note("error" if failed else "info", f"stopping: {reason}")]
        for unit in self._units.values():
            if unit.state is UnitState.WAITING:
                unit.state = UnitState.DOWN
        if self._units[FRONT].state is not UnitState.RUNNING:
            return effects + self._stop_nodes()
        self._phase = Phase.DRAINING_GATEWAY
        self._waiting_drained = {GATEWAY}
        effects += [Send(GATEWAY, Drain(deadline_ms=deadline_ms))]
        return [*effects, self._timer("drain", deadline_ms + DRAIN_MARGIN_MS)]

    def _drain_on(self) -> list[Effect]:
        """The gateway has no request left; schedulers should have none either."""
        addresses = self._scheduler_addresses()
        if self._phase is Phase.DRAINING_SCHEDULERS or not addresses:
            return self._stop_nodes()
        self._phase = Phase.DRAINING_SCHEDULERS
        self._waiting_drained = set(addresses)
        return [Send(address, Drain(deadline_ms=0)) for address in addresses]

    def _stop_nodes(self) -> list[Effect]:
        self._phase = Phase.STOPPING
        effects: list[Effect] = [StopTimer(("drain", "")), self._timer("kill", STOP_GRACE_MS)]
        for unit in self._units.values():
            for node in unit.alive_nodes():
                if node.ready and unit.state is not UnitState.FAILING:
                    effects.append(Send(f"{node.name}/{NODE_ACTOR}", Stop(reason=self._end_reason)))
                else:
                    effects.append(self._kill(unit, node))
        return effects + self._clean_when_all_ended()

    def _kill_stragglers(self) -> list[Effect]:
        late = [(unit, node) for unit in self._units.values() for node in unit.alive_nodes()]
        notes: list[Effect] = [Note("warning", f"{node.name} did not stop in time, killed") for _, node in late]
        return notes + [self._kill(unit, node) for unit, node in late]

    def _clean_when_all_ended(self) -> list[Effect]:
        busy = any(u.alive_nodes() or u.state is UnitState.CLEANING for u in self._units.values())
        if self._phase is not Phase.STOPPING or busy:
            return []
        self._phase = Phase.CLEANING
        return [StopTimer(("kill", "")), Run(CleanUnit(unit=""))]

    # -- small things ------------------------------------------------------------------------------------------------

    def _node(self, name: str, incarnation: int) -> Node | None:
        """The node of the current life, or None for an unknown name or an older life."""
        unit = self._units.get(unit_of(name))
        return unit.nodes.get(name) if unit is not None and unit.incarnation == incarnation else None

    def _kill(self, unit: Unit, node: Node) -> Run:
        return Run(SignalProcess(node=node.name, incarnation=unit.incarnation, signal="KILL"))

    def _scheduler_addresses(self) -> list[str]:
        units = self._units.values()
        return [control_address(u.name, "scheduler") for u in units if u.role and u.state is UnitState.RUNNING]

    def _timer(self, purpose: str, delay_ms: float, unit: Unit | None = None) -> StartTimer:
        name, incarnation = (unit.name, unit.incarnation) if unit else ("", 0)
        due = InstanceTimer(instance=name, incarnation=incarnation, purpose=purpose)
        return StartTimer((purpose, name), delay_ms, due)
