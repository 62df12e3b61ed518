"""The identity of a process."""

from __future__ import annotations

import os
import subprocess
import sys

from ckpt.processes import Process


def test_a_process_lives_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = Process.of(child.pid)
        assert process.lives
        assert process.parent == os.getpid()
        assert process.start_time >= Process.of(os.getpid()).start_time
        child.communicate(b"\n")
        assert not process.lives
        assert process.parent == -1


def test_a_process_that_waits_for_its_parent_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = Process.of(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.lives


def test_another_process_with_the_same_number_is_not_the_same() -> None:
    me = Process.of(os.getpid())
    assert me.lives
    assert not Process(me.pid, me.start_time - 1).lives


def test_a_number_without_a_process_has_no_start() -> None:
    assert Process.of(2**31 - 1) == Process(2**31 - 1, 0)
    assert not Process(2**31 - 1, 0).lives
