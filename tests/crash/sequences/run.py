"""Run the events of a seed, and check after each what the oracle demands. It runs as a script.

run.py ROOT FIRST COUNT EVENTS [MUTANT]: run the sequences of COUNT seeds from FIRST on, each of so
many EVENTS. Each job is a fork of this process, since a job that has been killed must be known to
be dead. With the name of a MUTANT, the code has this mistake, and the script says in which sequence
it is noticed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointManager, Tier
from ckpt.agent.client import status
from ckpt.agent.folder import AgentFolder
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.cli.main import main as command
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.single import new_attempt
from ckpt.errors import CkptError
from ckpt.events import Event as SaveEvent
from ckpt.events import SaveCommitted, SaveStaged, TierMissed
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import Retention
from ckpt.root.claim_marker import is_being_removed
from ckpt.save.job_steps import EarlierSteps
from ckpt.storage.registry import open_backend
from ckpt_backends.folder.posix import PosixBackend, _PosixUpload
from ckpt_backends.folder.shm import ShmBackend
from tests.agent.conftest import new_place
from tests.coordination.world import World, WorldCoordinator
from tests.crash.nursery import warm_up
from tests.crash.sequences.oracle import Facts, Listing, Oracle, Record, Records
from tests.crash.sequences.plans import (
    IMAGE_BYTES,
    MEMORY,
    PLACES,
    CopyPlan,
    Event,
    JobPlan,
    PinPlan,
    PrunePlan,
    TierPlan,
    WipePlan,
    events,
)
from tests.kit.waiting import until
from tests.processes import fork

_NUMBERS = 500
_OVER = ("done", "closed", "superseded", "given up")
_EXPECTED = ("OutOfSpace", "SaveSkipped", "StepsMissing", "TierBehind")
"""The errors of a job without faults: a capacity, ``every`` and ``backlog`` allow no more."""
_CALLS = ("put", "upload", "read_into", "head", "list", "folders", "delete", "discard")
_UPLOAD_CALLS = ("write", "finish", "abort")


class Wrong(AssertionError):
    """Something is not as the oracle demands."""


@dataclass
class Run:
    """The folders of one sequence, and what is known about them."""

    root: Path
    oracle: Oracle = field(default_factory=Oracle)
    serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def log(self) -> Path:
        return self.root / "log"

    def url(self, place: str) -> str:
        if place == MEMORY:
            return f"shm://sequences-{os.getpid() if _parent is None else _parent}"
        return str(self.root / place)

    def place(self, url: str) -> str:
        return MEMORY if url.startswith("shm:") else Path(url).name

    def tier(self, plan: TierPlan, ranks: int) -> Tier:
        capacity = None if plan.capacity is None else plan.capacity * ranks * IMAGE_BYTES
        return Tier(
            self.url(plan.place),
            every=plan.every,
            keep_last=plan.keep_last,
            keep_every=plan.keep_every,
            keep_best=("metric", "max") if plan.keep_best else None,
            codec=plan.codec,
            capacity=capacity,
        )

    def listed(self, place: str) -> frozenset[StepRef]:
        if place != MEMORY and not Path(self.url(place)).exists():
            return frozenset()
        backend = open_backend(self.url(place))
        try:
            return frozenset(committed(backend))
        finally:
            backend.close()

    def listing(self) -> Listing:
        return {place: self.listed(place) for place in PLACES}

    def cut_short(self) -> Listing:
        """Return the steps of any place whose removal has begun on a place, by that place."""
        refs = frozenset[StepRef]().union(*self.listing().values())
        marked: dict[str, frozenset[StepRef]] = {}
        for place in PLACES:
            if not Path(self.url(place)).exists():
                continue
            backend = open_backend(self.url(place))
            marked[place] = frozenset(ref for ref in refs if is_being_removed(backend, ref))
            backend.close()
        return marked

    def records(self) -> Records:
        """Return the rollbacks on each durable place."""
        return {
            place: [record_of(path) for path in Path(self.url(place)).glob("rollbacks/*.json")]
            for place in PLACES
        }

    def demand(self, wrong: list[str]) -> None:
        if wrong:
            raise Wrong("; ".join(wrong))


def record_of(path: Path) -> Record:
    body = json.loads(path.read_text())["body"]
    return Record(*(body[name] for name in ("number", "created_at", "step", "jobs")))


_parent: int | None = None


def in_fork(work: Callable[[], object]) -> int:
    """Do ``work`` in a child, and return how it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


# -- jobs ------------------------------------------------------------------------------------------


