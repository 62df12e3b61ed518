"""The real code of the protocol on simulated stores, a simulated clock and a simulated scheduler.

The scheduler's threads run one at a time, from one request to the next.

Every request to the job's store or to a tier is a gate. The test decides which task goes through
next, what becomes of its request, and when time passes. A task that does not go through is stopped.
A task that is killed at a gate is dead, and what it has sent may still arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ckpt.catalog.finalize import RunFacts, finalize
from ckpt.catalog.inventory import Inventory
from ckpt.coordination.abort_reason import Abort
from ckpt.coordination.commit_state_machine import (
    Bounds,
    Committed,
    Durable,
    Failure,
    Unknown,
    Verdict,
)
from ckpt.coordination.committer import Committer, SharedStore
from ckpt.errors import (
    CkptError,
    CommitError,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    TransientStorageError,
)
from ckpt.model.box import Box, even_slab
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import pack_fragment
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.model.manifest import FragmentRef, Manifest
from ckpt.model.record_encoding import pack, unpack
from ckpt.plan.leaf import Leaf
from ckpt.retention.removal import remove
from ckpt.root.claim_marker import discard_part
from ckpt.root.owner import Owner, claim, confirm
from ckpt.storage.api import Capabilities, ObjectInfo
from tests.plan.worlds import fragment_of

RANKS = 3
TIMEOUT, TAKEOVER = 100.0, 10.0
BOUND = 2 * (TIMEOUT + TAKEOVER * (RANKS - 1).bit_length())
STEP = 5
ARRAY = np.arange(6, dtype=np.float32)


class Killed(BaseException):
    """The process does not exist any more."""


@dataclass(eq=False)
class Task:
    """A process, as far as the protocol sees it: what it does between two requests
    takes no time.
    """

    name: str
    work: Callable[[], None]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    deadline: float = float("inf")
    doing: str = ""
    killed: bool = False
    ended: bool = False
    waited: float = 0.0
    fault: str = ""
    error: BaseException | None = None


class Simulation:
    def __init__(self) -> None:
        self.clock = 0.0
        self.tasks: list[Task] = []
        self.tiers = [Store(self, f"sim://{index}") for index in range(2)]
        self.verdicts: dict[tuple[str, int], dict[int, Verdict]] = {}
        self.finishers: set[tuple[str, int]] = set()
        self.in_flight: list[tuple[Store, str, bytes, bool]] = []
        self.changes = 0
        self._back = threading.Semaphore(0)
        self._current: Task | None = None

    # -- the scheduler -----------------------------------------------------------------------------

    def start(self, name: str, work: Callable[[], None]) -> Task:
        task = Task(name, work)
        self.tasks.append(task)
        threading.Thread(target=self._run, args=(task,), daemon=True).start()
        return task

    def _run(self, task: Task) -> None:
        task.turn.acquire()
        try:
            if not task.killed:
                task.work()
        except Killed:
            pass
        except BaseException as error:
            task.error = error
        task.ended = True
        self._back.release()

    def runnable(self) -> list[Task]:
        return [
            t
            for t in self.tasks
            if not t.ended and (t.killed or t.ready() or self.clock >= t.deadline)
        ]

    def let(self, task: Task) -> None:
        """Let the task do one request, and go on up to the next."""
        self._current = task
        task.turn.release()
        assert self._back.acquire(timeout=20), task.name
        self._current = None
        if task.error is not None:
            raise task.error

    def kill(self, task: Task, *, arrives: bool = False) -> None:
        """Kill the task at the gate. With ``arrives`` the store gets what it was about to put."""
        task.killed = True
        if arrives:
            task.fault = "arrives"
        self.let(task)

    def pass_time(self) -> bool:
        """Let time pass until the end of the next wait."""
        waiting = [
            t for t in self.tasks if not t.ended and not t.ready() and t.deadline > self.clock
        ]
        if waiting:
            end = min(task.deadline for task in waiting)
            for task in waiting:
                task.waited += end - self.clock
            self.clock = end
        return bool(waiting)

    # -- what runs in a task -----------------------------------------------------------------------

    def gate(
        self, doing: str, ready: Callable[[], bool] = lambda: True, deadline: float = float("inf")
    ) -> Task:
        task = self._current
        assert task is not None
        task.doing, task.ready, task.deadline = doing, ready, deadline
        self._back.release()
        task.turn.acquire()
        task.ready, task.deadline = (lambda: True), float("inf")
        if task.killed and task.fault != "arrives":
            raise Killed
        return task


class Store:
    """A tier."""

    capabilities = Capabilities(put_if_absent=True, shared=True, part_bytes=1 << 20)

    def __init__(self, sim: Simulation, url: str) -> None:
        self.sim, self.url = sim, url
        self.objects: dict[str, bytes] = {"notes.txt": b"a stranger's"}
        self.deleted: list[tuple[str, str]] = []

    def place(self, key: str, data: bytes, if_absent: bool) -> None:
        if if_absent and key in self.objects:
            raise ObjectExists(key)
        self.sim.changes += 1
        self.objects[key] = data

    def put(self, key: str, parts: Any, *, if_absent: bool = False) -> ObjectInfo:
        data = b"".join(parts)
        task = self.sim.gate(f"put {key}")
        fault, task.fault = task.fault, ""
        if fault == "full" and not key.endswith("claim"):  # there is room for an empty file
            raise OutOfSpace(key)
        if fault in {"late", "arrives"}:
            self.sim.in_flight.append((self, key, data, if_absent))
            if fault == "arrives":
                raise Killed
            raise TransientStorageError(key, "no answer")
        self.place(key, data, if_absent)
        if fault == "lost":
            raise TransientStorageError(key, "no answer")
        return ObjectInfo(key=key, size=len(data))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.sim.gate(f"read {key}")
        out[:] = self._find(key)[offset : offset + out.nbytes]

    def head(self, key: str) -> ObjectInfo:
        self.sim.gate(f"head {key}")
        return ObjectInfo(key=key, size=len(self._find(key)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.sim.gate(f"list {prefix}")
        yield from [
            ObjectInfo(key=k, size=len(v))
            for k, v in list(self.objects.items())
            if k.startswith(prefix)
        ]

    def folders(self, prefix: str) -> Iterator[str]:
        self.sim.gate("folders")
        yield from sorted({key.partition("/")[0] for key in self.objects if "/" in key})

    def delete(self, key: str) -> None:
        task = self.sim.gate(f"delete {key}")
        self.deleted.append((task.name, key))
        self.sim.changes += 1
        self.objects.pop(key, None)

    def upload(self, key: str, size: int) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _find(self, key: str) -> bytes:
        if key not in self.objects:
            raise ObjectNotFound(key)
        return self.objects[key]


class JobStore:
    """The messages and verdicts of one attempt. The store is ``gone`` with the process that held
    it.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.gone = sim, False
        self.votes: dict[tuple[str, int], bytes] = {}
        self.verdicts: dict[str, bytes] = {}

    def ask(
        self, doing: str, ready: Callable[[], bool] = lambda: True, deadline: float = float("inf")
    ) -> None:
        task = self.sim.gate(doing, lambda: self.gone or ready(), deadline)
        task.fault = "" if task.fault == "arrives" else task.fault
        if task.killed:
            raise Killed
        if self.gone:
            raise CommitError("the job's store is gone")


