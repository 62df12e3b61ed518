"""Kill jobs of four ranks on two nodes, with an agent on each, as tests/agent/deaths.py does.

It runs as a script.

node_deaths.py ROOT TIMES NUMBERS SEED: kill the ranks and the agents of one node or of both, TIMES
times at random moments. Each job resumes from what is left. A store in memory, a folder and an
agent stand for a machine.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from ckpt import CheckpointManager, Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.agent.messages import AgentStatus, JobStatus
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.events import Event, SaveCommitted
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.agent.conftest import holders, new_place
from tests.crash.nursery import orphans, warm_up
from tests.kit.stores import whole
from tests.kit.waiting import until
from tests.kit.worlds import environment_of
from tests.processes import fork
from tests.servers import free_port

NODES = (0, 0, 1, 1)
KEPT = 5
"""Steps that stay on the shared tier from one death to the next."""

AFTER_COMMIT: Final = 0.8
"""How many of the deaths wait for the first commit of the job. The others may come before it."""

Noted = set[tuple[str, int]]
"""(kind of tier, step) of each commit that a rank was notified of."""


@dataclass(frozen=True)
class Cluster:
    """Two nodes, and a folder that they share.

    Attributes:
        root: The folder of the test.
        places: The agent of each node.
        numbers: The numbers in the state of each rank.
        owner: The process that tests.
    """

    root: Path
    places: tuple[AgentFolder, ...]
    numbers: int
    owner: int

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    def memory(self, node: int) -> Path:
        """Return the folder of the tier in memory."""
        return Path(f"/dev/shm/ckpt-memory-{os.getuid()}-{self._name(node)}")

    def _name(self, node: int) -> str:
        return f"deaths-{self.owner}-{node}"

    def own(self, node: int) -> Path:
        """Return the folder on the disk of a node."""
        return self.root / f"node{node}"

    def tiers(self, node: int) -> list[Tier]:
        return [
            Tier(f"shm://{self._name(node)}"),
            Tier(str(self.own(node)), local=True, keep_last=3),
            Tier(str(self.shared), every=3),
        ]

    def noted(self) -> Noted:
        """Return what the ranks have noted. The last line may be torn."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = (line.split() for line in lines if line.endswith("."))
        return {(name, int(step)) for name, step, _ in found}

    def listed(self) -> list[int]:
        """Return the steps of the shared tier."""
        return whole(self.shared)

    def job(self, node: int, pid: int) -> JobStatus | None:
        """Return what the agent of a node knows of the job of a rank."""
        found = status(self.places[node])
        jobs = found.jobs if isinstance(found, AgentStatus) else ()
        return next((job for job in jobs if pid in job.processes), None)

    def knows(self, node: int, pid: int, *states: str) -> bool:
        """Return whether the agent of a node has the job of a rank in one of ``states``."""
        job = self.job(node, pid)
        return job is not None and job.state in states

    def await_each(self, ranks: Sequence[int], *states: str) -> None:
        """Wait until the agents of both nodes have the job in one of ``states``."""
        for node in (0, 1):
            known = partial(self.knows, node, ranks[NODES.index(node)], *states)
            assert until(known), tails(self)


def content(rank: int, step: int, numbers: int) -> torch.Tensor:
    return torch.arange(numbers, dtype=torch.int64) * 31 + 10 * step + rank


