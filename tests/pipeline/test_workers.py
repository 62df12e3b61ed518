from __future__ import annotations

import os
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from functools import partial

import pytest

from ckpt.errors import ThreadLimit
from ckpt.pipeline.workers import SingleCall, Workers


def os_threads() -> set[str]:
    names = set()
    for task in os.listdir("/proc/self/task"):
        # A thread may end meanwhile.
        with suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            names.add(file.read().strip())
    return names


def test_results_come_in_the_order_of_the_work(workers):
    def late(number: int) -> int:
        time.sleep(0.01 * (5 - number))
        return number

    assert workers.run_all(partial(late, number) for number in range(6)) == list(range(6))


def test_no_work_is_done_at_once(workers):
    assert workers.run_all([]) == []


def test_one_thread_does_what_is_submitted_in_turn():
    done: list[int] = []
    with Workers("turn", 1) as group:
        futures = [group.submit(done.append, number) for number in range(20)]
        assert [future.result() for future in futures] == [None] * 20
    assert done == list(range(20))


def test_work_runs_at_once_on_as_many_threads_as_told():
    meeting = threading.Barrier(3, timeout=10)
    with Workers("meet", 3) as group:
        assert sorted(group.run_all([meeting.wait] * 3)) == [0, 1, 2]


def test_an_error_is_raised_as_it_is_and_what_has_not_begun_is_cancelled():
    begun: list[int] = []
    error = ValueError("this one")

    def work(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise error
        time.sleep(0.001)

    with Workers("fail", 1) as group:
        with pytest.raises(ValueError, match="this one") as caught:
            group.run_all(partial(work, number) for number in range(1000))
        assert caught.value is error
        assert begun[:3] == [0, 1, 2]
        assert len(begun) < 1000
        assert group.run_all([lambda: "goes on"]) == ["goes on"]


def test_what_has_begun_is_waited_for_before_the_error_is_raised():
    begun, ended = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        time.sleep(0.1)
        ended.set()

    def fails() -> None:
        begun.wait(10)
        raise ValueError

    with Workers("wait", 2) as group:
        with pytest.raises(ValueError):
            group.run_all([slow, fails])
        assert ended.is_set()


def test_of_two_errors_the_first_in_order_is_raised():
    meeting = threading.Barrier(2, timeout=10)

    def fails(error: Exception) -> None:
        meeting.wait()
        raise error

    with Workers("two", 2) as group, pytest.raises(ValueError, match="one"):
        group.run_all([partial(fails, ValueError("one")), partial(fails, ValueError("two"))])


def test_threads_have_names_for_people_and_for_the_system():
    with Workers("napkin", 1) as group:
        assert group.submit(threading.current_thread).result().name.startswith("ckpt-napkin")
        assert "ckpt-napkin-0" in os_threads()
    while "ckpt-napkin-0" in os_threads():  # the system's thread ends a little after Python's
        pass


def test_a_long_name_is_cut_not_refused():
    with Workers("a-name-of-many-letters", 1) as group:
        group.submit(int).result()
        assert "ckpt-a-name-of-" in os_threads()


def test_threads_give_way_to_training_and_the_caller_does_not():
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    mine = niceness()
    with Workers("nice", 1, nice=5) as group:
        assert group.submit(niceness).result() == mine + 5
    assert niceness() == mine


def test_threads_stay_on_their_cores():
    core = min(os.sched_getaffinity(0))
    with Workers("core", 1, cpus=[core]) as group:
        assert group.submit(os.sched_getaffinity, 0).result() == {core}


@pytest.mark.parametrize("options", [{"nice": -1000}, {"cpus": [100_000]}])
def test_a_wish_that_is_not_granted_is_no_reason_to_fail(options):
    with Workers("wish", 1, **options) as group:
        assert group.run_all([lambda: 1]) == [1]


def test_close_finishes_what_was_submitted():
    done: list[int] = []
    group = Workers("end", 1)
    for number in range(5):
        group.submit(lambda n: (time.sleep(0.01), done.append(n)), number)
    group.close()
    assert done == list(range(5))


def test_close_with_cancel_drops_what_has_not_begun():
    done: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    group = Workers("drop", 1)
    group.submit(lambda: (begun.set(), go_on.wait(10), done.append(0)))
    later = group.submit(done.append, 1)
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    group.close(cancel=True)
    assert (done, later.cancelled()) == ([0], True)


class NoMore:
    """A Thread.start that works this many times, and then gets an error of the system."""

    def __init__(self, monkeypatch, times: int) -> None:
        self._start, self._left = threading.Thread.start, times
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self(thread))

    def __call__(self, thread: threading.Thread) -> None:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("can't start new thread")
        self._start(thread)


