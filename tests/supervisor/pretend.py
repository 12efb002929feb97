"""A pretend operating system and cluster around the supervisor's machine: virtual time, no process."""

from __future__ import annotations

from collections import deque

from actors.runtime.config import NodeConfig, Options
from actors.runtime.machine import Effect, Note, Run, Send, StartTimer, StopTimer
from actors.supervisor.jobs import CleanUnit, SignalProcess, StartProcess
from actors.supervisor.machine import SupervisorMachine
from actors.supervisor.topology import parse_topology
from actors.supervisor.units import TreePlan
from messages.base import GATEWAY, REGISTRY, Message, actor_of, node_of
from messages.cluster import ClusterView, InstanceInfo, ViewRequest
from messages.lifecycle import (
    Drain,
    Drained,
    NodeFailed,
    NodeHealth,
    NodeReady,
    ProcessExited,
    ProcessStarted,
    Stop,
    UnitCleaned,
)

MILLISECOND = 1_000_000


def make_plan(topology: str = "P2/D1", cpu_count: int = 8, **options: object) -> TreePlan:
    chosen = Options(topology=topology, **options)  # type: ignore[arg-type]
    return TreePlan(
        run_id="test",
        run_dir="/nowhere",
        options=chosen,
        topology=parse_topology(topology, lambda tp_size: None),
        cpu_count=cpu_count,
    )


