"""One conformance suite over every data plane."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from messages.layout import RegionDescriptor
from transport.dataplane import DataPlane, DataPlaneError, Strided
from transport.shm_dataplane import SHM_FOLDER, ShmDataPlane, run_segments, unlink_run_segments
from transport.tcp_dataplane import CONNECTIONS_PER_PEER, TcpDataPlane

BACKENDS = ["shm", "tcp"]


SECRET = b"s" * 32


class Planes:
    """Makes data planes of one run, as several nodes would have them, and closes them."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.run_id = uuid.uuid4().hex
        self.made: list[DataPlane] = []

    def make(self) -> DataPlane:
        plane: DataPlane
        plane = ShmDataPlane(self.run_id) if self.backend == "shm" else TcpDataPlane("127.0.0.1", SECRET)
        self.made.append(plane)
        return plane

    def close(self) -> None:
        for plane in self.made:
            plane.close()


@pytest.fixture(params=BACKENDS)
def planes(request: pytest.FixtureRequest) -> Iterator[Planes]:
    made = Planes(request.param)
    yield made
    made.close()


def array(plane: DataPlane, region_id: str) -> np.ndarray:
    return np.frombuffer(plane.view(region_id), np.uint8)


def linked(planes: Planes, size_bytes: int = 4096) -> tuple[DataPlane, DataPlane]:
    """Two nodes with a region each ("a", "b"), attached at the other."""
    one, other = planes.make(), planes.make()
    other.attach(one.create_region("a", size_bytes))
    one.attach(other.create_region("b", size_bytes))
    return one, other


def test_a_new_region_is_zeroed_and_writable(planes: Planes) -> None:
    plane = planes.make()
    descriptor = plane.create_region("a", 1000)
    assert (descriptor.region_id, descriptor.size_bytes, descriptor.backend) == ("a", 1000, planes.backend)
    view = plane.view("a")
    assert len(view) == 1000 and not any(view) and not view.readonly


def test_a_write_lands_in_the_peers_region_between_intact_guards(planes: Planes) -> None:
    one, other = linked(planes)
    array(one, "a")[:] = np.arange(4096) % 251
    array(other, "b")[:] = 0xEE
    moved = one.write("a", [Strided(10, 24)], "b", [Strided(100, 8, 3, 20)])
    assert moved == 24
    expected = np.full(4096, 0xEE, np.uint8)
    for run in range(3):
        expected[100 + 20 * run : 108 + 20 * run] = array(one, "a")[10 + 8 * run : 18 + 8 * run]
    assert (array(other, "b") == expected).all()


def test_a_read_brings_the_peers_bytes_between_intact_guards(planes: Planes) -> None:
    one, other = linked(planes)
    array(other, "b")[:] = np.arange(4096) % 251
    array(one, "a")[:] = 0xEE
    moved = one.read("b", [Strided(7, 8, 3, 20), Strided(500, 6)], "a", [Strided(40, 24), Strided(200, 3, 2, 5)])
    assert moved == 30
    expected = np.full(4096, 0xEE, np.uint8)
    source = array(other, "b")
    expected[40:64] = np.concatenate([source[7 + 20 * run : 15 + 20 * run] for run in range(3)])
    expected[200:203], expected[205:208] = source[500:503], source[503:506]
    assert (array(one, "a") == expected).all()


def test_a_copy_moves_bytes_between_local_regions(planes: Planes) -> None:
    plane = planes.make()
    plane.create_region("a", 64)
    plane.create_region("b", 64)
    array(plane, "a")[:] = np.arange(64)
    assert plane.copy("a", [Strided(0, 4, 4, 8)], "b", [Strided(16, 16)]) == 16
    assert bytes(array(plane, "b")[16:32]) == bytes(b for run in range(4) for b in range(8 * run, 8 * run + 4))
    assert not array(plane, "b")[:16].any() and not array(plane, "b")[32:].any()


