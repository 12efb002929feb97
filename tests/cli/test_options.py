"""Options on the command line: every one is documented, typed, and refused by name when it is wrong."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import get_type_hints

import click
import msgspec
import pytest
from click.testing import CliRunner

from actors.runtime.config import ConfigError, Options
from actors.runtime.option_ranges import RANGES, check_ranges, flag_of
from scripts.cluster import ClusterError, check_options
from scripts.main import _report, main
from scripts.options import HELP, build_options, cluster_options


@click.command()
@cluster_options({"block_size": 32})
def show(options: Options) -> None:
    click.echo(msgspec.json.encode(options).decode())


def parse(*arguments: str) -> Options:
    result = CliRunner().invoke(show, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.output, type=Options)


def test_every_option_has_one_sentence_of_help() -> None:
    assert set(HELP) == {field.name for field in msgspec.structs.fields(Options)}


def test_a_flag_beats_the_config_file_and_the_file_beats_the_command_default(tmp_path: Path) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text('block-size = 64\nmax_seqs_per_batch = 7\ntopology = "P1/D1"\n')
    options = parse("--config", str(config), "--max-seqs-per-batch", "9")
    assert (options.block_size, options.max_seqs_per_batch, options.topology) == (64, 9, "P1/D1")
    assert parse().block_size == 32


def test_a_json_config_file_works_like_a_toml_one(tmp_path: Path) -> None:
    config = tmp_path / "cluster.json"
    config.write_text(json.dumps({"kv_cache_transfer_mode": "PULL"}))
    assert parse("--config", str(config)).kv_cache_transfer_mode == "PULL"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--enable-pd-parallel-shard-pull=false"], False),
        (["--enable-pd-parallel-shard-pull"], True),
        (["--enable-pd-parallel-shard-pull", "false", "--block-size", "8"], False),
    ],
)
def test_booleans_are_written_as_the_references_write_them(arguments: list[str], expected: bool) -> None:
    assert parse(*arguments).enable_pd_parallel_shard_pull is expected


@pytest.mark.parametrize(
    ("decode", "prefill", "named"),
    [
        (3, 0, "prefill_num_speculative_tokens 0 with num_speculative_tokens 3"),
        (9, -1, "--num-speculative-tokens 9 is out of range; allowed: 0 to 8"),
        (3, -2, "--prefill-num-speculative-tokens -2 is out of range; allowed: -1 to 8"),
    ],
)
def test_draft_depths_that_cannot_work_are_refused_at_the_start(decode: int, prefill: int, named: str) -> None:
    """C33."""
    options = Options(num_speculative_tokens=decode, prefill_num_speculative_tokens=prefill)
    with pytest.raises(ConfigError, match=named):
        check_options(options)


def test_prefill_instances_may_have_a_draft_depth_of_their_own() -> None:
    options = Options(num_speculative_tokens=3, prefill_num_speculative_tokens=1)
    check_options(options)
    assert [options.speculative_tokens_of(role) for role in ("PREFILL", "DECODE", "MIX")] == [1, 3, 3]
    assert Options(num_speculative_tokens=2).speculative_tokens_of("PREFILL") == 2


NUMBERS = [name for name, hint in get_type_hints(Options).items() if hint in (int, float)]


def test_every_number_among_the_options_has_a_range_and_its_default_lies_in_it() -> None:
    assert set(RANGES) == set(NUMBERS)
    check_ranges(Options())


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_its_range_ends_the_command_before_anything_starts(name: str) -> None:
    least, most = RANGES[name]
    for value in {int(least) - 1, int(most) + 1} if most < 2**62 else {int(least) - 1}:
        result = CliRunner().invoke(main, ["serve", flag_of(name), str(value)])
        assert result.exit_code == 2
        assert result.output.startswith(f"kvferry: {flag_of(name)} {value}")
        assert "is out of range; allowed: " in result.output


def test_a_hang_timeout_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--hang-timeout-ms 900 is too short for --heartbeat-ms 500; .* at least 1000"
    ):
        check_options(Options(hang_timeout_ms=900))


def test_a_directory_with_the_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "front.1.trace").touch()
    result = CliRunner().invoke(main, ["generate", "--prompt", "x", "--trace-dir", str(tmp_path)])
    assert (result.exit_code, "holds another run's trace" in result.output) == (2, True), result.output


def test_a_cluster_that_does_not_come_up_ends_the_command_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*arguments: object) -> None:
        raise ClusterError("d0.r0 did not start")

    monkeypatch.setattr("scripts.generate.generate", generate)
    result = CliRunner().invoke(main, ["generate", "--prompt", "x"])
    assert (result.exit_code, result.output) == (1, "kvferry: d0.r0 did not start\n")


def test_a_path_that_cannot_be_written_ends_the_command_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*arguments: object) -> None:
        Path("/proc/none").mkdir()

    monkeypatch.setattr("scripts.generate.generate", generate)
    result = CliRunner().invoke(main, ["generate", "--prompt", "x"])
    assert (result.exit_code, result.output) == (1, "kvferry: /proc/none: No such file or directory\n")


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "made"

    def generate(*arguments: object) -> None:
        place.touch()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            place.unlink()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("scripts.generate.generate", generate)
    result = CliRunner().invoke(main, ["generate", "--prompt", "x"])
    assert (result.exit_code, "Aborted" in result.output, place.exists()) == (1, True, False)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("size", "count"), [("staging_mb", "staging_leases"), ("cache_memory_mb", "block_count")])
def test_of_two_options_that_stand_for_each_other_one_must_be_given(size: str, count: str) -> None:
    check_ranges(Options(**{size: 64, count: 0}))
    check_ranges(Options(**{size: 0, count: 4}))
    with pytest.raises(ConfigError, match=f"{flag_of(size)} and {flag_of(count)} are both 0"):
        check_ranges(Options(**{size: 0, count: 0}))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('dtype = "fp16"', "--dtype`; allowed: auto, float32, bfloat16"),
        ("blok_size = 3", "blok_size"),
        ("{", "cluster.toml"),
    ],
)
def test_a_config_file_that_is_wrong_is_named_with_what_is_allowed(tmp_path: Path, text: str, named: str) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text(text)
    result = CliRunner().invoke(main, ["serve", "--config", str(config)])
    assert result.exit_code == 2
    assert str(config) in result.output and named in result.output


def test_an_unknown_option_in_a_config_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="blok_size"):
        build_options({"blok_size": 3})


def test_a_value_of_the_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        build_options({"block_size": "many"})


@pytest.mark.parametrize(
    "command", [["--help"], ["serve", "--help"], ["demo", "--help"], ["bench", "handoff", "--help"]]
)
def test_help_teaches_without_importing_torch(command: list[str]) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_generate_without_a_prompt_is_refused_with_what_to_give() -> None:
    result = CliRunner().invoke(main, ["generate"])
    assert result.exit_code == 2
    assert "--prompt" in result.output


def test_a_report_with_tables_in_it_is_printed_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _report({"rate": 2.0, "depths": [{"depth": 1, "tokens_per_s": 12.345678}], "why": {"a": "b"}}, False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["rate", "2"], ["depths"], ["depth", "1"], ["tokens_per_s", "12.35"], ["why"], ["a", "b"]]
