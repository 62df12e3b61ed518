"""An exception ends the process.

``close`` takes at most ``exit_seconds``, what was durable stays, and the other ranks learn of it.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt.storage.tiers
from ckpt import CheckpointManager, PendingSave
from ckpt.coordination.abort_reason import Abort, rebuild
from ckpt.coordination.commit_state_machine import Bounds, Durable, Failure
from ckpt.coordination.committer import Committer, SharedStore
from ckpt.coordination.exchanges import encode_json
from ckpt.coordination.leaving import DepartingCoordinator, first_departure
from ckpt.elastic import ending_error
from ckpt.errors import AccessDenied, CommitError, ConfigError
from ckpt.model.keys import StepRef
from ckpt.model.manifest import FragmentRef
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Delay, FaultyBackend, Raise, Rule
from tests.coordination.world import World
from tests.distributed.survivors import reported, run_world
from tests.kit.interrupting import interrupted_call
from tests.kit.worlds import ROOT, run_code

STUCK = """
import sys, signal, torch
import ckpt.storage.tiers
from ckpt import CheckpointManager
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Delay, FaultyBackend, Rule
rules = [Rule(verb="put", key="step-0*2.*manifest", fault=Delay(3600))]
ckpt.storage.tiers.open_backend = lambda url, options: FaultyBackend(open_backend(url, options), rules)
import logging; logging.basicConfig()
def job(manager):
    manager.save({"x": torch.ones(3)}, 1)
    manager.save_async({"x": torch.ones(3)}, 2)
    HOW
