from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch

from ckpt.errors import TensorChanged
from ckpt.staging.copies import Copy
from ckpt.staging.fence import Fence
from ckpt.staging.snapshot import Batch, Snapshot

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def trained(build=OPTIMIZERS["SGD"]) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return parameter, build([parameter])


def snapshot_of(parameter: torch.nn.Parameter) -> tuple[Snapshot, torch.Tensor]:
    target = torch.zeros(4)
    snapshot = Snapshot(
        1,
        [
            Batch(
                eager=(), late_copies=(Copy("p", parameter.detach(), target, parameter),), checks=()
            )
        ],
    )
    snapshot.copy_eager()
    return snapshot, target


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_does_not_pass_before_the_copy_and_what_is_saved_is_from_before_it(name):
    parameter, optimizer = trained(OPTIMIZERS[name])
    fence = Fence()
    fence.guard([optimizer])
    snapshot, target = snapshot_of(parameter)
    fence.watch(snapshot)
    stepped = threading.Event()
    trainer = threading.Thread(target=lambda: (optimizer.step(), stepped.set()), daemon=True)
    trainer.start()
    assert not stepped.wait(0.1)
    assert parameter.detach().tolist() == [1] * 4
    snapshot.copy_late()
    assert stepped.wait(10)
    trainer.join()
    snapshot.wait_landed(0)
    assert target.tolist() == [1] * 4
    assert parameter.detach().tolist() != [1] * 4


def test_without_a_snapshot_in_flight_a_step_passes():
    parameter, optimizer = trained()
    fence = Fence()
    fence.guard([optimizer])
    optimizer.step()
    snapshot, _ = snapshot_of(parameter)
    snapshot.copy_late()
    fence.watch(snapshot)
    optimizer.step()
    assert parameter.detach()[0] < 0.9


def test_a_step_waits_for_every_snapshot_in_flight():
    parameter, optimizer = trained()
    fence = Fence()
    fence.guard([optimizer])
    snapshots = [snapshot_of(parameter)[0] for _ in range(3)]
    for snapshot in snapshots:
        fence.watch(snapshot)
    stepped = threading.Event()
    trainer = threading.Thread(target=lambda: (optimizer.step(), stepped.set()), daemon=True)
    trainer.start()
    for snapshot in reversed(snapshots):
        assert not stepped.wait(0.03)
        snapshot.copy_late()
    assert stepped.wait(10)
    trainer.join()


def test_a_failed_snapshot_lets_training_go_on():
    parameter, optimizer = trained()
    fence = Fence()
    fence.guard([optimizer])
    broken = Snapshot(
        1,
        [
            Batch(
                eager=(),
                late_copies=(Copy("p", torch.ones(3), torch.ones(4), parameter),),
                checks=(),
            )
        ],
    )
    fence.watch(broken)
    broken.copy_late()
    optimizer.step()


def test_wait_is_the_fence_for_those_without_an_optimizer():
    parameter, _ = trained()
    fence = Fence()
    snapshot, _ = snapshot_of(parameter)
    fence.watch(snapshot)
    threading.Timer(0.05, snapshot.copy_late).start()
    fence.wait()
    assert snapshot.has_landed


def test_an_optimizer_is_hooked_once():
    _, optimizer = trained()
    fence = Fence()
    for _ in range(3):
        fence.guard([optimizer, optimizer])
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_every_optimizer_is_hooked_and_all_hooks_are_removed():
    optimizers = [trained()[1] for _ in range(3)]
    fence = Fence()
    fence.guard(optimizers)
    assert [len(optimizer._optimizer_step_pre_hooks) for optimizer in optimizers] == [1, 1, 1]
    fence.remove()
    assert [len(optimizer._optimizer_step_pre_hooks) for optimizer in optimizers] == [0, 0, 0]
    assert [len(optimizer._optimizer_step_post_hooks) for optimizer in optimizers] == [0, 0, 0]
    fence.guard(optimizers[:1])
    assert len(optimizers[0]._optimizer_step_pre_hooks) == 1


def test_hooks_of_others_stay():
    _, optimizer = trained()
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    fence = Fence()
    fence.guard([optimizer])
    fence.remove()
    optimizer.step()
    assert called == [1]


def test_a_fence_does_not_keep_an_optimizer_alive():
    parameter, optimizer = trained()
    fence = Fence()
    fence.guard([optimizer])
    alive = weakref.ref(optimizer)
    del optimizer, parameter
    gc.collect()
    assert alive() is None
    fence.remove()


def test_a_snapshot_that_has_landed_is_not_held_against_a_step_after_the_next_one():
    """It is still being written when the next one is taken. Its last comparison of the versions
    comes after the step.
    """
    parameter, optimizer = trained()
    fence = Fence()
    fence.guard([optimizer])
    first, target = snapshot_of(parameter)
    fence.watch(first)
    first.copy_late()
    second, _ = snapshot_of(parameter)
    fence.watch(second)
    second.copy_late()
    optimizer.step()
    first.settle()
    second.settle()
    assert target.tolist() == [1] * 4


def test_a_change_before_the_next_one_is_still_seen():
    parameter, _ = trained()
    fence = Fence()
    first, _ = snapshot_of(parameter)
    fence.watch(first)
    first.copy_late()
    with torch.no_grad():
        parameter.add_(1)
    fence.watch(snapshot_of(parameter)[0])
    with pytest.raises(TensorChanged):
        first.settle()


def test_a_snapshot_is_let_go_when_a_step_has_passed_it_and_when_hooks_are_removed():
    """It keeps its slot in use."""
    parameter, optimizer = trained()
    fence = Fence()
    fence.guard([optimizer])
    for release in (optimizer.step, fence.remove):
        snapshot, _ = snapshot_of(parameter)
        fence.watch(snapshot)
        snapshot.copy_late()
        alive = weakref.ref(snapshot)
        del snapshot
        assert alive() is not None
        release()
        assert alive() is None


def test_a_forked_child_does_not_wait_for_a_copy_that_nobody_makes_there():
    parameter, optimizer = trained()
    fence = Fence()
    fence.guard([optimizer])
    fence.watch(snapshot_of(parameter)[0])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            optimizer.step()
            code = 0
        finally:
            os._exit(code)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert (ended, status) == (child, 0)
