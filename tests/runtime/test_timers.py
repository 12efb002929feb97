"""The timer thread, the log's lines, torn writes."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from actors.runtime.faults import TornWrite
from actors.runtime.guarded_dataplane import GuardedDataPlane
from actors.runtime.hooks import NoInjector
from actors.runtime.log import Log, format_line
from actors.runtime.timers import COMPACT_AT, Timers
from transport.dataplane import DataPlaneError, Strided
from transport.shm_dataplane import ShmDataPlane


@pytest.fixture
def timers() -> Iterator[Timers]:
    made = Timers("test")
    yield made
    made.close()


def test_timers_fire_in_order_of_their_time(timers: Timers) -> None:
    fired: queue.SimpleQueue[str] = queue.SimpleQueue()
    timers.start(30.0, lambda: fired.put("third"))
    timers.start(0.0, lambda: fired.put("first"))
    timers.start(5.0, lambda: fired.put("second"))
    assert [fired.get(timeout=10) for _ in range(3)] == ["first", "second", "third"]


def test_timers_of_one_time_fire_in_the_order_of_their_start(timers: Timers) -> None:
    fired: queue.SimpleQueue[int] = queue.SimpleQueue()

    def start_all() -> None:  # on the timers' thread: none can fire in between
        for index in range(50):
            timers.start(0.0, lambda index=index: fired.put(index))  # type: ignore[misc]

    timers.start(0.0, start_all)
    assert [fired.get(timeout=10) for _ in range(50)] == list(range(50))


def test_a_cancelled_timer_stays_silent(timers: Timers) -> None:
    fired: queue.SimpleQueue[str] = queue.SimpleQueue()
    cancelled = timers.start(5.0, lambda: fired.put("cancelled"))
    timers.start(10.0, lambda: fired.put("kept"))
    timers.cancel(cancelled)
    timers.cancel(cancelled)
    assert fired.get(timeout=10) == "kept"


def test_cancelled_timers_do_not_pile_up_until_they_are_due(timers: Timers) -> None:
    for _ in range(10 * COMPACT_AT):
        timers.cancel(timers.start(600_000.0, lambda: None))
    assert timers.count <= 2 * COMPACT_AT


def test_closing_forgets_what_was_not_due() -> None:
    timers = Timers("test")
    timers.start(60_000.0, lambda: None)
    timers.close()
    timers.close()
    assert timers.count == 0


def test_a_line_has_time_level_address_event_and_fields() -> None:
    line = format_line(0.25, "info", "d0.ctl/scheduler", "accepted", {"blocks": 3, "why": "two words", "ms": 1.0 / 3})
    clock, rest = line.split(" ", 1)
    assert len(clock) == len("HH:MM:SS.mmm") and clock.endswith(".250")
    assert rest == 'info d0.ctl/scheduler accepted blocks=3 why="two words" ms=0.333333'


def test_lines_below_the_level_are_not_written() -> None:
    lines: list[str] = []
    log = Log("n", "warning", lines.append)
    for level in ("debug", "info", "warning", "error"):
        log.write("a", level, "event", {})
    assert [line.split()[1] for line in lines] == ["warning", "error"]


class Tearing(NoInjector):
    """Every write stops after a quarter, everything else works."""

    def on_write(self, operation: str, region_id: str, size_bytes: int) -> None:
        if operation == "write":
            raise TornWrite("torn", 0.25)


@pytest.mark.parametrize(
    "target", [[Strided(0, 1024)], [Strided(0, 64, 16, 64)], [Strided(0, 512), Strided(512, 512)]], ids=str
)
def test_a_torn_write_leaves_the_first_part_and_is_an_error(target: list[Strided]) -> None:
    plane = ShmDataPlane("torn")
    try:
        guarded = GuardedDataPlane(plane, Tearing())
        guarded.create_region("a", 1024)
        guarded.create_region("b", 1024)
        np.frombuffer(guarded.view("a"), np.uint8)[:] = 1
        with pytest.raises(DataPlaneError, match="torn"):
            guarded.write("a", [Strided(0, piece.size_bytes) for piece in target], "b", target)
        assert bytes(guarded.view("b")) == b"\1" * 256 + b"\0" * 768
        assert guarded.copy("a", [Strided(0, 1024)], "b", [Strided(0, 1024)]) == 1024
        assert guarded.read("a", [Strided(0, 8)], "b", [Strided(0, 8)]) == 8
    finally:
        plane.close()
