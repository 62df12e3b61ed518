"""Kill trainers with an agent, as tests/crash/three_tiers.py does without one.

It runs as a script.

deaths.py ROOT TIMES NUMBERS SEED: kill the trainer, the agent, or both, TIMES times at random
moments. Each trainer resumes from what is left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.catalog.step_listing import committed
from ckpt.model.keys import StepRef
from ckpt.storage.registry import open_backend
from tests.agent.conftest import holders
from tests.crash.nursery import orphans, warm_up
from tests.crash.three_tiers import bury, check, memory_url, noted, trainer
from tests.kit.waiting import until
from tests.processes import fork

KILLED = ("trainer", "agent, then trainer", "both at once", "agent while it finishes")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGKILL, code


def kill_agent(place: AgentFolder) -> None:
    for pid in holders(place, "listen"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def knows(place: AgentFolder, trainer_pid: int, *states: str) -> bool:
    """Return whether the agent knows the job of a trainer, in one of ``states``."""
    found = status(place)
    return found is not None and any(
        trainer_pid in job.processes and job.state in states for job in found.jobs
    )


def one(root: Path, numbers: int, how: str, chance: random.Random) -> bool:
    """Cause one death, and return whether the trainer had committed a step before."""
    place, log = AgentFolder.of_this_user(), root / "log"
    child = fork(lambda: trainer(root, log, numbers, 10**6, agent="required"))
    assert until(lambda: knows(place, child, "running"))
    before = noted(log)
    time.sleep(chance.uniform(0.0, 1.0))
    if how == "agent, then trainer":
        kill_agent(place)
        assert until(lambda: knows(place, child, "running")), "it was not registered again"
    if how == "both at once":
        kill_agent(place)
    kill(child)
    if how == "agent while it finishes":
        time.sleep(chance.uniform(0.0, 1.5))
        kill_agent(place)
        assert until(lambda: not holders(place, "work")), "a worker has outlived its agent"
    known = noted(log)
    if how in KILLED[:2]:
        assert until(lambda: knows(place, child, "done", "superseded")), status(place)
        newest = max((step for _, step in known), default=-1)
        there = [ref.step for name in ("disk", "far") for ref in listed(root / name)]
        assert newest <= max(there, default=-1), (newest, there, known)
        if known != before:
            folder = f"ckpt-memory-{os.getuid()}-{memory_url(root).removeprefix('shm://')}"
            assert not (left := below(Path("/dev/shm", folder))), (left, tail(place))
            assert not orphans(child)
    # the retention that the agent applies counts the steps that it has added
    known |= {("disk", ref.step) for ref in listed(root / "disk")}
    newest = check(root, known, numbers)
    bury(child, root)
    for kept in (root / "far").glob("step-*"):
        if int(kept.name[5:14]) < newest - 4:
            shutil.rmtree(kept)
    log.write_text(f"disk {newest}\n")
    return known != before


def below(folder: Path) -> list[str]:
    """Return the folder, if it exists, and what is in it."""
    return [str(folder), *map(str, folder.rglob("*"))] if folder.exists() else []


def tail(place: AgentFolder) -> str:
    """Return the status of the agent, and the end of its log."""
    return f"{status(place)}\n{Path(place.log).read_text()[-8000:]}"


def listed(root: Path) -> list[StepRef]:
    return committed(open_backend(str(root))) if root.exists() else []


def main() -> None:
    root, times, numbers, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    warm_up()
    root.mkdir(parents=True)
    chance, after = random.Random(seed), 0
    try:
        for turn in range(times):
            after += one(root, numbers, KILLED[turn % len(KILLED)], chance)
    finally:
        bury(0, root)
    print(f"{times} deaths, {after} after commits")
    print("ALL WELL")


if __name__ == "__main__":
    main()
