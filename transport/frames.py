"""What links say to each other, apart from the envelopes: greeting, answer, credit, reset; and how frames are laid out.

A frame is one byte of kind and a body. Kind ``D``: a big-endian count of envelopes (4 bytes) and a batch as
``messages.codec`` lays it out; the count stands outside so that credit stays exact when a batch is damaged. Kind ``C``:
one control message as msgpack.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from messages.codec import MalformedFrame, batch_header

DATA = b"D"
CONTROL = b"C"
_DATA_KIND = DATA[0]
_CONTROL_KIND = CONTROL[0]
_COUNT_BYTES = 4


class Control(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what links say to each other."""


class Hello(Control, frozen=True, kw_only=True):
    """Sender → receiver, first on every connection."""

    protocol_version: int
    node: str
    incarnation: int
    target_node: str


class Welcome(Control, frozen=True, kw_only=True):
    """Receiver → sender: this session may carry ``limit`` envelopes so far."""

    protocol_version: int
    node: str
    incarnation: int
    limit: int


class Refused(Control, frozen=True, kw_only=True):
    """Receiver → sender: no session, and why."""

    reason: str


class Credit(Control, frozen=True, kw_only=True):
    """Receiver → sender: this session may carry ``limit`` envelopes in all (cumulative: a lost one does no harm)."""

    limit: int


class Reset(Control, frozen=True, kw_only=True):
    """Receiver → sender: data came outside any session (the receiver restarted); it was dropped. Greet again."""


AnyControl = Hello | Welcome | Refused | Credit | Reset

_ONE = DATA + (1).to_bytes(_COUNT_BYTES, "big") + batch_header(1)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def control_frame(control: AnyControl) -> bytes:
    """The frame that says ``control``."""
    return CONTROL + _encoder.encode(control)


def data_frame(parcels: Sequence[bytes]) -> bytes:
    """The frame that carries these encoded envelopes, in order."""
    if len(parcels) == 1:
        return _ONE + parcels[0]
    return b"".join((DATA, len(parcels).to_bytes(_COUNT_BYTES, "big"), batch_header(len(parcels)), *parcels))


def split(frame: bytes) -> AnyControl | tuple[int, memoryview]:
    """A control message, or (count, batch) of a data frame. Raises ``MalformedFrame`` for anything else."""
    if len(frame) > _COUNT_BYTES and frame[0] == _DATA_KIND:
        return int.from_bytes(frame[1 : 1 + _COUNT_BYTES], "big"), memoryview(frame)[1 + _COUNT_BYTES :]
    if frame and frame[0] == _CONTROL_KIND:
        try:
            return _decoder.decode(memoryview(frame)[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(f"not a control message ({len(frame)} bytes): {error}") from error
    raise MalformedFrame(f"not a frame ({len(frame)} bytes)")
