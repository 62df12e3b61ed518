"""ROOT: no tensor changes, and a rank dies between the commit and the comparison of the ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt import CheckpointManager
from ckpt.errors import CommitTimeout
from ckpt.events import Event, SaveCommitted

RANK = int(os.environ["RANK"])


def die_after_step_2(event: Event) -> None:
    if isinstance(event, SaveCommitted) and event.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    dist.init_process_group("gloo")
    net = nn.Linear(8, 8)
    net.weight.grad = torch.ones(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    state: dict[str, Any] = {f"net{RANK}": net, f"optimizer{RANK}": optimizer}
    with CheckpointManager(
        Path(sys.argv[1]),
        observers=[die_after_step_2] if RANK else [],
        commit_timeout_seconds=8,
        slots=1,
        on_suspicious="warn",
    ) as manager:
        optimizer.step()
        manager.save(state, 1)
        began = time.monotonic()
        manager.save(state, 2)  # it ends when its slot is free
        assert time.monotonic() - began < 50, time.monotonic() - began  # the comparison waits 60 s
        error = manager.save_async(state, 3).exception(30)
        assert isinstance(error, CommitTimeout), error
        began = time.monotonic()
    assert time.monotonic() - began < 50, time.monotonic() - began
    print("WELL", flush=True)
    os._exit(0)


main()
