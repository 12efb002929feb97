"""A gateway without processes: the real machine and edge on a thread, and instances that answer by a script."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from actors.gateway.edge import Edge
from actors.gateway.http import Service, make_app
from actors.gateway.machine import GatewayMachine
from actors.gateway.metrics import GatewayMetrics
from actors.gateway.seeds import SeedCounter
from actors.gateway.tokenizer import CheckpointTokenizer
from actors.runtime.config import Options
from actors.runtime.machine import Note, Run, Send
from actors.scheduler.siblings import samples_of
from messages.base import GATEWAY, REGISTRY, Message, control_address, instance_of
from messages.cluster import ClusterView
from messages.requests import (
    CancelRequest,
    Failed,
    Finished,
    Generation,
    PhaseTimes,
    SubmitRequest,
    TokenLogprobs,
    Usage,
)
from tests.gateway.harness import instance

WAIT_S = 20
Writer = Callable[[SubmitRequest], list[int]]


class FakeCluster:
    """p0 and d0 behind a real gateway machine.

    ``writer`` says which tokens a request gets (end tokens and limits are applied here). With ``script`` False nothing
    answers on its own: the test takes ``next_submission`` and ``say``s what the instances say.
    """

    def __init__(self, directory: Path, *, instances: tuple[str, ...] = ("p0", "d0"), length_max: int = 64) -> None:
        self.tokenizer = CheckpointTokenizer(directory)
        self.cached: Callable[[SubmitRequest], int] = lambda submit: 1
        self.writer: Writer = lambda submit: list(self.tokenizer.encode("hello world"))
        self.script = True
        self.submissions: queue.Queue[SubmitRequest] = queue.Queue()
        self.cancelled: queue.Queue[tuple[str, str]] = queue.Queue()
        self.notes: list[Note] = []
        self._mail: queue.Queue[tuple[str, Message] | None] = queue.Queue()
        self._quiet = threading.Condition()
        self._pending = 0
        self.machine = GatewayMachine(node="front", incarnation=1, options=Options(), address=GATEWAY)
        self.edge = Edge(lambda message: self._post(GATEWAY, message), GatewayMetrics())
        self.service = Service(
            model="tiny",
            version="0",
            run_id="test",
            length_max=length_max,
            edge=self.edge,
            tokenizer=self.tokenizer,
            seeds=SeedCounter(0, 1),
            clock=lambda: 1_700_000_000.0,
        )
        self.app = make_app(self.service)
        self._thread = threading.Thread(target=self._run, name="fake-gateway", daemon=True)
        self._thread.start()
        self._version = 0
        self.view(*instances, length_max=length_max)
        self.settle()

    def close(self) -> None:
        self._mail.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.edge.close()

    # -- what tests do -------------------------------------------------------------------------------------------------

    def view(self, *names: str, length_max: int = 64, linked: bool = True) -> None:
        self._version += 1
        infos = tuple(instance(name, max_model_len=length_max) for name in names)
        links = tuple((p, d) for p in names for d in names if linked and (p[0], d[0]) == ("p", "d"))
        self._post(REGISTRY, ClusterView(version=self._version, registry_incarnation=1, instances=infos, links=links))

    def say(self, name: str, *messages: Message) -> None:
        for message in messages:
            self._post(control_address(name, "scheduler"), message)

    def next_submission(self) -> SubmitRequest:
        return self.submissions.get(timeout=WAIT_S)

    def next_cancel(self) -> tuple[str, str]:
        """(instance, request id)."""
        return self.cancelled.get(timeout=WAIT_S)

    def settle(self) -> None:
        """Wait until the machine has handled all its mail."""
        with self._quiet:
            assert self._quiet.wait_for(lambda: self._pending == 0, WAIT_S)

    def live(self) -> int:
        self.settle()
        return int(dict(self.machine.status(0)[0])["requests"])

    # -- the script ----------------------------------------------------------------------------------------------------

    def answer(self, submit: SubmitRequest) -> None:
        """Token 0 from p0, one message per further token from d0, then the end."""
        tokens, reason = self._cut(submit)
        for index, token_id in enumerate(tokens):
            first = index == 0
            self.say("p0" if first else "d0", self.generation(submit, index, token_id, with_prompt=first))
        self.say("p0" if len(tokens) == 1 else "d0", self.finished(submit, len(tokens), reason, self.cached(submit)))

    def _cut(self, submit: SubmitRequest) -> tuple[list[int], str]:
        sampling = submit.sampling
        enders = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
        written = [*self.writer(submit), 2]
        tokens: list[int] = []
        for token_id in written[len(submit.delivered_token_ids) :]:
            tokens.append(token_id)
            if token_id in enders and len(tokens) >= sampling.min_tokens:
                return tokens, "stop"
            if len(tokens) == sampling.max_tokens:
                break
        return tokens, "length"

    @staticmethod
    def generation(submit: SubmitRequest, index: int, token_id: int, *, with_prompt: bool = False) -> Generation:
        def entry(chosen: int, count: int) -> TokenLogprobs:
            top = tuple((chosen + k, -0.5 - k) for k in range(count))
            return TokenLogprobs(token_id=chosen, logprob=-0.5, rank=1, top=top)

        sampling, prompt = submit.sampling, submit.prompt_token_ids
        scored = with_prompt and sampling.prompt_logprobs >= 0
        return Generation(
            request_id=submit.request_id,
            epoch=submit.epoch,
            first_index=index,
            token_ids=(token_id,),
            logprobs=(entry(token_id, sampling.logprobs),) if sampling.logprobs >= 0 else (),
            prompt_logprobs=(None, *(entry(token, sampling.prompt_logprobs) for token in prompt[1:])) if scored else (),
        )

    @staticmethod
    def finished(submit: SubmitRequest, count: int, reason: str = "length", cached: int = 1) -> Finished:
        usage = Usage(
            completion_tokens=count, cached_tokens=cached, drafted_tokens=6, accepted_tokens=4, decode_steps=2
        )
        message = Finished(
            request_id=submit.request_id,
            epoch=submit.epoch,
            reason="length",
            usage=usage,
            prefill_instance="p0",
            decode_instance="d0",
            times=PhaseTimes(handoff_ms=3.0, restore_ms=2.0, bytes_moved=4096, bytes_by_role=(("KEY", 4096),)),
        )
        return msgspec.structs.replace(message, reason=reason)

    @staticmethod
    def failed(submit: SubmitRequest, code: int = 500, *, retryable: bool = False) -> Failed:
        return Failed(
            request_id=submit.request_id, epoch=submit.epoch, code=code, message="it broke", retryable=retryable
        )

    # -- the shell -----------------------------------------------------------------------------------------------------

    def _post(self, sender: str, message: Message) -> None:
        with self._quiet:
            self._pending += 1
        self._mail.put((sender, message))

    def _run(self) -> None:
        self._carry_out(self.machine.start(time.monotonic_ns()))
        while (mail := self._mail.get()) is not None:
            self._carry_out(self.machine.handle(time.monotonic_ns(), *mail))
            with self._quiet:
                self._pending -= 1
                self._quiet.notify_all()

    def _carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Run):
                self.edge.submit(effect.job, lambda to, message: None, lambda done: self._post(GATEWAY, done))
            elif isinstance(effect, Send):
                self._hear(instance_of(effect.to), effect.message)
            elif isinstance(effect, Note):
                self.notes.append(effect)

    def _hear(self, name: str, message: Message) -> None:
        if isinstance(message, SubmitRequest):
            for submit in samples_of(message):
                self.submissions.put(submit)
                if self.script:
                    self.answer(submit)
        elif isinstance(message, CancelRequest):
            self.cancelled.put((name, message.request_id))
            if name == "d0":
                usage = Usage(completion_tokens=0, cached_tokens=1)
                cancelled = Finished(
                    request_id=message.request_id, epoch=message.epoch, reason="cancelled", usage=usage
                )
                self.say(name, cancelled)
