from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch import nn

import ckpt.storage.tiers
from ckpt import CheckpointManager, PerRank, RngState, SaveConfig, Tier
from ckpt.catalog.step_listing import committed, find, read_manifest
from ckpt.errors import (
    CkptError,
    ConfigError,
    ManagerClosed,
    OutOfSpace,
    RootInUse,
    SaveSkipped,
    StepExists,
    TensorChanged,
    UnsupportedValue,
)
from ckpt.events import Event, Restored, SaveCommitted, SaveFailed, SaveStaged, TierMissed
from ckpt.model.keys import OWNER
from ckpt.processes import Process
from ckpt.root.owner import Owner, claim, read_owner
from ckpt.save.active_save import HandOver
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.kit.marks import torture
from tests.kit.stores import Gated, faulty, whole
from tests.kit.waiting import until
from tests.kit.worlds import run_code


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


Faults = Callable[..., None]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Make every backend that is opened from now on have these faults.

    Its uploads have none, since they are not tested here.
    """

    def wrap(*rules: Rule) -> None:
        monkeypatch.setattr(
            ckpt.storage.tiers,
            "open_backend",
            lambda url, options: FaultyBackend(open_backend(url, options), rules),
        )

    return wrap


def job(seed: int = 0, width: int = 64) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(state: dict[str, Any], number: int = 0) -> None:
    torch.manual_seed(number)
    state["optimizer"].zero_grad()
    state["model"](torch.randn(4, state["model"][0].in_features)).square().sum().backward()
    state["optimizer"].step()
    state["step"] += 1


def copy_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {f"model/{key}": value.clone() for key, value in state["model"].state_dict().items()}
    for index, held in state["optimizer"].state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{key}": value.clone() for key, value in held.items()}
    return tensors


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key


def back(root: str, step: int | None = None) -> dict[str, Any]:
    state = job(seed=99)
    with CheckpointManager(root) as manager:
        assert manager.restore(state, step) is not None
    return state


# -- the state at the call -------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_everything_may_be_changed_right_after_the_call(root: str, overlap: Any) -> None:
    state = job(width=512)
    train(state)
    state |= {
        "plain": torch.arange(100_000.0),
        "array": np.arange(100_000.0),
        "list": [1, [2, 3]],
        "dict": {"a": {"b": 1}},
        "ema": [torch.ones(1000), torch.ones(10)],
        "bytes": bytearray(b"abc"),
    }
    expected = copy_of(state)
    with CheckpointManager(root, overlap=overlap) as manager:
        pending = manager.save_async(state)
        state["plain"].fill_(-1)
        state["array"][:] = -1
        state["list"][1].append(4)
        state["list"].clear()
        state["dict"]["a"]["b"] = 2
        state["ema"][0].zero_()
        state["ema"].pop()
        state["bytes"][0] = 0
        state["model"][1].running_mean.fill_(7)
        train(state)
        for parameter in state["model"].parameters():  # the step has passed, so the copy has landed
            parameter.data.zero_()
        pending.result(60)
        assert pending.step == 1
    target = job(seed=5, width=512) | {
        "plain": torch.zeros(100_000),
        "array": np.zeros(100_000),
        "list": None,
        "dict": None,
        "ema": [torch.zeros(1000), torch.zeros(10)],
        "bytes": None,
    }
    with CheckpointManager(root) as manager:
        manager.restore(target)
    assert_equal(copy_of(target), expected)
    assert torch.equal(target["plain"], torch.arange(100_000.0))
    assert np.array_equal(target["array"], np.arange(100_000.0))
    assert target["list"] == [1, [2, 3]]
    assert target["dict"] == {"a": {"b": 1}}
    assert all(bool((tensor == 1).all()) for tensor in target["ema"])
    assert target["bytes"] == bytearray(b"abc")
    assert target["step"] == 1


def test_with_overlap_off_even_parameters_may_be_changed_at_once(memory: str) -> None:
    state = job()
    train(state)
    expected = copy_of(state)
    with CheckpointManager(memory, overlap="off") as manager:
        manager.save_async(state)
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
    assert_equal(copy_of(back(memory)), expected)


def test_after_a_fence_parameters_may_be_changed_by_anybody(memory: str) -> None:
    state = job(width=512)
    train(state)
    expected = copy_of(state)
    with CheckpointManager(memory) as manager:
        pending = manager.save_async(state)
        manager.fence()
        pending.wait_staged(0)
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
        pending.result(60)
    target = job(seed=99, width=512)
    with CheckpointManager(memory) as manager:
        manager.restore(target)
    assert_equal(copy_of(target), expected)


@pytest.fixture
def held_copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make late copies wait until the event is set.

    So a test can act between the call and the copy.
    """
    from ckpt.staging.snapshot import Snapshot

    gate = threading.Event()
    original = Snapshot.copy_late

    def held(self: Snapshot) -> None:
        assert gate.wait(30)
        original(self)

    monkeypatch.setattr(Snapshot, "copy_late", held)
    yield gate
    gate.set()


