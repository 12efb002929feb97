"""What ``/metrics`` shows. Observed on the node's thread, rendered on the HTTP side's; prometheus_client locks."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from actors.gateway.jobs import DeliverEnd, DeliverRefusal, DeliverTokens, PublishInstances, PublishLoad
from messages.cluster import Heartbeat

_SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LENGTHS: Final = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
_LOADS: Final = ("running", "waiting", "blocks_free", "blocks_total", "slots_free", "slots_total", "leases")

Observation = DeliverTokens | DeliverEnd | DeliverRefusal | PublishInstances | PublishLoad


class GatewayMetrics:
    """One registry of its own per gateway, so that several may live in one process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvferry_{name}_seconds", text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvferry_{name}", text, labels, registry=registry)

        self._ttft = histogram("time_to_first_token", "Arrival to first token", _LONG_S)
        self._tpot = histogram("time_per_output_token", "Mean time per token after the first, per request", _SHORT_S)
        self._itl = histogram(
            "inter_token_latency", "Time between tokens of one request; those delivered together share it", _SHORT_S
        )
        self._e2e = histogram("request", "Arrival to end", _LONG_S)
        self._handoff = histogram("handoff", "First token sampled to request in the decode queue", _SHORT_S)
        self._restore = histogram("restore", "First token known to the decode instance to caches restored", _SHORT_S)
        self._requests = counter("requests", "Requests that ended", ("reason",))
        self._refusals = counter("refusals", "Requests that were not admitted", ("code",))
        self._retries = counter("request_retries", "Attempts after the first")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that ended")
        self._cached_tokens = counter("cached_prompt_tokens", "Prompt tokens that were not computed again")
        self._output_tokens = counter("generation_tokens", "Tokens delivered")
        self._handoff_bytes = counter("handoff_bytes", "Cache bytes moved between instances")
        self._decode_steps = counter("decode_steps", "Decode steps of requests that ended, one per request and step")
        self._drafted = counter("speculation_drafted_tokens", "Tokens drafted")
        self._accepted = counter("speculation_accepted_tokens", "Drafted tokens accepted")
        self._accepted_at = counter("speculation_accepted_by_position", "Accepted drafts by position", ("position",))
        self._accepted_length = Histogram(
            "kvferry_speculation_accepted_length",
            "Mean tokens per decode step of a request that was drafted for",
            buckets=_LENGTHS,
            registry=registry,
        )
        self._instances = Gauge("kvferry_instances", "Live instances", ("role",), registry=registry)
        self._loads = {
            name: Gauge(f"kvferry_instance_{name}", f"{name} of an instance", ("instance",), registry=registry)
            for name in _LOADS
        }
        self._loaded: set[str] = set()

    def render(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def observe(self, job: Observation) -> None:
        """Count what the machine just did. The node's thread."""
        match job:
            case DeliverTokens():
                self._observe_tokens(job)
            case DeliverEnd():
                self._observe_end(job)
            case DeliverRefusal():
                self._refusals.labels(str(job.code)).inc()
            case PublishInstances():
                self._observe_instances(job)
            case PublishLoad():
                self._observe_load(job.heartbeat)

    def _observe_tokens(self, job: DeliverTokens) -> None:
        count = len(job.token_ids)
        self._output_tokens.inc(count)
        if job.first_index == 0:
            self._ttft.observe(job.waited_ms / 1000)
            return
        for _ in range(count):
            self._itl.observe(job.waited_ms / 1000 / count)

    def _observe_end(self, job: DeliverEnd) -> None:
        timings, usage, phases = job.timings, job.usage, job.timings.phases
        self._requests.labels(job.reason).inc()
        self._retries.inc(timings.attempts - 1)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._e2e.observe(timings.e2e_ms / 1000)
        if timings.tpot_ms:
            self._tpot.observe(timings.tpot_ms / 1000)
        if phases.handoff_ms:
            self._handoff.observe(phases.handoff_ms / 1000)
            self._restore.observe(phases.restore_ms / 1000)
        self._handoff_bytes.inc(phases.bytes_moved)
        self._decode_steps.inc(usage.decode_steps)
        self._drafted.inc(usage.drafted_tokens)
        self._accepted.inc(usage.accepted_tokens)
        for position, count in enumerate(usage.accepted_by_position):
            self._accepted_at.labels(str(position)).inc(count)
        if usage.drafted_tokens:
            self._accepted_length.observe(usage.mean_accepted_length)

    def _observe_instances(self, job: PublishInstances) -> None:
        for role in ("MIX", "PREFILL", "DECODE"):
            self._instances.labels(role).set(sum(instance[1] == role for instance in job.instances))
        gone = self._loaded - {instance[0] for instance in job.instances}
        for name in gone:
            for gauge in self._loads.values():
                gauge.remove(name)
        self._loaded -= gone

    def _observe_load(self, heartbeat: Heartbeat) -> None:
        self._loaded.add(heartbeat.instance)
        for name, gauge in self._loads.items():
            gauge.labels(heartbeat.instance).set(getattr(heartbeat, name))
