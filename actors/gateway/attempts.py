"""One attempt after the other: submit a sample to an instance, withdraw it, try again, or end it. Pure.

The transitions of ``machine.py`` that several messages share; they change the record and the router's load and return
effects, and never look at the message that led to them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.gateway.jobs import DeliverEnd, EndReason, Timings
from actors.gateway.record import Holder, Record
from actors.gateway.routing import Router
from actors.runtime.config import Options
from actors.runtime.machine import Effect, Note, Run, Send, StartTimer, StopTimer
from messages.base import control_address
from messages.requests import CancelRequest, PhaseTimes, Sibling, SubmitRequest, Usage
from messages.timers import RequestTimer

RETRY_AFTER_S = 2
"""What a 503 tells the client: an instance that restarts is back after about this long."""
RETRY_BACKOFF_MS = 50.0
"""Before the second attempt; doubles with each further one."""
INSTANCE_WAIT_MS = 60_000.0
"""How long an admitted request waits for an instance to come back before it fails."""

_MS = 1e-6
_TIMERS = ("deadline", "wait", "gap", "close")


class Attempts:
    """Makes and ends attempts. ``address`` is where instances stream to."""

    def __init__(self, router: Router, options: Options, address: str) -> None:
        self._router = router
        self._options = options
        self._address = address
        self.retry_count = 0

    def place_all(self, now_ns: int, records: Iterable[Record]) -> list[Effect]:
        """Submit these, samples of one prompt together (their instance then computes it once)."""
        groups: dict[tuple[int, tuple[int, ...], str], list[Record]] = {}
        for record in records:
            alone = record.request_id if record.tokens else ""
            groups.setdefault((record.ticket, record.sample.prompt_token_ids, alone), []).append(record)
        return [effect for group in groups.values() for effect in self.place(now_ns, *group)]

    def place(self, now_ns: int, record: Record, *siblings: Record) -> list[Effect]:
        """Submit it to an instance, or let it wait for one; ``siblings`` are further samples of its prompt."""
        group = (record, *siblings)
        info = self._router.pick(record.length, record.avoid, len(group))
        if info is None:
            for each in group:
                each.state = "waiting"
                each.waits_for = "an instance"
            return [timer(each, "wait", INSTANCE_WAIT_MS) for each in group]
        for each in group:
            each.state = "prefill"
            each.prefill = Holder(info.instance, info.incarnation)
            each.loaded = info.instance
            each.progress_ns = now_ns
        submit = SubmitRequest(
            request_id=record.request_id,
            epoch=record.epoch,
            prompt_token_ids=record.sample.prompt_token_ids,
            sampling=record.sample.sampling,
            reply_to=self._address,
            priority=record.priority,
            delivered_token_ids=tuple(record.tokens),
            siblings=tuple(
                Sibling(request_id=each.request_id, epoch=each.epoch, sampling=each.sample.sampling)
                for each in siblings
            ),
        )
        stops: list[Effect] = [StopTimer(("wait", each.request_id)) for each in group]
        return [*stops, Send(control_address(info.instance, "scheduler"), submit)]

    def again(
        self, now_ns: int, record: Record, why: str, failed: str, *, code: int = 503, at_once: bool = False
    ) -> list[Effect]:
        """The current attempt is over without an end: make the next one, or give up with ``code``.

        ``failed`` is the instance at fault, if known. ``at_once`` skips the backoff: that instance is gone, so the next
        attempt goes elsewhere anyway.
        """
        effects = self.withdraw(record, "superseded", besides=failed)
        effects.append(StopTimer(("gap", record.request_id)))
        if (ended := record.ended_by_its_tokens()) != "":
            return effects + self.end(now_ns, record, ended)
        if record.attempts >= self._options.request_attempts_max:
            text = f"gave up after {record.attempts} attempts (request_attempts_max); the last one: {why}"
            return effects + self.end(now_ns, record, "error", code, text)
        self.unload(record)
        delay_ms = RETRY_BACKOFF_MS * 2 ** (record.attempts - 1)
        record.next_attempt()
        record.avoid = failed
        record.progress_ns = now_ns
        self.retry_count += 1
        fields: tuple[tuple[str, str | int | float], ...] = (
            ("request", record.request_id),
            ("attempt", record.attempts),
            ("delivered", len(record.tokens)),
            ("reason", why),
        )
        effects.append(Note("warning", "request attempted again", fields))
        if at_once:
            return effects + self.place(now_ns, record)
        record.state = "waiting"
        record.waits_for = "backoff"
        return [*effects, timer(record, "wait", delay_ms)]

    def withdraw(self, record: Record, reason: str, besides: str = "") -> list[Effect]:
        """Cancel the current attempt wherever it may be, except at ``besides``, which knows already."""
        if record.prefill is None:
            return []
        names = {record.prefill.instance}
        info = self._router.instances.get(record.prefill.instance)
        if record.decode is not None:
            names.add(record.decode.instance)
        elif info is None or info.role != "MIX":
            names.update(self._router.with_role("DECODE"))
        cancel = CancelRequest(request_id=record.request_id, epoch=record.last_epoch, reason=reason)
        alive = sorted(name for name in names if name != besides and name in self._router.instances)
        return [Send(control_address(name, "scheduler"), cancel) for name in alive]

    def unload(self, record: Record) -> None:
        """It no longer counts for the instance that it was submitted to."""
        if record.loaded:
            self._router.release(record.loaded)
            record.loaded = ""

    def end(self, now_ns: int, record: Record, reason: EndReason, code: int = 0, text: str = "") -> list[Effect]:
        """The sample's last word. Its record stays until that is delivered."""
        self.unload(record)
        record.state = "delivering"
        record.early.clear()
        word = _last_word(now_ns, record, reason, code, text)
        stops: list[Effect] = [StopTimer((purpose, record.request_id)) for purpose in _TIMERS]
        return [*stops, _perf_note(record, word), Run(word)]


