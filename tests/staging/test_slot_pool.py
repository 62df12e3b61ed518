from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.config import SaveConfig
from ckpt.errors import CommitError, HostMemoryExhausted, ManagerClosed, StorageError
from ckpt.processes import PROGRAM, Process, namespace
from ckpt.staging import slot_files
from ckpt.staging import slot_pool as slots_module
from ckpt.staging.memory_budget import Room, measure
from ckpt.staging.ring import Ring
from ckpt.staging.slot import Slot
from ckpt.staging.slot_pool import NoContents, SlotPool
from ckpt.staging.window import RingWindow
from tests.kit.interrupting import interrupted_call
from tests.processes import fork

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def shm(monkeypatch):
    """Use a folder of this test's own in the place of /dev/shm.

    The test sees no slots of other jobs, and no other job sees the slots of the test.
    """
    folder = Path(tempfile.mkdtemp(prefix="ckpt-test-", dir="/dev/shm"))
    monkeypatch.setattr(slot_files, "SHM", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def pools(shm):
    made: list[SlotPool] = []

    def build(count: int, limit: int | None = None, **how) -> SlotPool:
        made.append(SlotPool(count, limit=lambda _: limit, **how))
        return made[-1]

    yield build
    for pool in made:
        pool.close()


def own_files() -> set[str]:
    return {
        name for name in os.listdir(slot_files.SHM) if name.startswith(f"ckpt-slot-{os.getpid()}-")
    }


def take(pool: SlotPool, nbytes: int):
    slot = pool.acquire(nbytes, wait=False)
    assert slot is not None
    return slot


def test_a_slot_that_was_in_use_when_waves_were_decided_is_no_ring(pools):
    """The length of a ring is a multiple of the pieces that are copied."""
    pool = pools(1, limit=200 * MIB)
    old = take(pool, 150 * MIB)
    assert pool.acquire(210 * MIB, wait=False) is None
    pool.release(old)
    assert take(pool, 210 * MIB).capacity == 48 * MIB


def test_a_pool_that_was_stopped_makes_no_slot_for_a_save(pools):
    pool = pools(1)
    pool.stop()
    with pytest.raises(ManagerClosed):
        pool.acquire(MIB, wait=False)


def test_a_released_slot_is_the_same_memory_again(pools):
    pool = pools(1)
    slot = take(pool, MIB)
    address = slot.tensor.data_ptr()
    slot.view[:5] = b"image"
    pool.release(slot)
    again = take(pool, MIB)
    assert again is slot
    assert again.tensor.data_ptr() == address
    assert bytes(again.view[:5]) == b"image"


def test_view_and_tensor_are_the_same_bytes_with_room_for_a_padded_block(pools):
    slot = take(pools(1), 3 * MIB + 1)
    assert slot.capacity >= 3 * MIB + 4096
    assert len(slot.view) == slot.tensor.numel() == slot.capacity
    assert slot.tensor.data_ptr() % 4096 == 0
    slot.tensor[slot.capacity - 1] = 7
    assert slot.view[-1] == 7
    slot.view[0] = 9
    assert slot.tensor[0] == 9


def test_a_larger_image_gets_a_new_slot_and_the_small_one_is_dropped(pools):
    pool = pools(1)
    small = take(pool, MIB)
    pool.release(small)
    large = take(pool, 9 * MIB)
    assert large.capacity >= 9 * MIB
    assert not os.path.exists(small.path)
    assert own_files() == {os.path.basename(large.path)}


def test_a_smaller_image_takes_the_large_slot(pools):
    pool = pools(1)
    large = take(pool, 9 * MIB)
    pool.release(large)
    assert take(pool, MIB) is large


def test_when_all_slots_are_taken_there_is_none_or_one_waits(pools):
    pool = pools(2)
    one, two = take(pool, MIB), take(pool, MIB)
    assert one is not two
    assert pool.acquire(MIB, wait=False) is None
    began = time.monotonic()
    threading.Timer(0.1, pool.release, [two]).start()
    assert pool.acquire(MIB, wait=True) is two
    assert time.monotonic() - began >= 0.05


class Needed(NoContents):
    """The only copy of some contents is in the file ``path``, and in each of ``others``."""

    path: str | None = None
    others: tuple[str, ...] = ()

    def step_in(self, path: str) -> int:
        return 7 if path == self.path else 8

    def is_needed(self, path: str) -> bool:
        return path in (self.path, *self.others)


def test_slots_that_are_freed_count_within_the_limit(pools):
    contents = Needed()
    pool = pools(2, limit=6 * MIB, contents=contents)
    one, two = take(pool, 2 * MIB), take(pool, 2 * MIB)
    contents.path = one.path
    pool.release(one)
    pool.release(two)
    larger = take(pool, 4 * MIB)
    contents.path = larger.path
    pool.release(larger)
    pool.acquire(4 * MIB, wait=False)
    assert pool.nbytes <= 6 * MIB


def with_needed(pools, count=2):
    """Return a pool whose slots are all taken. The contents of the first slot are nowhere else."""
    contents = Needed()
    pool = pools(count, contents=contents)
    taken = [take(pool, MIB) for _ in range(count)]
    contents.path = taken[0].path
    return contents, pool, taken


def test_a_small_slot_with_what_is_nowhere_else_stays_until_a_larger_image_may_replace_it(pools):
    contents, pool, (one, two) = with_needed(pools)
    pool.release(one)
    pool.release(two)
    larger = take(pool, 8 * MIB)
    assert pool.slots == [one, larger]
    assert pool.acquire(8 * MIB, wait=False) is None  # The image in ``larger`` may be lost
    contents.path = larger.path
    assert take(pool, 8 * MIB) is not larger
    assert one not in pool.slots


def test_a_small_slot_that_is_not_needed_any_more_makes_room_for_another(pools):
    contents, pool, (one, two) = with_needed(pools)
    pool.release(one)
    pool.release(two)
    larger = take(pool, 8 * MIB)
    contents.path = larger.path  # It is committed
    pool.release(larger)
    assert take(pool, 8 * MIB) is not larger
    assert one not in pool.slots


def test_a_small_slot_with_what_is_nowhere_else_stays_beside_a_larger_one_that_is_free(pools):
    _, pool, (one, two) = with_needed(pools)
    pool.release(one)
    pool.release(two)
    larger = take(pool, 8 * MIB)
    pool.release(larger)  # Its image was not committed
    pool.reserve(8 * MIB)
    assert pool.slots == [one, larger]
    assert take(pool, 8 * MIB) is larger


def test_small_slots_that_all_hold_what_is_nowhere_else_stay(pools):
    contents, pool, (one, two) = with_needed(pools)
    contents.others = (two.path,)
    pool.release(one)
    pool.release(two)
    pool.plan(8 * MIB)
    pool.reserve(8 * MIB)
    for wait in (False, True):
        with pytest.raises(CommitError, match="start the job again"):
            pool.acquire(8 * MIB, wait=wait)
    assert pool.slots == [one, two]
    contents.path = None
    assert take(pool, 8 * MIB) not in (one, two)
    assert two in pool.slots


def test_a_small_slot_that_is_released_with_what_is_nowhere_else_stays(pools):
    contents = Needed()
    pool = pools(2, contents=contents)
    one = take(pool, MIB)
    larger = take(pool, 8 * MIB)
    contents.path = one.path
    pool.release(one)
    assert pool.slots == [one, larger]


def test_the_only_slot_grows_whatever_it_holds(pools):
    _, pool, (one,) = with_needed(pools, 1)
    pool.release(one)
    larger = take(pool, 8 * MIB)
    assert pool.slots == [larger]


def test_a_slot_with_what_is_nowhere_else_is_not_taken_while_another_is_in_use(pools):
    contents, pool, (one, two) = with_needed(pools)
    pool.release(one)
    assert pool.acquire(MIB, wait=False) is None
    found = []
    waiter = threading.Thread(target=lambda: found.append(pool.acquire(MIB, wait=True)))
    waiter.start()
    pool.release(two)
    waiter.join()
    assert found == [two]
    waiter = threading.Thread(target=lambda: found.append(pool.acquire(MIB, wait=True)))
    waiter.start()
    contents.path = None  # A newer image has been committed in the other slot
    pool.wake_waiters()
    waiter.join()
    assert found == [two, one]


def test_another_slot_is_made_before_one_with_what_is_nowhere_else_is_taken(pools):
    contents = Needed()
    pool = pools(2, contents=contents)
    one = take(pool, MIB)
    contents.path = one.path
    pool.release(one)
    assert take(pool, MIB) is not one


def test_a_slot_with_what_is_nowhere_else_is_not_taken_before_another_that_is_free(pools):
    _, pool, (one, two) = with_needed(pools)
    pool.release(one)
    pool.release(two)
    assert take(pool, MIB) is two


def test_no_slot_is_taken_if_all_hold_what_is_nowhere_else(pools):
    contents, pool, (one, two) = with_needed(pools)
    contents.others = (two.path,)
    pool.release(one)
    pool.release(two)
    with pytest.raises(CommitError, match="start the job again"):
        take(pool, MIB)
    contents.path = None
    assert take(pool, MIB) is one


def test_a_slot_with_what_is_nowhere_else_is_taken_if_no_other_is_in_use(pools):
    _, pool, (slot,) = with_needed(pools, 1)
    pool.release(slot)
    assert take(pool, MIB) is slot


def test_two_slots_share_no_memory(pools):
    pool = pools(2)
    one, two = take(pool, MIB), take(pool, MIB)
    one.tensor.fill_(1)
    two.tensor.fill_(2)
    assert bool((one.tensor == 1).all())


def test_a_slot_is_a_private_file_with_its_pages_reserved(pools):
    slot = take(pools(1), 5 * MIB)
    status = os.stat(slot.path)
    assert slot.is_shared
    assert slot.path.startswith("/dev/shm/")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= 5 * MIB
    slot.view[:3] = b"abc"
    assert Path(slot.path).read_bytes()[:3] == b"abc"


def test_no_file_is_left_after_close():
    before = own_files()
    pool = SlotPool(2)
    held, free = take(pool, MIB), take(pool, MIB)
    pool.release(free)
    assert len(own_files()) == len(before) + 2
    pool.close()
    assert own_files() == before
    held.view[0] = 1  # memory that is still in use stays


def test_two_hundred_saves_leave_memory_files_and_descriptors_flat(pools):
    pool = pools(2)
    take(pool, MIB)
    pool.release(take(pool, MIB))
    gc.collect()
    files, descriptors = len(own_files()), len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        pool.release(take(pool, MIB))
    assert len(own_files()) == files
    assert len(os.listdir("/proc/self/fd")) == descriptors


@contextmanager
def child() -> Iterator[tuple[int, str]]:
    """Run a process that holds a slot in this test's folder. Yield its id and the slot's path.

    Who kills it waits for it.
    """
    ear, mouth = os.pipe()

    def hold() -> None:
        os.write(mouth, str(take(SlotPool(1), MIB).path).encode())
        signal.pause()

    process = fork(hold)
    os.close(mouth)
    with open(ear) as file:
        path = os.read(file.fileno(), 1000).decode()
    try:
        yield process, path
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def test_the_slot_of_a_dead_process_is_removed_by_the_next_pool_and_that_of_a_live_one_is_kept(
    pools,
):
    with child() as (one, path), child() as (two, other):
        pools(1)
        assert [os.path.exists(path), os.path.exists(other)] == [True, True]
        os.kill(one, signal.SIGKILL)
        os.waitpid(one, 0)
        pools(1)
        assert [os.path.exists(path), os.path.exists(other)] == [False, True]
        os.kill(two, signal.SIGKILL)
        pools(1)  # it is dead, although no process has reaped it yet
        os.waitpid(two, 0)
        pools(1)
        assert not os.path.exists(other)


def test_what_the_other_ranks_of_a_launcher_hold_is_known(pools):
    """The slots that are counted are those of ranks that the same process has started. This test's
    own are not among them, and theirs are not among this test's.
    """

    def other() -> None:
        assert 1 * MIB <= slot_files.sibling_slot_bytes() <= 2 * MIB

    take(pools(1), 32 * MIB)
    with child():
        assert os.waitpid(fork(other), 0)[1] == 0
        assert slot_files.sibling_slot_bytes() == 0


def test_all_ranks_of_a_node_divide_the_memory_that_the_first_has_measured(shm):
    script = (
        "from ckpt.staging import slot_files; import sys; slot_files.SHM = sys.argv[1]; "
        "memory = slot_files.NodeMemory(); "
        "print(memory.first_measurement(lambda: int(sys.argv[2])), flush=True); sys.stdin.read()"
    )

    def rank(nbytes: int) -> Any:
        return subprocess.Popen(
            [sys.executable, "-c", script, str(shm), str(nbytes)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    own = slot_files.NodeMemory()
    assert own.first_measurement(lambda: 100) == 100  # of another launcher's rank
    assert not list(shm.glob("ckpt-memory-*"))  # These are the folders of tiers in memory
    (shm / f"ckpt-share-{os.getpid()}-{Process.of(os.getpid()).start_time}-x-{namespace()}").touch()
    with rank(900) as first:
        assert first.stdout.readline() == "900\n"
        with rank(700) as second:
            assert second.stdout.readline() == "900\n"
            first.kill()
            first.wait()
            with rank(500) as third:
                assert third.stdout.readline() == "900\n"
    with rank(500) as later:
        assert later.stdout.readline() == "500\n"
        assert own.first_measurement(lambda: 1) == 100
    own.close()
    SlotPool(1).close()  # removes what the killed rank has left
    assert len(os.listdir(shm)) == 1


def test_what_an_earlier_program_of_this_process_has_left_is_removed(pools):
    """``os.execv`` keeps the process id and the time of the start."""
    own = slot_files.new_path(1).rpartition(".")[0]  # without a program
    names = [f"{own}.{PROGRAM}", f"{own}.0badc0de"]
    for name in names:
        Path(name).write_bytes(b"slot")
    pools(1)
    assert [os.path.exists(name) for name in names] == [True, False]
    os.unlink(names[0])


def test_an_orphan_whose_pid_was_given_to_another_process_is_removed(pools):
    stale = f"{slot_files.SHM}/ckpt-slot-{os.getpid()}-1-1-abc"  # our pid, but another start
    Path(stale).touch()
    pools(1)
    assert not os.path.exists(stale)


@pytest.mark.parametrize(
    "name",
    [
        "ckpt-slot-note",
        "ckpt-slot-1-2-3",
        "ckpt-slot-x-1-1-a",
        "ckpt-slots-1-1-1-a",
        "other-slot-1-1-1-a",
    ],
)
def test_files_that_are_not_ours_are_left_alone(pools, name):
    foreign = Path(slot_files.SHM, name)
    foreign.touch()
    pools(1)
    assert foreign.exists()


def test_without_shared_memory_a_slot_is_anonymous_and_that_is_said(
    pools, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(slot_files, "SHM", str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        slot = take(pools(1), MIB)
    assert not slot.is_shared
    assert "anonymous memory" in caplog.text
    assert "lost with the process" in caplog.text
    slot.tensor.fill_(3)
    assert bytes(slot.view[:2]) == b"\x03\x03"


@pytest.fixture
def tiny_shm(tmp_path):
    """Use a /dev/shm of 4 MiB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", tmp_path],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_shared_memory_is_met_before_the_first_byte_and_leaves_no_file(
    pools, monkeypatch, tiny_shm
):
    monkeypatch.setattr(slot_files, "SHM", str(tiny_shm))
    pool = pools(2)
    slot = take(pool, 16 * MIB)
    slot.tensor.fill_(1)  # this would be a SIGBUS if the pages did not exist
    assert not slot.is_shared
    assert list(tiny_shm.iterdir()) == []


def test_an_image_larger_than_memory_is_refused_with_the_numbers(pools):
    with pytest.raises(HostMemoryExhausted, match="64 MiB may be used") as caught:
        pools(1, limit=64 * MIB).acquire(1 << 50, wait=True)
    assert caught.value.needed == 1 << 50


def test_a_pool_that_refused_goes_on(pools):
    pool = pools(1, limit=64 * MIB)
    with pytest.raises(HostMemoryExhausted):
        pool.acquire(1 << 50, wait=False)
    assert take(pool, MIB).capacity >= MIB


def test_slots_made_ahead_are_those_that_are_taken(pools):
    pool = pools(2)
    pool.reserve(MIB)
    ready = own_files()
    assert len(ready) == 2
    taken = {os.path.basename(take(pool, MIB).path) for _ in range(2)}
    assert taken == ready


def test_a_ring_made_ahead_is_given_back_if_a_save_has_made_one_meanwhile(pools, monkeypatch):
    pool, size = pools(2, elastic=True), 256 * MIB
    is_begun, is_taken, prefault = threading.Event(), threading.Event(), Ring.prefault

    def wait(ring: Ring) -> None:
        is_begun.set()
        assert is_taken.wait(60)
        prefault(ring)

    monkeypatch.setattr(Ring, "prefault", wait)
    maker = threading.Thread(target=pool.reserve, args=[size])
    maker.start()
    assert is_begun.wait(60)
    ring = take(pool, size)
    is_taken.set()
    maker.join()
    assert pool.slots == [ring]
    assert take(pool, size) is not ring  # A save that overlaps makes the second


def test_a_pool_knows_whether_all_its_slots_are_there(pools):
    pool = pools(2)
    assert not pool.has_all(MIB)
    slot = take(pool, MIB)
    assert not pool.has_all(MIB)
    pool.reserve(MIB)
    assert pool.has_all(MIB)  # Also while one is in use
    assert not pool.has_all(3 * MIB)
    os.unlink(slot.path)
    pool.release(slot)
    for taken in [take(pool, MIB), take(pool, MIB)]:  # one has replaced the slot that was lost
        pool.release(taken)
    assert pool.has_all(MIB)
    pool.reserve(3 * MIB)
    assert pool.has_all(3 * MIB)


def test_a_slot_that_is_still_being_made_ahead_is_waited_for(pools, monkeypatch):
    """The thread that has made the slot is slow to return."""
    pool = pools(1)
    is_taken, give_back = threading.Event(), pool._give_back

    def wait(request: object) -> None:
        assert is_taken.wait(60)
        give_back(request)

    monkeypatch.setattr(pool, "_give_back", wait)
    maker = threading.Thread(target=pool.reserve, args=[64 * MIB])
    maker.start()
    slot = take(pool, 64 * MIB)
    is_taken.set()
    maker.join()
    assert slot.capacity >= 64 * MIB
    assert len(own_files()) == 1


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def test_the_pages_of_a_ring_that_a_save_creates_are_touched_by_the_copying_thread(pools):
    pool, size = pools(2, elastic=True), 1024 * MIB
    pool.reserve(size)
    first = take(pool, size)
    before = resident()
    second = take(pool, size)  # the first save is not written yet
    window = RingWindow(second, size, b"header")
    assert resident() - before < 8 * MIB
    window.wait_room(40 * MIB)
    assert 60 * MIB <= resident() - before < 80 * MIB
    assert bytes(window._frames[0].data[:6]) == b"header"
    touched = faults()
    for slot in (first, second):
        slot.tensor[: 64 * MIB].fill_(1)
    assert faults() - touched < 64 * MIB // 4096 // 4


def test_a_slot_is_prefaulted(pools):
    slot = take(pools(1), 64 * MIB)
    source = torch.ones(64 * MIB, dtype=torch.uint8)
    before = faults()
    slot.tensor[: 64 * MIB].copy_(source)
    assert faults() - before < 64 * MIB // 4096 // 4


def test_a_kernel_that_cannot_populate_has_its_pages_touched_one_by_one(pools, monkeypatch):
    monkeypatch.setattr(
        "ckpt.staging.slot._MADV_POPULATE_WRITE", 9999
    )  # EINVAL, as from a kernel before 5.14
    slot = take(pools(1), 8 * MIB)
    assert os.stat(slot.path).st_blocks * 512 >= 8 * MIB
    slot.tensor.fill_(1)


def test_pages_that_are_gone_are_an_error_and_not_a_sigbus(pools):
    slot = take(pools(1), 8 * MIB)
    # foreign code did this: an access to one of these pages would kill the process
    os.truncate(slot.path, 0)
    with pytest.raises(HostMemoryExhausted, match="Bad address"):
        slot.prefault()


def test_a_slot_that_could_not_be_made_is_no_loss_to_the_pool(pools, monkeypatch):
    pool = pools(1)
    with monkeypatch.context() as broken:
        broken.setattr(Slot, "prefault", raise_exhausted)
        for _ in range(3):
            with pytest.raises(HostMemoryExhausted):
                pool.acquire(MIB, wait=True)
        with pytest.raises(HostMemoryExhausted):
            pool.reserve(MIB)
        assert own_files() == set()
    assert take(pool, MIB).capacity >= MIB


def raise_exhausted(slot) -> None:
    raise HostMemoryExhausted(slot.capacity, "no pages")


def test_memory_that_went_with_the_shared_memory_is_not_taken_twice(pools, monkeypatch, tmp_path):
    """There was room for two when it was measured. Then another process took it, and anonymous
    memory would mean an OOM kill.
    """
    monkeypatch.setattr(slot_files, "SHM", str(tmp_path / "missing"))
    pool = pools(2)
    first = take(pool, MIB)
    with monkeypatch.context() as eaten:
        eaten.setattr(
            slots_module,
            "measure",
            lambda shm, **how: replace(measure(shm, **how), memory=MIB // 2),
        )
        with pytest.raises(HostMemoryExhausted, match="are left since"):
            pool.acquire(MIB, wait=True)
        pool.release(first)
        assert take(pool, MIB) is first
    assert take(pool, MIB) is not first


def test_a_slot_that_could_not_be_made_holds_nothing_though_its_error_is_kept(pools, monkeypatch):
    monkeypatch.setattr(Slot, "prefault", raise_exhausted)
    with pytest.raises(HostMemoryExhausted) as kept:
        pools(1).acquire(MIB, wait=True)
    assert own_files() == set()
    assert kept.value.needed >= MIB


def test_memory_that_the_slots_have_taken_is_no_error_when_the_budget_is_thought_over(
    pools, monkeypatch, tmp_path
):
    """The budget is computed again after the first commit. An error then would never reach the
    other ranks, and farther tiers would never get the step.
    """
    monkeypatch.setattr(slot_files, "SHM", str(tmp_path / "missing"))
    pool = pools(1)
    slot = take(pool, MIB)
    monkeypatch.setattr(
        slots_module, "measure", lambda shm, **how: replace(measure(shm, **how), memory=0)
    )
    pool.reconsider()
    pool.release(slot)
    assert take(pool, MIB) is slot


def test_shared_memory_that_was_freed_is_taken_instead_of_anonymous(pools, monkeypatch, tmp_path):
    with monkeypatch.context() as full:
        full.setattr(slot_files, "SHM", str(tmp_path / "missing"))
        pool = pools(1)
        slot = take(pool, MIB)
    pool.release(slot)
    pool.reconsider()
    assert not slot.is_shared
    assert take(pool, MIB).is_shared


def test_a_slot_whose_step_cannot_be_taken_off_is_let_go_all_the_same():
    class Stuck(NoContents):
        def evict(self, path: str) -> None:
            raise StorageError(path, "it cannot be taken off")

    pool = SlotPool(1, contents=Stuck())
    pool.release(take(pool, MIB))
    with pytest.raises(StorageError) as kept:
        pool.acquire(9 * MIB, wait=False)
    assert own_files() == set()
    assert take(pool, 9 * MIB).capacity >= 9 * MIB
    pool.close()
    assert kept.value.detail


def test_a_slot_whose_file_has_vanished_is_replaced_by_a_new_one(pools):
    """logind's RemoveIPC and programs that clean /dev/shm remove a user's files there."""
    pool = pools(1)
    lost = take(pool, MIB)
    os.unlink(lost.path)
    pool.release(lost)
    slot = take(pool, MIB)
    assert slot is not lost
    assert own_files() == {os.path.basename(slot.path)}
    lost.view[0] = 1  # an image in it is still whole


def test_a_file_that_stands_in_the_place_of_a_slots_own_is_neither_used_nor_removed(pools):
    pool = pools(1)
    lost = take(pool, MIB)
    os.unlink(lost.path)
    Path(lost.path).write_bytes(b"another")
    pool.release(lost)
    slot = take(pool, MIB)
    assert slot.path != lost.path
    assert Path(lost.path).read_bytes() == b"another"


def fill(folder: Path) -> Path:
    """Fill a small /dev/shm from another process."""
    room = os.statvfs(folder)
    path = folder / "another"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
    return path


def test_a_slot_that_cannot_grow_back_is_replaced_by_anonymous_memory_until_there_is_room(
    pools, monkeypatch, tiny_shm, caplog
):
    """It was cut when a store in memory took the image in it, and another process has taken the
    memory that was cut off.
    """
    monkeypatch.setattr(slot_files, "SHM", str(tiny_shm))
    pool = pools(1)
    slot = take(pool, MIB)
    assert slot.is_shared
    os.truncate(slot.path, MIB)
    pool.release(slot)
    another = fill(tiny_shm)
    with caplog.at_level(logging.INFO, logger="ckpt"):
        for _ in range(3):
            slot = take(pool, MIB)
            slot.tensor.fill_(1)
            pool.release(slot)
            if slot.is_shared:  # the slot that was released has made room
                another.unlink()
                os.truncate(slot.path, MIB)
                another = fill(tiny_shm)
    assert not slot.is_shared
    assert caplog.text.count("using anonymous memory") == 1
    again = take(pool, MIB)
    assert again is slot  # a save does not make a new one each time
    another.unlink()
    with caplog.at_level(logging.INFO, logger="ckpt"):
        pool.release(again)
    assert "in /dev/shm" in caplog.messages[-1]
    assert take(pool, MIB).is_shared


def test_a_slot_is_made_ahead_again_when_there_is_room_in_shared_memory(
    pools, monkeypatch, tmp_path, shm
):
    monkeypatch.setattr(slot_files, "SHM", str(tmp_path / "missing"))
    pool = pools(2)
    one, two = take(pool, MIB), take(pool, MIB)
    assert not pool.release(one)
    monkeypatch.setattr(slot_files, "SHM", str(shm))
    assert pool.release(two)
    pool.reserve(MIB)
    assert len(own_files()) == 2
    assert take(pool, MIB).is_shared


def mapped() -> int:
    """Return the slots of this test that are mapped by this process."""
    with open("/proc/self/maps") as file:
        return sum(f"{slot_files.SHM}/ckpt-slot" in line for line in file)


def test_a_slot_that_is_let_go_is_not_mapped_any_more(pools):
    """A plan over it is released with it."""
    pool = pools(1)
    slot = take(pool, MIB)
    plan = threading.Event()
    slot.layouts[plan] = slot.tensor[:10]
    assert mapped() == 1
    pool.release(slot)
    slot = None
    take(pool, 9 * MIB)
    assert mapped() == 1


def test_whoever_waits_for_a_slot_is_told_though_the_step_in_it_cannot_be_taken_off():
    fails = [True]

    class Stuck(NoContents):
        def evict(self, path: str) -> None:
            if fails.pop() if fails else False:
                raise StorageError(path, "it cannot be taken off")

    pool = SlotPool(1, contents=Stuck())
    small = take(pool, MIB)
    pool.plan(9 * MIB)  # what is released now is too small
    found: list[object] = []
    waiting = threading.Thread(
        target=lambda: found.append(pool.acquire(9 * MIB, wait=True)), daemon=True
    )
    waiting.start()
    condition: Any = pool._change._condition
    while not condition._waiters:
        time.sleep(0.001)
    with pytest.raises(StorageError):
        pool.release(small)
    waiting.join(30)
    assert found
    pool.close()


@pytest.mark.parametrize("event", ["call", "c_return"])
@pytest.mark.parametrize("slot", ["new", "free", "lost"])
def test_ctrl_c_loses_no_slot_wherever_it_interrupts_acquire(pools, slot: str, event: str) -> None:
    """Otherwise the next save would wait forever for the only slot."""
    files = ("staging/slot_pool.py", "staging/slot.py", "ckpt/locks.py", "/threading.py")
    turn, was_interrupted = 0, True
    while was_interrupted:
        turn, was_interrupted = turn + 1, False
        pool = pools(1)
        if slot != "new":
            pool.release(take(pool, MIB))
        if slot == "lost":
            os.unlink(pool.slots[0].path)
        with interrupted_call(files, turn, event=event):
            try:
                pool.acquire(MIB, wait=False)
            except KeyboardInterrupt:
                was_interrupted = True
        if was_interrupted:
            take(pool, MIB)
        assert len(pool.slots) == 1
        pool.close()
    assert turn > 4


def test_a_pool_of_rings_makes_the_second_when_the_first_is_in_use(pools):
    pool = pools(2, elastic=True)
    size = 1 << 30
    pool.plan(size)
    pool.reserve(size)
    assert pool.has_all(size)
    assert pool.nbytes == 192 << 20
    first = pool.acquire(size, wait=False)
    pool.reserve(size)
    assert pool.nbytes == 192 << 20
    second = pool.acquire(size, wait=False)
    assert isinstance(first, Ring)
    assert isinstance(second, Ring)
    assert pool.nbytes == 2 * (192 << 20)
    assert pool.acquire(size, wait=False) is None
    pool.release(first)
    assert pool.acquire(size, wait=False) is first


def test_the_second_ring_is_given_back_when_the_last_saves_did_not_need_it(pools):
    pool = pools(2, elastic=True)
    size = 400 * MIB

    def overlap() -> None:
        first, second = take(pool, size), take(pool, size)
        pool.release(first)
        pool.release(second)

    overlap()
    for _ in range(6):
        pool.release(take(pool, size))
        assert len(pool.slots) == 2
    overlap()  # the count begins again
    for saves in range(7):
        assert len(pool.slots) == 2, saves
        pool.release(take(pool, size))
    assert len(pool.slots) == 1
    overlap()
    assert len(pool.slots) == 2


def test_a_larger_image_has_larger_frames_while_the_previous_image_is_written(pools):
    pool = pools(2, elastic=True)
    pool.plan(100 * MIB)
    first = take(pool, 100 * MIB)
    assert (first.capacity, first.spill.frame_bytes) == (48 * MIB, 8 * MIB)
    first.spill.begin_growth()
    first.grow()
    assert first.spill.count * first.spill.frame_bytes == 8 * MIB
    second = take(pool, 1024 * MIB)
    assert (second.capacity, second.spill.frame_bytes) == (192 * MIB, 32 * MIB)
    assert first.spill is not second.spill
    assert not first.spill.may_grow()
    pool.release(first)
    assert first.spill.count == 0
    assert pool.slots == [second]


def test_a_multiple_of_the_image_limits_the_memory_of_a_pool():
    config = SaveConfig(host_memory="0.5x")
    pool = SlotPool(2, limit=config.memory_limit, elastic=True)
    pool.plan(1 << 30)
    assert pool._budget is not None
    assert pool._budget.slot_bytes + pool._budget.spill_bytes <= 384 << 20
    assert pool._budget.slots == 1
    pool.close()


def test_a_whole_slot_of_the_size_of_a_ring_is_no_ring(pools):
    """The state grows by the state of its optimizer, after a save without it."""
    pool = pools(2, elastic=True)
    whole = take(pool, 48 * MIB)
    assert not isinstance(whole, Ring)
    pool.release(whole)
    assert isinstance(take(pool, 400 * MIB), Ring)


def test_more_host_memory_than_the_machine_has_is_a_warning_with_both_figures(pools, caplog):
    pool = pools(2, elastic=True, limit=1 << 50)
    pool.plan(400 * MIB)
    (line,) = [row for row in caplog.records if row.levelno == logging.WARNING]
    assert "host_memory allows 1,073,741,824 MiB, but this machine" in line.getMessage()
    pool = pools(2, elastic=True, limit=300 * MIB)
    caplog.clear()
    pool.plan(400 * MIB)
    assert "host_memory allows" not in caplog.text


@pytest.mark.parametrize("limit", [250 * MIB, 500 * MIB, 900 * MIB])
@pytest.mark.parametrize("elastic", [True, False])
def test_what_host_memory_allows_is_no_warning(pools, caplog, limit, elastic):
    """A user who sets a limit expects that fewer images, or only parts of one, fit."""
    caplog.set_level(logging.INFO, "ckpt")
    pools(2, elastic=elastic, limit=limit).plan(600 * MIB)
    (line,) = caplog.records
    assert line.levelno == logging.INFO, line.getMessage()


@pytest.mark.parametrize(
    ("memory", "shared", "words"),
    [
        (1000, 1000, "2 were wanted, so a save may wait"),
        (2000, 500, "images are lost with the process"),
        (500, 500, "in waves"),
    ],
)
def test_what_the_machine_lacks_is_a_warning(pools, caplog, monkeypatch, memory, shared, words):
    room = Room(memory=memory * MIB, shared_bytes=shared * MIB, ranks=1)
    monkeypatch.setattr(slots_module, "measure", lambda *_, **__: room)
    pools(2).plan(600 * MIB)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert words in line.getMessage()


def test_a_ring_has_room_for_the_parts_of_the_store(pools):
    pool = pools(2, elastic=True, part_bytes=300 * MIB)
    assert take(pool, 2000 * MIB).capacity == 384 * MIB
