"""Sums and gathers through shared memory: same bits everywhere, and clear failures instead of hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.worker.collectives import CollectiveError, SingleRank
from actors.worker.shm_collectives import SHM_FOLDER, ShmCollective
from tests.worker.harness import run_ranks

_numbers = iter(range(1 << 30))


def group(size: int, function: Callable[[ShmCollective], Any], **options: int) -> list[Any]:
    """``function`` on every rank of a fresh group."""
    name = f"kvferry-test-{os.getpid()}-collective-{next(_numbers)}"
    settings = {"timeout_ms": 10_000, "join_timeout_ms": 10_000, **options}

    def rank(index: int) -> Any:
        return function(ShmCollective(name, rank=index, size=size, **settings))

    results = run_ranks(size, rank)
    assert not (SHM_FOLDER / name).exists(), "the segment outlived the group's start"
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_rank_order_and_the_same_bits_on_every_rank(size: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()

    def work(collective: ShmCollective) -> list[torch.Tensor]:
        return [collective.all_reduce(parts[collective.rank].clone()) for _ in range(20)]

    for results in group(size, work):
        for result in results:
            assert torch.equal(result, expected.to(dtype))


def test_a_tensor_larger_than_a_part_is_summed_in_pieces() -> None:
    parts = [torch.arange(1000, dtype=torch.float32) * (rank + 1) for rank in range(2)]
    results = group(2, lambda c: c.all_reduce(parts[c.rank].view(10, 100).clone()), part_bytes=256)
    for result in results:
        assert torch.equal(result.view(-1), torch.arange(1000, dtype=torch.float32) * 3)


def test_columns_of_unequal_width_are_gathered_side_by_side() -> None:
    widths = [3, 3, 1]
    whole = torch.randn(11, 7)
    parts = whole.split(widths, 1)
    for part_bytes in (1 << 16, 64):  # at once, and in pieces of a few rows
        for result in group(3, lambda c: c.all_gather(parts[c.rank], widths), part_bytes=part_bytes):
            assert torch.equal(result, whole)


def test_ranks_at_different_steps_fail_and_say_who_is_where() -> None:
    def work(collective: ShmCollective) -> None:
        collective.begin_step(1)
        collective.begin_step(7 + collective.rank)

    for error in group(2, work):
        assert isinstance(error, CollectiveError)
        assert "rank 0 at 7, rank 1 at 8" in str(error)


def test_a_missing_rank_is_named_after_the_timeout() -> None:
    def work(collective: ShmCollective) -> None:
        collective.begin_step(1)
        if collective.rank != 1:
            collective.begin_step(2)

    first, second, third = group(3, work, timeout_ms=200)
    assert second is None
    for error in (first, third):
        assert isinstance(error, CollectiveError)
        assert "rank 1 did not begin step 2 within 200 ms" in str(error)


def test_ranks_that_compute_different_batches_are_told() -> None:
    for error in group(2, lambda c: c.all_reduce(torch.zeros(3 + c.rank))):
        assert isinstance(error, CollectiveError) and "different batches" in str(error)


def test_a_rank_that_never_joins_is_named_and_leaves_no_segment() -> None:
    name = f"kvferry-test-{os.getpid()}-alone"
    with pytest.raises(CollectiveError, match="rank 1 did not join its group within 100 ms"):
        ShmCollective(name, rank=0, size=2, join_timeout_ms=100)
    assert not (SHM_FOLDER / name).exists()


def test_a_group_of_one_is_the_identity() -> None:
    alone, tensor = SingleRank(), torch.randn(2, 3)
    alone.begin_step(5)
    assert alone.all_reduce(tensor) is tensor and alone.all_gather(tensor, [3]) is tensor


TORCH_RANK = """
import sys, torch
from actors.worker.collectives import CollectiveError
from actors.worker.torch_collectives import TorchCollective
rank, place = int(sys.argv[1]), sys.argv[2]
group = TorchCollective(f"file://{place}", rank=rank, size=2, device=torch.device("cpu"), timeout_ms=30000)
group.begin_step(1)
parts = [torch.randn(4, 5, generator=torch.Generator().manual_seed(r)) for r in range(2)]
assert torch.equal(group.all_reduce(parts[rank].clone()), parts[0] + parts[1])
gathered = group.all_gather(parts[rank][:, : 3 - rank], [3, 2])
assert torch.equal(gathered, torch.cat((parts[0][:, :3], parts[1][:, :2]), 1))
try:
    group.begin_step(2 + rank)
except CollectiveError as error:
    assert "rank 0 at 2, rank 1 at 3" in str(error)
else:
    sys.exit("different steps were not noticed")
group.close()
"""


@pytest.mark.slow
def test_torch_distributed_keeps_the_same_contract(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", TORCH_RANK, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors.decode()
