"""Calls of a manager by a signal handler, which interrupts the training thread anywhere."""

from __future__ import annotations

import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import ConfigError, StagingError
from ckpt.staging.fence import Fence
from ckpt.staging.slot import Slot
from tests.kit.interrupting import interrupted_call
from tests.overlap.jobs import forward_backward, job
from tests.overlap.window import assert_restores, content


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def handler() -> Iterator[Callable[[Callable[[], object]], list[BaseException]]]:
    """Set what SIGUSR1 calls.

    Return the list of the errors that it raised, which a user's handler might suppress.
    """
    before = signal.getsignal(signal.SIGUSR1)

    def handle(act: Callable[[], object]) -> list[BaseException]:
        raised: list[BaseException] = []

        def collect(_: int, __: FrameType | None) -> None:
            try:
                act()
            except Exception as error:
                raised.append(error)

        signal.signal(signal.SIGUSR1, collect)
        return raised

    yield handle
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_a_save_or_close_inside_of_a_save_is_refused_and_not_waited_for(
    root: str, handler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The interrupted call has taken the only slot, which it gives back when the handler has
    returned.
    """
    state = job()
    reference, pin = content(state), Slot.pin

    def interrupted(slot: Slot, *args: Any) -> None:
        monkeypatch.undo()
        interrupt()
        pin(slot, *args)

    with CheckpointManager(root, slots=1) as manager:
        for number, call in enumerate(
            (lambda: manager.save(state, 9), lambda: manager.close(20)), 1
        ):
            raised = handler(call)
            monkeypatch.setattr(Slot, "pin", interrupted)
            manager.save(state, number)
            assert len(raised) == 1
            assert isinstance(raised[0], ConfigError)
            assert "inside of save_async()" in str(raised[0])
            assert str(raised[0]) in caplog.text
        assert manager.steps() == [1, 2]
    assert_restores(root, reference, job(seed=3))


def test_a_second_close_while_the_first_waits_does_nothing(
    root: str, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(root)
    manager.save(job(), 1)
    raised = handler(manager.close)
    monkeypatch.setattr(
        "ckpt.closing.wait_and_log", lambda done, *_: interrupt() or done.result() is None
    )
    manager.close()
    assert not raised


def test_a_state_that_is_being_restored_is_not_saved(root: str, handler: Any) -> None:
    """Some of its tensors are those of the checkpoint then, and others those of before."""
    state, other = job(), job(seed=7)
    with CheckpointManager(root) as manager:
        state["more"] = other["more"] = loaded = Interrupting()
        manager.save(state, 1)
        raised = handler(lambda: manager.save(other, 2))
        manager.restore(other)
        assert loaded.count == 1
        assert [type(error) for error in raised] == [ConfigError]
        assert "save_async() was called inside of restore()" in str(raised[0])
        assert manager.steps() == [1]


@pytest.mark.parametrize("call", ["save", "restore"])
def test_ctrl_c_as_a_call_returns_leaves_the_manager_usable(call: str, root: str) -> None:
    """Python raises the exception of a signal as a function begins, also in what ends the call."""
    state = job()
    with CheckpointManager(root, slots=1) as manager:
        manager.save(state, 1)
        calls = {"save": lambda: manager.save(state, 2), "restore": lambda: manager.restore(state)}
        interrupted = 0
        for turn in range(1, 100):
            try:
                with interrupted_call(("manager_calls.py",), turn):
                    calls[call]()
            except KeyboardInterrupt:
                interrupted += 1
            else:
                break
            manager.save(state, 2 + turn)
        assert interrupted > 1
        assert manager.steps()[-1] == 2 + interrupted


def test_ctrl_c_before_a_slot_is_filled_gives_the_slot_back(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the only slot would be lost, and the next save would wait for it for ever."""
    state = job()

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with CheckpointManager(root, slots=1, on_busy="skip") as manager:
        manager.save(state, 1)
        monkeypatch.setattr(Slot, "pin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.save(state, 2)
        assert manager.save_async(state, 3).exception() is None
        assert manager.steps() == [1, 3]


def test_ctrl_c_in_a_constructor_leaves_other_managers_usable(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error keeps what was made until then, and other managers find it."""

    def interrupted() -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with CheckpointManager(root) as manager:
        state = job()
        manager.save(state, 1)
        monkeypatch.setattr("ckpt.staging.fence.os.getpid", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            Fence()
        manager.restore(state)
    assert kept


def test_no_signal_handler_runs_between_the_taking_of_a_lock_and_its_block(root: str) -> None:
    """An exception of the handler would leave the lock taken, and the close would hang. A handler
    runs only between instructions of Python code.
    """
    taken: list[str] = []

    def on_call(frame: FrameType, *_: object) -> None:
        caller = frame
        while caller.f_code.co_filename == threading.__file__ and caller.f_back is not None:
            if caller.f_code is threading.Thread.start.__code__:
                return
            caller = caller.f_back
        if frame.f_code.co_name == "__enter__" and caller is not frame:
            file = caller.f_code.co_filename
            if "ckpt" in Path(file).parent.parts:
                taken.append(f"{file}:{caller.f_lineno}")

    state = job()
    with CheckpointManager(root) as manager:
        stop = manager.on_stop_request()
        sys.settrace(on_call)
        try:
            manager.save(state, 1)
            manager.save_async(state, 2).wait_staged()
            forward_backward(state, 0)
            state["optimizer"].step()
            manager.fence()
            manager.restore(state)
            stop.requested(3)
            manager.save_async(state, 3).result()
        finally:
            sys.settrace(None)
    assert not taken


class Interrupting:
    """An object of a state, during whose restore a signal arrives."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        self.count += 1
        interrupt()


class Interrupted(torch.optim.SGD):
    """A signal arrives when some parameters have changed and others have not."""

    armed = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            parameter.sub_(1)
            if self.armed and not number:
                interrupt()
        return loss


@pytest.mark.parametrize("saved_before", [True, False])
def test_a_save_in_the_midst_of_a_step_is_refused(
    saved_before: bool, root: str, handler: Any
) -> None:
    state = job(lambda parameters: Interrupted(parameters, lr=0.1))
    optimizer = state["optimizer"]
    with CheckpointManager(root) as manager:
        if saved_before:
            manager.save(state, 1)
        raised = handler(lambda: manager.save(state, 2))
        optimizer.armed = True
        optimizer.step()
        assert [type(error) for error in raised] == [StagingError]
        assert "a signal handler that interrupts Interrupted.step()" in str(raised[0])
        optimizer.armed = False
        reference = content(state)
        manager.save(state, 3)
        assert manager.steps() == ([1, 3] if saved_before else [3])
    assert_restores(
        root, reference, job(lambda parameters: Interrupted(parameters, lr=0.1), seed=3)
    )


def test_a_save_by_a_closure_and_by_a_hook_behind_the_step_is_made(root: str) -> None:
    state = job(lambda parameters: Interrupted(parameters, lr=0.1))
    optimizer, references = state["optimizer"], {}

    with CheckpointManager(root) as manager:

        def save(number: int) -> float:
            references[number] = content(state)
            manager.save(state, number)
            return 0.0

        forward_backward(state, 0)
        optimizer.step(lambda: save(1))
        hook = optimizer.register_step_post_hook(lambda *_: save(2))
        optimizer.step()
        hook.remove()
    for number, reference in references.items():
        blank = job(lambda parameters: Interrupted(parameters, lr=0.1), seed=3)
        assert_restores(root, reference, blank, number)