def timer(record: Record, purpose: str, delay_ms: float) -> StartTimer:
    """A timer of this record's current attempt."""
    due = RequestTimer(request_id=record.request_id, epoch=record.epoch, purpose=purpose)
    return StartTimer((purpose, record.request_id), delay_ms, due)


def _last_word(now_ns: int, record: Record, reason: EndReason, code: int, text: str) -> DeliverEnd:
    finished = record.finished
    count = record.stopped_at if record.stopped_at >= 0 else len(record.tokens)
    usage = msgspec.structs.replace(
        finished.usage if finished is not None else Usage(),
        prompt_tokens=len(record.sample.prompt_token_ids),
        completion_tokens=count,
    )
    decoded_ns = record.last_token_ns - record.first_token_ns
    prefill = record.prefill.instance if record.prefill is not None else ""
    decode = record.decode.instance if record.decode is not None else prefill
    timings = Timings(
        ttft_ms=(record.first_token_ns - record.arrived_ns) * _MS if record.tokens else 0.0,
        tpot_ms=decoded_ns * _MS / (len(record.tokens) - 1) if len(record.tokens) > 1 else 0.0,
        e2e_ms=(now_ns - record.arrived_ns) * _MS,
        attempts=record.attempts,
        prefill_instance=(finished.prefill_instance if finished is not None else "") or prefill,
        decode_instance=(finished.decode_instance if finished is not None else "") or decode,
        phases=finished.times if finished is not None else PhaseTimes(),
    )
    return DeliverEnd(
        ticket=record.ticket,
        sample=record.index,
        reason=reason,
        usage=usage,
        timings=timings,
        code=code,
        message=text,
        retry_after_s=RETRY_AFTER_S if code == 503 else 0,
    )


def _perf_note(record: Record, word: DeliverEnd) -> Note:
    """One line per request: where its time went."""
    timings, phases, usage = word.timings, word.timings.phases, word.usage
    fields: list[tuple[str, str | int | float]] = [
        ("request", record.request_id),
        ("reason", word.reason),
        ("prompt", usage.prompt_tokens),
        ("output", usage.completion_tokens),
        ("route", "→".join(dict.fromkeys((timings.prefill_instance, timings.decode_instance)))),
        ("attempts", timings.attempts),
        ("ttft_ms", round(timings.ttft_ms, 2)),
        ("tpot_ms", round(timings.tpot_ms, 3)),
        ("e2e_ms", round(timings.e2e_ms, 2)),
    ]
    for name in ("queue", "allocation", "prefill", "push", "pull", "merge", "sync", "restore", "handoff", "decode"):
        value = getattr(phases, f"{name}_ms")
        if value or name in ("handoff", "restore"):
            fields.append((f"{name}_ms", round(value, 2)))
    fields.append(("bytes", phases.bytes_moved))
    if usage.drafted_tokens:
        fields += [("drafted", usage.drafted_tokens), ("accepted", usage.accepted_tokens)]
    if word.reason == "error":
        fields += [("code", word.code), ("error", word.message)]
    return Note("warning" if word.reason == "error" else "info", "[PD-PERF]", tuple(fields))
