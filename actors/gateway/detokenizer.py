"""Tokens to text as they come, never tearing a character; stop strings, wherever they begin and end.

Theory. A detokenizer turns each token into the characters that are complete with it. A scanner reads that text,
character by character in effect, and gives out what can no longer be part of a stop string: it holds back the longest
suffix that begins some stop string. The first stop string to be *completed* ends the text (of several that complete
with the same character the one that began first), so the outcome does not depend on how the text was cut into tokens
or chunks.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """Characters that are complete now."""
        ...

    def flush(self) -> str:
        """What is left at the end: an incomplete character as U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token alone stands for."""
        ...


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return spelled | {chr(256 + position): byte for position, byte in enumerate(rest)}


_BYTES = _byte_of_character()


class ByteDetokenizer:
    """For byte-level tokenizers: exact, and constant work per token."""

    def __init__(self, id_to_token: Callable[[int], str | None], skipped_ids: frozenset[int]) -> None:
        self._id_to_token = id_to_token
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Characters that are complete now."""
        if token_id in self._skipped_ids:
            return ""
        return self._decoder.decode(self.token_bytes(token_id))

    def flush(self) -> str:
        """An incomplete character as U+FFFD."""
        return self._decoder.decode(b"", True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for; none for an id beyond the vocabulary."""
        token = self._id_to_token(token_id) or ""
        try:
            return bytes([_BYTES[character] for character in token])
        except KeyError:  # an added token that is not spelled in bytes stands for itself
            return token.encode()


class WindowDetokenizer:
    """For any other tokenizer: decodes a window of recent tokens, and gives what it has more than the window before.

    A window starts at a token boundary where the text was complete, so it stays short; a decoder that treats the first
    token of a text differently (stripping its space) treats both windows alike.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped_ids: frozenset[int]) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._ids: list[int] = []  # the window
        self._read = 0  # its tokens whose text was given out
        self._shown = ""  # their text

    def push(self, token_id: int) -> str:
        """Characters that are complete now."""
        if token_id in self._skipped_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") or len(text) <= len(self._shown):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What the decoder makes of the tokens that were held back."""
        return self._advance(self._decode(self._ids)) if self._ids else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token's text, decoded alone."""
        return self._decode([token_id]).encode()


class StopScanner:
    """Finds the first stop string to be completed in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""  # not given out yet: it may begin a stop string
        self._tail = ""  # the end of what was given out: a stop string may begin in it
        self.hit = ""

    def push(self, text: str, *, blind: bool = False) -> str:
        """The text that may be shown now. After a hit (``hit`` names the stop string) nothing more is.

        A stop string completed inside ``blind`` text does not count; one that begins there and is completed later does,
        and then what of it was shown already stays shown.
        """
        if self.hit or not self._stops:
            return "" if self.hit else text
        buffer = self._held + text
        searched = len(buffer) if blind else len(self._held)
        found = self._first_completed(buffer, searched)
        if found is not None:
            start, end, self.hit = found
            self._held = ""
            return buffer[: end if self._include else max(start, 0)]
        kept = 0 if blind or self._include else self._kept(buffer)
        self._held = buffer[len(buffer) - kept :]
        shown = buffer[: len(buffer) - kept]
        self._tail = (self._tail + shown)[-self._longest :]
        return shown

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, buffer: str, searched: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the first stop string completed after ``searched`` characters of ``buffer``."""
        reach = len(self._tail)
        whole = self._tail + buffer
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = whole.find(stop, max(0, reach + searched - len(stop) + 1))
            if start < 0:
                continue
            candidate = (start - reach, start - reach + len(stop), stop)
            if best is None or (candidate[1], candidate[0]) < (best[1], best[0]):
                best = candidate
        return best

    def _kept(self, buffer: str) -> int:
        """Length of the longest suffix of ``buffer`` that begins some stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            suffix = buffer[len(buffer) - length :]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0


class TextStep(msgspec.Struct, frozen=True):
    """What one token added. ``offset`` is where its text starts in the whole text (stop strings not cut)."""

    text: str
    offset: int
    stopped: bool = False


class TextStream:
    """The text of one sample: detokenised, without its end token, cut at the first stop string.

    ``ending_ids`` end the request and belong to its tokens but not to its text, unless ``include_stop``. A stop string
    may be completed from token number ``min_tokens`` on. One thread at a time.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        ending_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops, include=include_stop)
        self._ending_ids = frozenset() if include_stop else frozenset(ending_ids)
        self._min_tokens = min_tokens
        self._length = 0
        self.token_count = 0

    @property
    def stop(self) -> str:
        """The stop string that ended the text, "" when none did."""
        return self._scanner.hit

    def push(self, token_id: int) -> TextStep:
        """One more token. After a step with ``stopped`` there are no more."""
        self.token_count += 1
        offset = self._length
        if token_id in self._ending_ids:
            return TextStep("", offset)
        piece = self._detokenizer.push(token_id)
        self._length += len(piece)
        text = self._scanner.push(piece, blind=self.token_count < self._min_tokens)
        return TextStep(text, offset, bool(self._scanner.hit))

    def flush(self) -> str:
        """The rest, at the end: held-back text, and an incomplete character."""
        if self._scanner.hit:
            return ""
        return self._scanner.push(self._detokenizer.flush(), blind=True) + self._scanner.flush()