def trainer(cluster: Cluster, rank: int, port: int) -> None:
    """Train from the newest step, and save, until the process is killed."""
    node = NODES[rank]
    os.environ.update(environment_of(rank, len(NODES), port))
    os.environ["CKPT_AGENT_FOLDER"] = cluster.places[node].path
    descriptor = os.open(cluster.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    names = {str(tier.url): name for tier, name in zip(cluster.tiers(node), KINDS, strict=True)}

    def note(name: str, step: int) -> None:
        os.write(descriptor, f"{name} {step} .\n".encode())

    def notice(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            note(next(name for url, name in names.items() if event.tier.endswith(url)), event.step)

    dist.init_process_group("gloo")
    key, numbers = f"x{rank}", cluster.numbers
    state = {key: content(rank, -1, numbers)}
    with CheckpointManager(cluster.tiers(node), observers=[notice], agent="required") as manager:
        report = manager.restore(state)
        step = -1 if report is None else report.step
        right = torch.equal(state[key], content(rank, step, numbers))
        note("restored" if right else "wrong", step)
        while True:
            step += 1
            state[key].copy_(content(rank, step, numbers))
            manager.save_async(state, step).wait_staged(60)


KINDS = ("memory", "node", "shared")


# -- deaths ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Victims:
    """A job that is to die."""

    cluster: Cluster
    ranks: tuple[int, ...]
    chance: random.Random

    def kill_ranks(self, *nodes: int) -> None:
        """Kill the ranks of ``nodes`` in any order."""
        of = [pid for pid, node in zip(self.ranks, NODES, strict=True) if node in nodes]
        for pid in self.chance.sample(of, len(of)):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def kill_agent(self, node: int) -> None:
        for pid in holders(self.cluster.places[node], "listen"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pause(self, seconds: float) -> None:
        """Let the others go on for a random time."""
        time.sleep(self.chance.uniform(0.0, seconds))

    def first_of(self, node: int) -> int:
        return self.ranks[NODES.index(node)]


def all_ranks(job: Victims) -> None:
    job.kill_ranks(0, 1)


def one_node_first(job: Victims) -> None:
    one = job.chance.randrange(2)
    job.kill_ranks(one)
    job.pause(1.0)
    job.kill_ranks(1 - one)


def an_agent_first(job: Victims) -> None:
    node = job.chance.randrange(2)
    job.kill_agent(node)
    job.cluster.await_each(job.ranks, "running")  # It is registered again
    job.pause(0.3)
    job.kill_ranks(0, 1)


def a_node_with_its_agent(job: Victims) -> None:
    node = job.chance.randrange(2)
    job.kill_agent(node)
    job.kill_ranks(node)
    job.pause(0.5)
    job.kill_ranks(1 - node)


def agents_while_they_finish(job: Victims) -> None:
    job.kill_ranks(0, 1)
    job.pause(1.0)
    for node in job.chance.sample((0, 1), job.chance.choice((1, 2))):
        job.kill_agent(node)


def a_node_with_all_it_holds(job: Victims) -> None:
    node = job.chance.randrange(2)
    job.kill_agent(node)
    job.kill_ranks(node)
    shutil.rmtree(job.cluster.memory(node), ignore_errors=True)
    shutil.rmtree(job.cluster.own(node), ignore_errors=True)
    job.pause(0.5)
    job.kill_ranks(1 - node)


FINISHED: tuple[Callable[[Victims], None], ...] = (all_ranks, one_node_first, an_agent_first)
"""After these, both agents live and each has all that its node had."""
DEATHS = (*FINISHED, a_node_with_its_agent, agents_while_they_finish, a_node_with_all_it_holds)


def one(cluster: Cluster, death: Callable[[Victims], None], chance: random.Random) -> bool:
    """Cause one death, and return whether the job had committed a step before."""
    before, port = cluster.noted(), free_port()
    ranks = tuple(fork(partial(trainer, cluster, rank, port)) for rank in range(4))
    job = Victims(cluster, ranks, chance)
    cluster.await_each(ranks, "running")
    if chance.random() < AFTER_COMMIT:
        assert until(lambda: _committed(cluster.noted() - before)), tails(cluster)
    job.pause(1.5)
    death(job)
    known = cluster.noted()
    assert not (wrong := {step for name, step in known if name == "wrong"}), wrong
    own = _committed(known - before)
    newest = max((step for name, step in known if name in KINDS), default=-1)
    if own and death in FINISHED:
        finished = partial(_has, cluster, newest)
        assert until(finished), (newest, known, tails(cluster))
        check_freed(job)
    check(cluster, known, newest, lost=death is a_node_with_all_it_holds)
    for pid in ranks:
        for name in orphans(pid):
            os.unlink(f"/dev/shm/{name}")
    return bool(own)


def _committed(noted: Noted) -> list[int]:
    return [step for name, step in noted if name in KINDS]


def _has(cluster: Cluster, step: int) -> bool:
    return step <= max(cluster.listed(), default=-1)


def check_freed(job: Victims) -> None:
    """Check that the agents free what the job had in memory when they have ended."""
    cluster = job.cluster
    cluster.await_each(job.ranks, "done", "superseded")
    for node in (0, 1):
        known = cluster.job(node, job.first_of(node))
        assert known is not None
        left = [str(path) for path in cluster.memory(node).glob(f"*.{known.attempt}*/*")]
        assert not left, (node, left, tails(cluster))
        assert not orphans(job.first_of(node))


def check(cluster: Cluster, known: Noted, newest: int, *, lost: bool) -> None:
    """Check that no torn step is listed, and that every step that was reported as committed is
    there.

    The exception is what a lost node had.
    """
    # The agents may still work: meanwhile a step may become listed, but no listed step may vanish.
    listed = cluster.listed()
    assert {step for name, step in known if name == "shared"} <= set(listed), (known, listed)
    if cluster.shared.exists():
        backend = open_backend(str(cluster.shared))
        with Workers("check", 2) as workers:
            for ref in committed(backend):
                report = verify_step(backend, ref, workers=workers)
                assert report.intact, (ref, report.faults)
    for step in listed:
        state = {f"x{rank}": content(rank, -1, cluster.numbers) for rank in range(4)}
        with CheckpointManager(str(cluster.shared)) as manager:
            assert manager.restore(state, step, rollback=False) is not None
        for rank in range(4):
            assert torch.equal(state[f"x{rank}"], content(rank, step, cluster.numbers)), step
    restored = resumed(cluster)
    least = max(listed, default=-1) if lost else newest
    assert restored >= least, (restored, least, known, listed, tails(cluster))
    for folder in cluster.shared.glob("step-*"):  # To free room on the disk
        if int(folder.name[5:14]) < max(listed, default=-1) - KEPT:
            shutil.rmtree(folder)
    cluster.log.write_text("".join(f"shared {step} .\n" for step in listed[-1:]))


def resumed(cluster: Cluster) -> int:
    """Return the step that a new job of four ranks restores, the same on all. It saves nothing."""
    port = free_port()
    ranks = [fork(partial(restorer, cluster, rank, port)) for rank in range(4)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert codes == [0] * 4, (codes, tails(cluster))
    found = {int(path.read_text()) for path in cluster.root.glob("resumed-*")}
    assert len(found) == 1, found
    return found.pop()


def restorer(cluster: Cluster, rank: int, port: int) -> None:
    os.environ.update(environment_of(rank, len(NODES), port))
    dist.init_process_group("gloo")
    state = {f"x{rank}": content(rank, -1, cluster.numbers)}
    with CheckpointManager(cluster.tiers(NODES[rank]), agent="off") as manager:
        report = manager.restore(state)
    step = -1 if report is None else report.step
    assert torch.equal(state[f"x{rank}"], content(rank, step, cluster.numbers)), step
    (cluster.root / f"resumed-{rank}").write_text(str(step))
    dist.destroy_process_group()


def tails(cluster: Cluster) -> str:
    """Return what the agents know, and the ends of their logs."""
    return "\n".join(
        f"{status(place)}\n{Path(place.log).read_text()[-4000:]}"
        for place in cluster.places
        if Path(place.log).exists()
    )


def main() -> None:
    root, times, numbers, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    warm_up()
    root.mkdir(parents=True)
    chance, after = random.Random(seed), Counter[str]()
    with ExitStack() as stack:
        places = tuple(stack.enter_context(new_place()) for _ in range(2))
        cluster = Cluster(root, places, numbers, os.getpid())
        try:
            for turn in range(times):
                death = DEATHS[turn % len(DEATHS)]
                after[death.__name__] += one(cluster, death, chance)
        finally:
            for node in (0, 1):
                shutil.rmtree(cluster.memory(node), ignore_errors=True)
    print(f"{times} deaths, after commits: {dict(after)}")
    print("ALL WELL")


if __name__ == "__main__":
    main()
