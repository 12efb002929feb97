"""What happens in one simulated run: drawn from its seed and the kinds of faults that are allowed, nothing else."""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec

from actors.runtime.config import Options
from actors.runtime.fault_plan import FaultPlan, MessageMatch, Point, Rule, WriteMatch
from actors.runtime.simulated_links import LinkSettings
from messages.requests import SamplingParams
from scripts.simulated_client import Request
from scripts.simulated_cluster import OPTIONS, with_options
from scripts.simulated_jobs import Speed
from scripts.simulated_model import EOS, VOCABULARY

FAULTS: Final = (
    "loss",
    "delay",
    "duplicate",
    "reorder",
    "partition",
    "crash",
    "hang",
    "slow",
    "staging",
    "write",
    "cancel",
    "burst",
)
"""Kinds of faults, as ``--faults`` names them."""

TOPOLOGIES: Final = {
    "P2/D1": 6,
    "P1/D2": 3,
    "P1/D1": 2,
    "P2/D2": 3,
    "P2x2/D1": 3,
    "P2/D1x2": 5,
    "P4/D2": 1,
    "P4/D1": 1,
    "P1x2/D2x2": 1,
    "TP2": 1,
    "TP1x2": 1,
}
"""Topologies and how often each is drawn, relative to the others."""

POINTS: Final = (
    "SubmitRequest",
    "AddNewRequest",
    "RequestAccepted",
    "ReserveLeases",
    "OpenReceive",
    "GrantLease",
    "OpenPush",
    "ExecuteBatch",
    "BatchResult",
    "LayerReady",
    "ChunkArrived",
    "ChunkMerged",
    "FirstGeneration",
    "PullKVCache",
    "PullDone",
    "Restore",
    "Merged",
    "Restored",
    "AllRestored",
    "HandoffComplete",
    "ReleaseRequest",
    "ReleaseReceive",
    "AbortPush",
    "PushDrained",
    "ClosePush",
    "Generation",
    "Finished",
    "LinkPeer",
    "PeerLinked",
    "RegisterInstance",
)
"""Protocol points at which a node may be killed or stopped."""

SIBLINGS_MAX: Final = 5

OVERTAKEN: Final = ("ChunkArrived", "ChunkArrived", "ChunkMerged", "PushDrained", "Restored", "Generation", "Finished")
"""Messages that may be late by about as long as somebody waits for them, so that they meet the next attempt."""

COUNTED: Final = (
    "Restored",
    "Restored",
    "Restored",
    "ReceiveOpened",
    "ReceiveReleased",
    "PushClosed",
    "BatchResult",
    "ChunkArrived",
)
"""Answers of ranks, which somebody counts."""

WARM_UP_MS: Final = 350.0
"""By then the cluster is up as a rule; requests may come earlier, too."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happens to nodes at ``at_ms``, for ``for_ms`` (a partition, a stall, a slow node) or for good."""

    kind: str
    at_ms: float
    node: str
    other: str = ""
    for_ms: float = 0.0
    ms: float = 0.0
    both: bool = True
    hold: bool = True


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a run. ``arrivals_ms`` goes with the requests that ``make_requests`` makes."""

    seed: int
    options: Options
    links: LinkSettings
    speed: Speed
    plan: FaultPlan
    incidents: tuple[Incident, ...]
    arrivals_ms: tuple[float, ...]
    heal_ms: float


def make_requests(seed: int, count: int, faults: frozenset[str]) -> list[Request]:
    """The clients' requests: short and long prompts, one token and many, seeds, stop tokens, cancels."""
    random = Random(f"requests {seed}")
    requests = []
    for number in range(1, count + 1):
        length = random.choice((1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, random.randrange(1, 28)))
        prompt = tuple(random.randrange(1, VOCABULARY) for _ in range(length))
        sampling = SamplingParams(
            seed=random.randrange(1 << 16),
            max_tokens=random.choice((1, 2, 2, 3, 4, 6, 14)),
            min_tokens=random.choice((0, 0, 0, 2)),
            eos_token_ids=(EOS,),
            ignore_eos=random.random() < 0.3,
            stop_token_ids=(random.randrange(1, VOCABULARY),) if random.random() < 0.3 else (),
        )
        cancel_ms = -1.0
        if "cancel" in faults and random.random() < 0.12:
            cancel_ms = random.choice((0.0, random.random() * 10, random.random() * 60))
        priority = "offline" if random.random() < 0.2 else "online"
        requests.append(Request(f"r{number}", prompt, sampling, priority, cancel_ms))  # type: ignore[arg-type]
    _gather(Random(f"samples {seed}"), requests)
    _slow_down(Random(f"intervals {seed}"), requests)
    return requests


