"""Jobs on a small disk that are killed during a save, one after the other.

``test_disk`` runs it in a mount namespace of its own.

small_disk.py FOLDER: a disk of 4 MiB. It prints what is there at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch._dynamo  # a manager needs it: imported once, and not by each fork

from ckpt import CheckpointManager, Tier
from ckpt.errors import OutOfSpace
from tests.kit.deadly import die_before_a_removal, die_in_the_save_of
from tests.kit.stores import whole
from tests.kit.waiting import until

NUMBERS = 110_000  # 0.9 MB: with keep_last=1 there are two for a while
LARGE = 101
REMOVAL = -1
"""A job with this ``kill`` commits its first step, and removes none. Other jobs are killed in the
save of that number.
"""


def state(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((NUMBERS + 9000 * (step == LARGE),), step)}


def taken(root: Path) -> int:
    """Return the bytes that files take. A file or folder may be removed during the count."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_blocks * 512
    return total


def job(root: Path, steps: range, kill: int | None, tier: Callable[[str], Tier]) -> None:
    """Run in a process of its own, which ends with it."""
    if kill == REMOVAL:
        die_before_a_removal()
    elif kill is not None:
        die_in_the_save_of(steps[kill - 1])
    with CheckpointManager(tier(str(root))) as manager:
        for step in steps:
            manager.save(state(step), step, timeout=60)
            if kill == 2:  # it removes older steps in the background, and is killed after that
                assert until(lambda: taken(root) < 1.5 * NUMBERS * 8)


def run(
    root: Path, steps: range, kill: int | None = None, tier: Callable[[str], Tier] | None = None
) -> int:
    """Run a job in a fork, and return its exit status."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            job(root, steps, kill, tier or (lambda url: Tier(url, keep_last=1)))
            code = 0
        except OutOfSpace as error:
            print("ckpt:", error, file=sys.stderr)
            code = 3
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main(disk: Path) -> None:
    root = disk / "run"
    one = NUMBERS * 8
    for number in range(1, 8):  # four of each would fill the disk
        assert os.WTERMSIG(run(root, range(number, number + 1), kill=1)) == signal.SIGKILL
        assert taken(root) < 2.5 * one, (number, taken(root))
    assert run(root, range(10, 13)) == 0
    print("after kills", *whole(root))
    for number in range(13, 33, 2):  # killed in the second save: the first is committed
        assert os.WTERMSIG(run(root, range(number, number + 2), kill=2)) == signal.SIGKILL
        assert taken(root) < 3.5 * one, (number, taken(root))
    for number in range(33, 40):
        assert os.WTERMSIG(run(root, range(number, number + 1), kill=REMOVAL)) == signal.SIGKILL
        assert taken(root) < 2.5 * one, (number, taken(root))
    assert run(root, range(40, 41)) == 0
    print("at the end", *whole(root), round(taken(root) / one))
    fresh(root)
    assert os.WTERMSIG(run(root, range(LARGE, LARGE + 1), kill=1)) == signal.SIGKILL
    fill(disk)  # there is no room for the note of the owner either
    assert run(root, range(102, 103)) == 0
    print("beside another's file", *whole(root))
    fresh(root)
    assert run(root, range(1, 5), tier=Tier) == 0
    assert run(root, range(5, 7), tier=Tier) == 3 << 8  # no step has to be kept
    assert run(root, range(7, 9)) == 0  # the retention rule is another one now
    print("with another rule", *whole(root))


def fresh(root: Path) -> None:
    shutil.rmtree(root)
    (root.parent / "filler").unlink(missing_ok=True)


def fill(disk: Path) -> None:
    room = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
