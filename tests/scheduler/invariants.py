"""What must hold in a scheduler after every message: shared by the machine tests and the simulation."""

from __future__ import annotations

from actors.scheduler.machine import SchedulerMachine


def check_scheduler(machine: SchedulerMachine) -> None:
    """I3 for blocks and slots, and the batching core's own rules. Raises ``AssertionError``."""
    pool, batcher = machine.pool, machine.batcher
    if pool is None or batcher is None:
        return
    pool.check()
    limits = batcher.limits
    for sequence in batcher.waiting:
        assert sequence.holding is None, f"{sequence.owner} waits but holds memory"
    for sequence in batcher.running:
        assert sequence.holding is not None, f"{sequence.owner} runs without memory"
        assert not sequence.holding.released, f"{sequence.owner} runs in memory that was given up"
        assert sequence.computed <= sequence.total
    assert len(batcher.steps) <= (2 if limits.runs_ahead else 1)
    for ahead, step in enumerate(batcher.steps):
        rows = [row for _, _, row in step.rows.values()]
        assert len(rows) <= limits.max_seqs_per_batch
        tokens = sum(row.token_count + row.speculative_tokens for row in rows)
        assert tokens <= limits.max_tokens_per_batch
        for sequence, holding, row in step.rows.values():
            if not row.is_prefill and sequence.holding is holding:
                # C29: a step begins and drafts as its sequence alone would have it
                wanted = min(limits.speculative_tokens, sequence.final_tokens - sequence.total - 1)
                assert (row.start, row.speculative_tokens) == (sequence.total - 1 + ahead, max(0, wanted))
            assert row.is_prefill or not row.token_ids or ahead == 0, "a token known before it is sampled"
            assert not holding.freed, f"{row.request_id} runs in memory that was freed"
            last = row.start + row.token_count + row.speculative_tokens
            assert last <= len(row.block_ids) * pool.block_size, f"{row.request_id} writes past its table"


def check_idle(machine: SchedulerMachine) -> None:
    """I4: nothing is in flight, so everything is free."""
    check_scheduler(machine)
    if machine.pool is None or machine.side is None or machine.batcher is None:
        return
    assert machine.side.live_count == 0, machine.status(0)
    assert machine.batcher.step is None
    assert not machine.batcher.running and not machine.batcher.waiting
    assert machine.pool.blocks.free_count == machine.pool.blocks.count, machine.pool.holdings
    assert machine.pool.slots.free_count == machine.pool.slots.count, machine.pool.holdings
