"""Several threads that step, managers that save, saves before a step, and processes that fork."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ckpt.storage.tiers
from ckpt import CheckpointManager
from ckpt.config import CheckMode
from ckpt.errors import ConfigError, StagingError
from ckpt.staging import fence
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Delay, FaultyBackend, Rule
from tests.kit.worlds import run_code
from tests.overlap.jobs import train, trained
from tests.overlap.window import Window, assert_restores, content
from tests.processes import fork


@pytest.fixture
def slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store where the end of every upload takes longer than a few steps."""
    rules = [Rule(verb="finish", fault=Delay(0.5))]
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: FaultyBackend(open_backend(url, options), rules),
    )


def in_a_thread(work: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


# -- threads ---------------------------------------------------------------------------------------


def test_a_step_in_another_thread_waits(root: str, window: Window) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: in_a_thread(lambda: train(state, 3)))
    assert_restores(root, window.reference, trained(seed=5))


class Counting(torch.optim.Optimizer):
    """An optimizer that sets each of its tensors to the number of its steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("count", torch.zeros_like(parameter)).add_(1)
                parameter.add_(1)


def counted(numbers: int = 50_000) -> dict[str, Any]:
    model = nn.ParameterList([nn.Parameter(torch.zeros(numbers)) for _ in range(6)])
    optimizer = Counting(list(model))
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_thread_that_steps_all_the_time_never_tears_a_checkpoint(root: str) -> None:
    """Code should not do this, but every save is of one moment, or fails with a name."""
    state = counted()
    ended = threading.Event()
    kept: list[int] = []

    def steps() -> None:
        for pause in itertools.cycle([0.001] * 20 + [0.3]):  # some saves have enough time
            state["optimizer"].step()
            if ended.wait(pause):
                return

    stepper = threading.Thread(target=steps)
    with CheckpointManager(root) as manager:
        manager.save(state, 0)  # the hooks exist from now on
        stepper.start()
        try:
            for number in range(1, 1000):
                if number > 40 and kept:
                    break
                try:
                    error = manager.save_async(state, number).exception(60)
                except StagingError as reported:
                    error = reported
                    time.sleep(0.01)
                if error is None:
                    kept.append(number)
                else:
                    assert isinstance(error, StagingError), error
        finally:
            ended.set()
            stepper.join()
    assert kept
    for number in kept:
        target = counted()
        with CheckpointManager(root) as manager:
            manager.restore(target, number)
        first = target["model"][0].flatten()[0]
        for parameter in target["model"]:
            assert bool((parameter == first).all())
            assert bool((target["optimizer"].state[parameter]["count"] == first).all())


class Halting(Counting):
    """An optimizer that stops in the middle of a step until it may go on, and raises on request."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.inside, self.go, self.fail = threading.Event(), threading.Event(), False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        first.add_(1)
        self.inside.set()
        assert self.go.wait(30)
        if self.fail:
            raise ZeroDivisionError
        super().step()
        first.sub_(1)


def test_a_save_in_the_midst_of_another_threads_step_is_refused(root: str) -> None:
    """A save at that time would hold the state of no step."""
    state = counted(10)
    optimizer = state["optimizer"] = Halting(list(state["model"]))
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        try:
            assert optimizer.inside.wait(30)
            with pytest.raises(
                StagingError, match=r"another thread is in the midst of Halting\.step"
            ):
                manager.save_async(state, 2)
        finally:
            optimizer.go.set()
            thread.join()
        reference = content(state)
        manager.save(state, 2)
    assert_restores(root, reference, blank(10))


def blank(numbers: int) -> dict[str, Any]:
    target = counted(numbers)
    optimizer = Halting(list(target["model"]))
    optimizer.go.set()
    optimizer.step()
    return target | {"optimizer": optimizer}


@pytest.mark.parametrize("where", ["here", "in a thread that is gone"])
def test_a_step_that_raised_is_over(where: str, root: str) -> None:
    state = counted(10)
    optimizer = state["optimizer"] = Halting(list(state["model"]))
    optimizer.go.set()
    with CheckpointManager(root) as manager:
        optimizer.step()
        manager.save(state, 1)
        optimizer.fail = True
        with pytest.raises(ZeroDivisionError):
            optimizer.step() if where == "here" else in_a_thread(optimizer.step)
        reference = content(state)
        manager.save(state, 2)
    assert_restores(root, reference, blank(10))


# -- saves and managers ----------------------------------------------------------------------------


def test_two_saves_before_a_step_hold_the_same_and_both_are_waited_for(
    root: str, window: Window
) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state, 1)
        manager.save_async(state, 2)
        window.must_wait(lambda: train(state, 3))
    for step in (1, 2):
        assert_restores(root, window.reference, trained(seed=5), step=step)


