"""FOLDER [CASE ...]: send signals to trainers, each of which is a fork of this process.

The script prints, as JSON, how each has ended and what it has left.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.coordination.single import SingleCoordinator
from ckpt.errors import ConfigError, OutOfSpace
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Delay, FaultyBackend, Raise, Rule
from tests.kit.stores import wrap_stores

CASES: dict[str, Callable[[Path], None]] = {}


def case(work: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[work.__name__] = work
    return work


SENT: list[int] = []


def kill(signum: int = signal.SIGTERM) -> None:
    SENT.append(signum)
    os.kill(os.getpid(), signum)


def faults(*rules: Rule) -> None:
    wrap_stores(pytest.MonkeyPatch(), lambda url, store: FaultyBackend(store, rules))


def train(
    root: Path | Tier,
    *signals: int,
    at: dict[int, Callable[[], object]],
    steps: int = 8,
    every: int = 3,
    settings: dict[str, Any] = {},  # noqa: B006 - read only
    **options: Any,
) -> SimpleNamespace:
    """Save each third step and the last. ``at`` is what happens within a step."""
    state: dict[str, Any] = {"x": torch.zeros(50_000), "step": 0}
    with CheckpointManager(root, **settings) as manager:
        manager.restore(state)
        stop = manager.on_signals(*signals, **options)
        for step in range(state["step"] + 1, steps + 1):
            at.get(step, int)()
            # otherwise a busy machine may be a step late
            while SENT and stop._last_step._promise is None:
                time.sleep(0.001)
            state["x"].fill_(step)
            state["step"] = step
            if step % every == 0:
                manager.save_async(state, step)
            if stop.requested(step):
                manager.save_async(state, step)
                print(f"stops after {step}")
                break
    print("returned", flush=True)  # a signal may end the process next
    return SimpleNamespace(signal=stop.signal, step=state["step"])


@case
def terminated(root: Path) -> None:
    train(root, at={4: kill})


@case
def user_signal(root: Path) -> None:
    train(root, at={4: lambda: kill(signal.SIGUSR1)})


@case
def nothing_happens(root: Path) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)]
    threads = threading.active_count()
    train(root, at={})
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads, threading.enumerate()
    kill()


@case
def at_a_step_that_is_saved_anyway(root: Path) -> None:
    train(root, at={6: kill})


@case
def the_user_decides_how_it_ends(root: Path) -> None:
    done = train(root, at={4: kill}, reraise=False)
    sys.exit(0 if done.signal == signal.SIGTERM and done.step == 4 else 1)


@case
def an_earlier_handler_has_the_last_word(root: Path) -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(70 + signum))
    train(root, at={4: kill})


@case
def what_was_ignored_is_ignored(root: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    train(root, at={4: lambda: kill(signal.SIGUSR1)})


@case
def many_signals(root: Path) -> None:
    faults(Rule(verb="put", key="manifest", fault=Delay(0.3)))
    # wait until the signals are handled, on a slow machine too
    later = threading.Timer(0.25, kill)
    train(root, at={3: later.start, 4: lambda: [kill() for _ in range(200)]})


@case
def interrupted_once(root: Path) -> None:
    train(root, signal.SIGINT, at={4: lambda: kill(signal.SIGINT)}, reraise=False)


@case
def interrupted_twice(root: Path) -> None:
    # a shell starts background processes with this signal ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def twice() -> None:
        kill(signal.SIGINT)
        time.sleep(0.3)  # two signals that are pending at once are one
        try:
            kill(signal.SIGINT)
        except KeyboardInterrupt:
            sys.exit(9)

    train(root, signal.SIGINT, at={4: twice})


@case
def the_grace_time_runs_out_while_the_last_save_streams(root: Path) -> None:
    faults(Rule(verb="put", key="step-0*4.*manifest", fault=Delay(30)))
    train(root, at={4: kill}, grace_seconds=0.7)


@case
def the_training_thread_is_stuck_where_python_hears_nothing(root: Path) -> None:
    libc = ctypes.CDLL(None)
    # a collective does not return at the signal, and sleep() itself would
    mutex = ctypes.create_string_buffer(64)

    def stick() -> None:
        threading.Timer(0.2, kill).start()
        for _ in range(2):
            libc.pthread_mutex_lock(mutex)

    train(root, at={4: stick}, grace_seconds=0.7)


@case
def the_store_of_the_job_does_not_answer(root: Path) -> None:
    post = SingleCoordinator.post

    def hang(self: SingleCoordinator, subject: str, message: bytes) -> None:
        if subject == "stop/promise":
            time.sleep(15)
        post(self, subject, message)

    SingleCoordinator.post = hang  # type: ignore[method-assign]
    train(root, at={4: kill}, grace_seconds=0.7)


@case
def signals_to_a_fork_are_its_own(root: Path) -> None:
    def fork() -> None:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

    train(root, at={4: fork})


@case
def an_error_ends_it_as_ever(root: Path) -> None:
    def fail() -> None:
        kill()
        raise SystemExit(5)

    train(root, at={4: fail})


@case
def tiers_that_would_not_take_the_step_take_the_last(root: Path) -> None:
    train(Tier(str(root), every=100), at={4: kill})


@case
def a_save_that_would_be_skipped_waits(root: Path) -> None:
    faults(Rule(verb="put", key="step-0*3.*manifest", fault=Delay(0.3)))
    train(root, at={4: kill}, settings={"on_busy": "skip", "slots": 1})


@case
def an_earlier_error_does_not_come_before_it(root: Path) -> None:
    faults(Rule(verb="put", key="step-0*3.*manifest", fault=Raise(OutOfSpace)))

    def later() -> None:
        time.sleep(0.3)
        kill()

    train(root, at={4: later})


@case
def the_manager_is_not_closed(root: Path) -> None:
    def forgotten() -> None:
        manager = CheckpointManager(root)
        manager.on_signals()
        manager.save_async({"x": torch.ones(10)}, 4)

    forgotten()


@case
def requested(root: Path) -> None:
    managers: list[CheckpointManager] = []
    init = CheckpointManager.on_signals

    def on_signals(self: CheckpointManager, *signals: int, **options: Any) -> Any:
        managers.append(self)
        return init(self, *signals, **options)

    CheckpointManager.on_signals = on_signals  # type: ignore[method-assign]

    def ask() -> None:
        SENT.append(0)
        managers[0].request_stop(deadline=15)
        managers[0].request_stop()

    assert train(root, at={4: ask}).signal is None


@case
def requested_and_then_signalled(root: Path) -> None:
    with CheckpointManager(root) as manager:
        stop = manager.on_signals()
        assert manager.on_stop_request() is stop
        manager.request_stop()
        while stop._last_step._promise is None:
            time.sleep(0.001)
        assert stop.requested(4)
        manager.save_async({"x": torch.zeros(3)}, 4)
        os.kill(os.getpid(), signal.SIGUSR1)
    print("returned")


@case
def requested_and_not_in_time(root: Path) -> None:
    """Request a stop in a thread that is not the main one, where no signal handler can be set."""

    def work() -> None:
        with CheckpointManager(root) as manager:
            stop = manager.on_stop_request()
            manager.save({"x": torch.zeros(3)}, 3)
            manager.request_stop(deadline=0.7)
            assert stop.signal is None
            time.sleep(15)  # a step that does not end
            print("returned")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@case
def wrong_calls(root: Path) -> None:
    def refused(message: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ConfigError as error:
            assert message in str(error), error  # noqa: PT017 - no pytest here
        else:
            raise AssertionError(message)

    with CheckpointManager(root) as manager:
        refused("above 0", lambda: manager.on_signals(grace_seconds=0))
        refused("not a signal", lambda: manager.on_signals(signal.SIGKILL))
        refused("not a signal", lambda: manager.on_signals(4711))
        refused("not a signal", lambda: manager.on_signals(signal.SIGRTMIN + 1))  # has no name
        thread = threading.Thread(target=lambda: refused("main thread", manager.on_signals))
        thread.start()
        thread.join()
        manager.on_signals()
        refused("already", manager.on_signals)
    manager = CheckpointManager(root)
    manager.on_signals()
    manager.close()


def live(work: Callable[[Path], None], root: Path) -> None:
    """Run the case, and exit at once: to finalize torch takes a second and shows nothing.

    The exception is the case that omits what the interpreter must end.
    """
    code: Any = 0
    try:
        work(root)
    except SystemExit as ended:
        code = ended.code
    if work is CASES["the_manager_is_not_closed"]:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    folder, *chosen = sys.argv[1:]
    reported: dict[str, Any] = {}
    for name in chosen or CASES:
        root, output = Path(folder) / name, Path(folder) / f"{name}.txt"
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # kills a process that hangs
            with open(output, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            live(CASES[name], root)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        steps = [ref.step for ref in committed(open_backend(str(root)))] if root.exists() else []
        reported[name] = [
            status,
            sorted(steps),
            round(time.monotonic() - began, 2),
            output.read_text(),
        ]
    print(json.dumps(reported))


if __name__ == "__main__":
    main()
