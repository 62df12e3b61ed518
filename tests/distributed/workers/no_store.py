"""FOLDER: two ranks; the job's store is in rank 0, which is killed right after it has voted that
its part is durable.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ckpt import CheckpointManager, PerRank
from ckpt.coordination import committer
from ckpt.coordination.commit_state_machine import Merge
from ckpt.errors import CommitError


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    manager = CheckpointManager(sys.argv[1], commit_timeout_seconds=60)
    state = {"x": torch.arange(1000.0), "mine": PerRank(rank)}
    manager.save(state, 1)
    dist.barrier()
    perform = committer._Commit._perform

    def act(self: Any, action: Any) -> Any:
        if isinstance(action, Merge):  # now all parts are there
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return perform(self, action)

    if rank == 0:
        committer._Commit._perform = act  # type: ignore[method-assign,assignment]
    pending = manager.save_async(state, 2)
    began, steps = time.monotonic(), 0
    while not pending.done():
        (torch.ones(100, 100) @ torch.ones(100, 100)).sum()
        time.sleep(0.01)
        steps += 1
    error = pending.exception(0)
    print(f"rank {rank}: after {time.monotonic() - began:.1f} s:", error, flush=True)
    assert isinstance(error, CommitError)
    assert "the job's store is gone" in str(error)
    assert time.monotonic() - began < 20
    assert steps > 10
    for step in (3, 4):  # training goes on
        began = time.monotonic()
        try:
            heard: BaseException | None = manager.save_async(state, step).exception(20)
        except CommitError as unheard:
            heard = unheard
        assert "gone" in str(heard), heard
        assert time.monotonic() - began < 10
    manager.close()
    print("WELL", flush=True)
    os._exit(0)


main()
