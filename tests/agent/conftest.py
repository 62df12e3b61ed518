"""An agent of the test's own, in a folder of its own, which ends with the test."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckpt import Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import AgentStatus, Job, JobStatus
from ckpt.processes import Process
from ckpt.root.owner import Owner
from ckpt.storage.tiers import urls_of
from tests.kit.waiting import until


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentFolder]:
    """Return the place of an agent that only this test and its children know."""
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", "0")
    with new_place() as found:
        monkeypatch.setenv("CKPT_AGENT_FOLDER", found.path)
        yield found


@contextmanager
def new_place() -> Iterator[AgentFolder]:
    """Yield the place of an agent, which ends with the block."""
    found = AgentFolder(tempfile.mkdtemp(prefix="ckpt-agent-test-"))
    yield found
    for pid in {*holders(found, "listen"), *holders(found, "work")}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert until(lambda: not holders(found, "work"))
    shutil.rmtree(found.path)


def holders(place: AgentFolder, name: str) -> list[int]:
    """Return the process that has taken the lock "listen", or the processes that have the file of
    the lock "work" open.

    The file of "listen" is open elsewhere too, without the lock: in an agent that finds the lock
    taken, until it ends, and in a new worker, until it runs its own program.

    Only processes with ``agent`` in their command line count. It takes milliseconds to look through
    the open files of all processes, and tests call this again and again.
    """
    wanted, found = f"{place.path}/{name}.lock", []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"agent" in (folder / "cmdline").read_bytes() and any(
                name != "listen" or folder.name in _takers(folder / "fdinfo" / each.name)
                for each in (folder / "fd").iterdir()
                if os.readlink(each) == wanted
            ):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def _takers(descriptor: Path) -> list[str]:
    """Return the processes that have taken the lock of an open file."""
    lines = descriptor.read_text().splitlines()
    return [line.split()[5] for line in lines if line.startswith("lock:")]


def job(attempt: str = "abc", pid: int | None = None) -> Job:
    """Return a job of this process, or of another one."""
    found = os.getpid() if pid is None else pid
    process = Process.of(found)
    tier = {"url": f"/nowhere/{attempt}"}
    return Job(
        owner=Owner.of_this_process(attempt),
        processes=(process,),
        ranks=1,
        tiers=(tier,),
        backlog=4,
        environment={},
    )


def job_of(place: AgentFolder) -> JobStatus | None:
    """Return the last job that the agent knows."""
    found = status(place)
    return found.jobs[-1] if isinstance(found, AgentStatus) and found.jobs else None


def await_state(place: AgentFolder, *states: str) -> JobStatus:
    """Return the last job of the agent, once it is in one of ``states``."""
    assert until(lambda: (job := job_of(place)) and job.state in states), (
        job_of(place),
        Path(place.log).read_text(),
    )
    job = job_of(place)
    assert job is not None
    return job


def memory_folder(*tiers: Tier) -> Path:
    """Return the folder of the tier in memory."""
    return Path(f"/dev/shm/ckpt-memory-{os.getuid()}-{urls_of(tiers)[0].removeprefix('shm://')}")
