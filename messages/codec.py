"""The one codec: envelopes to bytes and back. Each way yields its result or one named error, for any value or bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from messages.envelope import Envelope

REASON_CHARACTERS_MAX = 400

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_batch_decoder = msgspec.msgpack.Decoder(tuple[Envelope, ...])


_ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MalformedFrame(ValueError):
    """These bytes are not an envelope that this version understands."""


class UnencodableValue(ValueError):
    """No message can carry this value: it has no bytes (an integer beyond 64 bits, half a surrogate pair, …), or bytes
    that no receiver would take for a value of its type."""


def encode(envelope: Envelope) -> bytes:
    """One envelope as msgpack bytes; raises ``UnencodableValue``. Thread-safe."""
    try:
        return _encoder.encode(envelope)
    except _ENCODE_ERRORS as error:
        raise _unencodable(envelope.message, error) from error


def check_carried(value: msgspec.Struct) -> None:
    """Raise ``UnencodableValue`` unless a message can carry ``value`` to a receiver that expects its type.

    For values from outside, which were never in a message before. Takes about as long as sending it would.
    """
    try:
        _decoder_of(type(value)).decode(_encoder.encode(value))
    except (*_ENCODE_ERRORS, *_DECODE_ERRORS) as error:
        raise _unencodable(value, error) from error


@functools.cache
def _decoder_of(kind: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[msgspec.Struct]:
    return msgspec.msgpack.Decoder(kind)


def _unencodable(value: msgspec.Struct, error: Exception) -> UnencodableValue:
    # The text goes into messages itself, so it must be encodable whatever the value was.
    why = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX].encode("ascii", "backslashreplace").decode()
    return UnencodableValue(f"{type(value).__name__} cannot be encoded: {why}")


def decode(frame: bytes | memoryview) -> Envelope:
    """The envelope in ``frame``; raises ``MalformedFrame`` for anything else. Thread-safe."""
    try:
        return _decoder.decode(frame)
    except _DECODE_ERRORS as error:
        raise MalformedFrame(f"not an envelope ({len(frame)} bytes): {error}") from error


def encode_batch(envelopes: Sequence[Envelope]) -> bytes:
    """Several envelopes of one link as one frame, in order."""
    return _encoder.encode(envelopes)


def decode_batch(frame: bytes | memoryview) -> tuple[Envelope, ...]:
    """The envelopes in ``frame``, in order; raises ``MalformedFrame`` for anything else. Thread-safe."""
    try:
        return _batch_decoder.decode(frame)
    except _DECODE_ERRORS as error:
        raise MalformedFrame(f"not a batch of envelopes ({len(frame)} bytes): {error}") from error


def batch_header(count: int) -> bytes:
    """What stands before ``count`` encoded envelopes, one after the other, to make them what ``encode_batch`` makes."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")
