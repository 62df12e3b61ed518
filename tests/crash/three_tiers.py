"""Kill trainers that save into memory, a disk and a far folder, as nursery.py does for one folder.

It runs as a script.

random ROOT TIMES NUMBERS SEED: kill a trainer TIMES times at random moments; each one resumes from
what the previous one has left. steps ROOT NUMBERS STRIDE: kill trainers before and after every
STRIDE-th call to any of the three stores.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt.storage.tiers
from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.config import AgentMode
from ckpt.events import Event, SaveCommitted
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.crash.nursery import Killer, content, die, orphans, warm_up
from tests.kit.stores import wrap_stores
from tests.processes import fork

CHUNK_BYTES = 1 << 20
Noted = set[tuple[str, int]]
"""(kind of tier, step) of every commit that was told."""


class KillerInMemory(Killer):
    """A killer for a store that takes images where they are."""

    def adopt(self, *args: Any) -> Any:
        return self.__getattr__("adopt")(*args)


def tiers(root: Path) -> list[Tier]:
    return [Tier("memory"), Tier(str(root / "disk"), keep_last=3), Tier(str(root / "far"), every=2)]


def memory_url(root: Path) -> str:
    return ckpt.storage.tiers._memory_url([Tier(str(root / "disk"))])


def kind(url: str) -> str:
    return "memory" if url.startswith("shm:") else Path(url).name


def trainer(root: Path, log: Path, numbers: int, last: int, agent: AgentMode = "off") -> None:
    """Train from the newest step, and save up to ``last``.

    Each step that is reported as committed is noted in a file that outlives the process.
    """
    state = content(-1, numbers)
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            os.write(descriptor, f"{kind(event.tier)} {event.step}\n".encode())

    with CheckpointManager(
        tiers(root), observers=[note], chunk_size=CHUNK_BYTES, agent=agent
    ) as manager:
        manager.restore(state)
        for step in range(state["step"] + 1, last):
            for key, value in content(step, numbers).items():
                state[key].copy_(value) if isinstance(value, torch.Tensor) else state.update(
                    step=value
                )
            manager.save_async(state)
            parameter.grad = torch.ones(1000)
            optimizer.step()
            state["x"].fill_(-1)  # the copy must have ended


def noted(log: Path) -> Noted:
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return {(name, int(step)) for name, step in (line.split() for line in whole.splitlines())}


def assert_is(state: dict[str, Any], step: int, numbers: int) -> None:
    expected = content(step, numbers)
    assert state["step"] == step, (state["step"], step)
    assert torch.equal(state["x"], expected["x"])
    assert torch.equal(state["small"], expected["small"])


def check(root: Path, known: Noted, numbers: int) -> int:
    """Check that no listed step is torn, and that saves go on. Return the newest step.

    Each step that was reported as committed is there, except those that a retention rule has
    removed.
    """
    listed: dict[str, set[int]] = {}
    with Workers("check", 2) as workers:
        for name, url in {
            "memory": memory_url(root),
            "disk": str(root / "disk"),
            "far": str(root / "far"),
        }.items():
            backend = open_backend(url)
            listed[name] = set()
            for ref in committed(backend):
                verified = verify_step(backend, ref, workers=workers)
                assert verified.intact, (name, ref, verified.faults)
                listed[name].add(ref.step)
    reported = {name: sorted(step for where, step in known if where == name) for name in listed}
    assert set(reported["far"]) <= listed["far"], (reported, listed)
    assert set(reported["disk"][-3:]) <= listed["disk"] | listed["far"], (reported, listed)
    somewhere = set[int]().union(*listed.values())
    newest = max((step for steps in reported.values() for step in steps), default=-1)
    # of the steps in memory, only this one certainly stays
    assert newest == -1 or newest in somewhere, (reported, listed)
    state = content(-1, numbers)
    with CheckpointManager(tiers(root), chunk_size=CHUNK_BYTES) as manager:
        for step in [*sorted(somewhere), None]:
            report = manager.restore(state, step, rollback=False)
            if report is None:
                assert not somewhere
                continue
            assert report.skipped == ()
            somewhere |= {finished for finished, _ in report.finished}  # it had all its parts
            assert_is(state, max(somewhere) if step is None else step, numbers)
        saved = max(somewhere, default=-1) + 1
        manager.save(content(saved, numbers), timeout=60)
        assert manager.latest_step() == saved
    return saved


def bury(pid: int, root: Path, *, memory: bool = True) -> None:
    """Remove what only the machine's memory holds."""
    for name in orphans(pid):
        os.unlink(f"/dev/shm/{name}")
    if memory:
        shutil.rmtree(
            f"/dev/shm/ckpt-memory-{os.getuid()}-{memory_url(root).removeprefix('shm://')}",
            ignore_errors=True,
        )


def at_random(root: Path, times: int, numbers: int, seed: int) -> None:
    root.mkdir(parents=True)
    chance, log = random.Random(seed), root / "log"
    from_memory = during = 0
    for _ in range(times):
        before = len(noted(log))
        child = fork(lambda: trainer(root, log, numbers, 10**6))
        time.sleep(chance.uniform(0.0, 0.3 + numbers * 4e-8))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, (
            "it ended by itself"
        )
        known = noted(log)
        during += len(known) > before
        on_disk = {step for name, step in known if name != "memory"}
        from_memory += bool(known) and max(step for _, step in known) not in on_disk
        newest = check(root, known, numbers)
        bury(child, root)
        for folder in (root / "far").glob("step-*"):  # to free room on the disk
            if int(folder.name[5:14]) < newest - 4:
                shutil.rmtree(folder)
        log.write_text(f"disk {newest}\n")
    print(
        f"{times} deaths, {during} after commits, {from_memory} with the newest step in memory "
        "alone"
    )


def doomed(root: Path, log: Path, numbers: int, nth: int, when: str) -> None:
    lock, counter = threading.Lock(), itertools.count(1)

    def count_and_die(moment: str) -> None:
        with lock:
            if moment == when and next(counter) == nth:
                die()

    def killer(url: str, store: StorageBackend) -> Killer:
        return (KillerInMemory if url.startswith("shm:") else Killer)(store, count_and_die)

    wrap_stores(pytest.MonkeyPatch(), killer)
    trainer(root, log, numbers, 4)


def at_every_step(root: Path, numbers: int, stride: int) -> None:
    root.mkdir(parents=True)
    place, log = root / "run", root / "log"
    deaths = {"before": 0, "after": 0}
    for when in deaths:
        for nth in range(1, 10_000, stride):
            with contextlib.suppress(FileNotFoundError):
                log.unlink()
            work = partial(doomed, place, log, numbers, nth, when)
            child = fork(work)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, -signal.SIGKILL), code
            check(place, noted(log), numbers)
            bury(child, place)
            shutil.rmtree(place)
            if code == 0:
                break
            deaths[when] += 1
    assert deaths["before"] > 60 // stride, deaths
    print(f"died before {deaths['before']} calls and after {deaths['after']}")


def main() -> None:
    warm_up()
    mode, root, *numbers = sys.argv[1:]
    try:
        (at_random if mode == "random" else at_every_step)(Path(root), *map(int, numbers))
    finally:
        bury(0, Path(root) / ("" if mode == "random" else "run"))
    print("ALL WELL")


if __name__ == "__main__":
    main()