def test_a_parameter_changed_behind_our_back_fails_that_save_by_name_and_nothing_else(
    root: str, held_copier: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    state = job()
    train(state)
    expected = copy_of(state)
    with CheckpointManager(root) as manager:
        held_copier.set()
        manager.save(state, 1)
        held_copier.clear()
        pending = manager.save_async(state, 2)
        with torch.no_grad():
            state["model"][2].weight.add_(1)  # not a step, so the fence does not see it
        held_copier.set()
        with pytest.raises(TensorChanged, match=r"'model/2\.weight'"):
            pending.result(30)
        train(state)  # training works
        assert manager.steps() == [1]
        # the manager works too: result() has raised the error, so no later call raises it again
        manager.save(state, 2)
        assert manager.steps() == [1, 2]
    assert_equal(copy_of(back(root, 1)), expected)
    assert "changed while step 2" in caplog.text


def test_a_step_waits_for_the_copy(memory: str, held_copier: threading.Event) -> None:
    state = job()
    train(state)
    expected = copy_of(state)
    with CheckpointManager(memory) as manager:
        manager.save_async(state)
        stepped = threading.Event()
        thread = threading.Thread(target=lambda: (train(state, 1), stepped.set()))
        thread.start()
        assert not stepped.wait(0.3)
        held_copier.set()
        thread.join(30)
        assert stepped.is_set()
    assert_equal(copy_of(back(memory)), expected)


def test_a_closed_manager_leaves_no_hook_behind(memory: str) -> None:
    state = job()
    with CheckpointManager(memory) as manager:
        manager.save(state)
        assert len(state["optimizer"]._optimizer_step_pre_hooks) == 1
        manager.save(state, 1)
        assert len(state["optimizer"]._optimizer_step_pre_hooks) == 1
    assert not state["optimizer"]._optimizer_step_pre_hooks


# -- errors in the background ----------------------------------------------------------------------

FULL = Rule(verb="put", key="step-.*json", nth=1, fault=Raise(OutOfSpace))


def failed(manager: CheckpointManager) -> Any:
    pending = manager.save_async({"x": torch.ones(3)}, 1)
    while not pending.done():
        time.sleep(0.005)
    return pending


@pytest.mark.parametrize("way", ["result", "exception", "save_async", "fence", "close"])
def test_an_error_in_the_background_is_told_exactly_once(
    memory: str, faults: Faults, way: str
) -> None:
    faults(FULL)
    manager = CheckpointManager(memory)
    pending = failed(manager)
    if way == "exception":
        assert isinstance(pending.exception(), OutOfSpace)
    else:
        tell: dict[str, Callable[[], object]] = {
            "result": pending.result,
            "save_async": lambda: manager.save_async({"x": 1}, 2),
            "fence": manager.fence,
            "close": manager.close,
        }
        with pytest.raises(OutOfSpace):
            tell[way]()
    if way != "close":
        manager.fence()
        manager.save({"x": torch.ones(3)}, 1)  # the same step may be tried again
        manager.save({"x": torch.ones(3)}, 2)
        assert manager.steps() == [1, 2]
    manager.close()


def test_a_failed_save_leaves_no_files(root: str, faults: Faults) -> None:
    faults(FULL)
    with CheckpointManager(root) as manager:
        failed(manager).exception()
        assert [path.name for path in Path(root).rglob("*") if path.is_file()] == [OWNER]


def test_the_error_of_the_body_goes_before_one_of_the_background(
    memory: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> None:
        with CheckpointManager(memory) as manager:
            failed(manager)
            raise ZeroDivisionError

    faults(FULL)
    with pytest.raises(ZeroDivisionError):
        body()
    assert "no space left" in caplog.text
    with pytest.raises(OutOfSpace), CheckpointManager(f"{memory}2") as manager:
        failed(manager)


# -- slots -----------------------------------------------------------------------------------------


@pytest.fixture
def gate(memory: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no file of a tensor into the store before it is set."""
    store = Gated(memory)
    monkeypatch.setattr(ckpt.storage.tiers, "open_backend", lambda url, options: store)
    return store.open


def test_with_skip_a_save_is_left_out_while_no_slot_is_free(
    memory: str, gate: threading.Event
) -> None:
    with CheckpointManager(memory, on_busy="skip", slots=1) as manager:
        first = manager.save_async({"x": 1}, 1)
        second = manager.save_async({"x": 2}, 2)
        assert second.done()
        assert manager.skipped == 1
        with pytest.raises(SaveSkipped):
            second.result()
        gate.set()
        first.result(30)
        manager.save({"x": 3}, 2)  # the skipped step was not used
        assert manager.steps() == [1, 2]


def test_a_long_wait_for_a_save_names_the_tier_in_the_log(
    memory: str, gate: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ckpt.pending._LONG_SECONDS", 0.1)
    with CheckpointManager(memory) as manager:
        with pytest.raises(TimeoutError, match=r"after 0\.3 s"):
            manager.save({"x": 1}, 7, timeout=0.3)
        assert f"waiting for {memory}: 1 step, newest 7" in caplog.text
        gate.set()


def test_with_wait_the_call_waits_for_a_slot_and_nothing_is_lost(
    memory: str, gate: threading.Event
) -> None:
    with CheckpointManager(memory, slots=1) as manager:
        manager.save_async({"x": 1}, 1)
        threading.Timer(0.4, gate.set).start()
        manager.save_async({"x": 2}, 2)
        assert gate.is_set()
        assert manager.skipped == 0
    with CheckpointManager(memory) as manager:
        assert manager.steps() == [1, 2]


def test_a_slow_store_costs_the_caller_nothing_while_a_slot_is_free(
    memory: str, gate: threading.Event
) -> None:
    with CheckpointManager(memory) as manager:
        one, two = manager.save_async({"x": 1}, 1), manager.save_async({"x": 2}, 2)
        assert not one.done()
        assert not two.done()
        gate.set()


def test_a_state_that_grows_and_shrinks_gets_slots_that_fit(memory: str) -> None:
    with CheckpointManager(memory) as manager:
        for step, size in enumerate([10, 3_000_000, 10, 100_000, 5_000_000]):
            manager.save_async({"x": torch.full((size,), float(step))}, step)
    with CheckpointManager(memory) as manager:
        for step, size in enumerate([10, 3_000_000, 10, 100_000, 5_000_000]):
            target = {"x": torch.zeros(size)}
            manager.restore(target, step)
            assert bool((target["x"] == step).all())


# -- steps -----------------------------------------------------------------------------------------


def test_the_step_is_that_of_the_state_or_the_next(memory: str) -> None:
    with CheckpointManager(memory) as manager:
        assert [manager.save({"x": 1}).step for _ in range(2)] == [0, 1]
        assert manager.save({"x": 1, "step": 7}).step == 7
        assert manager.save({"x": 1}).step == 8
        assert manager.save({"x": 1, "step": torch.tensor(3)}).step == 9
        assert manager.save({"x": 1, "step": 50}, 60).step == 60
        assert manager.steps() == [0, 1, 7, 8, 9, 60]
        assert manager.latest_step() == 60


@pytest.mark.parametrize("step", [-1, 1.0, "3", True, 10**18, None])
def test_a_step_that_is_no_number_from_0_on_is_refused(memory: str, step: Any) -> None:
    with CheckpointManager(memory) as manager:
        if step is None:
            assert manager.save_async({"step": True}).result().step == 0
        else:
            with pytest.raises(ConfigError, match="step"):
                manager.save_async({"x": 1}, step)


def test_a_step_is_saved_once(memory: str) -> None:
    with CheckpointManager(memory) as manager:
        manager.save_async({"x": 1}, 3)
        with pytest.raises(StepExists):
            manager.save_async({"x": 2}, 3)
    with CheckpointManager(memory) as manager:
        with pytest.raises(StepExists):
            manager.save({"x": 2}, 3)
        manager.save({"x": 3}, 4)
        assert manager.steps() == [3, 4]
        target = {"x": 0}
        manager.restore(target, 3)
        assert target == {"x": 1}


def test_a_run_that_forgets_to_restore_is_led_to_restore_first(tmp_path: Path) -> None:
    """Another number, which a step of its own run needs, would hide the existing run."""
    with CheckpointManager(tmp_path) as manager:
        for step in (8, 16):
            manager.save({"x": step}, step)
        with pytest.raises(StepExists, match="save under another step"):
            manager.save({"x": 2}, 16)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(StepExists, match=r"step 8 .* by an earlier job: restore first") as info:
            manager.save({"x": 2}, 8)
        assert "another step" not in str(info.value)
        assert info.value.earlier
        manager.restore({"x": 0}, 16)
        with pytest.raises(StepExists, match="save the steps after the restored one"):
            manager.save({"x": 2}, 16)
        manager.save({"x": 2}, 24)
    assert [ref.step for ref in sorted(committed(open_backend(str(tmp_path))))] == [8, 16, 24]


def test_after_going_back_later_steps_may_be_lived_again_and_the_younger_wins(memory: str) -> None:
    with CheckpointManager(memory) as manager:
        for step in (1, 2, 3):
            manager.save({"x": f"old {step}"}, step)
    with CheckpointManager(memory) as manager:
        target: dict[str, Any] = {"x": ""}
        manager.restore(target, 1)
        with pytest.raises(StepExists):
            manager.save({"x": "again"}, 1)
        manager.save({"x": "new 2"}, 2)
        manager.save({"x": "new 3"}, 3)
    with CheckpointManager(memory) as manager:
        assert manager.steps() == [1, 2, 3]
        for restored, expected in [(1, "old 1"), (2, "new 2"), (3, "new 3"), (None, "new 3")]:
            manager.restore(target, restored)
            assert target["x"] == expected


# -- one root, one job -----------------------------------------------------------------------------


def test_a_second_manager_on_the_root_of_a_busy_one_is_refused_and_writes_nothing(
    near: Path, far: Path, gated: Gated
) -> None:
    gated.open.clear()
    with CheckpointManager([near, far], commit_timeout_seconds=0.5) as first:
        pending = first.save_async({"x": 1}, 1)
        pending.result(20, tier=str(near))
        before = sorted(str(path) for path in near.rglob("*"))
        with CheckpointManager(near) as second:
            assert second.restore({"x": 0}) is not None  # reading needs no claim
            with pytest.raises(RootInUse, match="of this very process"):
                second.save({"x": 2}, 2)
        assert sorted(str(path) for path in near.rglob("*")) == before
        gated.open.set()
        pending.result(20)
        first.save({"x": 3}, 3)
    with CheckpointManager(near) as third:  # close has freed the root
        third.save({"x": 4}, 4)
        assert third.steps() == [1, 3, 4]


def test_a_manager_without_a_save_under_way_gives_its_root_up_to_a_second_one(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The cell of a notebook is run again, and something still refers to the first manager."""
    first = CheckpointManager(root)
    first.save({"x": 1}, 1)
    with CheckpointManager(root) as second:
        second.restore({"x": 0})
        assert "belongs to a job that is alive" not in caplog.text
        second.save({"x": 2}, 2)
        assert "is taken from another CheckpointManager of this process" in caplog.text
        with pytest.raises(RootInUse, match="of this very process"):
            first.save({"x": 3}, 3)
        second.save({"x": 4}, 4)
        first.close()
        second.save({"x": 5}, 5)
        assert second.steps() == [1, 2, 4, 5]


def test_a_restore_waits_for_the_saves_of_an_earlier_manager_of_the_process(
    memory: str, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """The cell of a notebook is run again while a save is under way."""
    first = CheckpointManager(memory)
    pending = first.save_async({"x": 1}, 4)
    threading.Timer(0.4, gate.set).start()
    with CheckpointManager(memory) as second:
        report = second.restore(state := {"x": 0})
        assert report is not None
        assert report.step == 4
        assert pending.result() is not None
        second.save_async(state).result()
        assert second.steps() == [4, 5]
    assert "alive" not in caplog.text


def test_a_restore_waits_until_one_of_its_own_tiers_has_the_save_of_an_earlier_manager(
    near: Path, far: Path, gated: Gated
) -> None:
    """The nearer tier is left out of the cell that is run again."""
    with CheckpointManager([near, far]) as first:
        pending = first.save_async({"x": 1}, 4)
        pending.result(20, tier=str(near))
        threading.Timer(0.4, gated.open.set).start()
        with CheckpointManager(far) as second:
            report = second.restore({"x": 0})
            assert report is not None
            assert report.step == 4


def test_a_restore_of_a_given_step_waits_for_no_save_of_another_manager(
    memory: str, gate: threading.Event
) -> None:
    """A second manager evaluates an older step beside the training."""
    gate.set()
    first = CheckpointManager(memory)
    first.save({"x": 1}, 1)
    gate.clear()
    pending = first.save_async({"x": 2}, 2)
    with CheckpointManager(memory) as second:
        second.restore(state := {"x": 0}, step=1)
        assert state["x"] == 1
        assert not pending.done()
        gate.set()
    first.close()


def test_a_save_waits_for_the_saves_of_an_earlier_manager_of_the_process(
    memory: str, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    first = CheckpointManager(memory)
    first.save_async({"x": 1}, 1)
    threading.Timer(0.4, gate.set).start()
    with CheckpointManager(memory) as second:
        second.save({"x": 2}, 2)
        assert second.steps() == [1, 2]
    assert "waits for the saves" in caplog.text


def test_a_manager_that_nobody_refers_to_gives_its_root_up(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The cell of a notebook has failed before ``close``, and is run again."""

    def cell(step: int) -> weakref.ref[CheckpointManager]:
        manager = CheckpointManager(root)
        manager.save({"x": step}, step)
        return weakref.ref(manager)

    for step in (1, 2, 3):
        manager = cell(step)
        gc.collect()
        assert manager() is None
        owner = read_owner(open_backend(root))
        assert owner is not None
        assert not owner.alive
    assert "is taken from" not in caplog.text
    with CheckpointManager(root) as last:
        assert last.steps() == [1, 2, 3]


_LIVES = """
import os, sys
import torch
from ckpt import CheckpointManager
root, life, slots = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
state = {"x": torch.zeros(9000), "step": 0}
manager = CheckpointManager(["memory", root])
report = manager.restore(state)
assert (report.step if report else 0) == life - 1
manager.save(state, life)
slots = [name for name in os.listdir("/dev/shm") if name.startswith(f"ckpt-slot-{os.getpid()}-")]
print(len(slots), flush=True)
if life < int(os.environ["NUMBER"]):
    os.execv(sys.executable, [sys.executable, "-c", os.environ["LIVES"], root, str(life + 1)])
manager.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lives", [2, *torture(3)])
def test_a_program_that_restarts_itself_by_execv_goes_on_and_leaves_no_slots(
    root: str, monkeypatch: pytest.MonkeyPatch, lives: int
) -> None:
    monkeypatch.setenv("LIVES", _LIVES)
    monkeypatch.setenv("NUMBER", str(lives))
    said = run_code(_LIVES, root, "1")
    assert len(set(said.split())) == 1, said
    assert whole(root) == [*range(1, lives + 1)]


def test_a_job_is_told_at_the_restore_that_the_root_belongs_to_a_living_one(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(root) as manager:
        manager.save({"x": 1}, 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        process = Process.of(other.pid)
        fields = {"pid": process.pid, "started": process.start_time}
        claim(
            open_backend(root),
            msgspec.structs.replace(Owner.of_this_process("otherzzzzzzz"), **fields),
        )
        with CheckpointManager(root) as manager:
            assert manager.restore({"x": 0}) is not None
            assert f"{root} belongs to a job that is alive (attempt otherzzzzzzz" in caplog.text
        other.kill()
    caplog.clear()
    with CheckpointManager(root) as manager:
        assert manager.restore({"x": 0}) is not None
    assert "alive" not in caplog.text


def test_a_closed_manager_says_so(memory: str) -> None:
    manager = CheckpointManager(memory)
    manager.save({"x": 1})
    manager.close()
    manager.close()
    calls: list[Callable[[], object]] = [
        lambda: manager.save_async({"x": 1}),
        lambda: manager.save({"x": 1}),
        lambda: manager.restore({"x": 1}),
        manager.steps,
        manager.latest_step,
        manager.fence,
    ]
    for call in calls:
        with pytest.raises(ManagerClosed):
            call()


def test_a_save_under_way_is_finished_by_close(root: str) -> None:
    manager = CheckpointManager(root)
    pending = manager.save_async(job(width=512))
    manager.close()
    assert pending.done()
    assert pending.exception() is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_child_the_manager_refuses_and_close_harms_nobody(root: str) -> None:
    with CheckpointManager(root) as manager:
        manager.save({"x": torch.ones(3)}, 1)
        assert until(lambda: len(own_slots()) == 2)  # the second one is made in the background
        slots = own_slots()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(ConfigError, match="fork"):
                    manager.save_async({"x": 1}, 2)
                manager.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert own_slots() == slots
        assert (Path(root) / OWNER).exists()
        manager.save({"x": torch.ones(3)}, 2)
        assert manager.steps() == [1, 2]


_STARTS_A_WORKER = """
import multiprocessing
import sys

from ckpt import CheckpointManager


class Readers:  # as a data loader of torchdata that has not been read from
    def state_dict(self):
        self.worker = multiprocessing.get_context("fork").Process(target=int)
        self.worker.start()
        return {"position": 0}

    def load_state_dict(self, state):
        raise AssertionError(state)


readers = Readers()
with CheckpointManager(sys.argv[1]) as manager:
    manager.save({"readers": readers}, 1)
    readers.worker.join()
    print("steps", manager.steps(), "worker", readers.worker.exitcode)
"""


def test_a_worker_that_the_state_starts_inside_of_a_save_ends_without_an_error(root: str) -> None:
    said = run_code(_STARTS_A_WORKER, root)
    assert said.splitlines() == ["steps [1] worker 0"]


# -- places and settings ---------------------------------------------------------------------------


def test_two_tiers_both_get_it_and_either_can_give_it(tmp_path: Path, memory: str) -> None:
    folder = str(tmp_path / "run")
    state = job()
    train(state)
    expected = copy_of(state)
    with CheckpointManager([memory, Tier(folder)]) as manager:
        manager.save(state, 5)
    for root in (memory, folder):
        assert_equal(copy_of(back(root)), expected)
    for path in Path(folder).rglob("*.safetensors"):
        path.write_bytes(b"")
    target = job(seed=3)
    with CheckpointManager([folder, memory]) as manager:
        report = manager.restore(target)
        assert report is not None
        assert report.tier == memory
        assert report.skipped == ()
        assert [repair.tier for repair in report.repaired] == [folder]
    assert_equal(copy_of(target), expected)


def test_a_tier_that_fails_does_not_undo_the_nearer_one(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, tmp_path / "far", [Rule(verb="finish", fault=Raise(OutOfSpace))])
    with CheckpointManager([memory, tmp_path / "far"]) as manager:
        with pytest.raises(OutOfSpace):
            manager.save({"x": torch.ones(3)}, 1)
        assert manager.steps() == [1]
        target = {"x": torch.zeros(3)}
        manager.restore(target)
        assert target["x"].tolist() == [1, 1, 1]


def test_the_same_place_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        CheckpointManager([tmp_path, str(tmp_path)])
    with pytest.raises(ConfigError):
        CheckpointManager([])


def test_a_manager_can_be_built_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt.toml").write_text(
        'root = "run"\n[save]\nslots = 1\nchunk_size = "2MiB"\n[metadata]\nteam = "speech"\n'
    )
    monkeypatch.chdir(tmp_path)
    with CheckpointManager.from_config() as manager:
        manager.save({"x": torch.zeros(3 << 20, dtype=torch.uint8)}, 1)
    backend = open_backend(str(tmp_path / "run"))
    manifest = read_manifest(backend, find(backend, 1)[0])
    assert bytes(manifest.metadata) == b'{"team":"speech"}'
    assert manifest.chunk_bytes == 2 << 20
    assert [chunk.nbytes for chunk in manifest.files[0].chunks[1:]] == [512 << 10] * 6
    (tmp_path / "ckpt.toml").write_text("[save]\nslots = 1\n")
    with pytest.raises(ConfigError, match=r"ckpt\.toml names no place"):
        CheckpointManager.from_config()
    (tmp_path / "ckpt.toml").unlink()
    with pytest.raises(ConfigError, match=rf"there is no ckpt\.toml in {tmp_path}"):
        CheckpointManager.from_config()


def test_a_setting_with_a_typing_error_is_answered_with_the_one_that_is_like_it() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'on_buzy'; did you mean on_busy\?"):
        CheckpointManager("runs", on_buzy="skip")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["$schema", 7])
def test_a_name_of_metadata_that_would_hide_the_others_is_refused(memory: str, name: Any) -> None:
    with pytest.raises(ConfigError, match="do not begin with"):
        CheckpointManager(memory, metadata={name: "x"})


def test_metadata_is_kept_and_must_be_plain(memory: str) -> None:
    with CheckpointManager(memory, metadata={"run": 7, "tags": ["a"]}) as manager:
        manager.save({"x": 1})
    backend = open_backend(memory)
    assert (
        bytes(read_manifest(backend, find(backend, None)[0]).metadata) == b'{"run":7,"tags":["a"]}'
    )
    with pytest.raises(UnsupportedValue, match="metadata/f"):
        CheckpointManager(memory, metadata={"f": print})


@pytest.mark.parametrize(
    "setting",
    [{"slots": 0}, {"on_busy": "later"}, {"commit_timeout_seconds": -1}, {"chunk_size": 3}],
)
def test_a_wrong_setting_is_told_when_the_manager_is_built(
    memory: str, setting: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        CheckpointManager(memory, **setting)
    with pytest.raises(ConfigError, match=next(iter(setting))):
        CheckpointManager(memory, config=SaveConfig(), **setting)


def test_a_launchers_world_without_a_process_group_is_refused(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="init_process_group"):
        CheckpointManager(memory)


# -- observers -------------------------------------------------------------------------------------


def test_observers_are_told_what_happens_and_cannot_break_it(
    memory: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[Event] = []

    def broken(event: Event) -> None:
        raise KeyError("mine")

    faults(Rule(verb="put", key="step-.*2\\..*json", fault=Raise(OutOfSpace)))
    with CheckpointManager(memory, observers=[broken, reported.append]) as manager:
        manager.save({"x": torch.ones(2)}, 1)
        with pytest.raises(OutOfSpace):
            manager.save({"x": torch.ones(2)}, 2)
        manager.restore({"x": torch.zeros(2)})
    assert [type(event) for event in reported] == [
        SaveStaged,
        SaveCommitted,
        SaveStaged,
        TierMissed,
        SaveFailed,
        Restored,
    ]
    assert [event.step for event in reported] == [1, 1, 2, 2, 2, 1]
    staged, committed = reported[:2]
    assert isinstance(staged, SaveStaged)
    assert staged.tiers == (memory,)
    assert staged.stall_seconds > 0
    assert staged.slot_bytes >= staged.nbytes == 4096 + 8
    assert isinstance(committed, SaveCommitted)
    assert committed.tier == memory
    assert committed.nbytes == 4096 + 8
    assert committed.durable_seconds > 0
    assert "observer failed" in caplog.text


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_the_stall_in_an_event_includes_the_call_even_if_the_copy_ends_before_it_returns(
    memory: str, monkeypatch: pytest.MonkeyPatch, overlap: Any
) -> None:
    reported: list[Event] = []
    staged, begin = threading.Event(), HandOver.begin

    def slow(hand_over: HandOver) -> None:
        begin(hand_over)
        assert staged.wait(30)

    def observe(event: Event) -> None:
        reported.append(event)
        staged.set()

    monkeypatch.setattr(HandOver, "begin", slow)
    with CheckpointManager(memory, observers=[observe], overlap=overlap) as manager:
        pending = manager.save_async({"x": torch.ones(2)}, 1)
        pending.result(30)
    event = reported[0]
    assert isinstance(event, SaveStaged)
    assert 0 < event.stall_seconds <= pending.stall_seconds


# -- for a long time -------------------------------------------------------------------------------


def own_slots() -> list[str]:
    names = os.listdir("/dev/shm")
    return sorted(name for name in names if name.startswith(f"ckpt-slot-{os.getpid()}-"))


def footprint() -> tuple[int, int, int, int]:
    """Return descriptors, threads, slots, and resident bytes."""
    gc.collect()
    process = psutil.Process()
    return (
        process.num_fds(),
        process.num_threads(),
        len(own_slots()),
        process.memory_info().rss,
    )


def test_a_hundred_saves_leave_memory_threads_and_descriptors_flat(root: str) -> None:
    state = job(width=256) | {"rng": PerRank(RngState()), "x": torch.zeros(1 << 20)}
    start = footprint()
    with CheckpointManager(root) as manager:

        def save(steps: Sequence[int]) -> None:
            for step in steps:
                pending = manager.save_async(state, step)
                train(state, step)
                if step % 7 == 0:
                    pending.result(60)
            pending.result(60)

        save(range(20))
        warm = footprint()
        save(range(20, 120))
        after = footprint()
        assert after[:3] == warm[:3]
        assert after[3] - warm[3] < 8 << 20
        assert manager.steps() == list(range(120))
    end = footprint()
    assert end[2] == start[2]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-")]


def test_building_and_closing_managers_leaks_nothing(root: str) -> None:
    def once(step: int) -> None:
        with CheckpointManager(root) as manager:
            manager.save({"x": torch.ones(1000)}, step)
            manager.restore({"x": torch.zeros(1000)})

    for step in range(3):
        once(step)
    warm = footprint()
    for step in range(3, 23):
        once(step)
    assert footprint()[:3] == warm[:3]


def test_a_manager_that_is_just_dropped_still_finishes_its_save(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    pending = CheckpointManager(root).save_async(job())
    assert pending.result(60).exception() is None
    assert not caplog.records


def test_every_error_is_one_of_ours(memory: str) -> None:
    with CheckpointManager(memory) as manager:
        wrong: list[Any] = [{"x": object()}, [], {"x": torch.empty(1, device="meta")}]
        for state in wrong:
            with pytest.raises(CkptError):
                manager.save_async(state)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_is_not_copied(memory: str, duplicate: Callable[[object], object]) -> None:
    """A copy would share threads, slots and the ledger of saves with this one."""
    with CheckpointManager(memory) as manager:
        with pytest.raises(TypeError, match="build one in each process"):
            duplicate(manager)
        manager.save({"step": 1}, step=1)


def test_a_torch_that_was_not_tested_is_warned_of_once(
    memory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version in ("2.9.1+cu128", "2.15.0", "2.10.0a0+git", "2.99.0", "2.99.1"):
        monkeypatch.setattr(torch, "__version__", version)
        CheckpointManager(memory).close()
    said = [record.getMessage() for record in caplog.records if "was tested" in record.getMessage()]
    assert len(said) == 1
    assert "torch 2.99.0 is installed" in said[0]
    assert "2.9 to 2.15" in said[0]


def test_a_step_lower_than_the_one_before_is_warned_of(
    memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(memory) as manager:
        for step in (1, 5, 3, 4):
            manager.save({"step": step}, step=step)
    said = [text for text in caplog.messages if "is saved after step" in text]
    assert said == ["ckpt: step 3 is saved after step 5: a restore takes the highest number"]
