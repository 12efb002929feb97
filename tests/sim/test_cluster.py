"""The simulated cluster: every topology serves, equal seeds give equal runs, and broken caches are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.gateway.jobs import DeliverTokens
from messages.requests import SamplingParams
from scripts.simulate import Run, parse_faults, run_seed
from scripts.simulated_checks import Checks
from scripts.simulated_client import Request
from scripts.simulated_cluster import SimulatedCluster, with_options
from scripts.simulated_memory import Violation
from scripts.simulated_model import EOS
from scripts.simulated_scenario import TOPOLOGIES
from scripts.simulated_tags import TagTensor

ROOT = Path(__file__).resolve().parents[2]


def requests(count: int, max_tokens: int = 5) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,), ignore_eos=True)
    return [
        Request(f"r{number}", tuple(range(1, 3 + 3 * number)), sampling, "online") for number in range(1, count + 1)
    ]


def serve(cluster: SimulatedCluster) -> None:
    Checks(cluster)
    cluster.begin()
    for request in cluster.clients.requests:
        cluster.simulation.call_at(300.0, lambda request=request: cluster.clients.submit(request))  # type: ignore[misc]
    cluster.simulation.run(for_ms=60_000, until=lambda: cluster.clients.open_count == 0)


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "P4/D4", "P1/D4", "P2x2/D2"])
@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
def test_every_topology_serves_right_tokens_and_frees_everything(topology: str, mode: str) -> None:
    for speculative in (0, 3):
        options = with_options(topology=topology, kv_cache_transfer_mode=mode, num_speculative_tokens=speculative)
        cluster = SimulatedCluster(1, requests(6), options=options)
        serve(cluster)
        assert [request.state for request in cluster.clients.requests] == ["finished"] * 6
        cluster.simulation.run(for_ms=5_000)
        assert cluster.checks is not None
        assert cluster.checks.at_rest() == ""


@pytest.mark.parametrize("topology", ["TP2", "P2/D1", "P1/D2x2"])
@pytest.mark.parametrize("speculative", [0, 3])
def test_samples_of_one_prompt_get_their_own_tokens_from_one_prefill(topology: str, speculative: int) -> None:
    for length in (3, 4, 9, 17):
        samples = [
            Request(
                f"r7-{k}",
                tuple(range(1, length + 1)),
                SamplingParams(seed=k, max_tokens=4 + k, eos_token_ids=(EOS,), ignore_eos=True),
                "online",
                is_sibling=k > 0,
            )
            for k in range(4)
        ]
        samples[0].siblings = samples[1:]
        options = with_options(topology=topology, num_speculative_tokens=speculative)
        cluster = SimulatedCluster(length, samples, options=options)
        serve(cluster)
        assert [sample.state for sample in samples] == ["finished"] * 4
        schedulers = [cluster.actor(f"{name}.ctl/scheduler") for name in cluster.instances]
        figures = [dict(actor.machine.status(0)[0]) for actor in schedulers if actor is not None]
        assert sum(figure["prefilled_tokens"] for figure in figures) == length
        assert sum(figure["forked"] for figure in figures) == 3
        cluster.simulation.run(for_ms=5_000)
        assert cluster.checks is not None
        assert cluster.checks.at_rest() == ""


@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (3, 1), (2, 0)])
@pytest.mark.parametrize("mode", ["PUSH", "PULL"])
def test_unequal_draft_depths_serve_right_tokens_and_free_everything(prefill: int, decode: int, mode: str) -> None:
    """C33."""
    options = with_options(
        topology="P2/D1",
        kv_cache_transfer_mode=mode,
        num_speculative_tokens=decode,
        prefill_num_speculative_tokens=prefill,
    )
    cluster = SimulatedCluster(1, requests(6), options=options)
    serve(cluster)
    assert [request.state for request in cluster.clients.requests] == ["finished"] * 6
    cluster.simulation.run(for_ms=5_000)
    assert cluster.checks is not None
    assert cluster.checks.at_rest() == ""


def test_a_prefill_instance_without_draft_cache_is_refused_at_the_link_with_the_reason() -> None:
    """C33: no request is decoded wrongly, none at all; both sides' logs say why and name the option."""
    options = with_options(topology="P2/D1", num_speculative_tokens=2, prefill_num_speculative_tokens=0)
    cluster = SimulatedCluster(1, requests(2), options=options, notes_max=400)
    serve(cluster)
    assert not any(request.state == "finished" for request in cluster.clients.requests)
    reasons = {
        address: str(dict(note.fields)["reason"])
        for _, address, note in cluster.simulation.notes
        if note.event == "link refused"
    }
    assert set(reasons) == {"p0.ctl/scheduler", "d0.ctl/scheduler"}
    assert all("option: prefill_num_speculative_tokens, at least 1" in reason for reason in reasons.values())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_faults_break_no_invariant(seed: int) -> None:
    assert run_seed(seed, 12, parse_faults("all")).violation == ""


