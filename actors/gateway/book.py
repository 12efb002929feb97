"""The records of all requests in flight, by request id and by ticket; and where a used id continues to count. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from actors.gateway.record import Record
from messages.base import first_epoch
from messages.gateway import ClientSubmit

ATTEMPTS_PER_LIFE = 1 << 20
"""Attempt numbers are never reused across the front's lives."""
REMEMBERED_IDS_MAX = 4096
"""Ended ids whose next attempt number is remembered."""


class Book:
    """Every request from admission until its last word is delivered."""

    def __init__(self, incarnation: int) -> None:
        self._life_attempt = max(0, incarnation - 1) * ATTEMPTS_PER_LIFE
        self._records: dict[str, Record] = {}
        self._tickets: dict[int, list[Record]] = {}
        self._names: dict[int, str] = {}  # ticket → the client's request id
        self._taken: set[str] = set()  # the clients' request ids
        self._next_attempts: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def all(self) -> list[Record]:
        """A list of its own: the book may change while it is walked."""
        return list(self._records.values())

    def get(self, request_id: str) -> Record | None:
        """The live record of this request id."""
        return self._records.get(request_id)

    def of_ticket(self, ticket: int) -> list[Record]:
        """All samples of a ticket that are not forgotten yet."""
        return list(self._tickets.get(ticket, ()))

    def find(self, ticket: int, sample: int) -> Record | None:
        """One sample of a ticket."""
        return next((record for record in self._tickets.get(ticket, ()) if record.index == sample), None)

    def taken(self, request_id: str, sample_ids: Iterable[str]) -> str:
        """The first of these ids that is already in flight, "" when none is."""
        if request_id in self._taken:
            return request_id
        return next((sample_id for sample_id in sample_ids if sample_id in self._records), "")

    def admit(self, now_ns: int, message: ClientSubmit) -> list[Record]:
        """Open a record per sample. Their ids must be free (``taken``)."""
        records = []
        for index, sample in enumerate(message.samples):
            attempt = self._next_attempts.pop(sample.request_id, self._life_attempt)
            record = Record(
                ticket=message.ticket,
                index=index,
                sample=sample,
                priority=message.priority,
                arrived_ns=now_ns,
                first_attempt=attempt,
                attempt=attempt,
                epoch=first_epoch(attempt),
                progress_ns=now_ns,
            )
            records.append(record)
            self._records[sample.request_id] = record
        self._tickets[message.ticket] = records
        self._names[message.ticket] = message.request_id
        self._taken.add(message.request_id)
        return list(records)

    def forget(self, record: Record) -> None:
        """Its last word is delivered. Its id may be used again, from the next attempt number on."""
        del self._records[record.request_id]
        self._next_attempts[record.request_id] = record.attempt + 1
        while len(self._next_attempts) > REMEMBERED_IDS_MAX:
            self._next_attempts.popitem(last=False)
        records = self._tickets[record.ticket]
        records.remove(record)
        if not records:
            del self._tickets[record.ticket]
            self._taken.remove(self._names.pop(record.ticket))