def _slow_down(random: Random, requests: list[Request]) -> None:
    """In some runs, tokens of some requests come to the gateway in groups."""
    if random.random() < 0.5:
        return
    for request in requests:
        interval = random.choice((1, 1, 2, 3, 16))
        request.sampling = msgspec.structs.replace(request.sampling, output_interval=interval)


def _gather(random: Random, requests: list[Request]) -> None:
    """In some runs, some requests are further samples of the one before them: the same prompt, seeds of their own."""
    if random.random() < 0.6:
        return
    first = requests[0]
    for request in requests[1:]:
        if len(first.siblings) == SIBLINGS_MAX or random.random() < 0.5:
            first = request
            continue
        request.is_sibling = True
        request.prompt, request.priority = first.prompt, first.priority
        request.sampling = msgspec.structs.replace(first.sampling, seed=request.sampling.seed)
        number = first.name.partition("-")[0]
        first.name = f"{number}-0"
        first.siblings.append(request)
        request.name = f"{number}-{len(first.siblings)}"


def draw(seed: int, request_count: int, faults: frozenset[str], topology: str = "") -> Scenario:
    """The scenario of a seed."""
    random = Random(f"scenario {seed}")
    chosen = random.choices(list(TOPOLOGIES), list(TOPOLOGIES.values()))[0]
    speculative = random.choice((0, 0, 1, 2, 3))
    prefill_speculative = random.choice((-1, -1, 1, 3) if speculative else (-1, -1, -1, 2))  # unequal depths: C33
    options = with_options(
        topology=topology or chosen,
        num_speculative_tokens=speculative,
        prefill_num_speculative_tokens=prefill_speculative,
        enable_mtp_draft_body_tp1=bool(speculative) and random.random() < 0.3,
        kv_cache_transfer_mode=random.choice(("PUSH", "PUSH", "PULL")),
        enable_pd_parallel_shard_pull=random.random() < 0.7,
        lease_windows=random.choice((1, 2, 2, 3)),
        staging_leases=random.choice((1, 2, 4)),
        block_count=random.choice((14, 24, 48)),
        max_seqs_per_batch=random.choice((2, 4, 8)),
        max_tokens_per_chunk_for_prefill=random.choice((3, 8, 8, 16)),
        offer_window=random.choice((1, 2, 4)),
        enable_chunked_prefill=True,
        seed=seed & 0xFFFF,
    )
    window_ms = random.choice((60.0, 200.0, 600.0))
    heal_ms = WARM_UP_MS + window_ms + random.choice((100.0, 1000.0, 3000.0, 9000.0))
    nodes = _nodes(options.topology)
    return Scenario(
        seed=seed,
        options=options,
        links=_links(random, faults),
        speed=Speed(slow=random.choice((0.0, 0.02, 0.1)) if "slow" in faults else 0.0),
        plan=_plan(random, faults, nodes, seed),
        incidents=_incidents(random, faults, nodes, WARM_UP_MS, heal_ms),
        arrivals_ms=_arrivals(random, request_count, window_ms, "burst" in faults),
        heal_ms=heal_ms,
    )


def _nodes(topology: str) -> list[str]:
    """Names of all nodes but the supervisor."""
    names = ["front"]
    counts: dict[str, int] = {}
    for group in topology.split("/"):
        letter = "m" if group.startswith("TP") else group[0].lower()
        size, _, copies = group.lstrip("TPD").partition("x")
        for _ in range(int(copies or 1)):
            instance = f"{letter}{counts.get(letter, 0)}"
            counts[letter] = counts.get(letter, 0) + 1
            names += [f"{instance}.ctl", *(f"{instance}.r{rank}" for rank in range(int(size)))]
    return names


def _links(random: Random, faults: frozenset[str]) -> LinkSettings:
    def rate(kind: str) -> float:
        return random.choice((0.0, 0.0, 0.002, 0.01, 0.05)) if kind in faults else 0.0

    return LinkSettings(
        drop=rate("loss") / 5,
        duplicate=rate("duplicate"),
        reorder=rate("reorder"),
        echo=random.choice((0.0, 0.0, 0.0, 0.3)) if "duplicate" in faults else 0.0,
        delay=rate("delay"),
        delay_ms=random.choice((5.0, 50.0, 2000.0, 7000.0)),
        latency_us=random.choice(((20.0, 200.0), (50.0, 2000.0))),
        local_us=random.choice((5.0, 50.0, 500.0)),
    )


