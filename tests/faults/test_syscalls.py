"""Any system call of the disk fails.

The caller gets an error, no committed step is lost, and the next save works.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import (
    AccessDenied,
    CkptError,
    CommitError,
    OutOfSpace,
    StorageError,
    TransientStorageError,
)
from ckpt.model.keys import MANIFEST
from tests.faults.conftest import Count
from tests.faults.syscalls import Syscalls
from tests.kit.marks import torture
from tests.kit.stores import whole

MOST_CALLS = 2000
TOLD = {
    errno.EIO: StorageError,
    errno.ENOSPC: OutOfSpace,
    errno.EDQUOT: OutOfSpace,
    errno.ESTALE: TransientStorageError,
    errno.EROFS: AccessDenied,
    errno.EACCES: AccessDenied,
}
"""The error that a caller gets for each code.

There is one exception. If the disk goes away for good while a manifest is put, the caller gets a
`CommitError`, since nobody can see whether the step was committed.
"""


def state(step: int) -> dict[str, object]:
    return {"x": torch.arange(5000, dtype=torch.int64) * 31 + step, "step": step}


def failing(nth: int, code: int, *, lasting: bool = False) -> Callable[[str, str], int | None]:
    """Return a ``fail`` for the ``nth`` call. With ``lasting`` later calls that change the disk
    fail too.
    """
    counter = itertools.count(1)

    def fail(verb: str, path: str) -> int | None:
        number = next(counter)
        return code if number == nth or (lasting and number > nth) else None

    return fail


def tiers(place: Path, *, keep_last: int | None) -> list[Tier]:
    return [Tier(str(place / "near"), keep_last=keep_last), Tier(str(place / "far"))]


def save_with_a_failure(
    place: Path, which: str, nth: int, code: int, *, lasting: bool, keep_last: int | None
) -> bool:
    """Save step 0; then 1 and 2 while the ``nth`` call below ``which`` fails; then 3.

    Return whether there was such a call.
    """
    with CheckpointManager(tiers(place, keep_last=keep_last)) as manager:
        manager.save(state(0), 0, timeout=30)
    calls = Syscalls(place / which, fail=failing(nth, code, lasting=lasting))
    reported: dict[int, CkptError | None] = {}
    with calls.entered():
        # a temporary error is tried again for this long, and 36 times that if a farther tier waits
        patience, wait = (2, 150) if lasting and code == errno.ESTALE else (600, 30)
        manager = CheckpointManager(
            tiers(place, keep_last=keep_last), commit_timeout_seconds=patience
        )
        for step in (1, 2):
            try:
                reported[step] = manager.save_async(state(step), step).exception(wait)
            except CkptError as error:  # the error of the previous save, on a farther tier
                reported[step] = error
        try:
            manager.close()
        except CkptError as error:
            reported[-1] = error
    for fault in reported.values():
        unseen = lasting and isinstance(fault, CommitError) and "cannot be seen" in str(fault)
        assert not unseen or any(MANIFEST in path for path in calls.failed), (nth, fault)
        assert fault is None or isinstance(fault, TOLD[code]) or unseen, (nth, type(fault), fault)
    near, far = whole(place / "near"), whole(place / "far")
    for step in (1, 2):
        if reported[step] is None:
            assert step in far, (nth, reported, near, far)
            assert step in near or keep_last, (nth, reported, near, far)
    assert 0 in far
    with CheckpointManager(tiers(place, keep_last=keep_last)) as manager:
        target = state(-1)
        report = manager.restore(target)
        assert report is not None
        assert torch.equal(target["x"], state(report.step)["x"])  # type: ignore[arg-type]
        # A step that lacked only its manifest was finished by the restore.
        finished = [step for step, _ in report.finished]
        assert (
            report.step
            == max(near + far + finished)
            >= max([step for step in (1, 2) if reported[step] is None], default=0)
        )
        manager.save(state(3), 3, timeout=30)
    assert whole(place / "near")[-1] == whole(place / "far")[-1] == 3
    return calls.calls >= nth


def sweep(tmp_path: Path, which: str, code: int, stride: int, *, lasting: bool = False) -> int:
    for tried, nth in enumerate(range(1, MOST_CALLS, stride)):
        keep_last = 2 if nth % 2 else None
        if not save_with_a_failure(
            tmp_path / f"{nth}", which, nth, code, lasting=lasting, keep_last=keep_last
        ):
            return tried
    raise AssertionError("the saves never ended")


@pytest.mark.parametrize(
    ("which", "code", "lasting"),
    [
        ("near", errno.EIO, False),
        ("far", errno.EROFS, True),
        *torture(("far", errno.EIO, False), ("near", errno.ENOSPC, True)),
    ],
)
def test_a_call_of_a_save_or_a_prune_fails(
    tmp_path: Path, tally: Count, which: str, code: int, lasting: bool
) -> None:
    tally("io-error", sweep(tmp_path, which, code, 29, lasting=lasting))


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS, errno.EACCES]
)
@pytest.mark.parametrize("which", ["near", "far"])
def test_any_call_of_a_save_or_a_prune_fails(
    tmp_path: Path, tally: Count, which: str, code: int, lasting: bool
) -> None:
    patient = lasting and code == errno.ESTALE  # each save is retried for a minute
    tally("io-error", sweep(tmp_path, which, code, 29 if patient else 1, lasting=lasting))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_any_call_of_a_restore_fails(tmp_path: Path, tally: Count, code: int) -> None:
    with CheckpointManager(tiers(tmp_path, keep_last=None)) as manager:
        for step in (0, 1):
            manager.save(state(step), step, timeout=30)
    for nth in itertools.count(1):
        calls = Syscalls(tmp_path / "near", fail=failing(nth, code))
        target = state(-1)
        with (
            CheckpointManager(tiers(tmp_path, keep_last=None)) as manager,
            calls.entered(reading=True),
        ):
            report = manager.restore(target)
        if calls.calls < nth:
            break
        assert report is not None
        assert report.step == 1, (nth, report)
        assert torch.equal(target["x"], state(1)["x"])  # type: ignore[arg-type]
    assert nth > 10
    tally("io-error", nth - 1)


def test_a_root_that_was_half_claimed_is_free_to_the_next_manager_of_the_process(
    tmp_path: Path,
) -> None:
    """The claim may exist although the call that made it has failed."""
    for nth in range(1, 12):
        calls = Syscalls(tmp_path, fail=failing(nth, errno.EROFS, lasting=True))
        with (
            calls.entered(),
            contextlib.suppress(CkptError),
            CheckpointManager(tmp_path) as manager,
        ):
            manager.save(state(nth), 2 * nth)
        with CheckpointManager(tmp_path) as manager:
            manager.restore(state(-1))
            manager.save(state(nth), 2 * nth + 1)
        assert whole(tmp_path)[-1] == 2 * nth + 1


def test_a_root_that_could_not_be_given_back_is_free_to_the_next_manager_of_the_process(
    tmp_path: Path,
) -> None:
    calls = Syscalls(
        tmp_path,
        fail=lambda verb, path: (
            errno.EIO if path.endswith("writer.json") and verb == "unlink" else None
        ),
    )
    with calls.entered(), CheckpointManager(tmp_path) as manager:
        manager.save(state(1), 1)
    assert (tmp_path / "writer.json").exists()
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(2), 2)
    assert whole(tmp_path) == [1, 2]
