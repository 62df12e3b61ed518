"""Whatever a test starts must not outlive it, least of all when it fails."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from tests.processes import ended, run

FAMILY = ["sh", "-c", "setsid sleep 60 & echo $!; wait"]
"""As torchrun: its worker has a session of its own."""


def test_a_test_that_fails_leaves_neither_the_process_nor_what_it_has_started() -> None:
    process = subprocess.Popen(FAMILY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None

    def fails() -> None:
        with ended(process):
            workers.append(int(process.stdout.readline()))  # type: ignore[union-attr]
            assert psutil.pid_exists(workers[0])
            raise ZeroDivisionError

    workers: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert process.returncode == -9
    assert process.stdout.closed
    assert not psutil.pid_exists(workers[0])


def test_what_takes_too_long_is_told_with_what_it_has_said_and_ended() -> None:
    with pytest.raises(pytest.fail.Exception, match="not at its end after 2 s") as told:
        run(FAMILY, timeout=2)
    assert not psutil.pid_exists(int(str(told.value).split()[-1]))
