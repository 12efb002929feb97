"""One rank's model runner: executes the command stream, step by step, over the caches in its registered region.

A step closes and opens sequences, checks each row against what is open, lets the draft propose, runs all rows through
the model as one flat batch (decode rows first, ordered by slot), samples or verifies, brings the draft up to date for
prefill chunks, and reports. A row that cannot run is answered with an error of its own; the others stand. Every rank
of a group takes the same decisions, because it sees the same commands and the same logits.

All calls on one thread. No clock and no sockets here: the shell measures and sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from actors.worker.caches import DTYPES, DeltaCache, bind_caches, copy_caches
from actors.worker.collectives import Collective, CollectiveError
from actors.worker.device import Device
from actors.worker.layer_reports import LayerReadyCallback, LayerReports
from actors.worker.mirror import HostMirror
from actors.worker.model.model import RankModel
from actors.worker.model.plan import PlanGeometry, RowSpec, StepPlan, plan_step
from actors.worker.model.weights import Progress, load_weights
from actors.worker.sampler import NOTHING_TO_DRAW, choose, token_logprobs
from actors.worker.sampling_rules import Draw, adjust
from actors.worker.sequences import OpenSequence, Pending, SequenceTable
from actors.worker.settings import RankPlan
from actors.worker.speculation import Drafter, Proposal, Verdict, verify
from messages.batch import BatchResult, BatchRow, ExecuteBatch, RowResult
from messages.requests import TokenLogprobs

PROMPT_LOGPROB_ROWS = 64
NOT_FINITE = "the model produced logits that are not finite for this sequence"


def sampling_failed(error: Exception) -> str:
    """What the client of one row hears when choosing its token raised ``error``."""
    return f"sampling failed for this sequence: {type(error).__name__}: {' '.join(str(error).split())}"


@dataclass
class _Work:
    """One row on its way through a step. ``first`` is its first token in the flat batch."""

    row: BatchRow
    sequence: OpenSequence
    source: _Work | None = None  # the row whose prompt this one shares
    first: int = 0
    proposal: Proposal = field(default_factory=Proposal)
    verdict: Verdict | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    bootstrap: bytes = b""
    error: str = ""

    @property
    def width(self) -> int:
        return len(self.row.token_ids) + len(self.proposal.tokens)

    def fail(self, error: str) -> None:
        """Answer this row, and every later one of its sequence, with ``error``."""
        self.error = self.sequence.error = error
        self.verdict, self.logprobs = None, ()


class ModelRunner:
    """One rank. ``buffer`` is its registered region (at least ``plan.region_bytes``), owned by the caller."""

    def __init__(
        self,
        plan: RankPlan,
        buffer: memoryview,
        collective: Collective,
        device: Device | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Loads this rank's weights. Raises ``ConfigError`` for a broken checkpoint or an absent device."""
        settings, config = plan.settings, plan.config
        self.plan = plan
        self._device = device or Device(settings.device, settings.rank)
        self._collective = collective
        target = self._device.torch_device
        self._dtype = DTYPES[plan.geometry.cache_dtype]
        weights = load_weights(
            config,
            tp_size=settings.tp_size,
            rank=settings.rank,
            dtype=self._dtype,
            device=target,
            with_draft=settings.speculative_tokens > 0,
            draft_replicated=settings.draft_replicated,
            progress=progress,
        )
        self._caches = bind_caches(buffer, plan.tensors, linear_key_dim=config.linear_key_dim)
        self._mirror: HostMirror | None = None
        if not self._device.shares_host_memory:
            host, self._caches = self._caches, copy_caches(self._caches, target)
            self._mirror = HostMirror(self._caches, host)
        self._model = RankModel(config, weights, self._caches, collective, target)
        group = config.attention_heads // max(config.kv_heads, settings.tp_size)
        self._geometry = self._plan_geometry(group)
        draft_group = config.attention_heads // config.kv_heads if settings.draft_replicated else group
        self._drafter: Drafter | None = None
        if self._model.has_draft:
            geometry = self._plan_geometry(draft_group)
            self._drafter = Drafter(self._model, geometry, settings.speculative_tokens)
        self.sequences = SequenceTable(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            slot_count=settings.slot_count,
            block_count=plan.block_count,
            block_size=settings.block_size,
            dtype_name=plan.geometry.cache_dtype,
            dtype=self._dtype,
            device=target,
            drafts=self._drafter is not None,
        )

    def execute(self, batch: ExecuteBatch, on_layer_ready: LayerReadyCallback | None = None) -> BatchResult:
        """Run one step. Raises ``CollectiveError`` when the group is broken; row errors are in the result.

        ``on_layer_ready`` is called during the step for rows with ``push_chunk`` ≥ 0, in layer order; the draft's
        layer, if there is one, comes last.
        """
        with torch.inference_mode():
            return self._execute(batch, on_layer_ready)

    @property
    def decode_path(self) -> str:
        """What decode steps run on: "compiled" or "torch" kernels."""
        return "compiled" if self._model.is_fused else "torch"

    def close(self) -> None:
        """Leave the group. The region belongs to the caller."""
        self._collective.close()

    # -- one step ---------------------------------------------------------------------------------------------------

    def _execute(self, batch: ExecuteBatch, on_layer_ready: LayerReadyCallback | None) -> BatchResult:
        self._collective.begin_step(batch.step)
        for request_id in batch.closed:
            self.sequences.close(request_id)
        for start in batch.opened:
            self.sequences.open(start)
        results: dict[int, RowResult] = {}
        works: dict[int, _Work] = {}
        for index, row in enumerate(batch.rows):
            source = None
            if row.fork_of:
                source = next((work for work in works.values() if work.row.request_id == row.fork_of), None)
            row = self.sequences.fill(row)
            sequence, error = self.sequences.find(row, source.sequence if source is not None else None)
            if sequence is None or error:
                results[index] = RowResult(request_id=row.request_id, epoch=row.epoch, error=error)
            else:
                works[index] = _Work(row, sequence, source)
                if sequence.restored and self._mirror is not None:
                    self._mirror.fetch(row.block_ids, sequence.slot)
                sequence.restored = False
        if works:
            self._run(list(works.values()), on_layer_ready)
        for index, work in works.items():
            results[index] = self._result(work)
        return BatchResult(
            step=batch.step,
            incarnation=batch.incarnation,
            rank=self.plan.settings.rank,
            rows=tuple(results[index] for index in range(len(batch.rows))),
        )

    def _run(self, works: list[_Work], on_layer_ready: LayerReadyCallback | None) -> None:
        decodes = sorted((work for work in works if not work.row.is_prefill), key=lambda work: work.sequence.slot)
        prefills = [work for work in works if work.row.is_prefill and work.source is None]
        forks = [work for work in works if work.source is not None]
        if self._drafter is not None and decodes:
            proposals = self._drafter.propose([(work.sequence, work.row) for work in decodes])
            for work, proposal in zip(decodes, proposals, strict=True):
                work.proposal = proposal
        plan, tokens = self._flatten(decodes, prefills)
        reports = LayerReports(self._device, self._mirror, [work.row for work in prefills], on_layer_ready)
        last = -1 if self._drafter is not None else self.plan.last_kv_layer
        hidden = self._model.forward(plan, tokens, lambda layer: reports.add("target", layer, layer == last))
        reports.flush()
        self._sample(decodes, prefills, forks, hidden)
        for work in decodes:
            self._advance_decode(work, hidden)
        for work in prefills:
            self._advance_prefill(work, hidden)
        if self._drafter is not None:
            drafting = [work for work in prefills if not work.error]
            chunks = [hidden[work.first : work.first + work.width] for work in drafting]
            self._drafter.prefill([(work.sequence, work.row) for work in drafting], chunks)
            reports = LayerReports(self._device, self._mirror, [work.row for work in drafting], on_layer_ready)
            reports.add("draft", 0, True)
            reports.flush()
        for work in forks:
            self._advance_fork(work, hidden)
        if self._mirror is not None:
            for work in prefills:
                self._mirror.publish_slot(work.sequence.slot)

    def _flatten(self, decodes: list[_Work], prefills: list[_Work]) -> tuple[StepPlan, torch.Tensor]:
        width = max((work.width for work in decodes), default=1)
        tokens: list[int] = []
        for work in decodes:
            work.first = len(tokens)
            tokens += [*work.row.token_ids, *work.proposal.tokens] + [0] * (width - work.width)
        for work in prefills:
            work.first = len(tokens)
            tokens += work.row.token_ids
        specs = [
            [
                RowSpec(work.row.start, work.width, work.sequence.slot, work.sequence.live, work.row.block_ids)
                for work in part
            ]
            for part in (decodes, prefills)
        ]
        plan = plan_step(self._geometry, specs[0], specs[1], width=width)
        return plan, torch.tensor(tokens, dtype=torch.int64, device=self._device.torch_device)

    def _sample(self, decodes: list[_Work], prefills: list[_Work], forks: list[_Work], hidden: torch.Tensor) -> None:
        """Logits of every position that needs them, then a verdict for each row that samples."""
        works: list[_Work] = []
        positions: list[int] = []
        draws: list[Draw] = []
        for work in decodes:
            works.append(work)
            positions += range(work.first, work.first + work.width)
            history, drafts = work.sequence.history, tuple(work.proposal.tokens)
            draws += [Draw(work.sequence.sampling, history, drafts[:count]) for count in range(len(drafts) + 1)]
        for work in prefills:
            if work.sequence.reports_prompt:
                try:
                    work.prompt_logprobs = self._prompt_logprobs(work, hidden)
                except CollectiveError:
                    raise
                except Exception as error:  # every rank alike: all have the same logits
                    work.fail(sampling_failed(error))
            if work.row.samples and not work.error:
                works.append(work)
                positions.append(work.first + work.width - 1)
                draws.append(Draw(work.sequence.sampling, work.sequence.history))
        for work in forks:
            assert work.source is not None
            works.append(work)
            positions.append(work.source.first + work.source.width - 1)
            draws.append(Draw(work.sequence.sampling, work.sequence.history))
        if not works:
            return
        whole = positions == list(range(hidden.shape[0]))
        rows = hidden if whole else hidden.index_select(0, self._tensor(positions))
        logits = self._model.logits(rows)
        finite = torch.isfinite(logits.amax(-1)).tolist()
        self._decide(works, logits, draws, finite)

    def _decide(self, works: list[_Work], logits: torch.Tensor, draws: list[Draw], finite: list[bool]) -> None:
        """All rows at once; if that raises, row by row, so that only the row at fault fails. No collectives inside."""
        try:
            self._decide_together(works, logits, draws, finite)
            return
        except Exception:
            pass  # which row it was is not known: each is tried alone and reports its own error
        begin = 0
        for work in works:
            span = slice(begin, begin + len(work.proposal.tokens) + 1)
            begin = span.stop
            if work.error:
                continue
            try:
                self._decide_together([work], logits[span], draws[span], finite[span])
            except Exception as error:
                work.fail(sampling_failed(error))

    def _decide_together(self, works: list[_Work], logits: torch.Tensor, draws: list[Draw], finite: list[bool]) -> None:
        adjusted = adjust(logits, draws)
        if adjusted is not logits:  # the rules of a row may leave it without a token, greedy or not
            drawable = torch.isfinite(adjusted.amax(-1)).tolist()
            if any(raw and not left for raw, left in zip(finite, drawable, strict=True)):
                raise ValueError(NOTHING_TO_DRAW)
        plain = all(not work.proposal.tokens for work in works)
        best = choose(adjusted, draws) if plain else adjusted.argmax(-1).tolist()
        begin = 0
        for work in works:
            count = len(work.proposal.tokens) + 1
            span = slice(begin, begin + count)
            begin += count
            if not all(finite[span]):
                work.fail(NOT_FINITE)
                self._scrub(work)
                continue
            if plain:
                work.verdict = Verdict([best[span.start]], 0)
            else:
                work.verdict = verify(adjusted[span], work.sequence, work.proposal, best[span])
            alternatives = work.sequence.sampling.logprobs
            if alternatives >= 0:
                tokens = work.verdict.tokens
                rows = logits[span.start : span.start + len(tokens)]
                work.logprobs = tuple(token_logprobs(rows, tokens, [alternatives] * len(tokens)))

    def _advance_decode(self, work: _Work, hidden: torch.Tensor) -> None:
        if work.verdict is None:
            return
        sequence, tokens = work.sequence, work.verdict.tokens
        sequence.accept(tokens, live=len(tokens) - 1)
        sequence.computed = work.row.start + len(tokens)
        if sequence.pending is not None:
            states = hidden[work.first : work.first + len(tokens)].clone()
            sequence.pending = sequence.pending.followed_by(states, tokens)

    def _advance_prefill(self, work: _Work, hidden: torch.Tensor) -> None:
        if work.error:
            return
        sequence = work.sequence
        sequence.live = 0
        sequence.computed = work.row.start + work.width
        if work.verdict is not None:
            sequence.accept(work.verdict.tokens, live=0)
        if work.row.ends_prefill and self._drafter is not None:
            last = hidden[work.first + work.width - 1]
            work.bootstrap = last.contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def _advance_fork(self, work: _Work, hidden: torch.Tensor) -> None:
        """Begin where the prompt that it shares ends: that prompt's state, a token of its own."""
        source, sequence = work.source, work.sequence
        assert source is not None
        if source.error and not work.error:
            work.fail(source.error)
        if work.error or work.verdict is None:
            return
        used = -(-work.row.start // self.plan.settings.block_size)
        tables = source.row.block_ids[:used], work.row.block_ids[:used]
        self._caches.copy_prompt(source.sequence.slot, sequence.slot, *tables)
        sequence.computed = work.row.start
        sequence.accept(work.verdict.tokens, live=0)
        if self._drafter is not None:
            last = source.first + source.width - 1
            sequence.pending = Pending(work.row.start - 1, hidden[last : last + 1].clone(), list(work.verdict.tokens))
            work.bootstrap = source.bootstrap

    def _prompt_logprobs(self, work: _Work, hidden: torch.Tensor) -> tuple[TokenLogprobs | None, ...]:
        """Entries for the prompt tokens that this chunk predicts; before them None for the prompt's first token."""
        sequence, row = work.sequence, work.row
        following = sequence.prompt[row.start + 1 : row.start + 1 + work.width]
        entries: list[TokenLogprobs | None] = [None] if row.start == 0 else []
        for begin in range(0, len(following), PROMPT_LOGPROB_ROWS):
            tokens = following[begin : begin + PROMPT_LOGPROB_ROWS]
            first = work.first + begin
            logits = self._model.logits(hidden[first : first + len(tokens)])
            entries += token_logprobs(logits, tokens, [sequence.sampling.prompt_logprobs] * len(tokens))
        return tuple(entries)

    def _scrub(self, work: _Work) -> None:
        """Zero what a broken sequence wrote: a masked position still multiplies its value, and NaN times 0 is NaN."""
        blocks = self._tensor(list(work.row.block_ids))
        size = self.plan.settings.block_size
        stride = self.plan.settings.speculative_tokens + 1
        slot = work.sequence.slot
        for cache in (*self._caches.layers, *self._caches.draft):
            if isinstance(cache, DeltaCache):
                cache.ssm[slot * stride : (slot + 1) * stride] = 0.0
                columns = self._caches.conv_columns
                cache.conv[slot * columns : (slot + 1) * columns] = 0.0
            else:
                for tensor in (cache.key, cache.value):
                    tensor.view(-1, size, tensor.shape[1]).index_fill_(0, blocks, 0.0)

    def _result(self, work: _Work) -> RowResult:
        row, verdict = work.row, work.verdict
        if work.error:
            return RowResult(request_id=row.request_id, epoch=row.epoch, error=work.error)
        return RowResult(
            request_id=row.request_id,
            epoch=row.epoch,
            token_ids=tuple(verdict.tokens) if verdict else (),
            logprobs=work.logprobs,
            prompt_logprobs=work.prompt_logprobs,
            drafted=len(work.proposal.tokens),
            accepted=verdict.accepted if verdict else 0,
            bootstrap_hidden=work.bootstrap,
            bootstrap_dtype=self.plan.geometry.cache_dtype if work.bootstrap else "",
        )

    def _plan_geometry(self, group: int) -> PlanGeometry:
        return PlanGeometry(
            block_size=self.plan.settings.block_size,
            conv_kernel=self.plan.config.conv_kernel,
            conv_columns=self._caches.conv_columns,
            checkpoints=self._caches.speculative_tokens + 1,
            group=group,
            device=self._device.torch_device,
            dtype=self._dtype,
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device.torch_device)
