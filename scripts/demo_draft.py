"""The MTP head while it is trained, and how well it drafts.

The maths is the one the server runs (see ``model.md`` of the design): draft step 1 at position ``t`` sees
``fc(concat(norm_e(embed(token[t+1])), norm_h(hidden[t])))`` and guesses ``token[t+2]``; draft step ``j`` takes the
normed output of step ``j-1`` as its hidden state and ``token[t+j]`` as its token.

While decoding, the draft's key/value cache holds step-1 entries (made from true hidden states) for every earlier
position, and steps 2… only append their own. Training follows that exactly: a step-``j`` query attends to the step-1
entries up to ``t`` and to the entries of steps ``2…j`` that belong to the same ``t``.

Shapes: B rows, T tokens, H heads, D head dim, C hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
    apply_rotary_pos_emb,
)


class DraftHead(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """The ``mtp.*`` weights of a checkpoint; embedding and ``lm_head`` are the target's and passed in."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        attention_layer = config.layer_types.index("full_attention")
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, attention_layer)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=config.initializer_range)

    def chain(self, embeddings_BTC: Tensor, hidden_BTC: Tensor, steps: int) -> list[Tensor]:
        """Hidden states of draft steps 1…``steps``; row ``t`` of step ``j`` (of ``T-j``) guesses token ``t+j+1``."""
        length = embeddings_BTC.shape[1]
        hidden = hidden_BTC
        cache: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(1, steps + 1):
            count = length - step
            fused = torch.cat(
                [self.pre_fc_norm_embedding(embeddings_BTC[:, step:]), self.pre_fc_norm_hidden(hidden[:, :count])], -1
            )
            hidden = self.norm(self._layer(self.fc(fused), step - 1, cache))
            outputs.append(hidden)
        return outputs

    def _layer(self, x: Tensor, position_offset: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        layer = self.layers[0]
        x = x + self._attention(layer.input_layernorm(x), position_offset, cache)
        output: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return output

    def _attention(self, x: Tensor, position_offset: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        attention = self.layers[0].self_attn
        rows, count, _ = x.shape
        dim, groups = attention.head_dim, attention.num_key_value_groups
        query, gate = attention.q_proj(x).view(rows, count, -1, 2 * dim).chunk(2, dim=-1)
        query = attention.q_norm(query).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(x).view(rows, count, -1, dim)).transpose(1, 2)
        value = attention.v_proj(x).view(rows, count, -1, dim).transpose(1, 2)
        positions = torch.arange(position_offset, position_offset + count).expand(rows, count)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(x, positions))
        cache.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        mixed = _attend(query, [(k[:, :, :count], v[:, :, :count]) for k, v in cache], attention.scaling)
        mixed = mixed.transpose(1, 2).reshape(rows, count, -1) * torch.sigmoid(gate.reshape(rows, count, -1))
        output: Tensor = attention.o_proj(mixed)
        return output


def _attend(query_BHTD: Tensor, cache: list[tuple[Tensor, Tensor]], scaling: float) -> Tensor:
    """Causal attention to the step-1 entries plus, for each later step, the entry of the same row."""
    first_key, first_value = cache[0]
    if len(cache) == 1:
        return F.scaled_dot_product_attention(query_BHTD, first_key, first_value, is_causal=True, scale=scaling)
    count = query_BHTD.shape[2]
    blocked = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = [(query_BHTD @ first_key.transpose(-1, -2)).masked_fill(blocked, float("-inf"))]
    scores += [(query_BHTD * key).sum(-1, keepdim=True) for key, _ in cache[1:]]
    weights = torch.softmax(torch.cat(scores, dim=-1) * scaling, dim=-1)
    mixed = weights[..., :count] @ first_value
    for index, (_, value) in enumerate(cache[1:]):
        mixed = mixed + weights[..., count + index, None] * value
    return mixed


@dataclass(frozen=True)
class Acceptance:
    """Greedy drafting measured on generated text: how often draft ``j`` is right given that those before it are."""

    by_position: tuple[float, ...]
    tokens_per_step: float
    prompts: int
    tokens: int


def measure_acceptance(
    model: Any, head: DraftHead, prompts: list[list[int]], new_tokens: int, steps: int
) -> Acceptance:
    """Generate greedily after each prompt and walk the text as a speculative server would."""
    tried, accepted = [0] * steps, [0] * steps
    step_count = token_count = 0
    for prompt in prompts:
        ids, drafts = _generate_and_draft(model, head, prompt, new_tokens + steps + 1, steps)
        at = len(prompt) - 1  # the position whose hidden state drafts next
        while at < len(prompt) - 1 + new_tokens:
            run = 0
            while run < steps:
                tried[run] += 1
                if drafts[run][at] != ids[at + run + 2]:
                    break
                accepted[run] += 1
                run += 1
            step_count += 1
            token_count += run + 1
            at += run + 1
    by_position = tuple(a / max(1, t) for a, t in zip(accepted, tried, strict=True))
    return Acceptance(by_position, token_count / max(1, step_count), len(prompts), token_count)


def _generate_and_draft(
    model: Any, head: DraftHead, prompt: list[int], new_tokens: int, steps: int
) -> tuple[list[int], list[list[int]]]:
    """The prompt continued greedily, and for each draft step the guesses at every position of that text."""
    start = torch.tensor([prompt])
    with torch.no_grad():
        ids = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        hidden = model.model(ids).last_hidden_state
        outputs = head.chain(model.model.embed_tokens(ids), hidden, steps)
        return ids[0].tolist(), [model.lm_head(output)[0].argmax(-1).tolist() for output in outputs]
