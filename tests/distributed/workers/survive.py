"""FOLDER GROUP_SECONDS STORAGE_SECONDS [dcp]: three ranks whose store outlives them.

Storage is slow and the process group has a short timeout; a rank is stopped; the leader is stopped;
the leader is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ckpt import CheckpointManager, PerRank
from ckpt.coordination import committer
from ckpt.coordination.commit_state_machine import Gather, Merge, Put
from ckpt.errors import CommitTimeout
from ckpt.pending import PendingSave
from ckpt.save.rank_files import RankFiles
from tests.kit.signals import stop_this_process
from tests.kit.stores import Wrapped, wrap_stores

RANK = int(os.environ["RANK"])
TIMEOUT = 3.0
slow_seconds = 0.0


def say(*words: object) -> None:
    print(f"rank {RANK}:", *words, flush=True)


def at(where: str, rank: int, step: int, what: Callable[[], None]) -> None:
    """Call ``what`` once on ``rank``, right before its save of ``step`` does ``where``.

    ``where`` is that it puts its fragment, gathers messages, merges, or puts the manifest.
    """
    if rank != RANK:
        return
    if where == "fragment":
        put_fragment = RankFiles.put_fragment

        def put(self: RankFiles, job: Any, *args: Any) -> Any:
            if job.ref.step == step:
                RankFiles.put_fragment = put_fragment  # type: ignore[method-assign]
                what()
            return put_fragment(self, job, *args)

        RankFiles.put_fragment = put  # type: ignore[method-assign,assignment]
        return
    kind, perform = (
        {"gather": Gather, "merge": Merge, "put": Put}[where],
        committer._Commit._perform,
    )

    def act(self: Any, action: Any) -> Any:
        if isinstance(action, kind) and self._ref.step == step:
            committer._Commit._perform = perform  # type: ignore[method-assign]
            what()
        return perform(self, action)

    committer._Commit._perform = act  # type: ignore[method-assign,assignment]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(pending: PendingSave, group: Any) -> int:
    """Train, with a collective in each step, until the save has ended on all ranks of ``group``."""
    steps, going = 0, torch.ones(1)
    while going.item():
        going = torch.tensor([0.0 if pending.done() else 1.0])
        dist.all_reduce(going, group=group)
        steps += 1
        time.sleep(0.005)
    return steps


def slow_storage_beside_a_hasty_group(
    manager: CheckpointManager, state: dict[str, Any], seconds: float
) -> None:
    global slow_seconds
    slow_seconds = seconds if RANK == 1 else 0.0
    began = time.monotonic()
    dist.barrier()  # no rank begins before this one has looked at its clock
    pending = manager.save_async(state, 1)
    steps = train(pending, None)
    assert pending.exception(0) is None, pending.exception(0)
    assert time.monotonic() - began >= seconds
    slow_seconds = 0.0
    say("storage took", round(time.monotonic() - began), "s,", steps, "steps of training meanwhile")


def a_rank_is_stopped(
    manager: CheckpointManager, state: dict[str, Any], pids: list[int], pair: Any
) -> None:
    at("fragment", 2, 2, stop_this_process)
    began = time.monotonic()
    pending = manager.save_async(state, 2)
    if RANK < 2:
        steps = train(pending, pair)
        assert steps > 20, (steps, pending.exception(0))
        waited = time.monotonic() - began
        assert waited < TIMEOUT + 6, waited
        if RANK == 0:
            os.kill(pids[2], signal.SIGCONT)
    error = pending.exception(30)
    assert isinstance(error, CommitTimeout), error
    assert error.missing == (2,), error
    say("told of rank 2:", error)


def the_leader_is_stopped(
    manager: CheckpointManager, state: dict[str, Any], pids: list[int]
) -> None:
    for step, where in ((3, "merge"), (4, "put")):
        at(where, 0, step, stop_this_process)
        pending = manager.save_async(state, step)
        assert pending.exception(30) is None, pending.exception(30)
        if RANK == 1:
            os.kill(pids[0], signal.SIGCONT)
        say("committed", step)


def the_leader_is_killed(manager: CheckpointManager, state: dict[str, Any]) -> None:
    at("gather", 0, 5, die)
    began = time.monotonic()
    pending = manager.save_async(state, 5)
    assert pending.exception(30) is None, pending.exception(30)
    assert time.monotonic() - began < 3 * TIMEOUT
    say("committed without a leader")
    error = manager.save_async(state, 6).exception(60)
    assert isinstance(error, CommitTimeout), error
    assert error.missing == (0,), error
    say("told of rank 0:", error)


class Slow(Wrapped):
    """A store that takes data slowly."""

    def upload(self, key: str, size: int) -> Any:
        time.sleep(slow_seconds)
        return self.inner.upload(key, size)


def dcp_dies(folder: Path, seconds: float) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    class SlowWriter(FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            time.sleep(seconds if RANK == 1 else 0)
            return super().write_data(*args)

    try:
        save({"x": torch.zeros(10)}, storage_writer=SlowWriter(folder / "dcp"))
    except Exception as error:
        say("DCP died:", str(error).splitlines()[0][:200])
    else:
        raise AssertionError("DCP outlived it")


def main() -> None:
    folder, group_seconds, seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    wrap_stores(pytest.MonkeyPatch(), lambda url, store: Slow(store))
    patient = dist.new_group([0, 1, 2], timeout=timedelta(seconds=120))
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=120))
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid(), group=patient)
    state = {"x": torch.arange(1000.0), "mine": PerRank(RANK)}
    _set_pg_timeout(timedelta(seconds=group_seconds))  # now that all ranks are there
    with CheckpointManager(folder / "slow", commit_timeout_seconds=4 * seconds + 20) as slow:
        slow_storage_beside_a_hasty_group(slow, state, seconds)
    dist.barrier(group=patient)
    manager = CheckpointManager(folder / "run", commit_timeout_seconds=TIMEOUT)
    manager.prepare(state)
    dist.barrier(group=patient)  # from here on seconds count
    a_rank_is_stopped(manager, state, pids, pair)
    dist.barrier(group=patient)
    the_leader_is_stopped(manager, state, pids)
    dist.barrier(group=patient)
    if "dcp" in sys.argv:
        dcp_dies(folder, seconds)
        dist.barrier(group=patient)  # the process group dies at different times on each rank
    the_leader_is_killed(manager, state)
    manager.close()
    say("WELL")
    os._exit(0)  # a process group without its leader cannot end in order


main()