def test_many_small_ranges_and_one_large_move_exactly(planes: Planes) -> None:
    size = 3 << 20
    one, other = linked(planes, size)
    generator = np.random.default_rng(1)
    array(one, "a")[:] = generator.integers(0, 256, size)
    blocks = generator.permutation(size // 1024)
    one.write(
        "a", [Strided(1024 * i, 1024) for i in range(len(blocks))], "b", [Strided(1024 * int(b), 1024) for b in blocks]
    )
    assert (array(other, "b").reshape(-1, 1024)[blocks] == array(one, "a").reshape(-1, 1024)).all()
    one.write("a", [Strided(0, size)], "b", [Strided(0, size)])
    assert (array(other, "b") == array(one, "a")).all()


@pytest.mark.parametrize("bad", [Strided(4090, 7), Strided(-1, 7), Strided(0, 7, 2, 4090), Strided(1 << 33, 7)])
def test_a_range_outside_its_region_is_refused_and_nothing_is_written(planes: Planes, bad: Strided) -> None:
    one, other = linked(planes)
    array(one, "a")[:] = 7
    good = Strided(0, bad.run_bytes * bad.count)
    with pytest.raises(DataPlaneError, match="outside region b"):
        one.write("a", [good, good], "b", [good, bad])
    with pytest.raises(DataPlaneError, match="outside region a"):
        one.write("a", [good, bad], "b", [good, good])
    assert not array(other, "b").any()
    array(other, "b")[:] = 9
    with pytest.raises(DataPlaneError, match="outside region b"):
        one.read("b", [good, bad], "a", [good, good])
    assert (array(one, "a") == 7).all()


def test_unequal_pairs_are_refused(planes: Planes) -> None:
    one, other = linked(planes)
    with pytest.raises(DataPlaneError, match="pair 0"):
        one.write("a", [Strided(0, 4)], "b", [Strided(0, 8)])
    assert not array(other, "b").any()


def test_unknown_regions_are_refused_by_name(planes: Planes) -> None:
    one, _ = linked(planes)
    with pytest.raises(DataPlaneError, match="nowhere"):
        one.write("a", [Strided(0, 4)], "nowhere", [Strided(0, 4)])
    with pytest.raises(DataPlaneError, match="nowhere"):
        one.view("nowhere")
    with pytest.raises(DataPlaneError, match="b is not registered"):
        one.view("b")


def test_a_region_id_is_used_once(planes: Planes) -> None:
    plane = planes.make()
    plane.create_region("a", 64)
    with pytest.raises(DataPlaneError, match="exists already"):
        plane.create_region("a", 64)


def test_a_region_too_large_for_the_host_is_refused_with_the_option(planes: Planes) -> None:
    with pytest.raises(DataPlaneError, match="cache_memory_mb"):
        planes.make().create_region("a", 1 << 50)
    with pytest.raises(DataPlaneError, match="at least 1"):
        planes.make().create_region("a", 0)


def test_a_region_of_this_process_may_be_its_own_remote(planes: Planes) -> None:
    plane = planes.make()
    plane.attach(plane.create_region("a", 64))
    plane.create_region("b", 64)
    array(plane, "a")[:] = 5
    assert plane.write("a", [Strided(0, 8)], "b", [Strided(8, 8)]) == 8
    assert plane.read("a", [Strided(0, 8)], "b", [Strided(0, 8)]) == 8
    assert bytes(plane.view("b"))[:17] == b"\x05" * 16 + b"\x00"


def test_a_detached_region_is_no_longer_reachable(planes: Planes) -> None:
    one, _ = linked(planes)
    one.detach("b")
    one.detach("b")
    with pytest.raises(DataPlaneError, match="b is not attached"):
        one.write("a", [Strided(0, 4)], "b", [Strided(0, 4)])


def test_a_descriptor_that_lies_is_refused(planes: Planes) -> None:
    one, other = planes.make(), planes.make()
    true = one.create_region("a", 4096)
    for size in (4095, 1 << 33):
        lie = RegionDescriptor(region_id="a", size_bytes=size, backend=true.backend, location=true.location)
        with pytest.raises(DataPlaneError, match="published"):
            other.attach(lie)
    with pytest.raises(DataPlaneError, match="backend"):
        other.attach(RegionDescriptor(region_id="a", size_bytes=4096, backend="rdma", location=true.location))


def test_everything_is_refused_after_close_and_views_stay_valid(planes: Planes) -> None:
    one, _ = linked(planes)
    view = one.view("a")
    one.close()
    one.close()
    view[0] = 1
    for refused in (
        lambda: one.view("a"),
        lambda: one.create_region("c", 64),
        lambda: one.write("a", [Strided(0, 4)], "b", [Strided(0, 4)]),
    ):
        with pytest.raises(DataPlaneError, match="closed"):
            refused()


def test_many_threads_write_disjoint_ranges_without_mixing(planes: Planes) -> None:
    one, other = linked(planes, 1 << 16)
    ready = threading.Barrier(4)

    def fill(thread_index: int) -> None:
        region = f"t{thread_index}"
        one.create_region(region, 4096)
        array(one, region)[:] = thread_index + 1
        ready.wait(10)
        for step in range(20):
            one.write(region, [Strided(0, 64)], "b", [Strided(64 * (4 * step + thread_index), 64)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
    expected = np.tile(np.repeat(np.arange(1, 5, dtype=np.uint8), 64), 20)
    assert (array(other, "b")[: expected.size] == expected).all()


def test_offsets_beyond_4_gib_are_exact(planes: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    """C15, in a sparse region of more than 2^32 bytes, of which only the touched pages exist."""
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, start + size))
    monkeypatch.setattr(mmap, "MAP_POPULATE", 0)
    one, other = planes.make(), planes.make()
    other.attach(one.create_region("large", (1 << 32) + (1 << 20)))
    other.create_region("small", 4096)
    large, small = array(one, "large"), array(other, "small")
    small[:] = np.arange(4096) % 251 + 1
    for at in ((1 << 31) - 3, (1 << 31) + 5003, (1 << 32) - 3, (1 << 32) + 5003):
        strided = Strided(at, 10, 4, 1000)
        other.write("small", [Strided(1, 40)], "large", [strided])
        for run in range(4):
            begin = at + 1000 * run
            assert (large[begin : begin + 10] == small[1 + 10 * run : 11 + 10 * run]).all()
            assert not large[begin - 3 : begin].any() and not large[begin + 10 : begin + 13].any()
        small[2000:2040] = 0
        other.read("large", [strided], "small", [Strided(2000, 40)])
        assert (small[2000:2040] == small[1:41]).all()


# -- shared memory only -----------------------------------------------------------------------------------------


def test_segments_are_private_and_named_after_their_run() -> None:
    run_id = uuid.uuid4().hex
    plane = ShmDataPlane(run_id)
    try:
        path = SHM_FOLDER / plane.create_region("d0.r0.1.caches", 64).location
        assert path.name.startswith(f"kvferry-{run_id}-")
        assert path.stat().st_mode & 0o777 == 0o600
        assert run_segments(run_id) == [path.name]
    finally:
        plane.close()
    assert run_segments(run_id) == []


def test_the_supervisor_can_unlink_what_a_killed_node_left() -> None:
    run_id = uuid.uuid4().hex
    child = os.fork()
    if child == 0:  # a node that dies without any clean-up
        ShmDataPlane(run_id).create_region("left", 64)
        os._exit(0)
    os.waitpid(child, 0)
    other = ShmDataPlane(run_id + "0")
    other.create_region("kept", 64)
    try:
        assert len(run_segments(run_id)) == 1
        assert len(unlink_run_segments(run_id)) == 1
        assert run_segments(run_id) == []
        assert len(run_segments(run_id + "0")) == 1
    finally:
        other.close()


def test_a_segment_of_another_run_or_outside_the_folder_is_not_mapped() -> None:
    plane = ShmDataPlane(uuid.uuid4().hex)
    for location in ("kvferry-other-a", plane._prefix + "/../../etc/passwd"):
        with pytest.raises(DataPlaneError, match="not a segment of this run"):
            plane.attach(RegionDescriptor(region_id="a", size_bytes=64, backend="shm", location=location))
    plane.close()


# -- tcp only --------------------------------------------------------------------------------------------------------


def test_a_peer_without_the_runs_secret_is_refused() -> None:
    with closing(TcpDataPlane("127.0.0.1", SECRET)) as one, closing(TcpDataPlane("127.0.0.1", b"x" * 32)) as other:
        descriptor = one.create_region("a", 64)
        with pytest.raises(DataPlaneError, match="same key file"):
            other.attach(descriptor)
        array(one, "a")[:] = 3
        assert bytes(one.view("a")) == b"\x03" * 64


def test_the_server_checks_ranges_itself_and_the_connection_lives_on() -> None:
    """A peer whose descriptor is wrong about the size gets no byte in."""
    with closing(TcpDataPlane("127.0.0.1", SECRET)) as one, closing(TcpDataPlane("127.0.0.1", SECRET)) as other:
        true = one.create_region("a", 4096)
        other.attach(true)
        other.create_region("b", 1 << 22)
        other._remote["a"] = RegionDescriptor(region_id="a", size_bytes=1 << 40, backend="tcp", location=true.location)
        array(other, "b")[:] = 1
        for size in (4097, 1 << 21):
            with pytest.raises(DataPlaneError, match="outside region a"):
                other.write("b", [Strided(0, 4), Strided(0, size)], "a", [Strided(0, 4), Strided(0, size)])
        assert not array(one, "a").any()
        assert other.write("b", [Strided(0, 4096)], "a", [Strided(0, 4096)]) == 4096
        assert array(one, "a").all()
        assert len(one._server._connections) == 1


def test_garbage_on_the_port_does_no_harm() -> None:
    with closing(TcpDataPlane("127.0.0.1", SECRET)) as one, closing(TcpDataPlane("127.0.0.1", SECRET)) as other:
        descriptor = one.create_region("a", 64)
        host, _, port = descriptor.location.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(64))
            while stranger.recv(1024):  # the nonce, then the end
                pass
        other.attach(descriptor)
        assert one._server.refused == 1


def test_a_write_to_a_node_that_is_gone_is_an_error() -> None:
    with closing(TcpDataPlane("127.0.0.1", SECRET)) as other:
        one = TcpDataPlane("127.0.0.1", SECRET)
        other.attach(one.create_region("a", 64))
        other.create_region("b", 64)
        one.close()
        with pytest.raises(DataPlaneError, match="broke"):
            other.write("b", [Strided(0, 4)], "a", [Strided(0, 4)])
        with pytest.raises(DataPlaneError, match="broke"):  # also on a connection that is new
            other.write("b", [Strided(0, 4)], "a", [Strided(0, 4)])


def test_more_threads_than_connections_take_turns() -> None:
    with closing(TcpDataPlane("127.0.0.1", SECRET)) as one, closing(TcpDataPlane("127.0.0.1", SECRET)) as other:
        other.attach(one.create_region("a", 1 << 16))
        other.create_region("b", 1 << 16)
        array(other, "b")[:] = 9
        with ThreadPoolExecutor(24) as pool:
            pieces = [[Strided(64 * index, 64)] for index in range(1024)]
            assert sum(pool.map(lambda piece: other.write("b", piece, "a", piece), pieces)) == 1 << 16
        assert (array(one, "a") == 9).all()
        assert len(one._server._connections) <= CONNECTIONS_PER_PEER
