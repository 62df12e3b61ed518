"""Which streams, devices and memory of an accelerator a save uses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, PerRank, RngState
from ckpt.staging import copies
from ckpt.staging.copies import Copy, LateCopies, copy_now
from ckpt.staging.device import background, is_ordered, side_stream, use_stream
from ckpt.staging.slot import Slot
from ckpt.state.walk import plan_cache
from tests.device.accelerator import SECONDS, content, device, keep_busy, trained

pytestmark = pytest.mark.device


def other() -> torch.device:
    if torch.accelerator.device_count() < 2:
        pytest.skip("there is one device only")
    return device(1)


def cuda() -> torch.device:
    if device().type != "cuda":
        pytest.skip("page-locked memory and captures are CUDA's own")
    return device()


def restored(
    root: str, step: int = 1, place: torch.device | None = None
) -> dict[str, torch.Tensor]:
    state = trained(place or device(), seed=9)
    with CheckpointManager(root) as manager:
        manager.restore(state, step)
    return content(state)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


# -- how long a call takes -------------------------------------------------------------------------


def test_a_call_that_copies_nothing_from_the_device_does_not_wait_for_what_is_queued(
    root: str, place: torch.device
) -> None:
    state = trained(place)
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        for number, seconds in enumerate(SECONDS, 2):
            under_way = keep_busy(seconds)
            pending = manager.save_async(state, number)
            waited = under_way.query()
            pending.result(60)
            if not waited:
                return
    pytest.fail("save_async() returned when all that was queued was done")


def test_a_step_does_not_wait_on_the_cpu_for_copies_that_are_only_launched(
    root: str, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current stream waits, and the thread does not."""
    state = trained(place)
    side = side_stream(place)
    assert side is not None
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        for number, seconds in enumerate(SECONDS, 2):
            under_way = keep_busy(seconds, side)
            pending = manager.save_async(state, number)
            manager._fence.wait()
            waited = under_way.query()
            pending.result(60)
            if not waited:
                return
    pytest.fail("the fence returned when the copies were done")


# -- streams ---------------------------------------------------------------------------------------


def test_a_device_has_one_side_stream(place: torch.device) -> None:
    side = side_stream(place)
    assert side is not None
    assert side is side_stream(torch.device(place.type, 0))
    assert side != torch.accelerator.current_stream(place)