"""  # noqa: E501
WAYS = {
    "within_with": (
        "raise ValueError('boom')",
        "with CheckpointManager(sys.argv[1], exit_seconds=0.3) as manager: job(manager)",
        1,
    ),
    "unhandled": (
        "raise ValueError('boom')",
        "manager = CheckpointManager(sys.argv[1], exit_seconds=0.3); job(manager)",
        1,
    ),
    "in_finally": (
        "raise ValueError('boom')",
        "manager = CheckpointManager(sys.argv[1], exit_seconds=0.3)\ntry: job(manager)\nfinally: "
        "manager.close()",
        1,
    ),
    "a_signal_to_a_handler_that_exits": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        "signal.raise_signal(signal.SIGTERM)",
        "with CheckpointManager(sys.argv[1], exit_seconds=0.3) as manager: job(manager)",
        143,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_an_exception_ends_does_not_wait_for_a_store_that_hangs(
    way: str, tmp_path: Path
) -> None:
    """The store would take an hour. The process ends nevertheless, and says what it has
    given up.
    """
    how, call, code = WAYS[way]
    said = run_code(
        STUCK.replace("HOW", how) + call, tmp_path / "run", status=code, timeout=100, finalize=True
    )
    assert f"this process ends: {tmp_path / 'run'} lacks step 2 (not finished within 0.3 s)" in said
    assert said.count("lacks step 2") == 1
    assert CheckpointManager(str(tmp_path / "run")).steps() == [1]


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    rules = [Rule(verb="put", key="manifest", fault=Delay(seconds))]
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: FaultyBackend(open_backend(url, options), rules),
    )


def save_and_raise(
    root: Path, error: BaseException, handles: list[PendingSave] | None = None, **settings: Any
) -> None:
    with CheckpointManager(str(root), **settings) as manager:
        pending = manager.save_async({"x": torch.ones(3)}, 1)
        if handles is not None:
            handles.append(pending)
        raise error


def test_what_can_be_finished_in_that_time_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, 0.3)
    with pytest.raises(ValueError):
        save_and_raise(tmp_path, ValueError())
    assert CheckpointManager(str(tmp_path)).steps() == [1]


@pytest.mark.parametrize("how", ["exit_0", "handled_before", "the_data_ended"])
def test_what_is_no_failure_has_all_the_time_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    slow(monkeypatch, 0.5)
    if how == "exit_0":
        with pytest.raises(SystemExit):
            save_and_raise(tmp_path, SystemExit(0), exit_seconds=0.0)
    elif how == "the_data_ended":
        manager = CheckpointManager(str(tmp_path), exit_seconds=0.0)
        manager.save_async({"x": torch.ones(3)}, 1)
        try:
            next(iter(()))
        except StopIteration:
            manager.close()
    else:
        try:
            raise ValueError
        except ValueError:
            manager = CheckpointManager(str(tmp_path), exit_seconds=0.0)
            manager.save_async({"x": torch.ones(3)}, 1)
            manager.close()
    assert CheckpointManager(str(tmp_path)).steps() == [1]


def slow_save(root: Path) -> CheckpointManager:
    manager = CheckpointManager(str(root), exit_seconds=0.0)
    manager.save_async({"x": torch.ones(3)}, 1)
    return manager


def fail() -> None:
    raise ValueError("boom")


def in_except(root: Path) -> None:
    manager = slow_save(root)
    try:
        fail()
    except ValueError:
        manager.close()


def in_a_function_of_except(root: Path) -> None:
    manager = slow_save(root)

    def clean_up() -> None:
        manager.close()

    try:
        fail()
    except ValueError as error:
        print(error)
        clean_up()


def in_except_of_an_error_from_another(root: Path) -> None:
    manager = slow_save(root)
    try:
        try:
            fail()
        except ValueError as error:
            raise KeyError from error
    except KeyError:
        manager.close()


def in_finally(root: Path) -> None:
    manager = slow_save(root)
    try:
        fail()
    finally:
        manager.close()


def in_except_that_raises(root: Path) -> None:
    manager = slow_save(root)
    try:
        fail()
    except ValueError:
        manager.close()
        raise


def in_except_that_exits(root: Path) -> None:
    manager = slow_save(root)
    try:
        fail()
    except ValueError:
        manager.close()
        sys.exit(1)


def in_except_below_finally(root: Path) -> None:
    manager = slow_save(root)

    def clean_up() -> None:
        try:
            raise KeyError
        except KeyError:
            manager.close()

    try:
        fail()
    finally:
        clean_up()


def in_finally_of_no_error_in_except(root: Path) -> None:
    def save_again() -> None:
        manager = slow_save(root)
        try:
            print(manager)
        finally:
            manager.close()

    try:
        fail()
    except ValueError:
        save_again()


def in_code_of_a_loader_that_fails(root: Path) -> None:
    class Loader:
        def get_source(self, name: str) -> str:
            raise RuntimeError(name)

    code = "def f(manager):\n    try: manager.x()\n    except AttributeError: manager.close()\n"
    names: dict[str, Any] = {"__loader__": Loader(), "__name__": "lost"}
    exec(compile(code, "lost.py", "exec"), names)
    manager = slow_save(root)
    try:
        fail()
    except ValueError:
        with suppress(RuntimeError):  # pytest asks that loader too if it sees this error
            names["f"](manager)


@pytest.mark.parametrize(
    "way",
    [
        in_except,
        in_a_function_of_except,
        in_except_of_an_error_from_another,
        in_finally_of_no_error_in_except,
        in_code_of_a_loader_that_fails,
    ],
)
def test_an_error_that_is_handled_takes_no_time_from_close(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: Callable[[Path], None],
) -> None:
    slow(monkeypatch, 0.5)
    way(tmp_path)
    assert CheckpointManager(str(tmp_path)).steps() == [1]
    assert "this process ends" not in caplog.text


ODD = """
def close(): return ending_error(but=None)
from ckpt.elastic.ending_error import ending_error
pattern = "\\d"
try:
    raise ValueError
except ValueError:
    assert close() is None
