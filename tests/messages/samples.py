"""A value of every message type, made from its annotations."""

from __future__ import annotations

import functools
import types
import typing

import msgspec
from hypothesis import strategies as st

from messages.base import Message
from messages.envelope import MESSAGE_TYPES, Envelope


@functools.cache
def messages() -> st.SearchStrategy[Message]:
    """Any message of any type."""
    return st.one_of([values(kind) for kind in MESSAGE_TYPES])


def values(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of one type."""
    return struct_values(kind)


@functools.cache
def struct_values(kind: type) -> st.SearchStrategy:
    """Structs of a type, every field drawn by its annotation."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: by_type(hints[name]) for name in kind.__struct_fields__})


def by_type(annotation: object) -> st.SearchStrategy:
    """Values of one annotation that messages use."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([by_type(argument) for argument in arguments])
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(by_type(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[by_type(argument) for argument in arguments])
    simple = {
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
        type(None): st.none(),
    }
    if annotation in simple:
        return simple[annotation]
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return struct_values(annotation)
    raise TypeError(f"messages use a type that tests cannot make: {annotation!r}")


def envelopes(inside: st.SearchStrategy[Message]) -> st.SearchStrategy[Envelope]:
    """Envelopes around such messages."""
    text, number = st.text(max_size=12), st.integers(0, (1 << 63) - 1)
    return st.builds(
        Envelope,
        message_id=text,
        sender=text,
        to=text,
        sent_ns=number,
        message=inside,
        parent_id=text,
        trace_id=text,
        epoch=number,
        incarnation=number,
    )


def unruly() -> st.SearchStrategy[object]:
    """Anything that a field could be given by mistake or malice: of its type or not, with bytes or without."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(),
        st.text(st.characters(categories=None), max_size=5),  # lone surrogates too
        st.binary(max_size=5),
        st.sampled_from((object(), object, 1j, {1}, 1 << 64, -(1 << 63) - 1, "\ud800", float("nan"))),
    )
    nested = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple))
    deep = st.integers(1, 5000).map(lambda depth: functools.reduce(lambda inner, _: [inner], range(depth), []))
    return nested | deep