def run_job(run: Run, job: JobPlan, agent: AgentFolder | None) -> None:
    """Let a child run a job, and check what it has noted and left."""
    run.log.write_text("")
    facts = Facts(new_attempt(), run.listing(), run.cut_short())
    places = {**facts.before, MEMORY: run.listed(MEMORY)}
    among = {ref.step for tier in job.tiers for ref in facts.before[tier.place]}
    records = run.records()
    older = sorted(among)[int(job.fraction * len(among))] if among else None
    first = 1 + max((ref.step for refs in places.values() for ref in refs), default=-1)
    code = in_fork(
        partial(train, run, job, facts.attempt, older, first, next(run.serial) * 1000, agent)
    )
    if code not in ((0, -signal.SIGKILL) if job.end == "kill" else (0,)):
        raise Wrong(f"the job has ended with {code}")
    if agent is not None:
        await_agent(agent, facts.attempt)
    notes = [json.loads(line) for line in run.log.read_text().splitlines()]
    read_notes(run, facts, notes)
    facts.after, facts.records = run.listing(), run.records()
    for note in notes:
        if note["what"] == "restored":
            check_restore(run, job, note, older, places, records)
            if job.start == "older":
                run.demand(run.oracle.no_rollback(job, places, records, facts))
        elif note["what"] == "error" and note["error"] not in _EXPECTED:
            raise Wrong(f"{note}")
    run.demand(run.oracle.missing_after_job(job, facts))
    if code == 0 and job.end == "close":
        run.demand(run.oracle.untold(facts))
    if (code == 0 and job.end == "close") or agent is not None:
        run.demand(run.oracle.missing_farther(job, facts))


def await_agent(agent: AgentFolder, attempt: str) -> None:
    def is_over() -> bool:
        answer = status(agent)
        jobs = answer.jobs if answer is not None else ()
        return not any(each.attempt == attempt and each.state not in _OVER for each in jobs)

    if not until(is_over, 60):
        raise Wrong(f"the agent is not done: {status(agent)}\n{Path(agent.log).read_text()}")


def read_notes(run: Run, facts: Facts, notes: list[dict[str, Any]]) -> None:
    for note in notes:
        match note["what"]:
            case "restored" if note["step"] is not None:
                facts.restored = StepRef(note["step"], note["attempt"])
                run.oracle.parents[facts.attempt] = facts.restored
            case "saved":
                ref = StepRef(note["step"], facts.attempt)
                run.oracle.contents[ref] = note["content"]
            case "begun":
                facts.begun[StepRef(note["step"], facts.attempt)] = note["places"]
            case "committed" | "missed" as what:
                by_place = facts.committed if what == "committed" else facts.missed
                ref = StepRef(note["step"], facts.attempt)
                by_place.setdefault(note["place"], set()).add(ref)
            case _:
                pass


def check_restore(
    run: Run,
    job: JobPlan,
    note: dict[str, Any],
    older: int | None,
    places: dict[str, frozenset[StepRef]],
    records: Records,
) -> None:
    expected: int | None = older
    if job.start == "newest":
        finished = max((step for step, _ in note["finished"]), default=-1)
        newest = max(run.oracle.newest(places, job, records), finished)
        expected = newest if newest >= 0 else None
    if note["step"] != expected or note.get("skipped"):
        raise Wrong(f"step {expected} should be restored, and not {note}")
    if expected is not None:
        ref = StepRef(note["step"], note["attempt"])
        if run.oracle.contents.get(ref) != note["content"]:
            raise Wrong(f"{note} is not what was saved, {run.oracle.contents.get(ref)}")


def train(
    run: Run,
    job: JobPlan,
    attempt: str,
    older: int | None,
    first: int,
    serial: int,
    agent: AgentFolder | None,
) -> None:
    """Be the job: restore, save, and end as the plan says."""
    if agent is not None:
        os.environ["CKPT_AGENT_FOLDER"] = agent.path
    log = os.open(run.log, os.O_WRONLY | os.O_APPEND)
    logging.basicConfig(filename=run.root / "messages", level=logging.INFO)
    if job.end == "kill":
        die_at(job.death)
    WorldCoordinator.attempt = attempt
    ended = World(job.ranks, patience=20).run(
        partial(train_rank, run, job, older, first, serial, log)
    )
    for error in ended.values():
        if error is not None:
            raise error


