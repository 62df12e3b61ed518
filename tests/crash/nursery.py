"""Fork savers, kill them, and check what they leave.

It runs as a script: many deaths are affordable because torch is imported only once.

random ROOT TIMES NUMBERS SEED: kill a saver TIMES times at random moments; its state has that many
NUMBERS. steps ROOT NUMBERS STRIDE: kill savers before and after each STRIDE-th call to the store,
from the first to the last of one save.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.kit.stores import Wrapped, wrap_stores
from tests.processes import fork

Content = dict[str, Any]


def content(step: int, numbers: int) -> Content:
    """Return what step ``step`` must hold."""
    return {
        "x": torch.arange(numbers, dtype=torch.int64) * 31 + step,
        "small": torch.tensor(step),
        "step": step,
    }


class Killer(Wrapped):
    """A store in which the process kills itself at the n-th call, before or after that call did its
    work.
    """

    def __init__(self, inner: Any, die: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._die = die

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name not in (
            "put",
            "upload",
            "write",
            "finish",
            "abort",
            "read_into",
            "head",
            "list",
            "folders",
            "delete",
            "adopt",
        ):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._die("before")
            result = found(*args, **kwargs)
            self._die("after")
            return Killer(result, self._die) if name == "upload" else result

        return call


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def saver(root: Path, log: Path, numbers: int, first: int, last: int) -> None:
    """Save steps while 'training', and note what is committed in a file that outlives
    the process.
    """
    state = content(first, numbers)
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with CheckpointManager(root, chunk_size=1 << 20) as manager:
        report = manager.restore(state)
        assert report is None or report.step == first - 1
        for step in range(first, last):
            state["x"].copy_(torch.arange(numbers, dtype=torch.int64) * 31 + step)
            state["small"].fill_(step)
            state["step"] = step
            pending = manager.save_async(state)
            parameter.grad = torch.ones(1000)
            optimizer.step()
            state["x"].fill_(-1)  # the copy must have ended
            pending.result(60)
            os.write(descriptor, f"{step}\n".encode())


def noted(log: Path) -> set[int]:
    return {int(line) for line in log.read_text().split()} if log.exists() else set()


def check(root: Path, known: set[int], numbers: int) -> int:
    """Check that all committed steps are there and whole, that no step is torn, and that saves go
    on.

    Return the newest step.
    """
    backend = open_backend(str(root))
    with Workers("check", 2) as workers:
        refs = committed(backend)
        for ref in refs:
            verified = verify_step(backend, ref, workers=workers)
            assert verified.intact, (ref, verified.faults)
    steps = sorted(ref.step for ref in refs)
    assert len(steps) == len(set(steps)), steps
    assert known <= set(steps), (known, steps)
    with CheckpointManager(root, chunk_size=1 << 20) as manager:
        target = content(-1, numbers)
        for step in [*steps, None]:
            report = manager.restore(target, step, rollback=False)
            if report is None:
                assert step is None
                assert not steps
                continue
            assert report.skipped == ()
            # if all parts existed when the saver died, the step is a checkpoint from now on
            steps = sorted({*steps, *(finished for finished, _ in report.finished)})
            assert report.step == (steps[-1] if step is None else step)
            expected = content(report.step, numbers)
            assert torch.equal(target["x"], expected["x"]), report
            assert torch.equal(target["small"], expected["small"])
            assert target["step"] == report.step
        newest = steps[-1] + 1 if steps else 0
        manager.save(content(newest, numbers), newest, timeout=60)
        assert manager.latest_step() == newest
    return newest


def orphans(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"ckpt-slot-{pid}-")]


def at_random(root: Path, times: int, numbers: int, seed: int) -> None:
    chance = random.Random(seed)
    log = root.with_suffix(".log")
    newest, deaths, during = -1, 0, 0
    for _ in range(times):
        first = newest + 1
        child = fork(partial(saver, root, log, numbers, first, 10**6))
        time.sleep(chance.uniform(0.0, 0.25 + numbers * 4e-8))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the saver ended by itself"
        before = len(list(root.glob("step-*"))) if root.exists() else 0
        deaths += 1
        newest = check(root, noted(log), numbers)
        during += before > len(committed(open_backend(str(root)))) - 1
        assert not orphans(child)
        for folder in root.glob("step-*"):  # to free room on the disk
            if int(folder.name[5:14]) < newest:
                shutil.rmtree(folder)
        log.write_text(f"{newest}\n")
    print(f"{deaths} deaths, {during} of them in the midst of a save, up to step {newest}")


def at_steps(root: Path, numbers: int, stride: int) -> None:
    root.mkdir(parents=True)
    base = root / "base"
    log = root / "base.log"
    child = fork(lambda: saver(base, log, numbers, 0, 2))
    assert os.waitpid(child, 0)[1] == 0
    calls = {"before": 0, "after": 0}
    for when in calls:
        for nth in range(1, 1000, stride):
            place, its_log = root / f"{when}{nth}", root / f"{when}{nth}.log"
            shutil.copytree(base, place)
            shutil.copy(log, its_log)

            def doomed(
                place: Path = place, its_log: Path = its_log, when: str = when, nth: int = nth
            ) -> None:
                lock, count = threading.Lock(), 0

                def count_and_die(moment: str) -> None:
                    nonlocal count
                    with lock:
                        count += moment == when
                        if moment == when and count == nth:
                            die()

                wrap_stores(pytest.MonkeyPatch(), lambda url, store: Killer(store, count_and_die))
                saver(place, its_log, numbers, 2, 3)

            code = os.waitstatus_to_exitcode(os.waitpid(fork(doomed), 0)[1])
            assert code in (0, -signal.SIGKILL), code
            check(place, noted(its_log), numbers)
            shutil.rmtree(place)
            if code == 0:
                break
            calls[when] = nth
        else:
            raise AssertionError("the save never ended")
    assert calls["before"] >= calls["after"] > 10, calls  # a call that raises has no after
    print(f"died before calls up to {calls['before']} and after calls up to {calls['after']}")


def warm_up() -> None:
    """Import what torch imports late, before the first fork.

    torch imports its compiler with the first optimizer. A saver that does so would be killed before
    it has saved anything.
    """
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)


def main() -> None:
    warm_up()
    mode, root, *numbers = sys.argv[1:]
    if mode == "random":
        at_random(Path(root), *map(int, numbers))
    else:
        at_steps(Path(root), *map(int, numbers))
    print("ALL WELL")


if __name__ == "__main__":
    main()
