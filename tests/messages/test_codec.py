"""The codec: golden bytes, round trips of every message type, and that no bytes whatever crash it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages.base import Message
from messages.batch import StepFailed
from messages.cluster import InstanceLost
from messages.codec import (
    MalformedFrame,
    UnencodableValue,
    batch_header,
    check_carried,
    decode,
    decode_batch,
    encode,
    encode_batch,
)
from messages.envelope import MESSAGE_TYPES, Envelope
from messages.handoff import HandoffComplete
from messages.lifecycle import Stop
from messages.requests import CancelRequest, Generation, SamplingParams, SubmitRequest
from messages.timers import RequestTimer
from messages.transfer import PushDrained
from tests.messages.samples import envelopes, messages, unruly, values

GOLDEN: list[tuple[Message, str]] = [
    (
        Generation(request_id="r", epoch=65536, first_index=1, token_ids=(7, 300)),
        "85a474797065aa47656e65726174696f6eaa726571756573745f6964a172a565706f6368ce00010000"
        "ab66697273745f696e64657801a9746f6b656e5f6964739207cd012c",
    ),
    (
        HandoffComplete(request_id="r", epoch=1, instance="d0", incarnation=2),
        "85a474797065af48616e646f6666436f6d706c657465aa726571756573745f6964a172a565706f636801"
        "a8696e7374616e6365a26430ab696e6361726e6174696f6e02",
    ),
    (
        StepFailed(step=9, incarnation=1, rank=1, reason="x"),
        "85a474797065aa537465704661696c6564a47374657009ab696e6361726e6174696f6e01a472616e6b01a6726561736f6ea178",
    ),
    (
        PushDrained(request_id="r", epoch=1, source_instance="p0", source_incarnation=3, source_rank=1),
        "86a474797065ab50757368447261696e6564aa726571756573745f6964a172a565706f636801af736f757263655f696e7374616e6365"
        "a27030b2736f757263655f696e6361726e6174696f6e03ab736f757263655f72616e6b01",
    ),
    (
        InstanceLost(instance="p0", incarnation=1, reason="exit code 70"),
        "84a474797065ac496e7374616e63654c6f7374a8696e7374616e6365a27030ab696e6361726e6174696f6e01"
        "a6726561736f6eac6578697420636f6465203730",
    ),
    (Stop(reason="bye"), "82a474797065a453746f70a6726561736f6ea3627965"),
    (
        RequestTimer(request_id="r", epoch=1, purpose="deadline"),
        "84a474797065ac5265717565737454696d6572aa726571756573745f6964a172a565706f636801a7707572706f7365a8646561646c696e65",
    ),
]
"""One message per conversation, and the bytes that it has had since protocol version 1."""

HEAD = "89aa6d6573736167655f6964a970302e723023312e31a673656e646572a170a2746fa171a773656e745f6e7305a76d657373616765"
TAIL = "a9706172656e745f6964a16da874726163655f6964a172a565706f636801ab696e6361726e6174696f6e02"


def around(message: Message) -> Envelope:
    return Envelope(
        message_id="p0.r0#1.1",
        sender="p",
        to="q",
        sent_ns=5,
        message=message,
        parent_id="m",
        trace_id="r",
        epoch=1,
        incarnation=2,
    )


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=[type(message).__name__ for message, _ in GOLDEN])
def test_the_bytes_of_an_envelope_are_what_they_always_were(message: Message, golden: str) -> None:
    envelope = around(message)
    assert encode(envelope).hex() == HEAD + golden + TAIL
    assert decode(encode(envelope)) == envelope


def test_fields_at_their_defaults_take_no_bytes() -> None:
    plain = Envelope(message_id="a", sender="b", to="c", sent_ns=1, message=Stop(reason=""))
    assert b"parent_id" not in encode(plain) and b"epoch" not in encode(plain)
    assert decode(encode(plain)) == plain


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=[kind.__name__ for kind in MESSAGE_TYPES])
def test_every_message_type_survives_the_way(kind: type[Message]) -> None:
    @settings(max_examples=15, deadline=None)
    @given(envelopes(values(kind)))
    def survives(envelope: Envelope) -> None:
        assert decode(encode(envelope)) == envelope
        assert type(decode(encode(envelope)).message) is kind

    survives()


def test_every_message_is_frozen_tagged_by_its_name_and_unique() -> None:
    assert len({kind.__name__ for kind in MESSAGE_TYPES}) == len(MESSAGE_TYPES)
    for kind in MESSAGE_TYPES:
        config = kind.__struct_config__
        assert config.frozen and config.tag == kind.__name__ and config.tag_field == "type"


@settings(max_examples=50, deadline=None)
@given(st.lists(envelopes(messages()), max_size=20))
def test_a_batch_is_its_envelopes_behind_a_header(batch: list[Envelope]) -> None:
    frame = encode_batch(batch)
    assert frame == batch_header(len(batch)) + b"".join(encode(envelope) for envelope in batch)
    assert decode_batch(frame) == tuple(batch)


@pytest.mark.parametrize("count", [0, 15, 16, 65535, 65536])
def test_batch_headers_are_msgpacks(count: int) -> None:
    nils = b"\xc0" * count
    assert msgspec.msgpack.decode(batch_header(count) + nils) == [None] * count


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_one_named_error(garbage: bytes) -> None:
    for decoder in (decode, decode_batch):
        try:
            decoder(garbage)
        except MalformedFrame as error:
            assert str(len(garbage)) in str(error)


@settings(max_examples=100, deadline=None)
@given(envelopes(messages()), st.data())
def test_a_damaged_envelope_is_an_envelope_or_one_named_error(envelope: Envelope, data: st.DataObject) -> None:
    frame = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    for damaged in (bytes(frame), cut):
        try:
            assert isinstance(decode(damaged), Envelope)
        except MalformedFrame:
            continue


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,  # nested too deep
        b"\xdd\xff\xff\xff\xff",  # announces four billion elements
        b"\xdb\xff\xff\xff\xff",
        msgspec.msgpack.encode({"message_id": "a"}),
        msgspec.msgpack.encode(
            {"message_id": "a", "sender": "b", "to": "c", "sent_ns": 1, "message": {"type": "NoSuchMessage"}}
        ),
        encode(around(CancelRequest(request_id="r", epoch=1)))[:-1],
        encode(around(CancelRequest(request_id="r", epoch=1))) + b"\x00",
    ],
    ids=["empty", "reserved", "deep", "long-array", "long-text", "no-message", "unknown-type", "short", "long"],
)
def test_these_are_no_envelopes(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode(frame)
    with pytest.raises(MalformedFrame):
        decode_batch(frame)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), unruly(), min_size=1, max_size=3))
def test_what_passes_the_check_is_carried_and_anything_else_is_one_named_error(fields: dict[str, object]) -> None:
    sampling = SamplingParams(**fields)  # type: ignore[arg-type]
    message = SubmitRequest(request_id="r", epoch=0, prompt_token_ids=(1,), sampling=sampling, reply_to="front/gateway")
    try:
        check_carried(sampling)
    except UnencodableValue as error:
        assert "SamplingParams" in str(error)
        assert encode(around(Stop(reason=str(error)))), "the reason itself can be told"
    else:
        arrived = decode(encode(around(message)))
        assert isinstance(arrived.message, SubmitRequest)


@settings(max_examples=200, deadline=None)
@given(unruly())
def test_an_envelope_is_bytes_or_one_named_error(value: object) -> None:
    for message in (Stop(reason=value), Generation(request_id="r", epoch=0, first_index=0, token_ids=value)):  # type: ignore[arg-type]
        try:
            assert encode(around(message))
        except UnencodableValue as error:
            assert type(message).__name__ in str(error)