def test_work_for_which_no_thread_can_be_started_is_refused_and_never_runs(monkeypatch):
    done: list[int] = []
    group = Workers("none", 2)
    with monkeypatch.context() as patch:
        NoMore(patch, 0)
        with pytest.raises(ThreadLimit, match="ulimit -u"):
            group.submit(done.append, 1)
        with pytest.raises(ThreadLimit):
            group.run_all([partial(done.append, 2)])
    group.submit(done.append, 3).result(10)
    group.close()
    assert done == [3]


def test_where_the_system_starts_no_more_threads_those_that_there_are_do_the_work(monkeypatch):
    NoMore(monkeypatch, 1)
    with Workers("few", 4) as group:
        assert group.run_all(partial(int, number) for number in range(20)) == list(range(20))
        assert list(group.stream(partial(int, number) for number in range(20))) == list(range(20))


def test_a_thread_that_was_started_ahead_takes_the_first_work():
    with Workers("ahead", 2) as group:
        group.start()
        group.start()
        group.submit(int).result()
        assert sum(thread.name.startswith("ckpt-ahead") for thread in threading.enumerate()) == 1


@pytest.mark.parametrize("ahead", [3, 2])
def test_a_thread_that_could_not_be_started_ahead_is_started_with_the_work(monkeypatch, ahead):
    meeting = threading.Barrier(2, timeout=10)
    with Workers("later", 2) as group:
        with monkeypatch.context() as patch:
            NoMore(patch, 1)
            group.start(ahead)
        assert sorted(group.run_all([meeting.wait] * 2)) == [0, 1]


def test_a_thread_that_could_not_be_started_for_work_is_started_with_later_work(monkeypatch):
    meeting = threading.Barrier(2, timeout=10)
    with Workers("later", 2) as group:
        with monkeypatch.context() as patch:
            NoMore(patch, 1)
            group.run_all([int] * 5)
        assert sorted(group.run_all([meeting.wait] * 2)) == [0, 1]


def test_without_any_thread_at_the_end_of_the_script_work_is_done_at_once(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Workers("over", 2) as group:
        group.start(2)
        assert group.submit(int).done()


def test_threads_of_a_group_that_nobody_closes_end_with_it():
    group = Workers("lost", 1)
    group.submit(int).result()
    [thread] = [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-lost")]
    del group
    thread.join(30)
    assert not thread.is_alive()


def test_whoever_waits_for_work_that_was_dropped_goes_on():
    begun, go_on = threading.Event(), threading.Event()
    group = Workers("drop", 1)
    group.submit(lambda: (begun.set(), go_on.wait(10)))
    later = group.submit(int)
    begun.wait(10)
    closing = threading.Thread(target=lambda: group.close(cancel=True))
    closing.start()
    assert wait([later], 10).done == {later}
    go_on.set()
    closing.join(10)


def test_a_call_that_was_revoked_never_begins_and_one_that_has_begun_is_not_revoked():
    calls: list[int] = []
    one, two = SingleCall(partial(calls.append, 1)), SingleCall(partial(calls.append, 2))
    assert one.revoke()
    one()
    two()
    two()
    assert not two.revoke()
    assert calls == [2]