def train_rank(
    run: Run,
    job: JobPlan,
    older: int | None,
    first: int,
    serial: int,
    log: int,
    coordinator: Coordinator,
) -> None:
    def note(what: str, **fields: object) -> None:
        if coordinator.rank == 0:
            os.write(log, json.dumps({"what": what, **fields}).encode() + b"\n")

    def observe(event: SaveEvent) -> None:
        match event:
            case SaveStaged():
                note("begun", step=event.step, places=[run.place(url) for url in event.tiers])
            case SaveCommitted():
                note("committed", step=event.step, place=run.place(event.tier))
            case TierMissed():
                note(
                    "missed", step=event.step, place=run.place(event.tier), error=repr(event.error)
                )
            case _:
                pass

    tiers = [Tier(run.url(MEMORY))] * job.memory
    tiers += [run.tier(plan, job.ranks) for plan in job.tiers]
    manager = CheckpointManager(
        tiers,
        coordinator=coordinator,
        observers=[observe],
        backlog=job.backlog,
        agent="required" if job.agent else "off",
        commit_timeout_seconds=30,
    )
    try:
        with manager:
            state = content(-1, -1)
            restored = None
            if job.start != "nothing" and not (job.start == "older" and older is None):
                report = manager.restore(state, older if job.start == "older" else None)
                restored = None if report is None else report.step
                note(
                    "restored",
                    step=restored,
                    attempt="" if report is None else report.attempt,
                    content=content_of(state),
                    finished=[] if report is None else report.finished,
                    skipped=[] if report is None else report.skipped,
                )
            start = first if restored is None else restored + 1
            start = max(first, start) if job.jumps else start
            save_steps(manager, job, range(start, start + job.saves), serial, note)
            if job.end == "raise":
                raise _Stop
            if job.end == "detach":
                manager.close(detach=True)
    except _Stop:
        pass
    except CkptError as error:
        note("error", error=type(error).__name__, text=str(error))


class _Stop(Exception):
    """The training loop fails."""


def save_steps(
    manager: CheckpointManager,
    job: JobPlan,
    steps: range,
    serial: int,
    note: Callable[..., None],
) -> None:
    for step in steps:
        value = serial + step - steps[0]
        note("saved", step=step, content=value)
        try:
            pending = manager.save_async(
                content(step, value), metrics={"metric": float(value * 7919 % 1009)}
            )
            if job.waits:
                pending.result(60)
        except CkptError as error:
            note("error", error=type(error).__name__, text=str(error))


def content(step: int, value: int) -> dict[str, Any]:
    return {"x": torch.full((_NUMBERS,), value), "step": step}


def content_of(state: dict[str, Any]) -> int:
    """Return the value that all elements of the tensor in ``state`` have."""
    (value,) = set(state["x"].tolist())  # An operation of torch may not start threads in a fork
    return int(value)


