"""Reading weights: slices only, both prefixes, index files; and broken checkpoints named by tensor and file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.runtime.config import ConfigError
from actors.worker.model.checkpoint import INDEX_FILE, Checkpoint
from actors.worker.model.config import load_config
from actors.worker.model.weights import load_weights, vocab_range
from messages.requests import SamplingParams
from tests.worker.harness import TINY, LocalEngine, prompts_of, tiny_checkpoint

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def copy(model_dir: Path, target: Path) -> Path:
    shutil.copytree(model_dir, target)
    return target


def tokens_of(folder: Path) -> list[list[int]]:
    with LocalEngine(folder) as engine:
        return [result.token_ids for result in engine.generate(prompts_of([9, 30]), GREEDY)]


def load(folder: Path, tp_size: int = 1, rank: int = 0) -> object:
    return load_weights(
        load_config(folder),
        tp_size=tp_size,
        rank=rank,
        dtype=torch.float32,
        device=torch.device("cpu"),
        with_draft=True,
        draft_replicated=False,
    )


def test_both_prefixes_and_split_files_give_the_same_model(model_dir: Path, tmp_path: Path) -> None:
    expected = tokens_of(model_dir)
    assert tokens_of(tiny_checkpoint(tmp_path / "wrapped", prefix="model.language_model.")) == expected
    split = copy(model_dir, tmp_path / "split")
    tensors = load_file(str(split / "model.safetensors"))
    (split / "model.safetensors").unlink()
    tensors["model.visual.patch_embed.weight"] = torch.zeros(3)
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"model-{index}.safetensors"
        save_file({name: tensors[name] for name in part}, str(split / file))
        weight_map.update({name: file for name in part})
    (split / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert tokens_of(split) == expected


def test_embeddings_of_their_own_for_input_and_output(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.worker.harness import Reference

    folder = tiny_checkpoint(tmp_path / "untied", sizes=replace(TINY, tied_embeddings=False))
    reference = Reference(folder)
    with LocalEngine(folder, 2) as engine:
        for prompt, result in zip(prompts_of([9, 30]), engine.generate(prompts_of([9, 30]), GREEDY), strict=True):
            reference.assert_greedy(prompt, result.token_ids)


def test_a_slice_reads_rows_in_the_order_asked_and_columns(model_dir: Path) -> None:
    with Checkpoint(model_dir) as checkpoint:
        whole = checkpoint.read("layers.0.mlp.up_proj.weight", (96, 64), torch.float32)
        part = checkpoint.read("layers.0.mlp.up_proj.weight", (96, 64), torch.float32, rows=[(90, 96), (3, 5)])
        assert torch.equal(part, torch.cat((whole[90:96], whole[3:5])))
        columns = checkpoint.read("layers.0.mlp.up_proj.weight", (96, 64), torch.float32, columns=(16, 32))
        assert torch.equal(columns, whole[:, 16:32])


def test_a_missing_tensor_and_a_wrong_shape_are_named(model_dir: Path, tmp_path: Path) -> None:
    folder = copy(model_dir, tmp_path / "c")
    tensors = load_file(str(folder / "model.safetensors"))
    gone = dict(tensors)
    del gone["model.layers.2.linear_attn.A_log"]
    save_file(gone, str(folder / "model.safetensors"))
    with pytest.raises(ConfigError, match=r"layers\.2\.linear_attn\.A_log"):
        load(folder)
    tensors["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: tensor model\.layers\.3\.self_attn\.o_proj\.weight has"
    ):
        load(folder)


def test_a_file_cut_short_is_named(model_dir: Path, tmp_path: Path) -> None:
    folder = copy(model_dir, tmp_path / "c")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors is broken or cut short"):
        load(folder)


def test_an_index_that_points_nowhere_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = copy(model_dir, tmp_path / "c")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"norm\.weight in gone\.safetensors, which is missing"):
        load(folder)


def test_a_tensor_stored_twice_without_an_index_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = copy(model_dir, tmp_path / "c")
    save_file({"model.norm.weight": torch.zeros(TINY.hidden_size)}, str(folder / "second.safetensors"))
    with pytest.raises(ConfigError, match=r"norm\.weight is stored twice"):
        load(folder)


def test_loading_reports_progress_up_to_the_end(model_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(
        load_config(model_dir),
        tp_size=2,
        rank=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        with_draft=True,
        draft_replicated=False,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (6, 6) and [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(320, 4), (321, 4), (7, 4), (5, 4)])
def test_the_vocabulary_is_covered_once(vocab_size: int, tp_size: int) -> None:
    ranges = [vocab_range(vocab_size, tp_size, rank) for rank in range(tp_size)]
    assert [token for first, last in ranges for token in range(first, last)] == list(range(vocab_size))
