from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt.errors import StorageError
from ckpt_backends.folder import direct_io
from ckpt_backends.folder.direct_io import (
    BUFFER_BYTES,
    STRAIGHT_BYTES,
    address,
    blocks_of,
    is_cached,
    read_at,
)
from ckpt_backends.folder.posix import open_posix
from tests.kit.examples import examples

SIZE = 3 * BUFFER_BYTES + 4321
DATA = np.random.default_rng(4).bytes(SIZE)
GUARD = 0x5A


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached(path: Path, offset: int = 0, nbytes: int = SIZE) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_cached(fd, offset, nbytes)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file on a disk with direct reads, out of the page cache."""
    path = tmp_path_factory.mktemp("disk") / "file"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        pytest.skip(f"NOT TESTED: no direct I/O on {path}")
    finally:
        os.close(fd)
    return path


@dataclass(frozen=True)
class Read:
    """A direct read that the kernel got: where the parts are, and what it returned."""

    places: tuple[int, ...]
    nbytes: tuple[int, ...]
    offset: int


@pytest.fixture
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    seen: list[Read] = []
    real = os.preadv

    def preadv(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            seen.append(
                Read(tuple(map(address, parts)), tuple(part.nbytes for part in parts), offset)
            )
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


class Room:
    """Memory with checked surroundings; ``at`` is the distance from a page's start."""

    def __init__(self, nbytes: int, at: int) -> None:
        self._map = mmap.mmap(-1, nbytes + at + mmap.PAGESIZE)
        self._all = np.frombuffer(self._map, dtype=np.uint8)
        self._all[:] = GUARD
        self.begin, self.end = at, at + nbytes
        self.view = memoryview(self._map)[self.begin : self.end]

    def untouched_around(self) -> bool:
        return bool(
            (self._all[: self.begin] == GUARD).all() and (self._all[self.end :] == GUARD).all()
        )


LENGTHS = st.one_of(
    st.integers(0, 9000),
    st.integers(1, 40).map(lambda n: 512 * n),
    st.integers(STRAIGHT_BYTES - 5000, 2 * STRAIGHT_BYTES),
)
PLACES = st.one_of(st.integers(0, 4095), st.sampled_from([0, 64, 512]))


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.one_of(
        st.integers(0, SIZE + 5000), st.integers(0, SIZE // 512).map(lambda n: 512 * n)
    ),
    parts=st.lists(st.tuples(LENGTHS, PLACES), max_size=8),
)
@example(offset=4096, parts=[(SIZE - 4096, 0)])
@example(offset=4096, parts=[(SIZE, 64)])
@example(offset=4160, parts=[(2 * BUFFER_BYTES, 64), (100, 3), (STRAIGHT_BYTES, 164)])
@example(offset=4095, parts=[(BUFFER_BYTES + 2, 4095)])
@example(
    offset=0, parts=[(BUFFER_BYTES, 64), (0, 0), (BUFFER_BYTES, 64), (STRAIGHT_BYTES, 0), (SIZE, 1)]
)
@example(offset=SIZE, parts=[(100_000, 0)])
def test_any_bytes_come_to_any_memory_and_nowhere_else(
    disk: Path, offset: int, parts: list[tuple[int, int]]
) -> None:
    evict(disk)
    rooms = [Room(nbytes, at) for nbytes, at in parts]
    expected = DATA[offset:][: sum(nbytes for nbytes, _ in parts)]
    assert read_at(str(disk), offset, [room.view for room in rooms]) == len(expected)
    for room in rooms:
        here, expected = expected[: room.view.nbytes], expected[room.view.nbytes :]
        assert room.view[: len(here)] == here
        assert room.untouched_around()


@pytest.mark.parametrize("warm", [True, False])
def test_more_parts_than_the_kernel_takes_at_once(disk: Path, warm: bool) -> None:
    evict(disk)
    if warm:
        disk.read_bytes()
    outs = [memoryview(bytearray(nbytes)) for nbytes in (*range(1, 3000), 7)]
    asked = sum(out.nbytes for out in outs)
    assert read_at(str(disk), 5, outs) == asked
    assert b"".join(outs) == DATA[5 : 5 + asked]


def test_memory_that_fits_its_offset_is_read_into_itself(
    disk: Path, direct_reads: list[Read]
) -> None:
    evict(disk)
    room = Room(BUFFER_BYTES + 700, at=100)
    assert read_at(str(disk), 8192 + 100, [room.view]) == room.view.nbytes
    [read] = direct_reads
    start = address(room.view)
    inside = [
        n for place, n in zip(read.places, read.nbytes, strict=True) if start <= place < start + n
    ]
    assert sum(inside) > room.view.nbytes - 2 * blocks_of_file(disk)[1]
    assert room.view == DATA[8292 : 8292 + room.view.nbytes]


