"""No process that a test starts outlives the test, above all when it fails."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest

from tests.kit.worlds import run_code
from tests.processes import ended, run

FAMILY = ["sh", "-c", "setsid sleep 60 & echo $!; wait"]
"""As torchrun: its worker has a session of its own."""


ORPHANS = ["sh", "-c", "setsid sleep 60 & echo $!; kill -9 $$"]
"""As torchrun when it is killed, or crashes."""


@pytest.mark.parametrize("family", [FAMILY, ORPHANS])
def test_a_test_that_fails_leaves_neither_the_process_nor_what_it_has_started(
    family: list[str],
) -> None:
    process = subprocess.Popen(family, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None

    def fails() -> None:
        with ended(process):
            workers.append(int(process.stdout.readline()))  # type: ignore[union-attr]
            if family is ORPHANS:
                process.wait(10)
            assert psutil.pid_exists(workers[0])
            raise ZeroDivisionError

    workers: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert process.returncode == -9
    assert process.stdout.closed
    assert not psutil.pid_exists(workers[0])


@pytest.mark.parametrize("family", [FAMILY, ORPHANS])
def test_what_takes_too_long_is_told_with_what_it_has_said_and_ended(family: list[str]) -> None:
    """The test also covers processes that only hold the output open of the process that started
    them.
    """
    with pytest.raises(pytest.fail.Exception, match="not at its end after 1 s") as reported:
        run(family, timeout=1)
    assert not psutil.pid_exists(int(str(reported.value).split()[-1]))


def test_a_test_that_is_interrupted_leaves_no_answer_to_the_next_one() -> None:
    def interrupt(*_: object) -> None:
        raise ZeroDivisionError

    sleeper = "import os, sys, time; os.kill(int(sys.argv[1]), 10); time.sleep(60)"
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(ZeroDivisionError):
            run_code(sleeper, os.getpid())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert run_code("print('whole')") == "whole\n"
