"""Power is lost after any system call of saves and prunes.

Each step that was reported as committed is there, and no listed checkpoint is torn.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import NoCheckpoint
from tests.faults.conftest import Count
from tests.faults.power import Disk, Survives, build
from tests.faults.syscalls import Mark, Op, Syscalls
from tests.kit.stores import whole

KEPT = 2
Log = list[Op | Mark]


def state(step: int) -> dict[str, object]:
    return {"x": torch.arange(3000, dtype=torch.int64) * 31 + step, "step": step}


def job(root: Path, steps: range, reported: Callable[[str], None]) -> None:
    """Save and prune."""
    with CheckpointManager(
        Tier(str(root), keep_last=KEPT), chunk_size=4096, journal=False
    ) as manager:
        for step in steps:
            manager.save(state(step), step, timeout=30)
            reported(f"committed {step}")


def record(place: Path, steps: int) -> Log:
    """Run two jobs, one after the other."""
    place.mkdir()
    calls = Syscalls(place)
    with calls.entered():
        job(place / "run", range(steps - 1), calls.mark)
        job(place / "run", range(steps - 1, steps), calls.mark)
    return calls.log


def check(
    place: Path, reported: list[int], found: dict[str, bytes | None], *, goes_on: bool
) -> list[int]:
    build(place, found.items())
    try:
        steps = whole(place / "run")
        if goes_on:
            with CheckpointManager(place / "run") as manager:
                target = state(-1)
                report = manager.restore(target)
                # A restore finishes a step that lacked only its manifest
                finished = [number for number, _ in report.finished] if report else []
                newest = max([*steps, *finished], default=0)
                assert (report.step if report else 0) == newest
                step = newest + 1
                manager.save(state(step), step, timeout=30)
            assert whole(place / "run")[-1] == step
        return steps
    finally:
        shutil.rmtree(place)


def lose_power(tmp_path: Path, log: Log, rounds: int, seed: int) -> int:
    """Lose power after each call, and return how many states were examined.

    What was not forced is lost; then all of it survives; then, ``rounds`` times, any part of it.
    """
    disk, reported, chance = Disk(tmp_path / "disk"), list[int](), random.Random(seed)
    seen: dict[object, list[int]] = {}
    looked = 0
    for entry in log:
        if isinstance(entry, Mark):
            reported.append(int(entry.what.split()[1]))
        else:
            disk.play(entry)
        partial: list[Survives] = [lambda: chance.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.0])] * rounds
        for survives in [lambda: 0.0, lambda: 1.0, *partial]:
            found = disk.after(survives)
            key = tuple(found.items())
            if key not in seen:
                seen[key] = check(tmp_path / "after", reported, found, goes_on=len(seen) % 50 == 0)
            looked += 1
            lost = set(reported[-KEPT:]) - set(seen[key])
            if (
                reported and reported[-1] + 1 in seen[key]
            ):  # committed and pruned before the caller learned it
                lost -= {reported[-1] + 1 - KEPT}
            assert not lost, (entry, lost, sorted(found))
    return looked


def test_power_is_lost_after_any_system_call(tmp_path: Path, tally: Count) -> None:
    log = record(tmp_path / "disk", 4)
    tally("power", lose_power(tmp_path, log, rounds=1, seed=1))


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_power_is_lost_after_any_system_call_in_many_ways(tmp_path: Path, tally: Count) -> None:
    log = record(tmp_path / "disk", 7)
    tally("power", lose_power(tmp_path, log, rounds=30, seed=2))


def test_the_recording_is_the_disk(tmp_path: Path) -> None:
    """If all writes survive, the calls leave what is on the disk, so no call was missed."""
    log = record(tmp_path / "disk", 3)
    disk = Disk(tmp_path / "disk")
    for entry in log:
        if isinstance(entry, Op):
            disk.play(entry)
    there = {
        str(path.relative_to(tmp_path / "disk")): path.read_bytes() if path.is_file() else None
        for path in (tmp_path / "disk").rglob("*")
    }
    assert disk.after(lambda: 1.0) == there


@pytest.mark.parametrize(
    "missing", [r"\.tmp$", r"/step-[^/]*$", r"/disk/run$", r"/disk$"], ids=repr
)
def test_an_engine_that_forces_less_is_caught(tmp_path: Path, missing: str) -> None:
    """The same recording without the fsyncs of data, of the folders of steps, of the root, or of
    the folder above it, loses a reported step, lists a torn checkpoint, or leaves fragments of data
    that is torn, from which a job makes one.
    """
    log = [
        entry
        for entry in record(tmp_path / "disk", 3)
        if isinstance(entry, Mark) or entry.verb != "fsync" or not re.search(missing, entry.path)
    ]
    with pytest.raises((AssertionError, NoCheckpoint)):
        lose_power(tmp_path, log, rounds=2, seed=3)