def test_small_neighbours_of_memory_that_fits_come_together(
    disk: Path, direct_reads: list[Read]
) -> None:
    evict(disk)
    block = blocks_of_file(disk)[1]
    small = [Room(700, at=k) for k in range(10)]
    large = Room(BUFFER_BYTES, at=(7000 + block) % block)
    outs = [room.view for room in [*small, large, *small]]
    assert read_at(str(disk), block, outs) == 14_000 + BUFFER_BYTES
    assert len(direct_reads) == 3
    assert large.view == DATA[block + 7000 :][:BUFFER_BYTES]
    assert b"".join(room.view for room in small) == DATA[block + 7000 + BUFFER_BYTES :][:7000]


def test_memory_that_does_not_fit_passes_through_one_small_buffer(
    disk: Path, direct_reads: list[Read]
) -> None:
    evict(disk)
    if blocks_of_file(disk)[0] <= 64:
        pytest.skip("NOT TESTED: this disk takes memory at any 64 bytes")
    room = Room(2 * BUFFER_BYTES, at=64)
    read_at(str(disk), 4096, [room.view])
    read_at(str(disk), 4096, [room.view])
    assert len({read.places for read in direct_reads}) == 1
    assert {read.nbytes for read in direct_reads} == {(BUFFER_BYTES,)}
    assert room.view == DATA[4096 : 4096 + room.view.nbytes]


