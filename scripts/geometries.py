"""Cache geometries of known models, for plans and benchmarks without a checkpoint."""

from __future__ import annotations

from messages.layout import ModelGeometry

ATTENTION_EVERY = 4
"""Every fourth layer of these models is full attention, the others are gated delta-net."""


def _qwen(
    name: str,
    *,
    layers: int,
    attention_heads: int,
    kv_heads: int,
    key_heads: int = 16,
    value_heads: int = 16,
) -> ModelGeometry:
    return ModelGeometry(
        model_fingerprint=name,
        layer_kinds=tuple("attention" if (i + 1) % ATTENTION_EVERY == 0 else "delta" for i in range(layers)),
        attention_heads=attention_heads,
        kv_heads=kv_heads,
        head_dim=256,
        linear_key_heads=key_heads,
        linear_value_heads=value_heads,
        linear_key_dim=128,
        linear_value_dim=128,
        conv_kernel=4,
        draft_layers=1,
        cache_dtype="bfloat16",
        max_model_len=262_144,
    )


GEOMETRIES: dict[str, ModelGeometry] = {
    "qwen3.5-2b": _qwen("qwen3.5-2b", layers=24, attention_heads=8, kv_heads=2),
    "qwen3.5-4b": _qwen("qwen3.5-4b", layers=32, attention_heads=16, kv_heads=4, value_heads=32),
    "tiny": ModelGeometry(
        model_fingerprint="tiny",
        layer_kinds=("delta", "attention", "delta", "attention"),
        attention_heads=4,
        kv_heads=2,
        head_dim=16,
        linear_key_heads=4,
        linear_value_heads=8,
        linear_key_dim=8,
        linear_value_dim=16,
        conv_kernel=4,
        draft_layers=1,
        cache_dtype="float32",
        max_model_len=8192,
    ),
}
"""Name → geometry. ``qwen3.5-2b`` is the reference geometry of the benchmarks."""
