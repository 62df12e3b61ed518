"""Kill a job at the calls of its saves to the store, while files refer to older steps and are
removed. Every listed step is what was saved.

It runs as a script: ROOT BEGIN STRIDE. The job dies before each STRIDE-th call, the first time
before call BEGIN. ``other_root.py`` does the same with a base in another root, whose run goes on
and prunes after the job has died, and ``adopted_base.py`` with one that was adopted.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage import registry
from ckpt.storage.registry import open_backend
from tests.crash.nursery import Killer, die, warm_up
from tests.kit.stores import wrap_stores
from tests.processes import fork

WIDTH = 32
STEPS = 7
CHANGES = 4  # Before this step, a frozen layer changes, so that a new base takes over


def model_at(step: int) -> nn.Sequential:
    """Return the model as a step holds it: three frozen layers and one that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    frozen = list(model)[:3]
    with torch.no_grad():
        for layer in frozen:
            layer.requires_grad_(False)
        list(model.parameters())[6].fill_(step)
        if step >= CHANGES:
            list(model.parameters())[2].add_(1)
    return model


def job(root: Path, log: Path) -> None:
    """Save the steps after the newest one, and note each that is committed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    base = str(base_of(root)) if base_of(root).exists() else None
    tier = Tier(str(root), keep_last=1, base=base)
    with CheckpointManager(tier, journal=False) as manager:
        state = {"model": model_at(0)}
        report = manager.restore(state)
        for step in range(report.step + 1 if report else 1, STEPS + 1):
            state["model"].load_state_dict(model_at(step).state_dict())
            manager.save(state, step)
            os.write(descriptor, f"{step}\n".encode())


def base_of(root: Path) -> Path:
    return root.with_name(f"{root.name}-base")


def save_base(root: Path, step: int) -> None:
    """Save a whole step of the run whose root is the base of ``root``, and remove the others that
    no run needs.
    """
    tier = Tier(str(base_of(root)), keep_last=1)
    with CheckpointManager(tier, journal=False, incremental=False) as manager:
        manager.save({"model": model_at(1)}, step)


def check(root: Path, log: Path) -> None:
    backend = open_backend(str(root))
    refs = committed(backend)
    with Workers("check", 1) as workers:
        for ref in refs:
            verified = verify_step(backend, ref, workers=workers)
            assert verified.intact, (ref, verified.faults)
    for ref in refs:
        weights = ckpt.load(root, "model", step=ref.step)
        for name, value in model_at(ref.step).state_dict().items():
            assert torch.equal(weights[name], value), (ref, name)
    noted = [int(line) for line in log.read_text().split()] if log.exists() else []
    assert max(noted, default=0) <= max((ref.step for ref in refs), default=0), (noted, refs)


def doomed(root: Path, log: Path, number: int) -> None:
    lock, count = threading.Lock(), 0

    def count_and_die(moment: str) -> None:
        nonlocal count
        with lock:
            count += moment == "before"
            if count == number:
                die()

    patch = pytest.MonkeyPatch()
    wrap_stores(patch, lambda url, store: Killer(store, count_and_die))
    # The store of a base in another root
    patch.setattr(registry, "open_backend", lambda url, _: Killer(open_backend(url), count_and_die))
    job(root, log)


def main(save_base: Callable[[Path, int], None] | None = None) -> None:
    """Kill the jobs. ``save_base`` saves a step as the base of a root, before and after each."""
    warm_up()
    folder, begin, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    deaths = 0
    for number in range(begin, 10_000, stride):
        root, log = folder / str(number), folder / f"{number}.log"
        if save_base is not None:
            assert os.waitpid(fork(partial(save_base, root, 1)), 0)[1] == 0
        code = os.waitstatus_to_exitcode(os.waitpid(fork(partial(doomed, root, log, number)), 0)[1])
        assert code in (0, -signal.SIGKILL), code
        if save_base is not None:
            assert os.waitpid(fork(partial(save_base, root, 2)), 0)[1] == 0
        check(root, log)
        if code == 0:
            break
        deaths += 1
        assert os.waitpid(fork(partial(job, root, log)), 0)[1] == 0
        check(root, log)
        assert max(ref.step for ref in committed(open_backend(str(root)))) == STEPS
        shutil.rmtree(root)
    print(f"{deaths} deaths")
    print("ALL WELL")


if __name__ == "__main__":
    main()