def blocks_of_file(path: Path) -> tuple[int, int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return blocks_of(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("at", [0, 64])
def test_a_direct_read_leaves_nothing_in_the_page_cache(disk: Path, at: int) -> None:
    evict(disk)
    read_at(str(disk), 0, [Room(BUFFER_BYTES, at).view])
    assert not cached(disk, 0, BUFFER_BYTES)


def test_a_large_buffered_read_leaves_nothing_there_either(disk: Path) -> None:
    path = disk.with_name("larger")
    path.write_bytes(DATA * 2)
    evict(path)
    out = memoryview(bytearray(2 * SIZE))
    assert read_at(str(path), 0, [out], direct=False) == out.nbytes
    assert out == DATA * 2
    assert not cached(path, 0, out.nbytes)
    path.unlink()


@pytest.mark.parametrize("at", [0, 64])
def test_what_lies_in_the_page_cache_is_taken_from_there_and_stays(
    disk: Path, direct_reads: list[Read], at: int
) -> None:
    room = Room(SIZE, at)
    for _ in range(10):  # the kernel may reclaim pages at any time, but not each time
        direct_reads.clear()
        disk.read_bytes()
        assert read_at(str(disk), 0, [room.view]) == SIZE
        assert room.view == DATA
        if not direct_reads and cached(disk):
            return
    raise AssertionError("a read takes what is in the page cache out of it")


def test_what_lies_there_in_part_is_read_from_the_disk(
    disk: Path, direct_reads: list[Read]
) -> None:
    evict(disk)
    with disk.open("rb") as file:
        file.read(BUFFER_BYTES)
    assert cached(disk, 0, 4096)
    room = Room(SIZE, at=0)
    read_at(str(disk), 0, [room.view])
    assert direct_reads
    assert room.view == DATA


def test_memory_files_are_never_asked_for_direct_reads(direct_reads: list[Read]) -> None:
    path = Path(f"/dev/shm/ckpt-test-{os.getpid()}")
    try:
        path.write_bytes(DATA)
        room = Room(SIZE - 1, at=3)
        assert read_at(str(path), 1, [room.view]) == SIZE - 1
    finally:
        path.unlink()
    assert direct_reads == []
    assert room.view == DATA[1:]


def test_a_kernel_that_cannot_tell_what_is_cached_reads_from_the_disk(
    disk: Path, direct_reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_SYS_CACHESTAT", 100_000)
    disk.read_bytes()
    assert not cached(disk)
    room = Room(BUFFER_BYTES, at=0)
    read_at(str(disk), 0, [room.view])
    assert len(direct_reads) == 1
    assert room.view == DATA[:BUFFER_BYTES]


def test_a_kernel_that_cannot_tell_its_blocks_is_asked_for_whole_pages(
    disk: Path, direct_reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_STATX_DIOALIGN", 0)
    evict(disk)
    room = Room(BUFFER_BYTES, at=512)
    read_at(str(disk), 512 + 4096, [room.view])
    assert direct_reads
    for read in direct_reads:
        assert not any(number % 4096 for number in (*read.places, *read.nbytes, read.offset))
    assert room.view == DATA[4608 : 4608 + BUFFER_BYTES]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT])
@pytest.mark.parametrize("refused_from", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 64])
def test_a_direct_read_that_is_refused_goes_on_buffered(
    disk: Path, monkeypatch: pytest.MonkeyPatch, code: int, refused_from: int, at: int
) -> None:
    real, asked = os.preadv, []

    def preadv(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            asked.append(offset)
            if len(asked) > refused_from:
                raise OSError(code, os.strerror(code))
        return real(fd, parts, offset)

    evict(disk)
    monkeypatch.setattr(os, "preadv", preadv)
    room = Room(SIZE, at)
    assert read_at(str(disk), 0, [room.view]) == SIZE
    assert asked
    assert len(asked) <= refused_from + 1  # one refusal is enough
    assert room.view == DATA


@pytest.mark.parametrize("refused", range(5))
def test_after_one_refusal_nothing_is_left_out(
    disk: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """A later request may succeed. Its bytes must not take the place of those that are missing."""
    real, asked = os.preadv, []

    def preadv(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            asked.append(offset)
            if len(asked) == refused + 1:
                raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, parts, offset)

    evict(disk)
    monkeypatch.setattr(os, "preadv", preadv)
    rooms = [
        Room(nbytes, 0) for nbytes in (STRAIGHT_BYTES, 500, BUFFER_BYTES, STRAIGHT_BYTES, 4096)
    ]
    outs = [room.view for room in rooms]
    assert read_at(str(disk), 0, outs) == sum(out.nbytes for out in outs)
    assert len(asked) >= min(refused + 1, 3)
    assert b"".join(outs) == DATA[: sum(out.nbytes for out in outs)]


def test_a_file_system_without_direct_reads_is_read_buffered(
    disk: Path, direct_reads: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    evict(disk)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    room = Room(SIZE, at=0)
    assert read_at(str(disk), 0, [room.view]) == SIZE
    assert direct_reads == []
    assert room.view == DATA


@pytest.mark.parametrize("at_most", [1, 512, 100_000, BUFFER_BYTES - 512])
@pytest.mark.parametrize("at", [0, 64])
def test_direct_reads_that_stop_short_are_gone_on_with(
    disk: Path, monkeypatch: pytest.MonkeyPatch, at_most: int, at: int
) -> None:
    real = os.preadv

    def preadv(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            count = real(fd, parts, offset)
            for part in parts:  # a kernel that stops has not written these
                part[max(0, min(at_most, part.nbytes)) :] = b"\0" * max(0, part.nbytes - at_most)
            return min(count, at_most)
        return real(fd, parts, offset)

    evict(disk)
    monkeypatch.setattr(os, "preadv", preadv)
    room = Room(SIZE - 100, at)
    assert read_at(str(disk), 100, [room.view]) == SIZE - 100
    assert room.view == DATA[100:]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("at", [0, 64])
def test_a_bad_sector_is_an_error_of_the_store_and_no_descriptor_stays(
    disk: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, at: int
) -> None:
    def fail(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    evict(disk)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match="Input/output"):
        open_posix(str(disk.parent), {"direct": direct}).read_into(
            disk.name, 0, Room(SIZE, at).view
        )
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_too_short_is_named_with_its_end(disk: Path) -> None:
    evict(disk)
    with pytest.raises(StorageError, match=f"ends at byte {SIZE}"):
        open_posix(str(disk.parent), {}).read_into(disk.name, 4096, Room(SIZE, at=64).view)


def test_a_thread_takes_its_buffer_along_when_it_ends(disk: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def read() -> None:
        evict(disk)
        read_at(str(disk), 0, [Room(BUFFER_BYTES, at=64).view])

    def in_a_thread() -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    in_a_thread()
    before = resident()
    for _ in range(20):
        in_a_thread()
    assert resident() - before < 5 * BUFFER_BYTES


def test_reads_at_once_do_not_meet(disk: Path) -> None:
    evict(disk)
    rooms = [Room(SIZE - 1000 * k, at=64 + 8 * k) for k in range(6)]
    threads = [
        threading.Thread(target=read_at, args=(str(disk), 1000 * k, [room.view]))
        for k, room in enumerate(rooms)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, room in enumerate(rooms):
        assert room.view == DATA[1000 * k :]
        assert room.untouched_around()


@pytest.fixture(scope="module", autouse=True)
def _tidy(disk: Path) -> Iterator[None]:
    yield
    disk.unlink()
