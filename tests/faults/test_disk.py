"""A disk of its own fills up, runs out of inodes, or becomes read-only during a save.

The tests need the right to mount.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import AccessDenied, CkptError, OutOfSpace
from tests.crash.nursery import Killer
from tests.faults.conftest import Count
from tests.kit.disks import mount, run_script_mounted
from tests.kit.stores import whole, wrap_stores
from tests.kit.worlds import ROOT

__all__ = ["mount"]
ALL = [pytest.mark.torture, pytest.mark.timeout(1800)]
PAGE = 4096
NUMBERS = 8 * PAGE // 8


def state(step: int) -> dict[str, object]:
    return {"x": torch.arange(NUMBERS, dtype=torch.int64) + step, "step": step}


def fill(path: Path, *, leave: int) -> None:
    """Fill all of the file system but ``leave`` bytes."""
    room = os.statvfs(path.parent)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(descriptor, 0, room.f_bavail * room.f_frsize - leave)
    os.close(descriptor)


def others(tmp_path: Path, mounted: Path, which: str) -> list[Tier]:
    names = {
        name: str(mounted / "run" if name == which else tmp_path / name) for name in ("near", "far")
    }
    return [Tier(names["near"]), Tier(names["far"])]


def goes_wrong_and_on(
    tiers: list[Tier],
    which: str,
    spoil: Callable[[], None],
    mend: Callable[[], None],
    error: type[CkptError],
) -> bool:
    """Save step 1, then 2 on a spoiled disk, then 3 on a repaired one. Return whether 2
    was lost.
    """
    spoiled, healthy = (tiers[0], tiers[1]) if which == "near" else (tiers[1], tiers[0])
    # A file that is open for writing, such as a journal, keeps a disk from becoming read-only.
    with CheckpointManager(tiers, journal=False) as manager:
        manager.save(state(1), 1, timeout=30)
        spoil()
        pending = manager.save_async(state(2), 2)
        lost = pending.exception(30, tier=spoiled.url)
        assert lost is None or isinstance(lost, error), (type(lost), lost)
        pending.exception(30)
        mend()
        manager.save(state(3), 3, timeout=30)
    assert whole(spoiled.url) == ([1, 3] if lost else [1, 2, 3])
    assert whole(healthy.url) == ([1, 3] if lost and which == "near" else [1, 2, 3])
    return lost is not None


@pytest.mark.parametrize("which", ["near", "far"])
@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=ALL)])
def test_a_disk_that_is_full_but_for_some_pages(
    tmp_path: Path, mount: Callable[[str], Path], tally: Count, which: str, stride: int
) -> None:
    """With each count of free pages, another file finds no room: the image, the fragment, the
    manifest or the note of the owner.
    """
    place = mount("size=1m")
    lost = []
    for pages in range(0, 18, stride):
        tiers, filler = others(tmp_path / f"{pages}", place, which), place / "filler"
        spoil = partial(fill, filler, leave=pages * PAGE)
        lost.append(goes_wrong_and_on(tiers, which, spoil, filler.unlink, OutOfSpace))
        subprocess.run(["rm", "-r", str(place / "run")], check=True)
    assert lost[0]
    assert not lost[-1]
    assert sum(lost) > 4
    tally("no-space", sum(lost))


def test_a_disk_without_inodes(tmp_path: Path, mount: Callable[[str], Path], tally: Count) -> None:
    place = mount("size=4m,nr_inodes=40")
    lost = []
    for left in range(7):
        tiers = others(tmp_path / f"{left}", place, "near")

        def spoil(left: int = left) -> None:
            for number in range(os.statvfs(place).f_ffree - left):
                (place / f"filler{number}").touch()

        def mend() -> None:
            for path in place.glob("filler*"):
                path.unlink()

        lost.append(goes_wrong_and_on(tiers, "near", spoil, mend, OutOfSpace))
        subprocess.run(["rm", "-r", str(place / "run")], check=True)
    assert lost[0]
    assert not lost[-1]
    tally("no-inodes", sum(lost))


@pytest.mark.parametrize("which", ["near", "far"])
@pytest.mark.parametrize("calls", [(1, 2, 4, 6, 8, 10), pytest.param(range(1, 21), marks=ALL)])
def test_a_disk_that_is_turned_read_only_between_two_calls(
    tmp_path: Path,
    mount: Callable[[str], Path],
    tally: Count,
    which: str,
    calls: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = mount("size=4m")
    armed: list[int] = []

    def remount(how: str) -> bool:
        return (
            subprocess.run(
                ["mount", "-o", f"remount,{how}", str(place)], capture_output=True, check=False
            ).returncode
            == 0
        )

    def tick(moment: str) -> None:
        if armed and moment == "before":
            armed[0] -= 1
            if armed[0] == 0 and not remount("ro"):
                armed[0] = 1  # a file is open for writing when the next call comes

    wrap_stores(
        monkeypatch,
        lambda url, store: Killer(store, tick) if url.startswith(str(place)) else store,
    )
    lost = 0
    for nth in calls:
        tiers = others(tmp_path / f"{nth}", place, which)

        def spoil(nth: int = nth) -> None:
            armed[:] = [nth]

        def mend() -> None:
            armed.clear()
            remount("rw")

        lost += goes_wrong_and_on(tiers, which, spoil, mend, AccessDenied)
        subprocess.run(["rm", "-r", str(place / "run")], check=True)
    assert lost > 1
    tally("read-only", lost)


def output_on(place: Path, size: str, script: str) -> list[str]:
    """Return the lines that a script of tests/ prints while ``place`` is a tmpfs of this size,
    without those of the log.
    """
    said = run_script_mounted(
        f"mount -t tmpfs -o size={size} none {place}", ROOT / "tests" / script, place
    )
    return [line for line in said.splitlines() if not line.startswith("ckpt: ")]


def test_a_disk_that_is_pulled_takes_no_save_under_its_mount_point(tmp_path: Path) -> None:
    reported = output_on(tmp_path, "64m", "pulled_disk.py")
    assert reported == ["disk 1 4", "disk/run 1 4", "disk/run2 4"]


def test_jobs_that_are_killed_in_mid_save_do_not_fill_a_small_disk(tmp_path: Path) -> None:
    reported = output_on(tmp_path, "4m", "small_disk.py")
    assert reported == [
        "after kills 12",
        "at the end 40 1",
        "beside another's file 102",
        "with another rule 8",
    ]
