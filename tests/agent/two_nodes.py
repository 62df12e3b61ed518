"""A job of four ranks on two nodes with tiers of their own.

A store in memory, a folder and an agent stand for a machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import AgentStatus, JobStatus
from tests.agent.conftest import await_state, new_place
from tests.kit.worlds import Ended, environment_of, run_forks
from tests.servers import free_port

NODES = (0, 0, 1, 1)
NUMBERS = 50_000
KILLED = -signal.SIGKILL
TRAINER = """
import json, os, shutil, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
from ckpt import CheckpointManager, Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.events import NodeReplicated
first, last, end = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
node, numbers, shm = os.environ["NODE"], int(sys.argv[5]), Path(sys.argv[6])
other = Path(str(shm)[:-1] + "0")
def copies(step):
    return [path for path in other.glob(f"step-{step:09}.*/rank-0000[23].*")]
def kept_aside(step):
    return next(other.glob(f"step-{step:09}.*")), Path(os.environ["GO"]).with_name("aside")
def here(fields):
    return {**fields, "url": fields["url"].replace("NODE", node)}
tiers = [Tier(**here(fields)) for fields in json.loads(sys.argv[1])]
near = Path(tiers[0].url)
dist.init_process_group("gloo")
rank = dist.get_rank()
copied, change = set(), threading.Condition()
def notice(event):
    if isinstance(event, NodeReplicated):
        with change:
            copied.add(event.step)
            change.notify_all()
manager = CheckpointManager(tiers, observers=[notice], agent="required")
state = {f"x{rank}": torch.zeros(numbers, dtype=torch.int64)}
if "restore" in end:
    report = manager.restore(state)
    print("from", report and report.step, state[f"x{rank}"].unique().tolist(), flush=True)
for step in range(first, last + 1):
    state[f"x{rank}"].fill_(10 * step + rank)
    save = manager.save_async(state, step)
    shared = "shared" in end and manager._tiers[1].takes(step)
    save.result(60, tier=manager._tiers[1 if shared else 0].url)
    if "copied" in end:  # the copies of the step on the buddies, before the next one begins
        with change:
            assert rank % 2 or change.wait_for(lambda: step in copied, 60), (step, copied)
        dist.barrier()
        if "older" in end and rank == 0 and step == last - 1:
            shutil.copytree(*kept_aside(step))
    if "unpruned" in end and rank % 2 == 0 and step == first:
        [old] = near.glob(f"step-{step:09}.*")
        aside = near.with_name(f"aside-{node}")
        shutil.copytree(old, aside)
    dist.barrier()
if "unpruned" in end and rank % 2 == 0:  # the ranks are killed before they remove an old step
    shutil.copytree(aside, old, dirs_exist_ok=True)
dist.barrier()
if "without" in end:
    for path in shm.glob(end.partition("without ")[2]) if rank == 2 else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
if "unmade" in end:
    for path in shm.glob(f"step-{last:09}.*") if rank == 2 else ():
        shutil.rmtree(path)
    for path in other.glob(f"step-{last:09}.*/manifest.json") if rank == 0 else ():
        path.unlink()
    dist.barrier()
if "older" in end and rank == 0:  # the buddy did not get the copies of the last step in time
    for path in copies(last):
        path.unlink()
    step, aside = kept_aside(last - 1)
    for path in aside.glob("rank-0000[23].*"):
        shutil.copy(path, step)
if "damaged" in end and rank == 0:
    for path in copies(last):
        if path.name == "rank-00003.safetensors":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
if "lost" in end:  # the node of ranks 2 and 3, with its memory and its agent
    if rank == 2:
        os.kill(status(AgentFolder.of_this_user()).pid, signal.SIGSTOP)
        shutil.rmtree(shm)
    dist.barrier()
if "live" in end and node == "1":
    print("lives", flush=True)
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.05)
if "close" in end:
    manager.close(detach="detach" in end)
    dist.destroy_process_group()
else:
    os.kill(os.getpid(), 9)
"""


@dataclass
class Cluster:
    """Two nodes, and the tiers of a job on them.

    Attributes:
        places: The agent of each node.
        tiers: The tiers; ``NODE`` in a URL becomes the number of the node.
        folder: The folder of the test.
    """

    places: tuple[AgentFolder, AgentFolder]
    tiers: list[dict[str, object]]
    folder: Path

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    def memory(self, node: int) -> Path:
        name = f"test-{os.getpid()}-{node}"
        return Path(f"/dev/shm/ckpt-memory-{os.getuid()}-{name}")

    def steps_in_memory(self, node: int) -> list[str]:
        return sorted(path.parent.name[5:14] for path in self.memory(node).glob("step-*/rank-*"))

    def train(self, first: int, last: int, end: str, numbers: int = NUMBERS) -> Ended:
        """Run four ranks that save the steps, and then end in the way ``end`` names."""
        script = self.folder / "trainer.py"
        script.write_text(TRAINER)
        port = free_port()
        environments = [
            {
                **environment_of(rank, 4, port),
                "NODE": str(node),
                "CKPT_AGENT_FOLDER": self.places[node].path,
                "GO": str(self.folder / "go"),
            }
            for rank, node in enumerate(NODES)
        ]
        words = [script, msgspec.json.encode(self.tiers).decode(), first, last, end, numbers]
        words.append(self.memory(1))
        ended = run_forks(words, environments, timeout=150, end_together=False)
        status = 0 if "close" in end else KILLED
        assert set(ended.statuses) == {status}, ended
        return ended

    @contextmanager
    def training(self, last: int, end: str, numbers: int = NUMBERS) -> Iterator[None]:
        """Do as ``train``, beside the block. When the block ends, the ranks that live may end."""
        runner = threading.Thread(target=self.train, args=(1, last, end, numbers))
        runner.start()
        try:
            yield
        finally:
            (self.folder / "go").touch()
            runner.join()

    def await_end(self, *states: str) -> list[JobStatus]:
        return [await_state(place, *(states or ("done",))) for place in self.places]

    def job(self, node: int) -> JobStatus | None:
        found = status(self.places[node])
        return found.jobs[-1] if isinstance(found, AgentStatus) and found.jobs else None

    def waits(self, node: int, why: str) -> bool:
        """Return whether the agent of a node has tried, and waits because of ``why``."""
        found = self.job(node)
        return found is not None and why in found.error


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Make a cluster where each node has a tier in memory, and the shared folder takes each 100th
    step.
    """
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", "0")
    with new_place() as one, new_place() as two:
        tiers: list[dict[str, object]] = [
            {"url": f"shm://test-{os.getpid()}-NODE"},
            {"url": str(tmp_path / "shared"), "every": 100},
        ]
        found = Cluster((one, two), tiers, tmp_path)
        yield found
        for place in found.places:
            log = Path(place.log)
            print(log.read_text() if log.exists() else "no agent")
    for node in (0, 1):
        shutil.rmtree(found.memory(node), ignore_errors=True)


def holds(
    root: Path | str, step: int, numbers: int = NUMBERS, options: Mapping[str, object] | None = None
) -> bool:
    """Return whether ``step`` restores from ``root`` alone, with the content of all ranks."""
    state = {f"x{rank}": torch.zeros(numbers, dtype=torch.int64) for rank in range(4)}
    with CheckpointManager(Tier(str(root), options or {})) as manager:
        report = manager.restore(dict(state), step, rollback=False)
    return report is not None and all(
        state[f"x{rank}"].unique().tolist() == [10 * step + rank] for rank in range(4)
    )


def listed(root: Path) -> list[str]:
    """Return the names of all files of steps."""
    return sorted(path.name for path in root.glob("step-*/*"))
