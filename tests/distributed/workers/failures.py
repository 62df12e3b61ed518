# ruff: noqa: PT017 - a worker has no pytest
"""FOLDER: one rank does something wrong; all ranks get an error, none hangs, and the next save
works.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, PerRank
from ckpt.errors import (
    CkptError,
    CommitError,
    CommitTimeout,
    EntryUnexpected,
    NoCheckpoint,
    ObjectNotFound,
    OutOfSpace,
    PeerFailed,
    ReplicasDiverged,
    RestoreError,
    RootInUse,
    SaveSkipped,
    StepExists,
    UnsupportedValue,
)
from ckpt.storage.testing import Fault, FaultyBackend, Raise, Rule
from ckpt.storage.testing.faulty import Verb
from tests.distributed.workers.nets import build, step
from tests.kit.stores import wrap_stores

RANK = 0
OfRank = tuple[int, Verb, str, Fault]
"""A fault of one rank alone: the rank, the verb, the key and what happens."""


@contextlib.contextmanager
def manager_on(
    path: Path, *faults: OfRank, seconds: float = 40, **settings: Any
) -> Iterator[CheckpointManager]:
    """Yield a manager that waits some seconds for ranks."""
    rules = [
        Rule(verb=verb, key=key, fault=fault) for rank, verb, key, fault in faults if rank == RANK
    ]
    with pytest.MonkeyPatch.context() as patch:
        wrap_stores(patch, lambda url, store: FaultyBackend(store, rules))
        with CheckpointManager(path, commit_timeout_seconds=seconds, **settings) as manager:
            yield manager


def fails(
    kind: type[CkptError], *words: str, manager: CheckpointManager, state: dict[str, Any], step: int
) -> None:
    try:
        pending = manager.save_async(state, step)
    except CkptError as error:
        raised: CkptError | None = error
    else:
        raised = pending.exception(60)
    assert type(raised) is kind, (step, repr(raised))
    for word in words:
        assert word in str(raised), str(raised)


def works(manager: CheckpointManager, state: dict[str, Any], step: int) -> None:
    manager.save(state, step, timeout=60)
    dist.barrier()
    assert manager.latest_step() == step


def diverged(folder: Path) -> None:
    net, optimizer = build("ddp", seed=0)
    step(net, optimizer, 0)
    state: dict[str, Any] = {
        "model": net,
        "optimizer": optimizer,
        "plain": {"lr": 0.1, "list": [1, 2]},
    }
    with manager_on(folder / "diverged") as manager:
        works(manager, state, 1)
        for number, name in enumerate(
            ["big", "tiny", "norm.running_mean", "norm.num_batches_tracked"]
        ):
            tensor = dict(net.module.state_dict(keep_vars=True))[name]
            with torch.no_grad():
                before = tensor.clone()
                if RANK == 1:
                    tensor.view(-1)[-1] += 1
                # a checkpoint has the buffers of the first rank, as DDP does
                if name.startswith("norm"):
                    works(manager, state, 10 + number)
                    manager.restore(state, 10 + number)
                    assert torch.equal(tensor, before)
                else:
                    words = (f"'model/{name}'", "0, 1")
                    fails(ReplicasDiverged, *words, manager=manager, state=state, step=10 + number)
                tensor.copy_(before)
        moment = optimizer.state[net.module.big]["exp_avg"]
        before = moment.clone()
        if RANK == 0:
            moment[5, 5] += 1
        fails(
            ReplicasDiverged, "'optimizer/model/big/exp_avg'", manager=manager, state=state, step=20
        )
        moment.copy_(before)
        works(manager, state, 21)
        fails(ReplicasDiverged, "'n'", manager=manager, state={**state, "n": RANK}, step=22)
        if RANK == 1:
            state["plain"]["list"][1] = 3
        fails(ReplicasDiverged, "'plain/list", "PerRank", manager=manager, state=state, step=23)
        state["plain"]["list"][1] = 2
        common = torch.ones(3) * (RANK + 1)
        fails(ReplicasDiverged, "'x'", manager=manager, state={"x": common}, step=24)
        works(manager, {**state, "mine": PerRank(RANK)}, 25)
        assert manager.steps() == [1, 12, 13, 21, 25]


def one_rank_raises(folder: Path) -> None:
    state: dict[str, Any] = {"x": torch.ones(100)}
    for culprit in (1, 0):
        with manager_on(folder / f"raises{culprit}") as manager:
            works(manager, state, 1)
            bad = {**state, "y": object()} if culprit == RANK else {**state, "y": 1}
            kind = UnsupportedValue if culprit == RANK else PeerFailed
            # No rank waits for one that has failed, or else this is a CommitTimeout.
            fails(
                kind,
                "'y'",
                f"rank {culprit}" if kind is PeerFailed else "",
                manager=manager,
                state=bad,
                step=2,
            )
            works(manager, state, 2)  # the same step, tried again
            works(manager, state, 3)
            if culprit == RANK:
                fails(UnsupportedValue, manager=manager, state={"y": object()}, step=4)
            else:
                pending = manager.save_async(state, 4)
                while not pending.done():
                    time.sleep(0.01)
            dist.barrier()
            # an error that no call has raised is raised by the next save, once, and that save fails
            # too
            try:
                manager.save(state, 5, timeout=30)
            except (CommitError, SaveSkipped):  # this rank may have raised it already
                pass
            else:
                raise AssertionError("nobody was told")
            works(manager, state, 6)


def one_store_fails(folder: Path) -> None:
    state = {"x": torch.arange(1000.0), "mine": PerRank(torch.full((10,), float(RANK)))}
    for culprit in (1, 0):
        fault: OfRank = (culprit, "upload", "step-0*2\\.", Raise(OutOfSpace))
        with manager_on(folder / f"full{culprit}", fault) as manager:
            works(manager, state, 1)
            kind = OutOfSpace if culprit == RANK else PeerFailed
            fails(kind, "no space left", manager=manager, state=state, step=2)
            works(manager, state, 3)
            dist.barrier()
            left = [path.parent.name for path in (folder / f"full{culprit}").glob("step-0*2.*/*")]
            assert left == [], left


def one_rank_is_silent(folder: Path) -> None:
    state = {"x": torch.ones(10)}
    with manager_on(folder / "silent", seconds=6) as manager:
        works(manager, state, 1)
        if RANK == 0:
            began = time.monotonic()
            fails(CommitTimeout, "rank(s) 1", "6 s", manager=manager, state=state, step=2)
            assert time.monotonic() - began > 5.9
        dist.barrier()
        works(manager, state, 3)
        assert manager.steps() == [1, 3]


def step_is_taken(folder: Path) -> None:
    state = {"x": torch.ones(10)}
    with manager_on(folder / "taken") as manager:
        works(manager, state, 1)
        dist.barrier()
        with manager_on(folder / "taken") as second:
            works(second, state, 2)
            fails(RootInUse, "is written by another", manager=manager, state=state, step=3)
    with manager_on(folder / "taken") as manager:
        fails(StepExists, "step 1", manager=manager, state=state, step=1)
        works(manager, state, 3)


def stages(folder: Path) -> None:
    """Check names that only one rank has, as in a pipeline."""
    torch.manual_seed(RANK)
    mine = nn.Linear(4 + RANK, 3)
    optimizer = torch.optim.Adam(mine.parameters())
    mine(torch.ones(1, 4 + RANK)).sum().backward()
    optimizer.step()
    with manager_on(folder / "stages") as manager:
        works(manager, {f"stage{RANK}": mine, "optimizer": optimizer, "step": 1}, 1)
    expected = [mine.weight.detach().clone(), optimizer.state[mine.weight]["exp_avg"].clone()]
    other = nn.Linear(4 + RANK, 3)
    fresh = torch.optim.Adam(other.parameters())
    with manager_on(folder / "stages") as manager:
        try:
            manager.restore({f"stage{RANK}": other, "optimizer": fresh, "step": 0})
        except EntryUnexpected:
            return
    assert torch.equal(other.weight, expected[0])
    assert torch.equal(fresh.state[other.weight]["exp_avg"], expected[1])
    print(f"rank {RANK} has its stage back", flush=True)


def restores(folder: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        torch.manual_seed(number)
        return {"x": torch.randn(200_000), "n": number, "mine": PerRank(RANK * 100 + number)}

    def blank() -> dict[str, Any]:
        return {"x": torch.zeros(200_000), "n": -1, "mine": PerRank(None)}

    path = folder / "restores"
    with manager_on(path) as manager:
        for number in (1, 2, 3):
            works(manager, state(number), number)
        # on one rank only
        wrongs: list[dict[str, Any]] = [
            {"x": torch.zeros(5)},
            {"x": torch.zeros(200_000), "more": 1},
        ]
        for wrong in wrongs:
            target = blank() | (wrong if RANK == 1 else {})
            try:
                manager.restore(target)
            except RestoreError as error:
                assert ("x" if len(wrong) == 1 else "more") in str(error), error
            else:
                raise AssertionError("a target that does not fit was restored")
            assert bool((target["x"] == 0).all()) or RANK == 0
            assert target["n"] == -1
    dist.barrier()
    if RANK == 0:
        for data in path.glob("step-0*3.*/rank-00000.safetensors"):
            content = bytearray(data.read_bytes())
            content[-10] ^= 1
            data.write_bytes(content)
    dist.barrier()
    for gone in (1, 0):  # one rank cannot see the data of step 2 either
        with manager_on(
            path, (gone, "read_into", "step-0*2\\..*safetensors", Raise(ObjectNotFound))
        ) as manager:
            target = blank()
            report = manager.restore(target)
            assert report is not None
            assert report.step == 1
            assert [number for number, _ in report.skipped] == [3, 2], report.skipped
            assert f"rank {gone}" in report.skipped[1][1], report.skipped
            assert torch.equal(target["x"], state(1)["x"])
            assert target["n"] == 1
            assert target["mine"].value == RANK * 100 + 1
            assert manager.restore(blank(), 1) is not None
            try:
                manager.restore(blank(), 3)
            except NoCheckpoint as error:
                assert "step 3" in str(error)
            else:
                raise AssertionError("a damaged step was restored")
    with manager_on(folder / "nothing here") as manager:
        assert manager.restore(blank()) is None
    with manager_on(path, (0, "folders", "", Raise(OutOfSpace))) as manager:
        try:
            manager.restore(blank())
        except CkptError as error:
            assert "no space left" in str(error)
        else:
            raise AssertionError("the leader's error was lost")


def main() -> None:
    global RANK
    dist.init_process_group("gloo")
    RANK = dist.get_rank()
    for check in (
        diverged,
        one_rank_raises,
        one_store_fails,
        one_rank_is_silent,
        step_is_taken,
        stages,
        restores,
    ):
        began = time.monotonic()
        check(Path(sys.argv[1]))
        dist.barrier()
        if RANK == 0:
            print(f"{check.__name__} is well, {time.monotonic() - began:.1f} s", flush=True)
    if RANK == 0:
        print("ALL WELL")
    exit_rank()


main()
