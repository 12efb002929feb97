"""The messaging benchmark measures something on both sides, and says how they compare."""

from __future__ import annotations

from scripts.bench_messaging import run


def test_both_sides_are_measured_and_compared() -> None:
    report = run(round_trips=100, one_way=2000, repeats=1)
    for side in ("actors", "bare"):
        assert 0 < report[side]["round_trip_us_median"] <= report[side]["round_trip_us_p99"]
        assert report[side]["one_way_per_s"] > 0
    assert report["payload_bytes"] > 100
    assert report["round_trip_ratio"] > 0 and report["one_way_ratio"] > 0
