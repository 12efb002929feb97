"""``kvferry bench accuracy``: the same prompts on two topologies, compared token by token, and perplexity on both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.config import Options
from scripts.client import CONCURRENCY_MAX, RequestError, complete_all
from scripts.cluster import Cluster
from scripts.compare import first_difference, tie_tolerance

WAITING_PER_SLOT = 2
"""Requests under way at once, per sequence that may run: enough to keep a cluster busy, few enough to wait briefly."""


def _answers(options: Options, payloads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    concurrency = min(CONCURRENCY_MAX, WAITING_PER_SLOT * options.max_seqs_per_batch)
    with Cluster(options) as cluster:
        answers = complete_all(cluster.url, payloads, concurrency)
    good = []
    for index, answer in enumerate(answers):
        if isinstance(answer, RequestError):
            raise RequestError(answer.status, f"prompt {index} on {options.topology}: {answer.text}")
        good.append(answer)
    return good


def _traced_in(options: Options, name: str) -> Options:
    """With a trace directory of its own, if there is to be a trace."""
    folder = str(Path(options.trace_dir) / name) if options.trace_dir else ""
    return msgspec.structs.replace(options, trace_dir=folder)


def top_two_gaps(answer: dict[str, Any]) -> list[float]:
    """Per generated token, the gap between the two best log-probabilities of an answer asked with ``logprobs=2``."""
    gaps = []
    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        best = sorted(top.values(), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return gaps


def perplexity(answer: dict[str, Any]) -> float:
    """exp of the mean negative log-probability of the prompt's tokens (the first has none)."""
    token_ids = answer["choices"][0]["prompt_token_ids"]
    entries = answer["choices"][0]["prompt_logprobs"]
    losses = [
        -entry[str(token)]["logprob"] for token, entry in zip(token_ids, entries, strict=True) if entry is not None
    ]
    return math.exp(sum(losses) / len(losses))


def run(options: Options, against: str, prompts: Sequence[str], max_tokens: int, text: str) -> dict[str, Any]:
    """Run ``prompts`` greedily on ``options.topology`` and on ``against`` (the reference), both undisturbed.

    Returns counts of equal outputs (exactly, and by the tie rule), every first difference with the reference's
    top-two gap, and the perplexity of ``text`` on both. Raises ``RequestError`` when a request fails, and
    ``ClusterError``.
    """
    asked = {"max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    payloads: list[dict[str, Any]] = [asked | {"prompt": prompt, "logprobs": 2} for prompt in prompts]
    payloads.append(asked | {"prompt": text, "max_tokens": 1, "prompt_logprobs": 0})
    ours = _answers(_traced_in(options, "measured"), payloads)
    theirs = _answers(msgspec.structs.replace(_traced_in(options, "against"), topology=against), payloads)
    differences = []
    ties = 0
    tolerance = tie_tolerance(options)
    for index, (answer, reference) in enumerate(zip(ours[:-1], theirs[:-1], strict=True)):
        difference = first_difference(
            reference["choices"][0]["token_ids"], answer["choices"][0]["token_ids"], top_two_gaps(reference)
        )
        if difference is not None:
            tie = difference.reference_gap < tolerance
            ties += tie
            differences.append({"index": index, "tie": tie} | difference._asdict())
    return {
        "topology": options.topology,
        "against": against,
        "prompts": len(prompts),
        "equal": len(prompts) - len(differences),
        "equal_by_tie_rule": len(prompts) - len(differences) + ties,
        "tie_tolerance": tolerance,
        "differences": differences,
        "perplexity_tokens": ours[-1]["usage"]["prompt_tokens"] - 1,
        "perplexity": perplexity(ours[-1]),
        "perplexity_against": perplexity(theirs[-1]),
    }