def _plan(random: Random, faults: frozenset[str], nodes: list[str], seed: int) -> FaultPlan:
    rules: list[Rule] = []
    if "crash" in faults and random.random() < 0.5:
        node = random.choice(nodes)
        rules.append(
            Rule(do="kill", at=Point(handled=random.choice(POINTS), node=node, nth=random.choice((1, 1, 2, 5, 9))))
        )
    if "hang" in faults and random.random() < 0.15:
        node = random.choice(nodes)
        point = Point(handled=random.choice(POINTS), node=node, nth=random.choice((1, 2, 5)))
        rules.append(Rule(do="hang", at=point, for_ms=random.choice((20.0, 500.0, 0.0))))
    for kind, do in (("loss", "drop"), ("duplicate", "duplicate"), ("reorder", "reorder"), ("delay", "delay")):
        if kind in faults and random.random() < 0.25:
            match = MessageMatch(type=random.choice(POINTS), nth=random.choice((1, 1, 2, 4)))
            rules.append(Rule(do=do, match=match, ms=random.choice((2.0, 30.0, 1500.0, 6000.0))))
    if "delay" in faults and random.random() < 0.3:
        match = MessageMatch(type=random.choice(OVERTAKEN), nth=random.choice((1, 1, 2, 3)))
        rules.append(Rule(do="delay", match=match, ms=OPTIONS.handoff_timeout_ms + 80.0 * random.random()))
    if "duplicate" in faults and random.random() < 0.35:
        match = MessageMatch(type=random.choice(COUNTED), nth=random.choice((0, 0, 1, 2)))  # 0: every one
        rules.append(Rule(do="duplicate", match=match, ms=random.choice((0.1, 0.1, 2.0))))
    if "staging" in faults and random.random() < 0.3:
        match = MessageMatch(
            type=random.choice(("GrantLease", "OpenReceive", "ReserveLeases")),
            probability=random.choice((0.1, 0.5)),
            times=random.choice((3, 20)),
        )
        rules.append(Rule(do="refuse", match=match))
    if "write" in faults and random.random() < 0.3:
        where = WriteMatch(
            operation=random.choice(("write", "read", "copy")), probability=0.2, times=random.choice((1, 3))
        )
        rules.append(Rule(do=random.choice(("fail", "slow", "tear")), write=where, ms=random.choice((20.0, 300.0))))
    return FaultPlan(rules=tuple(rules), seed=seed)


def _incidents(
    random: Random, faults: frozenset[str], nodes: list[str], begin_ms: float, end_ms: float
) -> tuple[Incident, ...]:
    incidents: list[Incident] = []
    end_ms = min(end_ms, begin_ms + 2000.0)

    def when() -> float:
        return begin_ms + random.random() * (end_ms - begin_ms)

    if "crash" in faults:
        for _ in range(random.choice((0, 0, 1, 2, 3))):
            incidents.append(Incident(kind="crash", at_ms=when(), node=random.choice(nodes)))
    if "partition" in faults and random.random() < 0.25:
        first, second = random.sample([*nodes, "supervisor"], 2)
        incidents.append(
            Incident(
                kind="partition",
                at_ms=when(),
                node=first,
                other=second,
                for_ms=random.choice((20.0, 300.0, 2500.0, 7000.0)),
                both=random.random() < 0.6,
                hold=random.random() < 0.6,
            )
        )
    if "partition" in faults and random.random() < 0.25:
        for _ in range(random.choice((1, 3))):
            controls = [name for name in nodes if "." not in name or name.endswith(".ctl")]
            first, second = random.sample(random.choice((controls, nodes)), 2)
            incidents.append(Incident(kind="break", at_ms=when(), node=first, other=second))
    if "hang" in faults and random.random() < 0.2:
        for_ms = random.choice((10.0, 100.0, 1500.0, 6000.0))
        incidents.append(Incident(kind="hang", at_ms=when(), node=random.choice(nodes), for_ms=for_ms))
    if "slow" in faults and random.random() < 0.2:
        incidents.append(
            Incident(
                kind="slow", at_ms=when(), node=random.choice(nodes), for_ms=500.0, ms=random.choice((0.5, 5.0, 40.0))
            )
        )
    return tuple(sorted(incidents, key=lambda incident: incident.at_ms))


def _arrivals(random: Random, count: int, window_ms: float, burst: bool) -> tuple[float, ...]:
    if burst and random.random() < 0.4:
        moments = [WARM_UP_MS + random.random() * window_ms for _ in range(random.choice((1, 2, 3)))]
        return tuple(random.choice(moments) + random.random() for _ in range(count))
    return tuple(random.choice((0.0, WARM_UP_MS, WARM_UP_MS)) + random.random() * window_ms for _ in range(count))
