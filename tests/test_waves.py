"""A state that is larger than the staging memory is staged in waves.

Its checkpoint is whole, and the stall is reported.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError, ConfigError, HostMemoryExhausted, OutOfSpace, StagingError
from ckpt.storage.testing import Raise, Rule
from tests.kit import small_pieces
from tests.kit.marks import torture
from tests.kit.stores import Wrapped, faulty, wrap_stores
from tests.kit.waiting import until
from tests.kit.worlds import run_code

MIB = 1 << 20
SMALL = MIB // 128
"""What stands for a MiB in most tests, in ckpt too: all sizes are 128 times smaller."""
STAGING = 44  # MiB, for a ring of 32 MiB, the smallest
WIDTH = 4800  # weight and two moments of 88 MiB each


@pytest.fixture(params=[SMALL, pytest.param(MIB, marks=pytest.mark.torture)], ids=["small", "real"])
def mib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes that stand for a MiB."""
    if request.param != MIB:
        small_pieces.shrink(small_pieces.scaled(request.param), monkeypatch.setattr)
    return int(request.param)


class Net(nn.Module):
    """A network whose state passes several times through the ring.

    One weight is not contiguous, and one tensor crosses the end of the ring.
    """

    odd: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)
        self.turned = nn.Parameter(torch.randn(width // 75, width).t())
        self.register_buffer("odd", torch.randn(width * 13 + 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.turned + self.odd[: self.width // 75]


def trained(mib: int) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    net = Net(int(WIDTH * math.sqrt(mib / MIB)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step(net, optimizer)
    return net, optimizer


def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.step()


def backward(net: Net) -> None:
    net.zero_grad()
    net(torch.randn(2, net.width)).square().mean().backward()


def bits(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        found |= {
            f"{name}.{key}": value.clone() for key, value in optimizer.state[parameter].items()
        }
    return found


def assert_restores(root: Path, expected: dict[str, torch.Tensor]) -> None:
    net = Net(len(expected["linear.bias"]))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with CheckpointManager(root) as manager:
        assert manager.restore({"net": net, "optimizer": optimizer})
    found = bits(net, optimizer)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("overlap", "mib"),
    [
        ("auto", SMALL),
        ("off", SMALL),
        *torture(("auto", MIB), ("off", MIB)),
    ],
    indirect=["mib"],
)
def test_a_state_larger_than_the_staging_memory_is_saved_whole(tmp_path, caplog, overlap, mib):
    caplog.set_level(logging.INFO, "ckpt")
    net, optimizer = trained(mib)
    with CheckpointManager(tmp_path, host_memory=STAGING * mib, overlap=overlap) as manager:
        for number in range(2):
            expected = bits(net, optimizer)
            backward(net)
            pending = manager.save_async({"net": net, "optimizer": optimizer}, number)
            assert pending.nbytes > 128 * mib
            if overlap == "off":
                pending.wait_staged(0)  # nothing is left to copy on return
            with torch.no_grad():
                net.odd.zero_()  # no optimizer owns it: it was copied, or set aside
            optimizer.step()  # it waits for the last wave itself
            stalled = pending.stall_seconds
            pending.result()
            assert pending.durable_seconds is not None
            if mib == MIB:  # the call waited for most of the streaming, and the report says so
                assert stalled > pending.durable_seconds / 8
            assert_restores(tmp_path, expected)
    assert "in waves" in caplog.text


def test_what_has_passed_through_is_taken_to_the_next_tier_from_the_nearest(tmp_path, mib):
    net, optimizer = trained(mib)
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager([near, far], host_memory=STAGING * mib) as manager:
        expected = bits(net, optimizer)
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        step(net, optimizer)
        pending.result()
    assert_restores(near, expected)
    assert_restores(far, expected)


def test_a_disk_that_fails_under_way_lets_the_optimizer_go_on(tmp_path, monkeypatch, mib):
    net, optimizer = trained(mib)
    rules = [
        Rule(verb="write", key="safetensors", nth=9, fault=Raise(OutOfSpace("k", "disk full")))
    ]
    faulty(monkeypatch, tmp_path, rules)
    with CheckpointManager(tmp_path, host_memory=STAGING * mib) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        step(net, optimizer)
        with pytest.raises(OutOfSpace):
            pending.result(30)
        expected = bits(net, optimizer)
        manager.save({"net": net, "optimizer": optimizer}, 2)
    assert_restores(tmp_path, expected)


def test_a_change_behind_our_back_while_waves_pass_fails_that_save(tmp_path):
    net, optimizer = trained(MIB)
    with CheckpointManager(tmp_path, host_memory=STAGING * MIB) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        with torch.no_grad():
            net.turned.add_(1)
        with pytest.raises(CkptError, match="net/turned"):
            pending.result(30)


def test_a_store_that_needs_all_parts_at_once_says_what_to_do(tmp_path, mib):
    net, optimizer = trained(mib)
    with CheckpointManager(Tier(f"dir::file://{tmp_path}"), host_memory=STAGING * mib) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        with pytest.raises(StagingError, match="nearer tier"):
            pending.result(30)


def test_too_little_for_waves_is_said_before_the_first_save(tmp_path):
    net, optimizer = trained(MIB)
    with CheckpointManager(tmp_path, host_memory=32 * MIB) as manager:
        with pytest.raises(HostMemoryExhausted, match="32 MiB may be used"):
            manager.prepare({"net": net, "optimizer": optimizer})
        with pytest.raises(HostMemoryExhausted):
            manager.save_async({"net": net, "optimizer": optimizer})


def test_a_part_that_fails_for_good_while_the_ring_is_full_holds_up_nobody(
    tmp_path, monkeypatch, mib
):
    """The other writer continues until the ring is full. Both get the error, and so do the copy and
    the fence.
    """
    net, optimizer = trained(mib)
    failing = threading.Event()

    class Slow(Wrapped):
        def upload(self, key, size):
            upload = self.inner.upload(key, size)
            write = upload.write

            def stubborn(offset: int, data: memoryview) -> None:
                if offset == 8 * mib and not failing.is_set():
                    time.sleep(1.0)  # the time that retries take
                    failing.set()
                    raise OutOfSpace(key, "disk full")
                write(offset, data)

            upload.write = stubborn
            return upload

    wrap_stores(monkeypatch, lambda url, store: Slow(store))
    with CheckpointManager(tmp_path, host_memory=STAGING * mib) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        with pytest.raises(OutOfSpace):
            pending.result(30)
        step(net, optimizer)


def test_what_is_set_aside_is_set_aside_once(tmp_path):
    """The memory for an eager tensor of many pieces is taken once, not once for each piece."""
    from ckpt.staging import snapshot

    assert snapshot.SMALL_DIVISOR == 4
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(70 << 20))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    holder: Any = nn.Module()
    holder.weight = weight
    holder.register_buffer("buffer", torch.randn(17 << 20))  # 68 MiB: three pieces
    state = {"m": holder, "o": optimizer}
    with CheckpointManager(tmp_path, host_memory=400 * MIB) as manager:
        before = resident()
        pending = manager.save_async(state, 1)
        grown = resident() - before
        expected = holder.buffer.clone()
        holder.buffer.zero_()
        pending.result(60)
        assert grown < 288 * MIB + 2 * 68 * MIB
        holder.buffer.fill_(1)
        manager.restore(state)
    assert torch.equal(holder.buffer, expected)


def resident() -> int:
    with open("/proc/self/status") as file:
        return sum(
            int(line.split()[1]) << 10 for line in file if line.startswith(("RssAnon", "RssShmem"))
        )


class Disk:
    """A disk that stalls while it is not ``open``, and then fails with ``error``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.error = threading.Event(), cast("CkptError | None", None)
        self.open.set()
        disk = self

        class Gated(Wrapped):
            def upload(self, key, size):
                upload = self.inner.upload(key, size)
                write = upload.write

                def wait(offset: int, data: memoryview) -> None:
                    assert disk.open.wait(60)
                    if disk.error is not None:
                        raise disk.error
                    write(offset, data)

                upload.write = wait
                return upload

        wrap_stores(monkeypatch, lambda url, store: Gated(store))


@pytest.mark.slow
def test_a_large_state_takes_a_ring_and_more_only_where_the_optimizer_waits(
    tmp_path, monkeypatch, caplog, mib
):
    """The first optimizer comes when all is written, the second when nothing is."""
    caplog.set_level(logging.INFO, "ckpt")
    net, optimizer = trained(mib)
    gate = Disk(monkeypatch).open
    with CheckpointManager(tmp_path) as manager:
        manager.save({"net": net, "optimizer": optimizer}, 1)
        step(net, optimizer)
        slots = manager._saver.slots
        assert slots.nbytes == 48 * mib
        for number in (2, 3):
            expected = bits(net, optimizer)
            backward(net)
            gate.clear()
            pending = manager.save_async({"net": net, "optimizer": optimizer}, number)
            optimizer.step()  # no byte is written, and it does not wait for that
            assert 48 * mib < slots.nbytes <= pending.nbytes + 64 * mib
            gate.set()
            pending.result(60)
            assert_restores(tmp_path, expected)
        grown = slots.nbytes
        for number in range(4, 12):
            manager.save({"net": net, "optimizer": optimizer}, number)
            optimizer.step()
        assert slots.nbytes == 48 * mib < grown
    assert "spill memory are kept for images: the optimizer's step comes before" in caplog.text
    assert "the last 8 saves needed no more" in caplog.text


def test_a_save_that_fails_after_the_spill_has_grown_gives_the_memory_back(
    tmp_path, monkeypatch, mib
):
    net, optimizer = trained(mib)
    rules = [
        Rule(verb="write", key="safetensors", nth=9, fault=Raise(OutOfSpace("k", "disk full")))
    ]
    faulty(monkeypatch, tmp_path, rules)
    with CheckpointManager(tmp_path) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        step(net, optimizer)
        with pytest.raises(OutOfSpace):
            pending.result(30)
        slots = manager._saver.slots
        for number in range(2, 11):
            manager.save({"net": net, "optimizer": optimizer}, number)
            expected = bits(net, optimizer)
        assert slots.nbytes == 48 * mib
    assert_restores(tmp_path, expected)


LIMIT = 300
"""MiB: room for a ring and some frames of the spill, which are less than the image."""


@pytest.mark.parametrize("ends", ["the disk goes on", "the disk fails"])
def test_a_disk_that_stalls_holds_the_optimizer_only_when_the_spill_is_full(
    tmp_path, monkeypatch, ends, mib
):
    net, optimizer = trained(mib)
    disk = Disk(monkeypatch)
    with CheckpointManager(tmp_path, host_memory=LIMIT * mib) as manager:
        disk.open.clear()
        expected = bits(net, optimizer)
        backward(net)
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        assert pending.nbytes > 224 * mib
        training = threading.Thread(target=optimizer.step, daemon=True)
        training.start()
        slots = manager._saver.slots
        assert until(lambda: slots.nbytes == 224 * mib)
        assert training.is_alive()  # the rest of the image has no memory
        if ends == "the disk fails":
            disk.error = OutOfSpace("k", "disk full")
        disk.open.set()
        training.join(60)
        assert not training.is_alive()
        if ends == "the disk fails":
            with pytest.raises(OutOfSpace):
                pending.result(60)
            disk.error, expected = None, bits(net, optimizer)
            for number in range(2, 10):  # all of them are written before the optimizer's step
                manager.save({"net": net, "optimizer": optimizer}, number)
            assert slots.nbytes == 48 * mib
        else:
            pending.result(60)
    assert_restores(tmp_path, expected)


def test_a_full_shared_memory_takes_nothing_from_the_spill(tmp_path, monkeypatch, mib):
    net, optimizer = trained(mib)
    disk = Disk(monkeypatch)
    with CheckpointManager(tmp_path) as manager:
        manager.prepare({"net": net, "optimizer": optimizer})
        disk.open.clear()
        backward(net)
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        full = os.statvfs_result((4096, 4096, 1000, 0, 0, 10, 10, 10, 0, 255))
        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", lambda _: full)
            optimizer.step()  # no byte is written
        disk.open.set()
        pending.result(60)


def test_the_tier_in_memory_needs_whole_images(tmp_path):
    with pytest.raises(ConfigError, match="the tier 'memory' keeps whole images"):
        CheckpointManager([Tier("memory"), tmp_path], host_memory="0.2x")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", *torture("zstd")])
def test_a_header_larger_than_the_ring_is_saved_and_restored(tmp_path, codec):
    """The ring has 16 KiB, in pieces of 4 KiB, and the header of 3,000 tensors has 200 KiB or more.

    The data of the tensors has 60 KB. It is copied at the call, since no optimizer owns it.
    """
    program = """
import sys, torch
from tests.kit import small_pieces
small_pieces.shrink()
from ckpt import CheckpointManager, Tier

def state(number):
    return {f"layer.{i}.weight": torch.full((5,), float(i + number)) for i in range(3000)}

with CheckpointManager([Tier(sys.argv[1], codec=sys.argv[2])]) as manager:
    for step in (1, 2):
        manager.save({"model": state(step)}, step)
    slots = manager._saver.slots
    assert slots.nbytes < 100 << 10, slots.nbytes
    found = {"model": state(9)}
    assert manager.restore(found).step == 2
    assert all(torch.equal(found["model"][name], value) for name, value in state(2).items())
"""
    run_code(program, tmp_path, codec, timeout=30)


@pytest.mark.torture
def test_the_header_of_fifty_thousand_tensors_passes_through_the_smallest_ring(tmp_path):
    """The header has 140 MB, since the names are long."""
    names = [hashlib.shake_128(b"%d" % number).hexdigest(1400) for number in range(50_000)]
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    with CheckpointManager(tmp_path, host_memory=STAGING * MIB) as manager:
        pending = manager.save_async({"model": state}, 1)
        pending.result(300)
        assert pending.nbytes > 128 * MIB
        assert manager._saver.slots.nbytes <= 160 * MIB
        target = {"model": {name: torch.zeros(2) for name in names}}
        assert manager.restore(target)
    assert all(torch.equal(target["model"][name], value) for name, value in state.items())