DIGEST = """
import hashlib, sys
from scripts.simulate import Run, parse_faults
run = Run(int(sys.argv[1]), 12, parse_faults("all"))
log = hashlib.sha256()
def on_step(actor, envelope, effects):
    log.update(repr((actor.address, envelope, effects)).encode())
run.cluster.simulation.on_step = on_step
run.go()
print(log.hexdigest(), run.cluster.simulation.step_count)
"""


@pytest.mark.parametrize("seed", [5, 11])
def test_the_same_seed_gives_the_same_run_in_another_process_with_other_hashes(seed: int) -> None:
    def digest(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DIGEST, str(seed)]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    first = digest("1")
    assert first == digest("2")
    assert int(first.split()[1]) > 100


def test_tracing_does_not_change_a_run(tmp_path: Path) -> None:
    plain = Run(4, 8, parse_faults("all")).go()
    traced = Run(4, 8, parse_faults("all"), trace_dir=tmp_path).go()
    assert (plain.steps, plain.states, plain.virtual_ms) == (traced.steps, traced.states, traced.virtual_ms)


def spoiled(role: str) -> str:
    """What a run says when one byte of a request's cache is damaged between its hand-off and its next decode step."""
    cluster = SimulatedCluster(1, requests(1, max_tokens=8), options=with_options(topology="P2/D1"))
    Checks(cluster)
    cluster.begin()
    request = cluster.clients.requests[0]
    cluster.simulation.call_at(300.0, lambda: cluster.clients.submit(request))
    cluster.simulation.run(for_ms=5_000, until=lambda: len(request.tokens) >= 3)
    worker = cluster.actor("d0.r0/worker")
    assert worker is not None
    runner = worker.executor.runner  # type: ignore[union-attr]
    views: list[TagTensor] = [*runner._by_block, *runner._slots]
    tensor = next(view for view in views if view.layout.role == role)
    layout = tensor.layout
    size = layout.resource_count * layout.resource_stride_bytes
    begin = layout.base_bytes
    tensor.region[begin : begin + size] = bytes(size)
    with pytest.raises(Violation) as raised:
        cluster.simulation.run(for_ms=60_000, until=lambda: cluster.clients.open_count == 0)
    return str(raised.value)


@pytest.mark.parametrize("role", ["KEY", "VALUE", "CONV", "SSM"])
def test_a_damaged_row_is_named_where_it_is_read(role: str) -> None:
    text = spoiled(role)
    assert text.startswith("I6: d0.r0 reads for r1")
    assert f".{role}" in text
    assert "zeros" in text


@pytest.mark.parametrize(
    ("first_index", "offset", "reason"),
    [(0, 0, "I1"), (2, 0, "I1"), (1, 1, "I6")],
    ids=["doubled", "skipped", "wrong"],
)
def test_a_client_notices_a_token_that_is_not_the_next_right_one(first_index: int, offset: int, reason: str) -> None:
    cluster = SimulatedCluster(1, requests(1))
    clients = cluster.clients
    request = clients.requests[0]
    request.state = "sent"
    clients._tickets[1] = (request,)
    right = request.expected
    clients.deliver(DeliverTokens(ticket=1, sample=0, first_index=0, token_ids=(right[0],)))
    tokens = (right[first_index] + offset,)
    with pytest.raises(Violation, match=reason):
        clients.deliver(DeliverTokens(ticket=1, sample=0, first_index=first_index, token_ids=tokens))
