"""The MTP head written down naively, with ``transformers``' own layers: one sequence, no cache, no batching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.worker.harness import Reference


class DraftOracle:
    """Greedy drafts for a sequence, computed from scratch each time."""

    def __init__(self, model_dir: Path, reference: Reference) -> None:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

        self._model = reference.model
        config = self._model.config
        weights = load_file(str(model_dir / "model.safetensors"))
        attention_layer = config.layer_types.index("full_attention")
        self._layer = Qwen3_5DecoderLayer(config, attention_layer).eval()
        prefix = "mtp.layers.0."
        self._layer.load_state_dict(
            {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        )
        self._fusion = weights["mtp.fc.weight"]

        def norm(name: str) -> Qwen3_5RMSNorm:
            module = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            module.load_state_dict({"weight": weights[name]})
            return module

        self._norm_embedding = norm("mtp.pre_fc_norm_embedding.weight")
        self._norm_hidden = norm("mtp.pre_fc_norm_hidden.weight")
        self._norm = norm("mtp.norm.weight")

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` drafts that follow ``tokens``, whose last token the target has not computed yet."""
        hidden = self._model.model(input_ids=torch.tensor([list(tokens[:-1])]), use_cache=False).last_hidden_state
        following = list(tokens[1:])
        for _ in range(count):
            output = self._body(hidden, following)
            best = int((output[0, -1] @ self._model.lm_head.weight.T).argmax())
            following.append(best)
            hidden = torch.cat((hidden, output[:, -1:]), 1)
        return following[len(tokens) - 1 :]

    def _body(self, hidden: torch.Tensor, following: Sequence[int]) -> torch.Tensor:
        embedded = self._model.model.embed_tokens(torch.tensor([list(following)]))
        joined = torch.cat((self._norm_embedding(embedded), self._norm_hidden(hidden)), -1)
        x = joined @ self._fusion.T
        length = x.shape[1]
        positions = torch.arange(length).expand(3, 1, length)
        rotary = self._model.model.rotary_emb(x, positions)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        x = self._layer(x, position_embeddings=rotary, attention_mask=mask)
        return self._norm(x[0] if isinstance(x, tuple) else x)
