"""Remove the nodes of a job one after the other, with all that they have.

Each node has namespaces of its own and an agent. It runs as a script, by the words ``ALONE`` of
``tests.kit.machines``.

removed_nodes.py ROOT NODES EACH TIMES SEED: EACH ranks on each of this many NODES. Each job resumes
on the nodes that are left and on a new one. A node is removed TIMES times. Its cable is pulled
first, then its processes, its memory and its namespaces end.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from ckpt import CheckpointManager, Tier
from ckpt.agent.client import connect, status
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import Stop
from ckpt.config import AGENT_FOLDER_VARIABLE
from ckpt.events import Event, NodeReplicated, SaveCommitted
from ckpt.storage.tiers import urls_of
from tests.crash.nursery import warm_up
from tests.kit.machines import Machine, Network, network
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.kit.worlds import environment_of

NUMBERS: Final = 20_000
"""The numbers in the state of each rank."""
EVERY: Final = 5
"""The shared tier takes one step in so many."""
PLACE: Final = AgentFolder("/dev/shm/agent")
"""The agent of each machine. Its memory is no other machine's."""

AGENT_DIES: Final = 0.25
"""How often the agent of another node is killed, too."""

Noted = frozenset[tuple[str, int, int]]
"""(what, step, rank) of each fact that a rank has noted."""


@dataclass(frozen=True)
class Cluster:
    """The machines, and the folder that they share."""

    network: Network
    root: Path
    each: int

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    def tiers(self) -> list[Tier]:
        return [Tier("memory", buddies=1), Tier(str(self.shared), every=EVERY)]


def content(rank: int, step: int) -> torch.Tensor:
    return torch.arange(NUMBERS, dtype=torch.int64) * 31 + 1000 * step + rank


# -- the ranks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One start of the job.

    Attributes:
        turn: Which start it is.
        machines: The machines, in the order of the ranks.
        steps: How many steps are saved before the ranks wait for their end. None: they go on.
        closes: Whether the ranks end by themselves, with a step that the shared tier takes.
    """

    cluster: Cluster
    turn: int
    machines: tuple[Machine, ...]
    steps: int | None = None
    closes: bool = False

    @property
    def ranks(self) -> int:
        return self.cluster.each * len(self.machines)

    @property
    def log(self) -> Path:
        return self.cluster.root / f"log-{self.turn}"

    def environment(self, rank: int) -> dict[str, str]:
        each = self.cluster.each
        return {
            **environment_of(rank, self.ranks, 29000 + self.turn),
            "GROUP_RANK": str(rank // each),
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": self.machines[0].address,
            "GLOO_SOCKET_IFNAME": "eth0",
            AGENT_FOLDER_VARIABLE: PLACE.path,
        }

    def start(self) -> list[tuple[Machine, int]]:
        """Return the machine and the process of each rank."""
        ranks = range(self.ranks)
        on = [self.machines[rank // self.cluster.each] for rank in ranks]
        return [(on[rank], on[rank].fork(partial(trainer, self, rank))) for rank in ranks]

    def noted(self) -> Noted:
        """What the ranks have noted. The last line may be torn."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = (line.split() for line in lines if line.endswith("."))
        return frozenset((what, int(step), int(rank)) for what, step, rank, _ in found)

    def by_all(self, what: str, ranks: Sequence[int]) -> int | None:
        """Return the newest step for which every one of ``ranks`` has noted ``what``."""
        noted = self.noted()
        steps = [
            {step for which, step, by in noted if (which, by) == (what, rank)} for rank in ranks
        ]
        return max(set.intersection(*steps), default=None)

    def safe(self) -> int | None:
        """Return the newest step that has its copies, as each node has reported."""
        return self.by_all("copied", range(0, self.ranks, self.cluster.each))

    def restored(self) -> int | None:
        """Return the step that all ranks have restored; None until all have."""
        noted = self.noted()
        assert not [note for note in noted if note[0] == "wrong"], noted
        found = {rank: step for what, step, rank in noted if what == "restored"}
        assert len(set(found.values())) < 2, found
        return found[0] if len(found) == self.ranks else None


def trainer(job: Job, rank: int) -> None:
    """Save a step, let it have its copies, and train on, until the job is killed."""
    os.environ.update(job.environment(rank))
    tiers, leads = job.cluster.tiers(), rank % job.cluster.each == 0
    memory = urls_of(tiers)[0]
    descriptor = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    copied, begun = threading.Semaphore(0), set[int]()

    def note(what: str, step: int) -> None:
        os.write(descriptor, f"{what} {step} {rank} .\n".encode())

    def notice(event: Event) -> None:
        if isinstance(event, SaveCommitted) and event.tier.endswith(memory):
            note("committed", event.step)
        elif isinstance(event, NodeReplicated) and event.step in begun:
            note("copied", event.step)
            copied.release()

    dist.init_process_group("gloo")
    key = f"x{rank}"
    state = {key: content(rank, -1)}
    with CheckpointManager(tiers, observers=[notice], agent="required") as manager:
        report = manager.restore(state)
        first = -1 if report is None else report.step
        note("restored" if torch.equal(state[key], content(rank, first)) else "wrong", first)
        for step in itertools.count(first + 1):
            if job.closes and step > first + 1 and (step - 1) % EVERY == 0:
                break
            if job.steps is not None and step > first + job.steps:
                break
            state[key].copy_(content(rank, step))
            begun.add(step)  # A step that was restored gets back its copies, too
            manager.save_async(state, step).result(60, tier=memory)
            if leads:
                assert copied.acquire(timeout=60), step
            dist.barrier()  # No node begins the next step while another one copies this one
        if not job.closes:
            note("waits", first)
            signal.pause()
    dist.destroy_process_group()