"""


def test_a_module_whose_first_line_is_a_function_is_read_without_warnings(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD.strip())
    # the function that asks is called by the module itself
    done = subprocess.run(
        [sys.executable, "-W", "always", str(tmp_path / "odd.py")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "<unknown>" not in done.stderr


def test_a_method_that_is_named_like_an_exit_ends_no_process() -> None:
    process = SimpleNamespace(kill=int)
    try:
        fail()
    except ValueError as error:
        process.kill()
        SimpleNamespace(kill=int).kill()
        found = ending_error.is_handled(error, sys._getframe())
    assert found


def test_a_clause_that_may_exit_does_not_handle_its_error() -> None:
    found: list[bool] = []
    try:
        fail()
    except ValueError as error:
        found += [ending_error.is_handled(error, sys._getframe())]
        if not found:
            exit(1)
    try:
        fail()
    except ValueError as error:
        found += [ending_error.is_handled(error, sys._getframe())]
        if not found:
            os.kill(os.getpid(), signal.SIGKILL)
    assert found == [False, False]


def test_each_file_on_the_stack_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = ast.parse

    def count(source: str, *args: Any, **options: Any) -> object:
        parsed.append(source)
        return parse(source, *args, **options)

    def deep(left: int) -> BaseException | None:
        try:
            return deep(left - 1) if left else ask()
        except KeyError:
            return None

    def ask() -> BaseException | None:
        return ending_error.ending_error(but=None)

    monkeypatch.setattr(ast, "parse", count)
    try:
        fail()
    except ValueError:
        found = deep(20)
    monkeypatch.undo()  # pytest parses the files of an assertion that fails
    assert found is None
    assert len(parsed) == 1


def test_close_while_an_error_is_handled_raises_what_no_call_has_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [Rule(verb="put", key="manifest", fault=Raise(AccessDenied))]
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: FaultyBackend(open_backend(url, options), rules),
    )
    with pytest.raises(AccessDenied):
        in_except(tmp_path)


def at_the_end_of_a_with_block_in_except(root: Path) -> None:
    manager = slow_save(root)
    try:
        raise KeyError
    except KeyError:
        with closing(manager):
            fail()


@pytest.mark.parametrize(
    "way",
    [
        in_finally,
        in_except_that_raises,
        in_except_that_exits,
        in_except_below_finally,
        at_the_end_of_a_with_block_in_except,
    ],
)
def test_an_error_that_goes_on_ends_close_soon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: Callable[[Path], None],
) -> None:
    slow(monkeypatch, 5.0)
    with pytest.raises((ValueError, SystemExit)):
        way(tmp_path)
    assert "this process ends" in caplog.text


def test_a_manager_that_was_built_while_an_error_was_handled_raises_a_signal_again(
    tmp_path: Path,
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda signum, _: heard.append(signum))
    try:
        try:
            raise ValueError
        except ValueError:
            manager = CheckpointManager(str(tmp_path))
            manager.on_signals(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR2)
            manager.close()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]


def test_an_error_in_closing_leaves_no_handler_of_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise CommitError("it failed")

    before = signal.getsignal(signal.SIGUSR2)
    manager = CheckpointManager(str(tmp_path))
    stop = manager.on_signals(signal.SIGUSR2)
    finish = manager._closer._finish
    monkeypatch.setattr(manager._closer, "_finish", fail)
    try:
        with pytest.raises(CommitError, match="it failed"):
            manager.close()
        assert signal.getsignal(signal.SIGUSR2) is before
    finally:
        stop.close()
        finish("")


def test_a_close_that_ctrl_c_interrupts_is_resumed_by_the_next_one(tmp_path: Path) -> None:
    """Wherever it is interrupted. Nothing of the manager is left then."""
    turn, interrupted = 0, True
    while interrupted:
        turn, interrupted = turn + 1, False
        before = set(threading.enumerate())
        manager = CheckpointManager(str(tmp_path / str(turn)))
        pending = manager.save_async({"x": torch.ones(3)}, 1)
        paths = [slot.path or "" for slot in manager._saver.slots.slots]
        assert any(map(os.path.exists, paths))
        with interrupted_call(
            ("manager.py", "closing.py", "manager_calls.py", "workers.py", "pending.py"), turn
        ):
            try:
                manager.close()
            except KeyboardInterrupt:
                interrupted = True
        manager.close()
        assert pending.done()
        assert pending.exception() is None
        assert not any(map(os.path.exists, paths))
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert not [name for name in names if name.startswith(("ckpt-save", "ckpt-slots"))]
    assert turn > 10


def test_the_end_of_the_script_resumes_a_close_that_ctrl_c_has_interrupted(tmp_path: Path) -> None:
    script = """