@pytest.mark.usefixtures("slow_store")
def test_a_save_that_has_landed_is_not_blamed_for_a_step_after_the_next_one(root: str) -> None:
    """Nothing changed while it was copied. That it is still being written does not matter."""
    state = trained()
    staged = threading.Event()
    with CheckpointManager(root, observers=[lambda event: staged.set()]) as manager:
        first = manager.save_async(state, 1)
        assert staged.wait(30)
        reference = content(state)
        second = manager.save_async(state, 2)
        train(state, 3)
        assert not first.done()
        first.result(60)
        second.result(60)
    for step in (1, 2):
        assert_restores(root, reference, trained(seed=5), step=step)


def test_two_managers_over_one_model_are_both_waited_for(root: str, window: Window) -> None:
    state = trained()
    other = f"memory://{uuid.uuid4().hex}"
    with CheckpointManager(root) as one, CheckpointManager(other) as two:
        for number in range(3):
            window.save(one, state, number)
            two.save_async(state, number)
            window.must_wait(partial(train, state, number))
        one.close()
        window.save(two, state, 3)  # the hooks of the other manager are still there
        window.must_wait(lambda: train(state, 3))
    assert_restores(other, window.reference, trained(seed=5), step=3)
    assert not state["optimizer"]._optimizer_step_pre_hooks


def test_two_managers_that_share_a_part_of_the_state_are_both_waited_for(
    root: str, window: Window
) -> None:
    """One manager saves the model and its optimizer, the other saves only the optimizer."""
    state = trained()
    other = f"memory://{uuid.uuid4().hex}"
    with CheckpointManager(root) as one, CheckpointManager(other) as two:
        two.save({"optimizer": state["optimizer"]}, 1)
        window.save(one, state)
        window.must_wait(lambda: train(state, 3))
    assert_restores(root, window.reference, trained(seed=5))


@pytest.mark.parametrize("check", ["off", "sampled"])
def test_a_restore_by_another_manager_waits(check: CheckMode, root: str, window: Window) -> None:
    state, other = trained(seed=1), f"memory://{uuid.uuid4().hex}"
    with CheckpointManager(root, check=check) as one, CheckpointManager(other) as two:
        two.save(state, 1)
        train(state, 3)
        pending = window.save(one, state, 2)
        window.must_wait(lambda: two.restore(state, 1))
        pending.result(60)
    assert_restores(root, window.reference, trained(seed=5), step=2)


def test_after_wait_staged_everything_may_be_changed(root: str, window: Window) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        window.close()
        pending.wait_staged(60)
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
        pending.result(60)
    assert_restores(root, window.reference, trained(seed=5))


@pytest.mark.parametrize("how", ["fence", "close", "restore"])
def test_what_says_that_it_waits_does(how: str, root: str, window: Window) -> None:
    state = trained()
    manager = CheckpointManager(root)
    manager.save(state, 1)
    train(state, 3)
    window.save(manager, state, 2)
    reference = window.reference
    acts = {
        "fence": manager.fence,
        "close": manager.close,
        "restore": lambda: manager.restore(state, 1),
    }
    window.must_wait(acts[how])
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    manager.close()
    assert_restores(root, reference, trained(seed=5), step=2)


# -- a fork ----------------------------------------------------------------------------------------


def forked(work: Callable[[], object], seconds: float = 30) -> int:
    """Return the exit status of a child that does ``work``, or -1 if it hung."""
    child = fork(work)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def slots() -> list[str]:
    return sorted(
        name for name in os.listdir("/dev/shm") if name.startswith(f"ckpt-slot-{os.getpid()}-")
    )


def test_a_child_made_in_the_window_trains_on_and_the_parent_saves_on(
    root: str, window: Window
) -> None:
    """The child has the hooks but no thread that copies. It must not wait for ever, and must not
    touch the parent's files.
    """
    state = trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        held = slots()
        assert held
        assert forked(state["optimizer"].step) == 0
        assert set(held) <= set(slots())
        window.must_wait(lambda: train(state, 3))
        manager.save(state, 2)
    assert_restores(root, window.reference, trained(seed=5), step=1)


@pytest.mark.parametrize("method", ["save_async", "save", "prepare", "fence", "restore", "steps"])
def test_a_child_that_uses_the_manager_is_told(method: str, root: str) -> None:
    state = trained()

    def use() -> None:
        arguments = () if method in ("fence", "steps") else (state,)
        with pytest.raises(ConfigError, match="before a fork"):
            getattr(manager, method)(*arguments)
        manager.close()

    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        held = slots()
        assert forked(use) == 0
        assert set(held) <= set(slots())
        manager.save(state, 2)
        assert manager.steps() == [1, 2]


