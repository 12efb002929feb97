"""What a reordered message waits for: that the next one of its link passes it. One rule for real and simulated links.

At most one message waits per link (one direction between two nodes): whatever comes next passes it, also when that one
was to wait itself. So a fault that strikes every message swaps them in pairs. What is lost on the way passes nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Link = TypeVar("Link", bound=Hashable)
Item = TypeVar("Item")


class Swaps(Generic[Link, Item]):
    """Who waits on which link. Any thread; an item leaves exactly once, by ``passed`` or by ``overdue``."""

    def __init__(self) -> None:
        self._waiting: dict[Link, Item] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def hold(self, link: Link, item: Item) -> bool:
        """Let ``item`` wait; False when one waits there already, which ``item`` then passes as any other would."""
        with self._lock:
            return self._waiting.setdefault(link, item) is item

    def passed(self, link: Link) -> Item | None:
        """Another message was sent on ``link``: what waited there, and now goes right behind it."""
        if not self._waiting:
            return None
        with self._lock:
            return self._waiting.pop(link, None)

    def overdue(self, link: Link, item: Item) -> bool:
        """``item`` has waited as long as it may; whether it waits still, and now goes although nothing passed it."""
        with self._lock:
            if self._waiting.get(link) is not item:
                return False
            del self._waiting[link]
            return True
