"""What the TCP data plane's two sides say: mutual proof of the run's secret, requests, answers.

Greeting: the server sends a nonce; the client answers with its proof and a nonce of its own; the server proves itself.
A proof is an HMAC-SHA256 of the other side's nonce under the run's secret, so a recorded one is worth nothing. The
bytes themselves are not encrypted: the data plane is meant for a cluster's own network.

Request: operation, region id, ranges, and (write) the bytes of the ranges. Answer: a status, a text when refused, and
(read) the bytes. One request for all ranges of an operation: no round trip per range.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transport.dataplane import DataPlaneError, Strided
from transport.stream import StreamClosed, receive_exactly

WRITE, READ, SIZE = 1, 2, 3
OK, REFUSED = 0, 1

RANGES_MAX = 1 << 20
REGION_ID_BYTES_MAX = 512
TEXT_BYTES_MAX = 4096
_NONCE_BYTES = 32

_REQUEST = struct.Struct("!BHI")  # operation, bytes of region id, ranges
_ANSWER = struct.Struct("!BIQ")  # status, bytes of text, bytes of the region or moved
_RANGE_BYTES = 32  # four 64-bit integers


class Unauthenticated(DataPlaneError):
    """The other side does not hold this run's secret."""


class Request(NamedTuple):
    """One operation on a region of the server."""

    operation: int
    region_id: str
    ranges: list[Strided]


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + nonce, hashlib.sha256).digest()


def greet_as_server(connection: socket.socket, secret: bytes) -> None:
    """Let the client prove itself, then prove this side. Raises ``Unauthenticated`` or ``OSError``."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    answer = receive_exactly(connection, 32 + _NONCE_BYTES)
    if not hmac.compare_digest(answer[:32], _proof(secret, b"client", nonce)):
        raise Unauthenticated("the client does not hold this run's secret")
    connection.sendall(_proof(secret, b"server", answer[32:]))


def greet_as_client(connection: socket.socket, secret: bytes) -> None:
    """Prove this side, and have the server prove itself. Raises ``Unauthenticated`` or ``OSError``."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    challenge = receive_exactly(connection, _NONCE_BYTES)
    connection.sendall(_proof(secret, b"client", challenge) + nonce)
    try:
        proof = receive_exactly(connection, 32)
    except StreamClosed:
        raise Unauthenticated("the server refused our proof: both hosts need the same key file") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonce)):
        raise Unauthenticated("the server does not hold this run's secret: both hosts need the same key file")


def encode_request(operation: int, region_id: str, ranges: Sequence[Strided]) -> bytes:
    """The head of a request, before a write's bytes. Raises ``DataPlaneError`` when it would be too large."""
    name = region_id.encode()
    if len(ranges) > RANGES_MAX or len(name) > REGION_ID_BYTES_MAX:
        raise DataPlaneError(
            f"{len(ranges)} ranges of region {region_id}: at most {RANGES_MAX} ranges per operation, and "
            f"{REGION_ID_BYTES_MAX} bytes of region id"
        )
    try:
        table = np.array(ranges, dtype="<i8").tobytes()
    except OverflowError:
        raise DataPlaneError(f"a range of region {region_id} lies outside region {region_id}: beyond 64 bits") from None
    return _REQUEST.pack(operation, len(name), len(ranges)) + name + table


def receive_request(connection: socket.socket) -> Request:
    """The next request's head. Raises ``ValueError`` when it is none, ``OSError`` when the connection ends."""
    operation, name_bytes, range_count = _REQUEST.unpack(receive_exactly(connection, _REQUEST.size))
    if operation not in (WRITE, READ, SIZE) or range_count > RANGES_MAX or name_bytes > REGION_ID_BYTES_MAX:
        raise ValueError(f"operation {operation} with {range_count} ranges is not a request")
    name = receive_exactly(connection, name_bytes).decode()
    table = np.frombuffer(receive_exactly(connection, range_count * _RANGE_BYTES), dtype="<i8")
    return Request(operation, name, [Strided(*row) for row in table.reshape(-1, 4).tolist()])


def encode_answer(status: int, text: str, size_bytes: int) -> bytes:
    """The head of an answer, before a read's bytes."""
    words = text.encode()[:TEXT_BYTES_MAX]
    return _ANSWER.pack(status, len(words), size_bytes) + words


def receive_answer(connection: socket.socket) -> int:
    """Bytes moved (or of the region). Raises ``DataPlaneError`` with the server's text when it refused."""
    status, text_bytes, size_bytes = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size))
    text = receive_exactly(connection, min(text_bytes, TEXT_BYTES_MAX)).decode(errors="replace")
    if status != OK:
        raise DataPlaneError(text)
    return int(size_bytes)