def die_at(number: int) -> None:
    """Let this process kill itself at its call to any store number ``number``: before the call if
    that is odd, and otherwise after it, also if the call raises.
    """
    lock, counter = threading.Lock(), itertools.count(1)

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with lock:
                turn = next(counter)
            if turn == number and number % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return work(*args, **named)
            finally:
                if turn == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for owner, names in (
        (PosixBackend, _CALLS),
        (_PosixUpload, _UPLOAD_CALLS),
        (ShmBackend, ("adopt",)),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


# -- what people do --------------------------------------------------------------------------------


def run_command(run: Run, *words: object, allowed: tuple[int, ...] = (0,)) -> int:
    def work() -> None:
        out = os.open(run.root / "messages", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["ckpt", *map(str, words)]
        try:
            code = command()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        os._exit(code)

    code = in_fork(work)
    if code not in allowed:
        raise Wrong(f"ckpt {' '.join(map(str, words))} ends with {code}")
    return code


def choice(refs: frozenset[StepRef], fraction: float) -> int | None:
    """Return the number of one of the steps, if there is any."""
    numbers = sorted({ref.step for ref in refs})
    return numbers[int(fraction * len(numbers))] if numbers else None


def run_event(run: Run, event: Event, agents: Callable[[], AgentFolder]) -> None:
    before = run.listing()
    match event:
        case JobPlan():
            run_job(run, event, agents() if event.agent else None)
        case CopyPlan(source, target, fraction, all_steps):
            if (step := choice(before[source], fraction)) is not None:
                which = ["--all"] if all_steps else ["--step", step]
                # 3: a job was killed in the midst of the removal of the step there.
                words = ("copy", run.url(source), run.url(target), *which)
                code = run_command(run, *words, allowed=(0, 3))
                after = run.listing()
                wanted = {ref for ref in before[source] if all_steps or ref.step == step}
                lost = {ref for place in PLACES for ref in before[place] - after[place]}
                if lost or (code == 0 and not wanted <= after[target]):
                    raise Wrong(f"{wanted} should be on {target}, and nothing gone: {lost}")
        case PrunePlan(place, keep_last):
            if before[place]:
                # 6: the job that has the root may be at work.
                words = ("prune", run.url(place), "--keep-last", keep_last)
                run_command(run, *words, allowed=(0, 6))
            run.demand(run.oracle.missing_after_prune(event, before, run.listing(), run.records()))
        case PinPlan(place, fraction, ends):
            pins = run.oracle.pins.setdefault(place, set())
            if ends and pins:
                run_command(run, "unpin", run.url(place))
                pins.clear()
            elif not ends and (step := choice(before[place], fraction)) is not None:
                # 7: a job was killed in the midst of the removal of the step.
                words = ("pin", run.url(place), step, "--for", "1d")
                code = run_command(run, *words, allowed=(0, 7))
                # Of several attempts at a step, the command pins the one that a restore takes.
                attempts = {ref for ref in before[place] if ref.step == step}
                pins |= attempts if code == 0 and len(attempts) == 1 else set()
        case WipePlan(place):
            shutil.rmtree(run.url(place), ignore_errors=True)
            run.oracle.pins.pop(place, None)


def check_all(run: Run) -> None:
    """Check every byte of every step, and that each place alone restores each of its steps."""
    for place in PLACES:
        if not (refs := run.listed(place)):
            continue
        backend = open_backend(run.url(place))
        with Workers("check", 2) as workers:
            for ref in refs:
                if faults := verify_step(backend, ref, workers=workers).faults:
                    raise Wrong(f"{ref} on {place}: {faults}")
        backend.close()
        code = in_fork(partial(restore_each, run, place, refs))
        if code:
            raise Wrong(f"the steps of {place} do not restore")


def restore_each(run: Run, place: str, refs: frozenset[StepRef]) -> None:
    with CheckpointManager(run.url(place)) as manager:
        for step in sorted({ref.step for ref in refs}):
            state = content(-1, -1)
            report = manager.restore(state, step, rollback=False)
            assert report is not None
            assert run.oracle.contents[StepRef(step, report.attempt)] == content_of(state)


def run_events(root: Path, plan: list[Event], agents: Callable[[], AgentFolder]) -> None:
    """Run a sequence from its start, in an empty folder."""
    global _parent
    _parent = os.getpid()
    run = Run(root)
    root.mkdir(parents=True)
    try:
        for number, event in enumerate(plan):
            try:
                run_event(run, event, agents)
            except BaseException as error:
                error.add_note(f"at event {number}: {event}")
                raise
        check_all(run)
    finally:
        forget_memory(run)


def forget_memory(run: Run) -> None:
    name = run.url(MEMORY).removeprefix("shm://")
    shutil.rmtree(f"/dev/shm/ckpt-memory-{os.getuid()}-{name}", ignore_errors=True)


@contextmanager
def agent_on_demand() -> Iterator[Callable[[], AgentFolder]]:
    """Return the place of one agent for all jobs, which the first job with an agent starts."""
    os.environ["CKPT_AGENT_MEMORY_SECONDS"] = "0"
    with new_place() as place:
        yield lambda: place


def keep_too_few() -> None:
    """Let each tier keep one step less than its policy says."""
    of = Retention.of

    def too_few(tier: Tier) -> Retention:
        rule = of(tier)
        most = rule.keep_last
        return replace(rule, keep_last=None if most is None else max(1, most - 1))

    Retention.of = too_few  # type: ignore[method-assign]


def forget_farther_tiers() -> None:
    """Let retention remove steps of earlier jobs that farther tiers still lack."""
    EarlierSteps.needed_refs = lambda *_: frozenset()  # type: ignore[method-assign]


MUTANTS = {"keep too few": keep_too_few, "forget farther tiers": forget_farther_tiers}


def main() -> None:
    root, (first, count, length) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    mutant = sys.argv[5] if len(sys.argv) > 5 else None
    warm_up()
    if mutant is not None:
        MUTANTS[mutant]()
    began = time.monotonic()
    with agent_on_demand() as agents:
        for seed in range(first, first + count):
            with tempfile.TemporaryDirectory(prefix=f"{seed}-", dir=root) as folder:
                plan = events(seed, length)
                try:
                    run_events(Path(folder, "run"), plan, agents)
                except BaseException as error:
                    if mutant is not None and isinstance(error, Wrong):
                        print(f"NOTICED in the sequence of seed {seed}: {error}")
                        return
                    print(f"seed {seed}:", *plan, sep="\n  ")
                    messages = Path(folder, "run", "messages")
                    print(messages.read_text()[-6000:] if messages.exists() else "")
                    raise
    print(f"ALL WELL: {count} sequences of {length} events in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
