"""Drives a ``GatewayMachine`` by hand, and shows what it did in the words of the tests."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from actors.gateway.jobs import DeliverEnd, DeliverRefusal, DeliverTokens, PublishInstances
from actors.gateway.machine import GatewayMachine
from actors.runtime.config import Options
from actors.runtime.machine import Effect, Note, Run, Send, StartTimer, StopTimer
from messages.base import GATEWAY, REGISTRY, Message, control_address, first_epoch, instance_of
from messages.cluster import ClusterView, InstanceInfo, InstanceLost, InstanceRole
from messages.gateway import ClientCancel, ClientStopped, ClientSubmit, Delivered, Sample
from messages.lifecycle import StatusReport, StatusRequest
from messages.requests import (
    CancelRequest,
    Failed,
    Finished,
    Generation,
    SamplingParams,
    SubmitRequest,
    TokenLogprobs,
)

PROMPT = (1, 2, 3)
MS = 1_000_000


def instance(name: str, incarnation: int = 1, max_model_len: int = 100) -> InstanceInfo:
    roles: dict[str, InstanceRole] = {"p": "PREFILL", "d": "DECODE", "m": "MIX"}
    return InstanceInfo(
        instance=name,
        incarnation=incarnation,
        role=roles[name[0]],
        tp_size=1,
        max_model_len=max_model_len,
        block_count=10,
        slot_count=4,
    )


class Harness:
    """One gateway machine, the time, and everything that it asked for so far."""

    def __init__(self, *instances: str | InstanceInfo, incarnation: int = 1, **options: int) -> None:
        self.machine = GatewayMachine(
            node="front",
            incarnation=incarnation,
            options=msgspec.structs.replace(Options(), **options),
            address=GATEWAY,
        )
        self.now_ns = 1000 * MS
        self.effects: list[Effect] = []
        self.timers: dict[tuple[str | int, ...], StartTimer] = {}
        self.deliver_acks = True
        self._version = 0
        self._take(self.machine.start(self.now_ns))
        self.view(*instances)

    # -- stimuli -----------------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message) -> list[Effect]:
        effects = self.machine.handle(self.now_ns, sender, message)
        self._take(effects)
        if self.deliver_acks:
            for effect in effects:
                if isinstance(effect, Run) and isinstance(effect.job, DeliverEnd):
                    self.ack(effect.job)
        return effects

    def ack(self, job: DeliverEnd) -> None:
        self.handle(GATEWAY, Delivered(ticket=job.ticket, sample=job.sample))

    def advance(self, ms: float) -> None:
        """Let time pass; timers that fall due are delivered in order, new ones count from the one that led to them."""
        end_ns = self.now_ns + int(ms * MS)
        while True:
            due = [(timer.delay_ms, key) for key, timer in self.timers.items() if timer.delay_ms <= end_ns]
            if not due:
                break
            due_ns, key = min(due, key=lambda item: item[0])
            self.now_ns = max(self.now_ns, int(due_ns))
            self.handle(GATEWAY, self.timers.pop(key).message)
        self.now_ns = end_ns

    def view(
        self,
        *instances: str | InstanceInfo,
        links: Collection[tuple[str, str]] | None = None,
        refused: tuple[tuple[str, str, str], ...] = (),
    ) -> None:
        """The registry's word: these are alive; ``links`` (prefill, decode), by default everybody with everybody."""
        self._version += 1
        infos = tuple(instance(item) if isinstance(item, str) else item for item in instances)
        pairs = ((p.instance, d.instance) for p in infos for d in infos if (p.role, d.role) == ("PREFILL", "DECODE"))
        linked = tuple(pair for pair in pairs if links is None or pair in links)
        view = ClusterView(
            version=self._version, registry_incarnation=1, instances=infos, links=linked, refused=refused
        )
        self.handle(REGISTRY, view)

    def missing(self) -> str:
        """What the gateway last published as missing."""
        jobs = [effect.job for effect in self.effects if isinstance(effect, Run)]
        return [job for job in jobs if isinstance(job, PublishInstances)][-1].missing

    def lose(self, name: str, incarnation: int = 1) -> None:
        self.handle(REGISTRY, InstanceLost(instance=name, incarnation=incarnation, reason="exit 9"))

    def submit(
        self,
        request_id: str = "r",
        *,
        ticket: int = 1,
        n: int = 1,
        prompt: tuple[int, ...] = PROMPT,
        **sampling: object,
    ) -> None:
        parameters = msgspec.convert({"max_tokens": 8, "eos_token_ids": (99,), **sampling}, SamplingParams)
        ids = [request_id] if n == 1 else [f"{request_id}-{k}" for k in range(n)]
        samples = tuple(Sample(request_id=name, prompt_token_ids=prompt, sampling=parameters) for name in ids)
        self.handle("front/gateway", ClientSubmit(ticket=ticket, request_id=request_id, samples=samples))

    def cancel(self, ticket: int = 1) -> None:
        self.handle("front/gateway", ClientCancel(ticket=ticket))

    def stop_string(self, token_count: int, *, ticket: int = 1, sample: int = 0) -> None:
        self.handle("front/gateway", ClientStopped(ticket=ticket, sample=sample, token_count=token_count))

    def tokens(
        self,
        name: str,
        first_index: int,
        *token_ids: int,
        request_id: str = "r",
        epoch: int = 0,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
    ) -> None:
        message = Generation(
            request_id=request_id,
            epoch=epoch,
            first_index=first_index,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        self.handle(control_address(name, "scheduler"), message)

    def finish(self, name: str, count: int, *, request_id: str = "r", epoch: int = 0, reason: str = "length") -> None:
        message = msgspec.convert(
            {
                "type": "Finished",
                "request_id": request_id,
                "epoch": epoch,
                "reason": reason,
                "usage": {"completion_tokens": count, "cached_tokens": 2},
            },
            Finished,
        )
        self.handle(control_address(name, "scheduler"), message)

    def fail(
        self, name: str, *, code: int = 503, retryable: bool = True, request_id: str = "r", epoch: int = 0
    ) -> None:
        message = Failed(request_id=request_id, epoch=epoch, code=code, message="no luck", retryable=retryable)
        self.handle(control_address(name, "scheduler"), message)

    def report(self, request: StatusRequest, name: str, *request_ids: str, epoch: int = 0) -> None:
        rows = tuple((request_id, epoch, "decode", "", 0) for request_id in request_ids)
        address = control_address(name, "scheduler")
        self.handle(address, StatusReport(address=address, incarnation=1, tag=request.tag, requests=rows))

    # -- what happened -----------------------------------------------------------------------------------------------

    def _take(self, effects: list[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, StartTimer):
                due_ns = self.now_ns + effect.delay_ms * MS
                self.timers[effect.key] = StartTimer(effect.key, due_ns, effect.message)
            elif isinstance(effect, StopTimer):
                self.timers.pop(effect.key, None)

    def sent(self, kind: type[Message]) -> list[tuple[str, Message]]:
        """(instance, message) of every message of this type, in order."""
        return [
            (instance_of(effect.to), effect.message)
            for effect in self.effects
            if isinstance(effect, Send) and isinstance(effect.message, kind)
        ]

    def submissions(self) -> list[tuple[str, SubmitRequest]]:
        return [(to, message) for to, message in self.sent(SubmitRequest) if isinstance(message, SubmitRequest)]

    def cancels(self) -> list[tuple[str, str, int]]:
        return [
            (to, message.request_id, message.epoch)
            for to, message in self.sent(CancelRequest)
            if isinstance(message, CancelRequest)
        ]

    def status_requests(self) -> list[tuple[str, StatusRequest]]:
        return [(to, message) for to, message in self.sent(StatusRequest) if isinstance(message, StatusRequest)]

    def delivered(self, ticket: int = 1, sample: int = 0) -> list[int]:
        """Tokens in the order of delivery; fails when an index comes twice or out of order."""
        tokens: list[int] = []
        for effect in self.effects:
            if isinstance(effect, Run) and isinstance(effect.job, DeliverTokens):
                job = effect.job
                if (job.ticket, job.sample) == (ticket, sample):
                    assert job.first_index == len(tokens)
                    assert job.token_ids
                    tokens += job.token_ids
        return tokens

    def ends(self, ticket: int = 1) -> list[DeliverEnd]:
        jobs = [effect.job for effect in self.effects if isinstance(effect, Run)]
        return [job for job in jobs if isinstance(job, DeliverEnd) and job.ticket == ticket]

    def refusals(self) -> list[DeliverRefusal]:
        jobs = [effect.job for effect in self.effects if isinstance(effect, Run)]
        return [job for job in jobs if isinstance(job, DeliverRefusal)]

    def perf_lines(self) -> list[Note]:
        return [effect for effect in self.effects if isinstance(effect, Note) and effect.event == "[PD-PERF]"]

    def live(self) -> int:
        values, _ = self.machine.status(self.now_ns)
        return int(dict(values)["requests"])


def epoch_of(attempt: int) -> int:
    return first_epoch(attempt)