import sys, threading, torch
import ckpt.closing
from ckpt import CheckpointManager
gate, waits, wait = threading.Event(), [], ckpt.closing.wait_and_log
def waiting(*args):
    waits.append(args)
    if len(waits) == 1:
        raise KeyboardInterrupt
    gate.set()
    return wait(*args)
ckpt.closing.wait_and_log = waiting
manager = CheckpointManager(sys.argv[1], observers=[lambda _: gate.wait()])
manager.save_async({"x": torch.ones(3)}, 1)
try:
    manager.close()
except KeyboardInterrupt:
    print(*[slot.path for slot in manager._saver.slots.slots])
"""
    said = run_code(script, tmp_path / "run", timeout=100, finalize=True)
    slots = [word for word in said.split() if word.startswith("/dev/shm/")]
    assert slots
    assert not any(map(os.path.exists, slots))
    assert CheckpointManager(str(tmp_path / "run")).steps() == [1]


def test_a_save_after_the_end_of_the_main_thread_says_what_to_do(tmp_path: Path) -> None:
    script = """
import atexit, sys, threading, torch
from ckpt import CheckpointManager
from ckpt.errors import ManagerClosed
manager = CheckpointManager(sys.argv[1])
def late(name):
    for what in (lambda: manager.save({"x": torch.ones(3)}, 1), lambda: CheckpointManager("late")):
        try:
            what()
        except ManagerClosed as error:
            print(name, error)
def beside():
    threading.main_thread().join()
    while not manager._guard.is_closed:
        pass
    late("thread")
