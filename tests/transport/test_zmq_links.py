"""What only links over sockets can get wrong: strangers, silence, authentication, leftovers."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from tests.transport.fabric import Fabric
from transport.frames import Hello, Reset, control_frame, data_frame
from transport.keys import KeysError, make_keys, read_keys, write_keys


@pytest.fixture
def ipc() -> Iterator[Fabric]:
    made = Fabric("ipc")
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[Fabric]:
    made = Fabric("tcp")
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def stranger(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.rcvtimeo = dealer.sndtimeo = 10_000
    dealer.connect(endpoint)
    return dealer


def test_garbage_is_counted_said_once_and_does_not_disturb_others(
    ipc: Fabric, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    one, other = ipc.node("one"), ipc.node("other")
    dealer = stranger(context, ipc.endpoint_of("other"))
    generator = random.Random(7)
    frames = [generator.randbytes(generator.randrange(0, 60)) for _ in range(300)]
    frames += [
        b"",
        b"D",
        b"C",
        b"D\0\0\0\1\x91\xc1",
        b"C\x81\xa4type\xa5Hello",
        control_frame(Hello(protocol_version=1, node="", incarnation=-1, target_node="other"))[:-1],
    ]
    for frame in frames:
        dealer.send(frame)
    dealer.send_multipart([b"a", b"b"])
    one.say("other", "fine")
    other.hears("fine")
    dealer.send(data_frame([b"x"]))
    dealer.send(control_frame(Hello(protocol_version=1, node="late", incarnation=1, target_node="other")))
    answers = []
    while not (answers and b"Welcome" in answers[-1]):
        answers.append(dealer.recv())
    assert answers[-2] == control_frame(Reset())  # data without a greeting
    assert other.links.counters()["malformed"] >= 100
    assert [event for event, _ in other.notes] == ["malformed_frame"]


def test_a_peer_that_takes_more_than_its_credit_loses_its_session(
    ipc: Fabric, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    from tests.transport.fabric import parcel

    other = ipc.node("other", consume=False, window_envelopes=4)
    dealer = stranger(context, ipc.endpoint_of("other"))
    dealer.send(control_frame(Hello(protocol_version=1, node="greedy", incarnation=1, target_node="other")))
    assert b"Welcome" in dealer.recv()
    dealer.send(data_frame([parcel("x")] * 5))
    assert b"Reset" in dealer.recv()
    assert other.texts == []


def test_a_peer_that_accepts_and_never_answers_is_a_bounded_wait(ipc: Fabric) -> None:
    """C40."""
    one, other = ipc.node("one", handshake_timeout_ms=300), ipc.node("other")
    with closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(f"{ipc.folder}/silent.sock")
        silent.listen()
        one.say("silent", "x")
        one.say("other", "y")
        other.hears("y")
        one.loses("silent", "no answer to the greeting within 300 ms")


def test_a_peer_that_answers_nonsense_is_a_bounded_wait(ipc: Fabric, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    one = ipc.node("one", handshake_timeout_ms=500)
    router = context.socket(zmq.ROUTER)
    router.rcvtimeo = 10_000
    router.bind(ipc.endpoint_of("odd"))
    one.say("odd", "x")
    peer, _ = router.recv_multipart()
    for frame in (
        b"",
        b"nonsense",
        data_frame([b"x"]),
        control_frame(Hello(protocol_version=1, node="odd", incarnation=1, target_node="one")),
    ):
        router.send_multipart([peer, frame])
    one.loses("odd", "no answer")
    assert one.links.counters()["malformed"] == 4


def test_sockets_of_the_run_directory_are_gone_after_close(ipc: Fabric) -> None:
    one = ipc.node("one")
    assert os.listdir(ipc.folder) == ["one.sock"]
    one.links.close()
    assert os.listdir(ipc.folder) == []


def test_the_socket_file_of_a_killed_node_does_not_stop_the_next(ipc: Fabric) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(f"{ipc.folder}/one.sock")
    one, other = ipc.node("one"), ipc.node("other")
    other.say("one", "x")
    one.hears("x")


def test_a_peer_with_other_keys_is_refused(tcp: Fabric) -> None:
    one = tcp.node("one")
    true_keys, tcp.keys = tcp.keys, make_keys()
    intruder = tcp.node("intruder", handshake_timeout_ms=500)
    intruder.say("one", "let me in")
    intruder.wait(lambda: intruder.lost, "was refused")
    tcp.keys = true_keys
    other = tcp.node("other")
    other.say("one", "friend")
    one.hears("friend")


def test_a_peer_that_knows_only_the_public_key_is_refused(tcp: Fabric, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    one = tcp.node("one")
    assert tcp.keys is not None
    dealer = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    dealer.curve_publickey, dealer.curve_secretkey = public, secret
    dealer.curve_serverkey = tcp.keys.curve_public.encode()
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    monitor.rcvtimeo = 10_000
    dealer.connect(tcp.endpoint_of("one"))
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    dealer.disable_monitor()
    monitor.close()
    assert one.texts == []


def test_a_peer_without_encryption_is_not_heard(tcp: Fabric, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    one, other = tcp.node("one"), tcp.node("other")
    dealer = stranger(context, tcp.endpoint_of("one"))
    dealer.send(control_frame(Hello(protocol_version=1, node="plain", incarnation=1, target_node="one")))
    other.say("one", "x")
    one.hears("x")
    dealer.rcvtimeo = 200
    with pytest.raises(zmq.Again):
        dealer.recv()
    assert "plain" not in one.known


def test_tcp_without_keys_is_an_error_at_start(tcp: Fabric) -> None:
    tcp.keys = None
    with pytest.raises(OSError, match="key file"):
        tcp.node("one")


def test_a_key_file_is_private_and_read_back(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "keys.json"
    keys = make_keys()
    write_keys(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path) == keys
    with pytest.raises(FileExistsError):
        write_keys(path, keys)
    path.chmod(0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        read_keys(path)
    path.chmod(0o600)
    path.write_text("{}")
    with pytest.raises(KeysError, match="not a key file"):
        read_keys(path)
    with pytest.raises(KeysError, match="no key file"):
        read_keys(path.parent / "none.json")
