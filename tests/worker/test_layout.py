"""Where each rank's caches lie: spans, strides and capacities, as values a person can check by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.runtime.config import ConfigError
from actors.worker.layout import (
    TENSOR_ALIGNMENT_BYTES,
    block_bytes,
    block_count_for,
    build_layout,
    kv_head_span,
    slot_bytes,
)
from messages.layout import ModelGeometry, Span, TensorLayout

QWEN_2B = ModelGeometry(
    model_fingerprint="f",
    layer_kinds=("delta", "delta", "delta", "attention") * 6,
    attention_heads=8,
    kv_heads=2,
    head_dim=256,
    linear_key_heads=16,
    linear_value_heads=16,
    linear_key_dim=128,
    linear_value_dim=128,
    conv_kernel=4,
    draft_layers=1,
    cache_dtype="bfloat16",
)


def layout(tp_size: int, rank: int, speculative_tokens: int = 3, **options: bool) -> dict[str, TensorLayout]:
    tensors, _ = build_layout(
        QWEN_2B,
        tp_size,
        rank,
        block_size=128,
        block_count=10,
        slot_count=4,
        speculative_tokens=speculative_tokens,
        **options,
    )
    return {tensor.name: tensor for tensor in tensors}


def test_tensors_lie_in_one_region_aligned_and_apart() -> None:
    tensors, total = build_layout(QWEN_2B, 2, 1, block_size=128, block_count=10, slot_count=4, speculative_tokens=3)
    end = 0
    for tensor in tensors:
        assert tensor.base_bytes % TENSOR_ALIGNMENT_BYTES == 0
        assert tensor.base_bytes >= end
        assert tensor.row_stride_bytes == tensor.row_units * tensor.unit_bytes
        assert tensor.resource_stride_bytes == tensor.rows_per_resource * tensor.row_stride_bytes
        end = tensor.base_bytes + tensor.resource_count * tensor.resource_stride_bytes
    assert total >= end and total % TENSOR_ALIGNMENT_BYTES == 0
    assert len(tensors) == 18 * 2 + 6 * 2 + 2


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "spans"),
    [
        (2, 1, [(0, 2)]),
        (2, 2, [(0, 1), (1, 1)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (4, 8, [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (3, 1)]),
        (8, 2, [(0, 4), (4, 4)]),
    ],
)
def test_kv_heads_are_contiguous_by_rank_or_shared(kv_heads: int, tp_size: int, spans: list[tuple[int, int]]) -> None:
    assert [kv_head_span(kv_heads, tp_size, rank) for rank in range(tp_size)] == spans


def test_conv_is_three_axes_in_one_row() -> None:
    conv = layout(4, 1)["target.0.CONV"]
    assert conv.spans == (
        Span(axis="Q", start=512, length=512, offset=0),
        Span(axis="K", start=512, length=512, offset=512),
        Span(axis="V", start=512, length=512, offset=1024),
    )
    assert dict(conv.axis_units) == {"Q": 2048, "K": 2048, "V": 2048}
    assert (conv.rows_per_resource, conv.live_rows, conv.row_units) == (3 + 3, 3, 1536)


def test_ssm_rows_are_checkpoints_and_the_stride_is_one_more_than_the_drafts() -> None:
    for speculative_tokens in (0, 1, 3, 8):
        tensors = layout(2, 0, speculative_tokens)
        ssm, conv = tensors["target.0.SSM"], tensors["target.0.CONV"]
        assert (ssm.rows_per_resource, ssm.live_rows) == (speculative_tokens + 1, 1)
        assert conv.rows_per_resource - conv.live_rows == speculative_tokens
        assert ssm.dtype == "float32" and ssm.unit_bytes == 128 * 128 * 4


def test_the_draft_exists_with_speculation_only_and_is_whole_when_replicated() -> None:
    assert "draft.0.KEY" not in layout(2, 0, 0)
    assert layout(2, 1)["draft.0.KEY"].spans == (Span(axis="kv_heads", start=1, length=1, offset=0),)
    replicated = layout(2, 1, draft_replicated=True)["draft.0.KEY"]
    assert replicated.spans == (Span(axis="kv_heads", start=0, length=2, offset=0),)


def test_the_reference_prompt_takes_what_the_design_says() -> None:
    tokens = 18_592
    per_token = block_bytes(QWEN_2B, 1, block_size=1)
    assert round(per_token * tokens / 1e6) == 228
    draft = block_bytes(QWEN_2B, 1, block_size=1, speculative_tokens=3) - per_token
    assert round(draft * tokens / 1e6) == 38
    assert 19e6 < slot_bytes(QWEN_2B, 1) < 21e6


def test_capacity_from_memory_leaves_room_for_slots_or_says_what_to_change() -> None:
    count = block_count_for(QWEN_2B, 2, block_size=16, slot_count=4, cache_memory_mb=512)
    used = count * block_bytes(QWEN_2B, 2, block_size=16) + 4 * slot_bytes(QWEN_2B, 2)
    assert used <= 512 << 20 < used + block_bytes(QWEN_2B, 2, block_size=16)
    with pytest.raises(ConfigError, match="raise cache_memory_mb or lower max_seqs_per_batch"):
        block_count_for(QWEN_2B, 1, block_size=16, slot_count=64, cache_memory_mb=512)


def test_heads_that_do_not_shard_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 attention heads do not divide by 3"):
        build_layout(QWEN_2B, 3, 0, block_size=16, block_count=1, slot_count=1)


def test_offsets_beyond_four_gigabytes_are_exact() -> None:
    tensors, total = build_layout(QWEN_2B, 1, 0, block_size=128, block_count=20_000, slot_count=1)
    assert total > 1 << 33
    assert tensors[-1].base_bytes + 20_000 * tensors[-1].resource_stride_bytes <= total


def test_layout_and_configuration_import_no_torch() -> None:
    code = (
        "import sys; import actors.worker.layout, actors.worker.model.config, actors.worker.settings; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
