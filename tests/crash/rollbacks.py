"""Kill a job of four ranks that goes back, before or after each of its calls to the stores.

It runs as a script. ROOT FIRST STRIDE: kill at the calls FIRST, FIRST + STRIDE and so on, until a
job ends before it is killed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointManager
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.single import new_attempt
from tests.coordination.world import World, WorldCoordinator
from tests.crash.nursery import warm_up
from tests.crash.sequences.run import die_at
from tests.processes import fork

RANKS = 4
OLD, NEW = 1, 2
"""The branches, in what the ranks save."""


def content(coordinator: Coordinator, step: int, branch: int) -> dict[str, Any]:
    """Return what a rank saves. Another rank, step or branch has other numbers."""
    return {f"x{coordinator.rank}": torch.full((100,), 100 * step + 10 * branch)}


def in_job(root: Path, work: Any, death: int | None = None) -> tuple[int, str]:
    """Do ``work`` on four ranks in a child, which dies at its call ``death`` to a store.

    Return its exit code, and what it has noted.
    """
    log = root / "log"
    log.write_text("")

    def job() -> None:
        if death is not None:
            die_at(death)
        WorldCoordinator.attempt = new_attempt()
        for error in World(RANKS, patience=30).run(partial(work, root)).values():
            if isinstance(error, BaseException):
                raise error

    code = os.waitstatus_to_exitcode(os.waitpid(fork(job), 0)[1])
    return code, log.read_text()


def note(root: Path, text: str) -> None:
    descriptor = os.open(root / "log", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def manager_of(root: Path, coordinator: Coordinator) -> CheckpointManager:
    tiers = [str(root / "near"), str(root / "far")]
    return CheckpointManager(tiers, coordinator=coordinator, commit_timeout_seconds=20)


def first(root: Path, coordinator: Coordinator) -> None:
    with manager_of(root, coordinator) as manager:
        for step in (1, 2, 3):
            manager.save(content(coordinator, step, OLD), step)


def going_back(root: Path, coordinator: Coordinator) -> None:
    with manager_of(root, coordinator) as manager:
        state = content(coordinator, 0, 0)
        manager.restore(state, step=1)
        note(root, "restored")
        for step in (2, 3):
            manager.save(content(coordinator, step, NEW), step)
            note(root, f"saved {step}")


def check(root: Path, coordinator: Coordinator) -> None:
    with manager_of(root, coordinator) as manager:
        state = content(coordinator, 0, 0)
        report = manager.restore(state)
        assert report is not None
        (value,) = set(state[f"x{coordinator.rank}"].tolist())
        note(root, f"{coordinator.rank} {report.step} {value}")
        manager.save(content(coordinator, report.step + 1, NEW), report.step + 1)


def what_should_be_there(notes: str) -> set[tuple[int, int]]:
    """Return the steps and branches that the next job may restore."""
    saved = max((int(line.split()[1]) for line in notes.splitlines() if "saved" in line), default=0)
    if not saved and "restored" not in notes:
        return {(3, OLD), (1, OLD)}
    # A save that was killed may have been committed.
    return {(step, NEW) for step in range(max(saved, 2), 4)} | ({(1, OLD)} if not saved else set())


def main() -> None:
    root, begin, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warm_up()
    template = root / "template"
    template.mkdir(parents=True)
    assert in_job(template, first) == (0, "")
    for deaths, number in enumerate(itertools.count(begin, stride)):
        run = root / "run"
        shutil.copytree(template, run)
        code, notes = in_job(run, going_back, number)
        assert code in (0, -signal.SIGKILL), (number, code)
        allowed = what_should_be_there(notes)
        ended, answers = in_job(run, check)
        assert ended == 0, (number, notes, answers)
        found = {tuple(map(int, line.split()[1:])) for line in answers.splitlines()}
        assert len(found) == 1, f"call {number}: the ranks do not agree: {answers}"
        ((step, value),) = found
        branch = value % 100 // 10
        assert value == 100 * step + 10 * branch, f"call {number}: {found}"
        assert (step, branch) in allowed, f"call {number}: {step, branch} after {notes!r}"
        shutil.rmtree(run)
        if code == 0:
            print(f"ALL WELL: {deaths} deaths")
            return


if __name__ == "__main__":
    main()
