"""A job in a container whose /dev/shm has 64 MB, as a series of scenes.

It runs in a mount namespace of its own, where it may fill /dev/shm.

small_shm.py FOLDER prints a line for each scene that succeeds. A SIGBUS would end all of them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointManager, Tier
from ckpt.staging.device import Devices
from ckpt.staging.slot_pool import SlotPool
from ckpt.storage.tiers import urls_of
from tests.overlap.window import assert_restores, content

MIB = 1 << 20
SHM = Path("/dev/shm")
LOG: list[str] = []


class Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOG.append(record.getMessage())


def state_of(mib: int, fill: float = 1.0) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.full((mib // 2, MIB // 4), fill))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, fill + 1)
    return {"weight": torch.nn.ParameterList([weight]), "optimizer": optimizer}


def step(state: dict[str, Any]) -> None:
    for parameter in state["weight"]:
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def slots() -> list[Path]:
    return sorted(SHM.glob("ckpt-slot-*"))


def free() -> int:
    room = os.statvfs(SHM)
    return room.f_bavail * room.f_frsize


def eat(leave: int = 0) -> None:
    """Fill all but ``leave`` bytes with a foreign file."""
    descriptor = os.open(SHM / "another", os.O_CREAT | os.O_WRONLY)
    if (more := free() - leave) > 0:
        os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, more)
    os.close(descriptor)


@contextlib.contextmanager
def before_slots_are_made_ahead(act: Callable[[], None]) -> Iterator[None]:
    original = SlotPool.reserve

    def reserve(self: SlotPool, nbytes: int, devices: Devices = ()) -> None:
        if not (SHM / "another").exists():
            act()
        original(self, nbytes, devices)

    SlotPool.reserve = reserve  # type: ignore[method-assign]
    try:
        yield
    finally:
        SlotPool.reserve = original  # type: ignore[method-assign]


def overlapped(
    manager: CheckpointManager, state: dict[str, Any], root: str, saves: int = 3
) -> None:
    """Save and step several times, so that both slots are in use, and compare."""
    references = []
    for number in range(saves):
        references.append(content(state))
        manager.save_async(state, number)
        step(state)
    manager.close()
    for number, reference in enumerate(references):
        assert_restores(
            root,
            reference,
            state_of(sum(p.nbytes for p in state["weight"]) * 2 // MIB, 9.0),
            number,
        )


def a_small_state_is_staged_there(root: str) -> None:
    manager = CheckpointManager(root)
    state = state_of(8)
    manager.prepare(state)
    manager.save(state, 100)
    files = slots()
    assert files
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    overlapped(manager, state, root)
    assert "2 slot(s) of 8 MiB each in /dev/shm" in "\n".join(LOG), LOG


def a_large_state_is_staged_elsewhere_and_that_is_said(root: str) -> None:
    manager = CheckpointManager([Tier("memory"), root])
    overlapped(manager, state_of(200), root)
    reported = "\n".join(LOG)
    assert "2 slot(s) of 200 MiB each in anonymous memory" in reported, LOG
    assert "images are lost with the process" in reported, LOG
    assert " MiB of /dev/shm are free" in reported, LOG


def filled_up_after_it_was_measured(root: str) -> None:
    with before_slots_are_made_ahead(eat):
        manager = CheckpointManager(root)
        state = state_of(20)
        manager.prepare(state)
        while free():  # the thread that makes slots ahead fills it
            time.sleep(0.01)
        overlapped(manager, state, root)
    assert "anonymous memory" in "\n".join(LOG), LOG


def filled_up_between_the_first_slot_and_the_second(root: str) -> None:
    with before_slots_are_made_ahead(lambda: eat(leave=3 * MIB)):
        manager = CheckpointManager(root)
        state = state_of(20)
        manager.save(state, 100)
        assert len(slots()) == 1
        overlapped(manager, state, root)
    assert "No space left on device" in "\n".join(LOG), LOG


def filled_up_when_the_slots_are_there(root: str) -> None:
    manager = CheckpointManager(root)
    state = state_of(20)
    manager.save(state, 100)
    manager.save_async(state, 101)
    manager.save(state, 102)
    assert len(slots()) == 2
    eat()
    overlapped(manager, state, root)


def full_from_the_beginning(root: str) -> None:
    eat()
    overlapped(CheckpointManager(root), state_of(20), root)
    assert "anonymous memory" in "\n".join(LOG), LOG


def a_state_that_grows_out_of_it(root: str) -> None:
    with CheckpointManager(root) as manager:
        references = {}
        for number, mib in enumerate([8, 20, 40, 80, 8]):
            state = state_of(mib, float(number))
            references[number] = content(state)
            manager.save_async(state, number)
            step(state)
    for (number, reference), mib in zip(references.items(), [8, 20, 40, 80, 8], strict=True):
        assert_restores(root, reference, state_of(mib, 9.0), number)


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def the_memory_tier_is_full_when_a_slot_is_wanted_back(root: str) -> None:
    """A slot that was kept as a checkpoint is cut to the length of the image. Then another file
    takes the memory that was cut off.

    Saves go on from anonymous memory. The memory tier is left out meanwhile, and takes steps again
    when there is room.
    """
    state = state_of(9)
    url = urls_of([Tier("memory"), Tier(root)])[0]
    references = {}
    with CheckpointManager([Tier("memory"), root], slots=1) as manager:
        for number in range(8):
            if number == 1:
                eat()
            if number == 3:  # the slot that was released has made room for itself
                eat()
            if number == 6:
                (SHM / "another").unlink()
            references[number] = content(state)
            manager.save_async(state, number).result(60)
            step(state)
        reported = "\n".join(LOG)
        assert reported.count("is not kept in") <= 1, LOG
        assert reported.count("using anonymous memory") == 1, LOG
        assert f"is kept in {url} again" in reported, LOG
        assert slots(), "the images are not in /dev/shm again"
    for number, reference in references.items():
        assert_restores(root, reference, state_of(9, 9.0), number)


def a_slot_that_was_let_go_takes_no_memory(root: str) -> None:
    """Images are in anonymous memory at first. When there is room in /dev/shm, that memory is
    released.
    """
    eat()
    state = state_of(20)
    with CheckpointManager(root, slots=1) as manager:
        manager.prepare(state)
        while not manager._saver.slots.slots:  # the thread that makes slots ahead makes them
            time.sleep(0.01)
        before = anonymous_bytes()
        (SHM / "another").unlink()
        manager.save(state, 0)
        manager.save(state, 1)
        manager.save(state, 2)
        assert slots()
        assert anonymous_bytes() < before - 15 * MIB, (before, anonymous_bytes())


SCENES = (
    a_small_state_is_staged_there,
    a_large_state_is_staged_elsewhere_and_that_is_said,
    filled_up_after_it_was_measured,
    filled_up_between_the_first_slot_and_the_second,
    filled_up_when_the_slots_are_there,
    full_from_the_beginning,
    a_state_that_grows_out_of_it,
    the_memory_tier_is_full_when_a_slot_is_wanted_back,
    a_slot_that_was_let_go_takes_no_memory,
)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    logger = logging.getLogger("ckpt")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    assert free() <= 64 * MIB, "not a small /dev/shm"
    for scene in SCENES:
        LOG.clear()
        try:
            scene(f"{folder}/{scene.__name__}")
            (SHM / "another").unlink(missing_ok=True)
            assert not slots(), slots()
            gc.collect()
            assert free() > 63 * MIB, "memory is still held"
        except Exception:
            traceback.print_exc()
        else:
            print(f"well: {scene.__name__}", flush=True)
        (SHM / "another").unlink(missing_ok=True)
        for left in slots():
            left.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