# -- one node is removed ---------------------------------------------------------------------------


def one(job: Job, least: int, chance: random.Random, *, late: bool) -> tuple[int, int]:
    """Start a job, check that it restores ``least`` or a later step, and remove a node.

    Return the newest step that had its copies, and the newest that was reported as committed.

    Args:
        late: Whether the agents of the other nodes finish the job before there is a new node.
    """
    ranks = job.start()
    restored = restored_by(job, least)
    if job.steps is not None:
        assert until(lambda: job.by_all("waits", range(job.ranks)) is not None), tails(job)
    else:
        assert until(lambda: job.safe() is not None), tails(job)
        time.sleep(chance.uniform(0.0, 1.5))
    lost = chance.choice(job.machines)
    left = [machine for machine in job.machines if machine is not lost]
    job.cluster.network.remove(lost)
    assert job.cluster.network.links() == sorted(machine.link for machine in left)
    time.sleep(chance.choice((0.0, chance.uniform(0.0, 2.0))))  # The launcher is slow to notice
    for machine, pid in ranks:
        if machine is not lost:
            os.kill(pid, signal.SIGKILL)
            machine.wait(pid)
    noted, safe = job.noted(), job.safe()
    assert safe is not None
    newest = max(step for what, step, _ in noted if what == "committed")
    on_shared = max(whole(job.cluster.shared), default=-1)
    if late and on_shared < newest:
        assert until(lambda: max(whole(job.cluster.shared), default=-1) >= safe), tails(job)
    elif chance.random() < AGENT_DIES:
        for pid in (unlucky := chance.choice(left)).processes():
            with suppress(ProcessLookupError):  # A worker of the agent may have just ended
                os.kill(pid, signal.SIGKILL)
        assert until(partial(is_idle, unlucky))
    print(f"turn {job.turn}: from {restored}, {newest=}, {safe=}, {on_shared=}", flush=True)
    return safe, newest


def restored_by(job: Job, least: int) -> int:
    """Return the step that all ranks have restored, bit for bit."""
    assert until(lambda: job.restored() is not None), tails(job)
    restored = job.restored()
    assert restored is not None
    assert restored >= least, (restored, least, tails(job))
    return restored


def finish(job: Job, least: int) -> None:
    """Start a job that ends by itself, and check that nothing is left on any machine."""
    ranks = job.start()
    codes = [machine.wait(pid) for machine, pid in ranks]
    assert codes == [0] * len(codes), (codes, tails(job))
    restored = restored_by(job, least)
    assert whole(job.cluster.shared)[-1] == (restored // EVERY + 1) * EVERY
    for machine in job.machines:
        machine.do(end_agent)
        assert until(partial(is_idle, machine)), machine.processes()
        machine.do(check_memory)


def is_idle(machine: Machine) -> bool:
    return not machine.processes()


def end_agent() -> None:
    connection = connect(PLACE)
    assert connection is not None
    connection.ask(Stop())
    connection.receive_stop()
    connection.close()


def check_memory() -> None:
    left = sorted(os.listdir("/dev/shm"))
    assert left == ["agent"], left
    left = sorted(os.listdir(PLACE.path))
    assert left == ["agent.log", "listen.lock", "work.lock"], left


def tails(job: Job) -> str:
    """Print what the agents know, and return what the ranks have noted."""

    def show() -> None:
        if Path(PLACE.log).exists():
            print(status(PLACE), Path(PLACE.log).read_text()[-3000:], flush=True)

    for machine in job.cluster.network.machines:
        machine.wait(machine.fork(show))
    return job.log.read_text() if job.log.exists() else "nothing noted"


def main() -> None:
    root, nodes, each, times, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    warm_up()
    root.mkdir(parents=True)
    chance = random.Random(seed)
    with network() as wires:
        cluster = Cluster(wires, root, each)
        for _ in range(nodes):
            wires.add()
        least = -1
        for turn in range(times):
            machines = tuple(chance.sample(wires.machines, nodes))
            steps = (3, None, 2, None)[turn % 4]
            job = Job(cluster, turn, machines, steps)
            least, newest = one(job, least, chance, late=turn % 4 == 0)
            assert steps is None or least == newest, (least, newest)
            wires.add()
        finish(Job(cluster, times, tuple(wires.machines), closes=True), least)
    print(f"{times} nodes were removed")
    print("ALL WELL")


if __name__ == "__main__":
    main()