class Pretend:
    """Runs the machine; processes obey it at once unless told to be stubborn. Time moves only by ``advance``."""

    def __init__(self, topology: str = "P2/D1", **options: object) -> None:
        self.plan = make_plan(topology, **options)
        self.machine = SupervisorMachine(self.plan)
        self.now_ns = 1_000 * MILLISECOND
        self.alive: dict[str, NodeConfig] = {}
        self.started: list[NodeConfig] = []
        self.sent: list[tuple[str, Message]] = []
        self.notes: list[Note] = []
        self.cleaned: list[str] = []
        self.killed: list[str] = []
        self.order: list[str] = []  # of everything that happens outside
        self.stubborn: set[str] = set()  # nodes that ignore Stop
        self.undrainable: set[str] = set()  # addresses that never say Drained
        self.unlinked: set[tuple[str, str]] = set()  # (prefill, decode) that are still being linked
        self.refused: dict[tuple[str, str], str] = {}  # (prefill, decode) that will not be linked, and why
        self.immortal: set[str] = set()  # nodes whose end the operating system reports late
        self.timers: dict[tuple[str | int, ...], tuple[int, Message]] = {}
        self._inbox: deque[Message] = deque()
        self._carry_out(self.machine.start(self.now_ns))
        self._settle()

    # -- what happens to the tree ------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        self._inbox.append(message)
        self._settle()

    def advance(self, milliseconds: float) -> None:
        """Let time pass; healthy nodes keep saying so."""
        end = self.now_ns + int(milliseconds * MILLISECOND)
        while True:
            due = [(at, key) for key, (at, _) in self.timers.items() if at <= end]
            if not due:
                break
            at, key = min(due)
            self.now_ns = max(self.now_ns, at)
            self._inbox.append(self.timers.pop(key)[1])
            self._settle()
        self.now_ns = end

    def sleep(self, milliseconds: float) -> None:
        """Nothing runs, the supervisor neither; what was due is late."""
        self.now_ns += int(milliseconds * MILLISECOND)

    def incarnation(self, node: str) -> int:
        return max(config.incarnation for config in self.started if config.node == node)

    def ready(self, *nodes: str) -> None:
        for node in nodes:
            detail = "http://127.0.0.1:8000" if node == "front" else ""
            self.tell(NodeReady(node=node, incarnation=self.incarnation(node), pid=1, detail=detail))

    def all_ready(self) -> None:
        self.ready(*self.alive)
        self.advance(200)

    def healthy(self, *nodes: str) -> None:
        for node in nodes or tuple(self.alive):
            self.tell(
                NodeHealth(
                    node=node,
                    incarnation=self.incarnation(node),
                    rss_bytes=50_000_000,
                    cpu_percent=3.0,
                    threads=4,
                )
            )

    def exit(self, node: str, exit_code: int = -9, last_words: str = "") -> None:
        config = self.alive.pop(node)
        self.immortal.discard(node)
        self.order.append(f"exit {node}")
        self.tell(ProcessExited(node=node, incarnation=config.incarnation, exit_code=exit_code, last_words=last_words))

    def fail(self, node: str, reason: str, fatal: bool = False) -> None:
        incarnation = self.incarnation(node)
        self.tell(NodeFailed(node=node, incarnation=incarnation, actor="worker", reason=reason, fatal=fatal))

    # -- what was seen -----------------------------------------------------------------------------------------------

    def sent_of(self, kind: type[Message]) -> list[tuple[str, Message]]:
        return [(to, message) for to, message in self.sent if isinstance(message, kind)]

    def value(self, key: str) -> object:
        return dict(self.machine.status(self.now_ns)[0])[key]

    # -- the world ---------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while self._inbox:
            self._carry_out(self.machine.handle(self.now_ns, "somebody", self._inbox.popleft()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append((effect.to, effect.message))
                    self.order.append(f"{type(effect.message).__name__} {effect.to}")
                    self._answer(effect.to, effect.message)
                case StartTimer():
                    self.timers[effect.key] = (self.now_ns + int(effect.delay_ms * MILLISECOND), effect.message)
                case StopTimer():
                    self.timers.pop(effect.key, None)
                case Note():
                    self.notes.append(effect)
                case Run(job=StartProcess(config=config)):
                    assert config.node not in self.alive, f"{config.node} started twice"
                    self.alive[config.node] = config
                    self.started.append(config)
                    self.order.append(f"start {config.node}")
                    self._inbox.append(ProcessStarted(node=config.node, incarnation=config.incarnation, pid=100))
                case Run(job=SignalProcess() as job):
                    self.killed.append(job.node)
                    if job.node not in self.immortal:
                        self._end(job.node, -9)
                case Run(job=CleanUnit() as job):
                    assert not any(node in self.alive for node in job.nodes), "cleaned under a living process"
                    assert job.unit or not self.alive
                    self.cleaned.append(job.unit)
                    self.order.append(f"clean {job.unit}")
                    self._inbox.append(UnitCleaned(unit=job.unit))
                case _:
                    raise AssertionError(effect)

    def _end(self, node: str, exit_code: int) -> None:
        config = self.alive.pop(node, None)
        if config is not None:
            self.order.append(f"exit {node}")
            self._inbox.append(ProcessExited(node=node, incarnation=config.incarnation, exit_code=exit_code))

    def _answer(self, to: str, message: Message) -> None:
        node = node_of(to)
        if node not in self.alive:
            return
        if isinstance(message, Stop) and node not in self.stubborn:
            self._end(node, 0)
        elif isinstance(message, Drain) and to not in self.undrainable:
            self._inbox.append(Drained(node=node, actor=actor_of(to)))
        elif isinstance(message, ViewRequest) and to == REGISTRY:
            self._inbox.append(self._view())

    def _view(self) -> ClusterView:
        controls = [config for config in self.alive.values() if config.node.endswith(".ctl")]
        infos = tuple(
            InstanceInfo(
                instance=config.instance,
                incarnation=config.incarnation,
                role=config.role or "MIX",
                tp_size=config.tp_size,
                max_model_len=100,
                block_count=10,
                slot_count=4,
            )
            for config in controls
        )
        pairs = [(p.instance, d.instance) for p in infos for d in infos if (p.role, d.role) == ("PREFILL", "DECODE")]
        return ClusterView(
            version=1,
            registry_incarnation=1,
            instances=infos,
            links=tuple(pair for pair in pairs if pair not in self.unlinked and pair not in self.refused),
            refused=tuple((*pair, why) for pair, why in self.refused.items() if pair in pairs),
        )


__all__ = ["GATEWAY", "MILLISECOND", "Pretend", "make_plan"]