def test_threads_may_be_on_one_stream_at_once(place: torch.device) -> None:
    stream = torch.Stream(device=place)
    inside = threading.Barrier(2)
    seen: list[bool] = []

    def work() -> None:
        before = torch.accelerator.current_stream(place)
        with use_stream(stream):
            inside.wait(20)
            seen.append(torch.accelerator.current_stream(place) == stream)
            inside.wait(20)
        seen.append(torch.accelerator.current_stream(place) == before)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_a_device_without_streams_is_copied_while_the_caller_waits(
    root: str, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPS is such a device, and each device that torch.accelerator does not know."""
    monkeypatch.setattr(copies, "side_stream", lambda _: None)
    monkeypatch.setattr(plan_cache, "is_ordered", lambda at: at.type == "cpu")
    state = trained(place)
    keep_busy(SECONDS[0])
    for parameter in state["model"].parameters():
        parameter.data.fill_(3)
    with CheckpointManager(root) as manager:
        pending = manager.save_async(state, 1)
        expected = content(state)
        for parameter in state["model"].parameters():
            parameter.data.fill_(4)
        pending.result(60)
    assert_same(restored(root), expected)


LAZY: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "conjugated": lambda place: torch.complex(torch.ones(4), torch.arange(4.0)).to(place).conj(),
    "negated": lambda place: torch._neg_view(torch.arange(4.0).to(place)),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("late", [False, True])
def test_what_is_lazy_is_resolved_before_it_is_copied(
    place: torch.device, kind: str, late: bool
) -> None:
    if place.type == torch._C._get_privateuse1_backend_name():
        pytest.skip(
            "an accelerator outside of torch need not know lazy views: a simulated one crashes"
        )
    lazy = LAZY[kind](place)
    assert lazy.is_conj() or lazy.is_neg()
    expected = lazy.resolve_conj().resolve_neg().cpu()
    made = torch.zeros_like(expected)
    copy = Copy("lazy", lazy, made, lazy)
    if late:
        side = side_stream(place)
        assert side is not None
        keep_busy(SECONDS[0], side)
        beside = LateCopies([place])
        beside.wait_for_queued_work()
        beside.run([copy])
        beside.synchronize()
    else:
        copy_now([copy], [place])
    assert torch.equal(made, expected)


def test_parts_and_odd_strides_come_over(root: str, place: torch.device) -> None:
    whole = torch.arange(4096.0, device=place).reshape(64, 64)
    state = {"t": whole.t(), "part": whole[3:9, 5:11], "one": whole[0, 0], "none": whole[:0]}
    into = {name: torch.zeros_like(value.cpu()) for name, value in state.items()}
    on_device = {
        name: torch.zeros(value.shape[::-1], device=place).t() for name, value in state.items()
    }
    with CheckpointManager(root) as manager:
        manager.save(dict(state), 1)
        manager.restore(into, 1)
        manager.restore(on_device, 1)
    for name, value in state.items():
        assert torch.equal(into[name], value.cpu())
        assert torch.equal(on_device[name].cpu(), value.cpu())


def test_what_is_restored_on_a_stream_of_the_users_own_is_seen_there(
    root: str, place: torch.device
) -> None:
    state = {"x": torch.arange(4096.0, device=place).reshape(64, 64)}
    with CheckpointManager(root) as manager:
        manager.save(dict(state), 1)
        with torch.Stream(device=place):
            into = {"x": torch.zeros(64, 64, device=place).t()}
            manager.restore(into, 1)
            found = (into["x"] + 1).cpu()
    assert torch.equal(found, torch.arange(4096.0).reshape(64, 64) + 1)


def test_a_state_too_large_for_its_buffer_passes_through_in_waves(
    root: str, place: torch.device
) -> None:
    state: dict[str, Any] = trained(place, width=4096)
    expected = content(state)
    with CheckpointManager(root, host_memory=192 << 20, slots=1) as manager:
        manager.save(state, 1)
    loaded = trained(place, seed=9, width=4096)
    with CheckpointManager(root) as manager:
        manager.restore(loaded, 1)
    assert_same(content(loaded), expected)


def test_the_generators_of_the_devices_come_back(root: str, place: torch.device) -> None:
    state = {"rng": PerRank(RngState())}
    torch.manual_seed(5)
    torch.randn(3, device=place)
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        expected = torch.randn(8, device=place).cpu()
        torch.randn(3, device=place)
        manager.restore(state, 1)
        assert torch.equal(torch.randn(8, device=place).cpu(), expected)


# -- devices ---------------------------------------------------------------------------------------


def test_a_state_on_several_devices_is_as_it_was_at_the_call(
    root: str, place: torch.device
) -> None:
    second = other()
    states = {
        "a": trained(place),
        "b": trained(second, seed=1),
        "c": trained(torch.device("cpu"), seed=2),
    }
    expected = {name: content(state) for name, state in states.items()}
    for at in (place, second):
        side = side_stream(at)
        assert side is not None
        keep_busy(SECONDS[0], side)
    with CheckpointManager(root) as manager:
        pending = manager.save_async(states, 1)
        for state in states.values():
            state["optimizer"].step()
        pending.result(60)
        loaded = {
            "a": trained(place, seed=9),
            "b": trained(second, seed=9),
            "c": trained(torch.device("cpu"), seed=9),
        }
        manager.restore(loaded, 1)
    for name, state in loaded.items():
        assert_same(content(state), expected[name])


def test_background_threads_work_on_the_device_of_the_state(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = other()
    seen: list[int] = []
    run = LateCopies.run

    def look(self: LateCopies, todo: list[Copy]) -> None:
        seen.append(torch.accelerator.current_device_index())
        run(self, todo)

    monkeypatch.setattr(LateCopies, "run", look)
    with CheckpointManager(root) as manager:
        manager.save(trained(second), 1)
    assert set(seen) == {1}
    assert torch.accelerator.current_device_index() == 0


def test_the_device_of_a_thread_is_its_own_again(place: torch.device) -> None:
    second = other()
    with background(second):
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0


# -- memory ----------------------------------------------------------------------------------------


def test_a_slot_is_pinned_for_the_device_and_again_when_it_was_cut(place: torch.device) -> None:
    cuda()
    path = f"/dev/shm/ckpt-test-{uuid.uuid4().hex}"
    slot = Slot(8 << 20, path)
    try:
        slot.prefault()
        slot.pin([place])
        assert slot.is_pinned
        assert slot.tensor.is_pinned()
        os.truncate(path, 2 << 20)
        slot.regrow()
        assert slot.is_pinned
        source = torch.arange(8 << 20, device=place).to(torch.uint8)
        slot.tensor.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(place)
        assert torch.equal(slot.tensor, source.cpu())
    finally:
        slot.close()
    assert not slot.is_pinned


def test_a_manager_pins_what_it_copies_to(root: str, place: torch.device) -> None:
    cuda()
    with CheckpointManager(root) as manager:
        state = trained(place)
        manager.prepare(state)
        manager.save(state, 1)
        assert all(slot.is_pinned for slot in manager._saver.slots.slots)


HOST_STATE = """
import ctypes, torch
from ckpt import CheckpointManager
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
with CheckpointManager("memory://host") as manager:
    for step in range(3):
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        manager.save({"model": model, "optimizer": optimizer}, step)
    manager.restore({"model": model, "optimizer": optimizer})
    assert not any(slot.is_pinned for slot in manager._saver.slots.slots)
assert not torch.cuda.is_initialized()
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
driver.cuInit(0)
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 0, "a context was made"
"""


def test_a_state_in_host_memory_makes_no_context() -> None:
    cuda()
    done = subprocess.run(
        [sys.executable, "-c", HOST_STATE],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr


def test_cuda_calls_of_a_thread_are_relaxed_inside_and_as_before_outside() -> None:
    place = cuda()
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode

    def mode() -> int:
        held = ctypes.c_int(0)
        exchange(ctypes.byref(held))
        was = held.value
        exchange(ctypes.byref(held))
        return was

    with background(place):
        assert mode() == 2
    assert mode() == 0


def test_every_ordered_device_says_so(place: torch.device) -> None:
    assert is_ordered(place)
    assert is_ordered(torch.device("cpu"))
    assert not is_ordered(torch.device("meta"))