class SimCoordinator:
    world_size = RANKS

    def __init__(self, store: JobStore, attempt: str, rank: int) -> None:
        self.store, self.attempt, self.rank = store, attempt, rank

    def post(self, subject: str, vote: bytes) -> None:
        self.store.ask(f"tell {subject}")
        self.store.votes[subject, self.rank] = vote

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        def come() -> dict[int, bytes]:
            return {
                r: self.store.votes[subject, r] for r in ranks if (subject, r) in self.store.votes
            }

        self.store.ask(f"hear {subject}", lambda: bool(come()), self.store.sim.clock + timeout)
        return come()

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        self.store.ask(f"decide {subject}")
        return self.store.verdicts.setdefault(subject, verdict)

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        self.store.ask(
            f"verdict {subject}",
            lambda: subject in self.store.verdicts,
            self.store.sim.clock + timeout,
        )
        return self.store.verdicts.get(subject)

    def forget(self, subject: str) -> None:
        self.store.ask(f"forget {subject}")
        self.store.votes.pop((subject, self.rank), None)

    def clone(self) -> SimCoordinator:
        return self

    def close(self) -> None:
        pass


class Inline:
    """Workers without threads."""

    def run_all(self, tasks: Any) -> list[Any]:
        return [task() for task in tasks]


