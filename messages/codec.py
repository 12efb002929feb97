"""The one codec: envelopes to bytes and back. Decoding yields envelopes or one named error, for any bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from messages.envelope import Envelope

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_batch_decoder = msgspec.msgpack.Decoder(tuple[Envelope, ...])


class MalformedFrame(ValueError):
    """These bytes are not an envelope that this version understands."""


def encode(envelope: Envelope) -> bytes:
    """One envelope as msgpack bytes. Thread-safe."""
    return _encoder.encode(envelope)


def decode(frame: bytes | memoryview) -> Envelope:
    """The envelope in ``frame``; raises ``MalformedFrame`` for anything else. Thread-safe."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"not an envelope ({len(frame)} bytes): {error}") from error


def encode_batch(envelopes: Sequence[Envelope]) -> bytes:
    """Several envelopes of one link as one frame, in order."""
    return _encoder.encode(envelopes)


def decode_batch(frame: bytes | memoryview) -> tuple[Envelope, ...]:
    """The envelopes in ``frame``, in order; raises ``MalformedFrame`` for anything else. Thread-safe."""
    try:
        return _batch_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"not a batch of envelopes ({len(frame)} bytes): {error}") from error


def batch_header(count: int) -> bytes:
    """What stands before ``count`` encoded envelopes, one after the other, to make them what ``encode_batch`` makes."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")
