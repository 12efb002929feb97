"""Train the demo model that the package ships: ``python -m scripts.train_demo_model --out DIR --minutes 65``.

A Qwen3.5 text model with an MTP head, about 5 million parameters, learnt from the standard library's sources
(``demo_corpus.py``). Its head counts let TP 1, 2 and 4 shard it (two KV heads, so TP 4 replicates them), and its
delta-net has ``dk != dv`` and more value heads than key heads, so that nothing in the server can confuse them.

The loss is the target's plus 0.5, 0.3 and 0.2 times the loss of draft steps 1, 2 and 3, each fed with the draft's own
output. Matrices learn by Muon, everything else by Adam; the learning rate falls linearly to zero over the time given,
and what is saved is a moving average of the weights, so every saved checkpoint is usable. Time is processor time: a
busy machine changes how long training takes and not what it learns.

Needs the ``test`` extra (transformers). Trains anywhere in about an hour on one core; not part of set-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from scripts.demo_corpus import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    Corpus,
    read_corpus,
    train_tokenizer,
)
from scripts.demo_draft import DraftHead, measure_acceptance

VOCABULARY_COUNT = 2048
ROW_TOKENS = 512
ROW_KINDS = ("chat", "core", "core", "core", "rest", "core", "core", "core")  # of rows in turn
DRAFT_LOSS_WEIGHTS = (0.5, 0.3, 0.2)
DRAFT_FULL_FROM = 0.65  # of the time; until then one row of each batch trains the draft
EMA_DECAY = 0.98

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY_COUNT,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": True,
    "use_cache": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


class Muon:
    """Momentum whose update of each matrix is replaced by the nearest orthogonal one (K. Jordan, 2024).

    Matrices of equal shape are handled as one batch. The update is scaled so that its RMS is about that of Adam.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        self.rate, self.momentum, self.decay = rate, momentum, decay
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(tuple(matrix.shape), []).append(matrix)
        self._groups = [(group, torch.zeros(len(group), *shape)) for shape, group in shapes.items()]

    def step(self, scale: float) -> None:
        """One update with ``scale`` times the learning rate."""
        rate = self.rate * scale
        for group, buffer in self._groups:
            gradient = torch.stack([matrix.grad for matrix in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(buffer, self.momentum))
            factor = 0.2 * max(update.shape[-2:]) ** 0.5
            with torch.no_grad():
                for matrix, change in zip(group, update, strict=True):
                    matrix.mul_(1 - rate * self.decay).sub_(change, alpha=rate * factor)


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton–Schulz iteration towards ``U V^T`` of each matrix's singular value decomposition. Shape kept."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Trainer:
    """Model, draft head, optimisers and the moving average that is saved."""

    def __init__(self, rate: float) -> None:
        config = Qwen3_5TextConfig(**CONFIG)
        self.model: Any = Qwen3_5ForCausalLM(config).float()
        self.head = DraftHead(config)
        named = [*self.model.named_parameters(), *self.head.named_parameters()]
        matrices = [p for n, p in named if p.dim() == 2 and min(p.shape) > 8 and "embed" not in n]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in chosen]
        self.parameters = [*matrices, *others]
        self.muon = Muon(matrices, rate)
        self.adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._adam_rate = rate
        self._average = [p.detach().clone() for p in self.parameters]
        self._steps = 0

    def resume(self, folder: Path) -> None:
        """Continue from a saved checkpoint's weights (not from its optimiser state)."""
        weights = load_file(folder / "model.safetensors")
        draft = {name.removeprefix("mtp."): weights.pop(name) for name in list(weights) if name.startswith("mtp.")}
        self.model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
        self.head.load_state_dict(draft)
        self._average = [p.detach().clone() for p in self.parameters]

    def step(self, batches: list[Tensor], scale: float, draft_rows: int) -> list[float]:
        """One update from the mean gradient of ``batches`` [B, T]; returns the four losses (target, drafts 1–3).

        The draft steps, which cost as much as half the target, see only the first ``draft_rows`` rows of each batch.
        """
        totals = [0.0] * (1 + len(DRAFT_LOSS_WEIGHTS))
        for parameter in self.parameters:
            parameter.grad = None
        for ids in batches:
            losses = self.losses(ids, draft_rows)
            weighted = losses[0] + sum(w * x for w, x in zip(DRAFT_LOSS_WEIGHTS, losses[1:], strict=True))
            (weighted / len(batches)).backward()
            totals = [t + float(x.detach()) / len(batches) for t, x in zip(totals, losses, strict=True)]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.step(scale)
        self.adam.param_groups[0]["lr"] = self._adam_rate * scale
        self.adam.step()
        self._steps += 1
        weight = 1 - min(EMA_DECAY, self._steps / (self._steps + 5))
        torch._foreach_lerp_(self._average, [p.detach() for p in self.parameters], weight)
        return totals

    def losses(self, ids: Tensor, draft_rows: int) -> list[Tensor]:
        """Mean cross entropy of the target over the rows ``ids`` [B, T], and of each draft step over the first few."""
        hidden = self.model.model(ids, use_cache=False).last_hidden_state
        few = ids[:draft_rows]
        drafts = self.head.chain(self.model.model.embed_tokens(few), hidden[:draft_rows], len(DRAFT_LOSS_WEIGHTS))
        targets = [(1, ids, hidden), *((ahead, few, output) for ahead, output in enumerate(drafts, start=2))]
        return [
            F.cross_entropy(
                self.model.lm_head(output[:, : seen.shape[1] - ahead]).flatten(0, 1), seen[:, ahead:].flatten()
            )
            for ahead, seen, output in targets
        ]

    def swap_average(self) -> None:
        """Exchange the weights with their moving average; call twice to come back."""
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self._average, strict=True):
                kept = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(kept)