class Attempt:
    """One incarnation of the job: the same step on one tier after the other, on every rank."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim, self.name = sim, name
        self.ref = StepRef(STEP, name)
        self.store = JobStore(sim)
        self.owner = Owner(attempt=name, host="far", machine="elsewhere", pid=1, started=1)
        self.tasks = [
            sim.start(f"{name}/{rank}", partial(self._rank, rank)) for rank in range(RANKS)
        ]

    @property
    def over(self) -> bool:
        return all(task.ended for task in self.tasks)

    def _rank(self, rank: int) -> None:
        coordinator = SimCoordinator(self.store, self.name, rank)
        for index, tier in enumerate(self.sim.tiers):
            abort: CkptError | None = None
            vote: Durable | Failure
            try:
                if rank == 0:
                    claim(tier, self.owner)
                vote = self._write(tier, rank)
            except CkptError as error:
                abort, vote = error if rank == 0 else None, Failure(str(error))
            committer = Committer(
                coordinator, SharedStore(tier, confirm=partial(confirm, tier, self.owner)),
                name=f"tier{index}", bounds=Bounds(TIMEOUT, TAKEOVER),
            )  # fmt: skip
            task = self.sim.tasks[self.sim.tasks.index(self.tasks[rank])]
            task.waited = 0.0
            try:
                verdict = committer.commit(self.ref, vote, abort=abort)
            except CommitError:  # the store is gone: the outcome of the save is not known
                return
            self.sim.changes += 1
            self.sim.verdicts.setdefault((self.name, index), {})[rank] = verdict
            if isinstance(verdict, Abort) or isinstance(vote, Failure):
                names = fragment_name(rank), data_name(rank)
                try:
                    discard_part(tier, self.ref, *map(self.ref.key, names), rank=rank)
                except CkptError:
                    continue

    def _write(self, tier: Store, rank: int) -> Durable:
        slab = even_slab(Box.whole(ARRAY.shape), RANKS, rank)
        assert slab is not None
        leaf = Leaf("x", "float32", ARRAY.shape, (slab,))
        image, fragment = fragment_of(rank, RANKS, [leaf], {"x": ARRAY}, attempt=self.name)
        tier.put(self.ref.key(data_name(rank)), [image])
        data = pack(pack_fragment(fragment))
        tier.put(self.ref.key(fragment_name(rank)), [data])
        return Durable(FragmentRef(fragment_name(rank), rank, len(data), checksum(data)))


def start_finisher(sim: Simulation, attempt: Attempt, index: int) -> Task:
    """Run `ckpt finalize --job-is-dead`, or the next restore, on a job that may live."""

    def finish() -> None:
        sim.finishers.add((attempt.name, index))
        with suppress(CkptError):
            finalize(
                sim.tiers[index],
                attempt.ref,
                workers=Inline(),  # type: ignore[arg-type]
                facts=RunFacts(job_is_dead=True),
                read_data=False,
            )

    return sim.start(f"finisher {attempt.name}", finish)


def start_pruner(sim: Simulation, attempt: Attempt, index: int) -> Task:
    """Remove what a job has left, which is long dead."""

    def clear() -> None:
        with suppress(CkptError):
            for held in Inventory(sim.tiers[index]).look(without_manifest=True):
                if held.ref == attempt.ref and held.state == "incomplete":
                    remove(sim.tiers[index], held)

    return sim.start(f"pruner {attempt.name}", clear)


def check_tiers(
    sim: Simulation, attempts: list[Attempt], seen: dict[tuple[int, str], bytes]
) -> None:
    """Check that what is listed is whole, of one attempt, and always the same.

    Objects that do not belong to the job are still there.
    """
    for index, tier in enumerate(sim.tiers):
        assert tier.objects["notes.txt"] == b"a stranger's"
        for attempt in attempts:
            ref = attempt.ref
            data = tier.objects.get(ref.manifest)
            if data is None:
                assert (index, ref.manifest) not in seen, "a checkpoint was removed"
                continue
            assert seen.setdefault((index, ref.manifest), data) == data
            manifest = unpack(data, Manifest, key=ref.manifest)
            assert (manifest.attempt, len(manifest.files)) == (attempt.name, RANKS)
            for name in [part.name for part in manifest.fragments] + [
                file.name for file in manifest.files
            ]:
                assert ref.key(name) in tier.objects, f"{ref.key(name)} is gone from {tier.url}"
        for who, key in tier.deleted:
            owner = who.split("/")[0].split()[-1]
            assert key.startswith(f"step-{STEP:09d}.{owner}/"), (who, key)
            if "/" in who and not key.endswith("claim"):
                assert f"rank-{int(who.split('/')[1]):05d}." in key, (who, key)


def check_verdicts(sim: Simulation) -> None:
    """Check that all ranks get one verdict, and that it is true."""
    for (name, index), heard in sim.verdicts.items():
        assert len(set(map(repr, heard.values()))) == 1, heard
        verdict = next(iter(heard.values()))
        data = sim.tiers[index].objects.get(StepRef(STEP, name).manifest)
        if isinstance(verdict, Committed):
            assert data is not None
            assert checksum(data) == verdict.checksum
        elif isinstance(verdict, Abort):
            assert data is None or (name, index) in sim.finishers, verdict
        else:
            assert isinstance(verdict, Unknown)


def check_bounds(sim: Simulation) -> None:
    for task in sim.tasks:
        assert task.waited <= BOUND, (task.name, task.waited, task.doing)
