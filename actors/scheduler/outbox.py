"""Effects on their way out: what the parts of a scheduler add to while they handle one message."""

from __future__ import annotations

from actors.runtime.machine import Effect, Fail, Note, Send, StartTimer, StopTimer
from messages.base import Message
from messages.timers import InstanceTimer, RequestTimer


class Outbox:
    """Collects effects in order; the machine takes them when its message is handled."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self.late: dict[str, int] = {}  # message type → how many came too late to matter

    def drop_late(self, message: Message, request_id: str, epoch: int) -> None:
        """A message about what is over changes nothing; it is counted, and told to whoever debugs."""
        name = type(message).__name__
        self.late[name] = self.late.get(name, 0) + 1
        self.note("debug", "late message ignored", type=name, request_id=request_id, epoch=epoch)

    def take(self) -> list[Effect]:
        """Everything added since the last time."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, to: str, message: Message) -> None:
        """Send ``message`` to the actor at ``to``."""
        self._effects.append(Send(to, message))

    def start_request_timer(self, purpose: str, request_id: str, epoch: int, delay_ms: float) -> None:
        """``RequestTimer(purpose)`` comes back after ``delay_ms``."""
        due = RequestTimer(request_id=request_id, epoch=epoch, purpose=purpose)
        self._effects.append(StartTimer((purpose, request_id, epoch), delay_ms, due))

    def stop_request_timer(self, purpose: str, request_id: str, epoch: int) -> None:
        """Forget that timer, if it runs."""
        self._effects.append(StopTimer((purpose, request_id, epoch)))

    def start_instance_timer(self, purpose: str, instance: str, incarnation: int, delay_ms: float) -> None:
        """``InstanceTimer(purpose)`` comes back after ``delay_ms``."""
        due = InstanceTimer(instance=instance, incarnation=incarnation, purpose=purpose)
        self._effects.append(StartTimer((purpose, instance, incarnation), delay_ms, due))

    def stop_instance_timer(self, purpose: str, instance: str, incarnation: int) -> None:
        """Forget that timer, if it runs."""
        self._effects.append(StopTimer((purpose, instance, incarnation)))

    def note(self, level: str, event: str, **fields: str | int | float) -> None:
        """One line for people."""
        self._effects.append(Note(level, event, tuple(fields.items())))

    def fail(self, reason: str, *, fatal: bool = False) -> None:
        """This actor cannot go on."""
        self._effects.append(Fail(reason, fatal))