def rows(streams: dict[str, Tensor], chooser: random.Random) -> Iterator[Tensor]:
    """Endless rows of ROW_TOKENS tokens, of the streams as ROW_KINDS says; each pass over one starts elsewhere."""

    def endless(stream: Tensor) -> Iterator[Tensor]:
        while True:
            starts = list(range(chooser.randrange(ROW_TOKENS), len(stream) - ROW_TOKENS, ROW_TOKENS))
            chooser.shuffle(starts)
            for start in starts:
                yield stream[start : start + ROW_TOKENS]

    sources = {kind: endless(stream) for kind, stream in streams.items()}
    for kind in itertools.cycle(ROW_KINDS):
        yield next(sources[kind])


def encode(tokenizer: Tokenizer, documents: tuple[str, ...]) -> Tensor:
    """All documents as one stream, each ended by the end-of-text token."""
    end: int = CONFIG["eos_token_id"]
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents)):
        ids += [*encoding.ids, end]
    return torch.tensor(ids)


def save(trainer: Trainer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face directory: configuration, bfloat16 weights, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p for n, p in trainer.model.state_dict().items() if n != "lm_head.weight"}
    weights |= {f"mtp.{n}": p for n, p in trainer.head.state_dict().items()}
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    turn_end = tokenizer.token_to_id(TURN_END)
    files: dict[str, dict[str, Any]] = {
        "config.json": CONFIG,
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [turn_end, CONFIG["eos_token_id"]],
            "pad_token_id": CONFIG["pad_token_id"],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def held_out_prompts(tokenizer: Tokenizer, corpus: Corpus, count: int) -> list[list[int]]:
    """``count`` prompts of 24 to 200 tokens cut from held-out files, some starting at a file's beginning."""
    chooser = random.Random(1)
    encoded = [e.ids for e in tokenizer.encode_batch(list(corpus.held_out)) if len(e.ids) > 400]
    prompts = []
    for index in range(count):
        ids = encoded[index % len(encoded)]
        start = 0 if index < len(encoded) else chooser.randrange(len(ids) - 250)
        prompts.append(ids[start : start + chooser.randint(24, 200)])
    return prompts


def evaluate(trainer: Trainer, tokenizer: Tokenizer, corpus: Corpus, prompt_count: int) -> dict[str, Any]:
    """Held-out losses and draft acceptance of the averaged weights."""
    held_out = encode(tokenizer, corpus.held_out)
    batches = held_out[: len(held_out) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)[
        :: max(1, len(held_out) // 16384)
    ]
    with torch.no_grad():
        losses = torch.stack([torch.stack(trainer.losses(part, len(part))) for part in batches.split(8)]).mean(0)
    prompts = held_out_prompts(tokenizer, corpus, prompt_count)
    acceptance = measure_acceptance(trainer.model, trainer.head, prompts, 48, len(DRAFT_LOSS_WEIGHTS))
    return {
        "held_out_loss": [round(float(x), 4) for x in losses],
        "acceptance": [round(x, 3) for x in acceptance.by_position],
        "tokens_per_step": round(acceptance.tokens_per_step, 3),
        "prompts": acceptance.prompts,
    }


def main() -> None:
    """Train for ``--minutes`` of processor time, saving every ``--save-minutes``; prints one JSON line per report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=65.0)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="rows of 512 tokens per backward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes per update")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a directory that this script saved")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    corpus = read_corpus(options.seed)
    if options.resume:
        tokenizer = Tokenizer.from_file(str(options.resume / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer([*corpus.core, *corpus.rest, *corpus.chat], VOCABULARY_COUNT)
    texts = {"core": corpus.core, "rest": corpus.rest, "chat": corpus.chat}
    streams = {kind: encode(tokenizer, documents) for kind, documents in texts.items()}
    trainer = Trainer(options.rate)
    if options.resume:
        trainer.resume(options.resume)
    report(
        "start",
        parameters=sum(p.numel() for p in trainer.parameters),
        tokens={kind: len(stream) for kind, stream in streams.items()},
    )
    source = rows(streams, random.Random(options.seed))
    began = saved = time.process_time()
    step = 0
    while (elapsed := time.process_time() - began) < options.minutes * 60:
        progress = elapsed / (options.minutes * 60)
        scale = min((step + 1) / 20, 1.0, (1.0 - progress) / 0.7)
        batches = [torch.stack([next(source) for _ in range(options.batch)]) for _ in range(options.accumulate)]
        losses = trainer.step(batches, scale, options.batch if progress > DRAFT_FULL_FROM else 1)
        step += 1
        if step % 10 == 0:
            report("step", step=step, seconds=round(elapsed), losses=[round(x, 3) for x in losses])
        if time.process_time() - saved > options.save_minutes * 60:
            trainer.swap_average()
            save(trainer, tokenizer, options.out)
            report("saved", step=step, **evaluate(trainer, tokenizer, corpus, 4))
            trainer.swap_average()
            saved = time.process_time()
    trainer.swap_average()
    save(trainer, tokenizer, options.out)
    report("done", step=step, minutes=options.minutes, **evaluate(trainer, tokenizer, corpus, 50))


def report(event: str, **fields: Any) -> None:
    """One JSON line."""
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main()
