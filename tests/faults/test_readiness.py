"""Ready means that a request sent now is served, and not refused by an instance whose links are still being made."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest

from actors.runtime.trace_file import SENT, Trace
from scripts.cluster import Cluster
from tests.e2e.conftest import OPTIONS, ask, prompt_of


@pytest.mark.slow
@pytest.mark.parametrize("side", ["p0", "d0"])
def test_a_request_sent_when_the_cluster_is_ready_is_not_refused_first(side: str, tmp_path: Path) -> None:
    """Although one side's link takes a second longer than everything else."""
    faults = f"delay type=PeerLinked sender={side}.r0/* ms=1000"
    options = msgspec.structs.replace(OPTIONS, topology="P1/D1", faults=faults, trace_dir=str(tmp_path))
    with Cluster(options) as cluster:
        assert httpx.get(f"{cluster.url}/health", trust_env=False).status_code == 200
        (answer,) = ask(cluster, [prompt_of(20, 1)], max_tokens=4)
        assert answer["kvferry"]["attempts"] == 1
    sent = [record.type for record in Trace(tmp_path).records() if record.kind == SENT]
    assert "RequestAccepted" in sent
    assert "RequestRefused" not in sent