CHILD_THAT_EXITS = """
import atexit, os, sys, threading
import torch
from ckpt import CheckpointManager

def slots():
    prefix = f"ckpt-slot-{parent}-"
    return {name for name in os.listdir("/dev/shm") if name.startswith(prefix)}

parent, model = os.getpid(), torch.nn.Linear(3, 3)
with CheckpointManager(sys.argv[1]) as manager:
    pending = manager.save_async({"model": model}, 1)
    before = slots()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(1), os.close(2)
            threading._shutdown()
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert before and before <= slots()
    pending.result(60)
    manager.save({"model": model}, 2)
    assert manager.steps() == [1, 2]
"""


def test_a_child_that_exits_as_a_script_does_takes_nothing_with_it(tmp_path: Path) -> None:
    """The child runs atexit functions, as a data loader's worker or a script that forks does. It is
    a child of a process of its own: among the functions of this one may be those of a client of a
    store, which wait for a thread that a child does not have.
    """
    run_code(CHILD_THAT_EXITS, tmp_path / "root")


def test_workers_of_a_data_loader_do_no_harm(root: str, window: Window) -> None:
    state = trained()
    loader: Any = torch.utils.data.DataLoader(
        TensorDataset(torch.ones(8, 3)), num_workers=2, multiprocessing_context="fork", batch_size=2
    )
    with CheckpointManager(root) as manager:
        for number in range(2):
            window.save(manager, state, number)
            assert len(list(loader)) == 4
            window.must_wait(partial(train, state, number))
        manager.fence()
    assert_restores(root, window.reference, trained(seed=5))


# -- a captured step -------------------------------------------------------------------------------


def test_once_a_step_was_captured_nothing_is_copied_late_any_more(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test needs no GPU: torch reports a capture while one step runs.

    A step that calls no hook and moves no counter stands for a replay.
    """
    state = trained()
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        with monkeypatch.context() as capturing:
            capturing.setattr(fence, "is_capturing", lambda device: True)
            train(state, 3)
        for number in (2, 3):
            reference = content(state)
            pending = manager.save_async(state, number)
            replay(state)
            pending.result(60)
    assert_restores(root, reference, trained(seed=5), step=3)


@pytest.mark.parametrize("way", ["save_async", "prepare", "restore"])
def test_a_step_captured_before_the_first_save_is_noticed(
    way: str, root: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        with monkeypatch.context() as capturing:
            capturing.setattr(fence, "is_capturing", lambda device: True)
            train(state, 3)
        if way == "prepare":
            manager.prepare(state)
        elif way == "restore":
            manager.restore(state)
        reference = content(state)
        window.hold()
        pending = manager.save_async(state, 1)
        replay(state)
        window.close()
        pending.result(60)
    assert_restores(root, reference, trained(seed=5), step=1)


def test_a_capturable_optimizer_is_taken_for_captured(root: str, window: Window) -> None:
    """It may have been captured before the manager existed."""
    state = trained()
    state["optimizer"].param_groups[0]["capturable"] = True
    with CheckpointManager(root) as manager:
        for number in range(2):
            reference = content(state)
            window.hold()
            pending = manager.save_async(state, number)
            replay(state)
            window.close()
            pending.result(60)
    assert_restores(root, reference, trained(seed=5), step=1)


def test_only_the_optimizer_that_was_captured_is_copied_at_once(
    root: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, other = trained(), trained(seed=2)
    with CheckpointManager(root) as manager:
        with monkeypatch.context() as capturing:
            capturing.setattr(fence, "is_capturing", lambda device: True)
            train(captured, 3)
        state = {"one": captured, "two": other}
        window.save(manager, state, 1)
        replay(captured)
        window.overtake(lambda: train(other, 3))
        assert not window.overtaken
    assert_restores(root, window.reference, {"one": trained(seed=5), "two": trained(seed=5)})


def test_managers_listen_to_all_optimizers_until_they_are_closed_or_gone() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    managers = [CheckpointManager(f"memory://{uuid.uuid4().hex}") for _ in range(3)]
    assert len(hooks) == before + 3
    for number, manager in enumerate(managers, start=1):
        manager.close()
        assert len(hooks) == before + 3 - number
    listening = fence.Fence()
    listening.listen()
    assert len(hooks) == before + 1
    del listening
    gc.collect()
    assert len(hooks) == before


def test_a_fork_asks_no_device_whether_it_captures(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    with CheckpointManager(root):
        monkeypatch.setattr(fence, "is_capturing", lambda device: os._exit(3))
        child = os.fork()
        if child == 0:
            train(state, 3)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def replay(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.data.add_(1)
        state["optimizer"].state[parameter]["exp_avg"].data.add_(1)


@pytest.mark.usefixtures("slow_store")
def test_the_first_capture_waits_for_a_copy_under_way(
    root: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state, 1)
        with monkeypatch.context() as capturing:
            capturing.setattr(fence, "is_capturing", lambda device: True)
            window.must_wait(lambda: train(state, 3))
    assert_restores(root, window.reference, trained(seed=5))
