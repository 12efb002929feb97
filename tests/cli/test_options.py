"""Options on the command line: every one is documented, typed, and refused by name when it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from actors.runtime.config import ConfigError, Options
from scripts.cluster import check_options
from scripts.main import main
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
        (9, -1, "num_speculative_tokens 9 is out of range; allowed: 0 to 8"),
        (3, -2, "prefill_num_speculative_tokens -2 is out of range; allowed: -1 to 8"),
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
