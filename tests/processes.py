"""Processes that a test starts, and those that they start, end with the test, even if it fails."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

_MARK = "CKPT_TESTS_OF"
"""In the environment of all that tests start: whose parent has died is known by it."""
os.environ[_MARK] = str(os.getpid())


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill the process at the end of the block, and close its pipes.

    All its descendants are killed too: torchrun's workers have sessions of their own and outlive a
    killed agent.
    """
    with process:
        try:
            yield process
        finally:
            kill_all(process)


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Send SIGKILL to a process and all its descendants.

    Processes that tests have started and that have lost their parent count as descendants.
    """
    tree: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    tree += _orphans()
    for each in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(tree, timeout=10)


def _orphans() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marked = each.environ().get(_MARK) == str(os.getpid())
            if marked and os.getpid() not in [parent.pid for parent in each.parents()]:
                found.append(each)
    return found


def run(
    command: Sequence[object], *, timeout: float, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command as ``subprocess.run`` does, with standard error in the output.

    If it takes longer, fail with its output, and leave nothing running.
    """
    words = [str(word) for word in command]
    heard = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | how
    with ended(subprocess.Popen(words, **heard)) as process:
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_all(process)
            said, _ = process.communicate(timeout=10)
            pytest.fail(
                f"not at its end after {timeout:.0f} s: {' '.join(words)[:200]}\n{said[-8000:]}",
                pytrace=False,
            )
    return subprocess.CompletedProcess(words, process.returncode, said)


def fork(work: Callable[[], object]) -> int:
    """Return the identity of a child that does ``work``, and exits with 1 if it raises."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
