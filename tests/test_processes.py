"""Whatever a test starts must not outlive it, least of all when it fails."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.processes import ended, run

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""
"""As torchrun: its worker has a session of its own."""


def test_a_test_that_fails_leaves_neither_the_process_nor_what_it_has_started() -> None:
    pipe = subprocess.PIPE
    with (
        pytest.raises(ZeroDivisionError),
        ended(subprocess.Popen([sys.executable, "-c", FAMILY], stdout=pipe, text=True)) as process,
    ):
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        assert psutil.pid_exists(worker)
        raise ZeroDivisionError
    assert process.returncode == -9
    assert process.stdout.closed
    assert not psutil.pid_exists(worker)


def test_what_takes_too_long_is_told_with_what_it_has_said_and_ended() -> None:
    with pytest.raises(pytest.fail.Exception, match="not at its end after 1 s") as told:
        run([sys.executable, "-c", FAMILY], timeout=1)
    assert not psutil.pid_exists(int(str(told.value).split()[-1]))
