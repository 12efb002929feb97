"""Which instance gets a request: the least loaded of those that can hold it, in turn among equals. Pure."""

from __future__ import annotations

from messages.cluster import ClusterView, InstanceInfo


class Router:
    """Knows the live instances and how many requests of this gateway each one works on."""

    def __init__(self) -> None:
        self.instances: dict[str, InstanceInfo] = {}
        self._links: frozenset[tuple[str, str]] = frozenset()
        self._refused: tuple[tuple[str, str, str], ...] = ()
        self._outstanding: dict[str, int] = {}
        self._picked_last: dict[str, int] = {}
        self._picks = 0

    def follow(self, view: ClusterView) -> None:
        """The live instances and their links are exactly these."""
        self.instances = {info.instance: info for info in view.instances}
        self._links = frozenset(view.links)
        self._refused = view.refused

    def lose(self, instance: str) -> None:
        """That instance is dead."""
        self.instances.pop(instance, None)

    def is_alive(self, instance: str, incarnation: int) -> bool:
        """Whether this very life of the instance is among the live ones; incarnation -1 stands for any."""
        info = self.instances.get(instance)
        return info is not None and incarnation in (-1, info.incarnation)

    def with_role(self, role: str) -> list[str]:
        """Names of the live instances with this role."""
        return sorted(name for name, info in self.instances.items() if info.role == role)

    def can_serve(self) -> bool:
        """A mixed instance serves alone; a prefill instance needs a decode instance."""
        return bool(self.with_role("MIX") or (self.with_role("PREFILL") and self.with_role("DECODE")))

    def is_linked(self, prefill: str) -> bool:
        """Whether some live decode instance can take over from this prefill instance."""
        return any(source == prefill and target in self.instances for source, target in self._links)

    def missing(self) -> str:
        """Why a request that comes now would wait or be refused, "" when it would not."""
        if self.with_role("MIX") or any(self.is_linked(name) for name in self.with_role("PREFILL")):
            return ""
        if not self.can_serve():
            return "no instance can serve"
        refusals = [f"{source} with {target}: {why}" for source, target, why in self._refused]
        if refusals:
            return f"no prefill instance can hand over to a decode instance; links refused: {'; '.join(refusals)}"
        return "prefill and decode instances are being linked"

    def length_max(self) -> int:
        """The longest prompt plus output that some route through the live instances can hold; 0 when there is none."""
        mixed = [info.max_model_len for info in self.instances.values() if info.role == "MIX"]
        prefill = [info.max_model_len for info in self.instances.values() if info.role == "PREFILL"]
        decode = [info.max_model_len for info in self.instances.values() if info.role == "DECODE"]
        split = [min(max(prefill), max(decode))] if prefill and decode else []
        return max(mixed + split, default=0)

    def pick(self, length: int, avoid: str = "", count: int = 1) -> InstanceInfo | None:
        """The instance that should start ``count`` requests of ``length`` tokens in all; one without a link to a decode
        instance only when none has one, ``avoid`` only when it is the last one.

        None when no live instance can. The load of the picked one grows by ``count``, each until ``release``.
        """
        decodes = any(info.role == "DECODE" and info.max_model_len >= length for info in self.instances.values())
        able = [
            info
            for info in self.instances.values()
            if info.max_model_len >= length and (info.role == "MIX" or (info.role == "PREFILL" and decodes))
        ]
        able = [info for info in able if info.role == "MIX" or self.is_linked(info.instance)] or able
        able = [info for info in able if info.instance != avoid] or able
        if not able:
            return None
        picked = min(able, key=lambda info: (self.load(info.instance), self._picked_last.get(info.instance, 0)))
        self._picks += 1
        self._picked_last[picked.instance] = self._picks
        self._outstanding[picked.instance] = self.load(picked.instance) + count
        return picked

    def load(self, instance: str) -> int:
        """Requests this gateway gave the instance and that it has not passed on or ended."""
        return self._outstanding.get(instance, 0)

    def release(self, instance: str) -> None:
        """One request less on this instance."""
        left = self.load(instance) - 1
        if left > 0:
            self._outstanding[instance] = left
        else:
            self._outstanding.pop(instance, None)
