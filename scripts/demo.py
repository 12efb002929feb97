"""``kvferry demo``: the story of a hand-off, told by a real cluster, and the proof that nothing was lost on the way."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from actors.runtime.config import Options
from scripts.bench_accuracy import top_two_gaps
from scripts.client import complete_all, open_client, stream
from scripts.cluster import Cluster
from scripts.compare import equal_by_tie_rule, tie_tolerance
from scripts.demo_prompts import DEMO_PROMPTS
from scripts.trace_commands import sequence_text

REFERENCE_TOPOLOGY = "TP1"


class Completion(msgspec.Struct):
    """What one streamed request delivered."""

    prompt: str
    token_ids: list[int] = []
    text: str = ""
    finish_reason: str = ""
    request_id: str = ""
    measured: dict[str, Any] = {}


def run(options: Options, max_tokens: int) -> int:
    """Tell the story on ``options.topology``; returns the exit status (0: both proofs hold)."""
    console = Console(highlight=False)
    prompts = list(DEMO_PROMPTS[:4])
    asked = {"max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as trace_dir:
        traced = msgspec.structs.replace(options, port=0, verify_handoffs=True, trace_dir=trace_dir)
        with Cluster(traced) as cluster:
            console.print(f"\n[bold]1. Four completions, prefilled and decoded on {options.topology}[/bold]")
            completions = asyncio.run(_stream_all(cluster.url, prompts, asked, console))
        console.print("\n[bold]2. Where their time went[/bold]")
        for completion in completions:
            console.print(perf_line(completion.measured), markup=False, soft_wrap=True)
        console.print("\n[bold]3. Bytes moved per cache role[/bold]")
        _print_bytes(completions, console)
        console.print(f"\n[bold]4. The messages of request {completions[0].request_id}[/bold]")
        console.print(sequence_text(Path(trace_dir), completions[0].request_id), markup=False, soft_wrap=True)
    console.print(f"\n[bold]5. The same prompts on {REFERENCE_TOPOLOGY}, not disaggregated[/bold]")
    tokens_equal = _equal_to_reference(options, completions, asked)
    verified, moved = (sum(c.measured.get(name, 0) for c in completions) for name in ("verified_bytes", "bytes_moved"))
    handed_off = all(c.measured.get("decode_instance") != c.measured.get("prefill_instance") for c in completions)
    bit_identical = verified > 0 and verified >= moved
    console.print(f"tokens equal reference: {'yes' if tokens_equal else 'no'}")
    if handed_off:
        console.print(
            f"restored caches bit-identical: {'yes' if bit_identical else 'no'} ({verified:,} bytes compared)"
        )
    else:
        console.print(f"restored caches bit-identical: nothing was handed off on {options.topology}")
    return 0 if tokens_equal and (bit_identical or not handed_off) else 1


async def _stream_all(url: str, prompts: list[str], asked: dict[str, Any], console: Console) -> list[Completion]:
    async with open_client(url) as client:

        async def one(number: int, prompt: str) -> Completion:
            completion = Completion(prompt)
            async for event in stream(client, asked | {"prompt": prompt}):
                completion.request_id = event["id"]
                completion.measured = event.get("kvferry") or completion.measured
                for choice in event["choices"]:
                    completion.token_ids += choice.get("token_ids") or []
                    completion.text += choice["text"]
                    completion.finish_reason = choice["finish_reason"] or completion.finish_reason
            console.print(f"[cyan]── {number} · {len(completion.token_ids)} tokens · {completion.finish_reason}[/cyan]")
            console.print(completion.prompt, style="dim", markup=False, end="")
            console.print(completion.text, markup=False)
            return completion

        return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts, start=1))))


def perf_line(measured: dict[str, Any]) -> str:
    """One ``[PD-PERF]`` line from a response's ``kvferry`` object."""
    shown = " ".join(
        f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in measured.items()
        if isinstance(value, int | float | str) and value not in ("", -1)
    )
    return f"[PD-PERF] {shown}"


def _print_bytes(completions: list[Completion], console: Console) -> None:
    total: Counter[str] = Counter()
    for completion in completions:
        total.update(dict(completion.measured.get("bytes_by_role", [])))
    for role, count in total.items():
        console.print(f"  {role:16} {count:>12,} bytes")
    console.print(f"  {'all':16} {sum(total.values()):>12,} bytes")


def _equal_to_reference(options: Options, completions: list[Completion], asked: dict[str, Any]) -> bool:
    alone = msgspec.structs.replace(options, topology=REFERENCE_TOPOLOGY, port=0, trace_dir="")
    payloads = [asked | {"prompt": completion.prompt, "logprobs": 2} for completion in completions]
    with Cluster(alone) as cluster:
        answers = complete_all(cluster.url, payloads)
    tolerance = tie_tolerance(options)
    for completion, answer in zip(completions, answers, strict=True):
        if not isinstance(answer, dict):
            raise answer
        reference = answer["choices"][0]["token_ids"]
        if not equal_by_tie_rule(reference, completion.token_ids, top_two_gaps(answer), tolerance):
            return False
    return True