atexit.register(late, "atexit")
threading.Thread(target=beside).start()
"""
    said = run_code(script, tmp_path / "run", timeout=100, finalize=True)
    for name in ("thread", "atexit"):
        assert said.count(f"{name} the main thread has ended, which closes every") == 2
    assert "let the main thread join it" in said


def test_the_handle_of_a_save_that_was_given_up_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(monkeypatch, 5.0)
    handles: list[PendingSave] = []
    with pytest.raises(ValueError, match="boom"):
        save_and_raise(tmp_path, ValueError("boom"), handles, exit_seconds=0.1)
    with pytest.raises(CommitError, match="lacks step 1"):
        handles[0].result(0)


@pytest.mark.parametrize("wrong", [-1, float("inf"), "10", None])
def test_a_time_that_is_none_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="exit_seconds"):
        CheckpointManager(str(tmp_path), exit_seconds=wrong)  # type: ignore[arg-type]


# -- the other ranks -------------------------------------------------------------------------------


def test_who_waits_for_a_rank_that_has_left_hears_why_and_not_after_the_time_out() -> None:
    world = World(2)
    ref = StepRef(1, "abcxyz")

    def rank(coordinator: object) -> object:
        if coordinator.rank == 1:  # type: ignore[attr-defined]
            leaving = DepartingCoordinator(coordinator)  # type: ignore[arg-type]
            leaving.leave("ValueError: boom")
            return leaving.post("save", b"")
        committer = Committer(
            coordinator,  # type: ignore[arg-type]
            SharedStore(open_backend("memory://leaving")),
            name="save",
            bounds=Bounds(3600, 0.05),
        )
        return committer.commit(ref, Durable(FragmentRef("rank-00000.json", 0, 1, "x")))

    verdict, reported = world.run(rank).values()
    assert isinstance(reported, CommitError)
    assert isinstance(verdict, Abort), verdict
    assert "it has ended: ValueError: boom" in str(verdict)
    assert first_departure(world.coordinator(0)).rank == 1  # type: ignore[union-attr]


def test_a_second_rank_that_leaves_is_not_waited_for_either() -> None:
    """The first one has voted before."""
    world = World(3)
    ref = StepRef(1, "abcxyz")

    def vote(rank: int) -> Durable:
        return Durable(FragmentRef(f"rank-{rank:05}.json", rank, 1, "x"))

    first, second = (DepartingCoordinator(world.coordinator(rank)) for rank in (1, 2))
    first.post(f"save/{ref.folder}", encode_json(vote(1)))
    first.leave("ValueError: first")
    second.leave("ValueError: second")
    committer = Committer(
        world.coordinator(0),
        SharedStore(open_backend("memory://both")),
        name="save",
        bounds=Bounds(3600, 0.05),
    )
    verdict = committer.commit(ref, vote(0))
    assert isinstance(verdict, Abort), verdict
    assert "rank 2" in str(rebuild(verdict, 1)), rebuild(verdict, 1)
    assert "it has ended: ValueError: second" in str(verdict)


def test_the_last_word_of_a_rank_that_has_left_counts() -> None:
    world = World(2)
    ref = StepRef(1, "abcxyz")
    heard: list[object] = []
    world.coordinator(1).set_once("gone", b'{"rank": 1, "reason": "boom"}')

    class Late(type(world.coordinator(0))):  # type: ignore[misc]
        """The message arrives between the wait for it and the check of who has left."""

        def verdict(self, subject: str, *, timeout: float) -> bytes | None:
            if subject == "gone":
                own_vote = encode_json(Failure("its own reason"))
                self.world.messages[f"save/{ref.folder}", 1] = own_vote
            return super().verdict(subject, timeout=timeout)

    committer = Committer(
        Late(world, 0),
        SharedStore(open_backend("memory://late")),
        name="save",
        bounds=Bounds(3600, 0.05),
    )
    heard.append(committer.commit(ref, Durable(FragmentRef("rank-00000.json", 0, 1, "x"))))
    assert "its own reason" in str(heard[0])


def test_a_rank_may_leave_for_an_error_with_a_name_that_is_not_utf_8() -> None:
    """Such as the name of a file of a data set. The others would wait until the time-out."""
    world = World(2)
    DepartingCoordinator(world.coordinator(1)).leave("ValueError: no such file: step\udce9")
    gone = first_departure(world.coordinator(0))
    assert gone is not None
    assert gone.reason == r"ValueError: no such file: step\udce9"


def test_a_wait_that_is_under_way_ends_when_this_rank_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckpt.coordination.leaving._LOOK_SECONDS", 0.05)
    leaving = DepartingCoordinator(World(2, patience=100.0).coordinator(0))
    threading.Timer(0.1, leaving.leave, ["boom"]).start()
    began = time.monotonic()
    with pytest.raises(CommitError, match="has left"):
        leaving.clone().verdict("never", timeout=3600)
    assert time.monotonic() - began < 60


@pytest.mark.distributed
def test_a_rank_that_raises_ends_in_seconds_and_the_other_hears_of_it(tmp_path: Path) -> None:
    """The commit timeout is 600 s."""
    outputs = run_world(2, "raises.py", tmp_path / "run", store_here=True)
    reported(outputs, 0)
    assert "ValueError: boom" in outputs[1]
    assert "lacks step 2 (not finished within 1.0 s)" in outputs[1]
    assert "heard: step 3" in outputs[0]
    assert "ValueError: boom" in outputs[0]
    assert CheckpointManager(str(tmp_path / "run")).steps() == [1]


def test_a_close_after_ctrl_c_waits_for_the_saves_that_the_block_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose process goes on after Ctrl-C."""
    slow(monkeypatch, 1.0)
    manager = CheckpointManager(str(tmp_path), exit_seconds=0.0)
    try:
        with manager:
            manager.save_async({"x": torch.ones(3)}, 1)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    manager.close()
    assert CheckpointManager(str(tmp_path)).steps() == [1]
