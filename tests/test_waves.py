"""A state that is larger than the staging memory is staged in waves.

Its checkpoint is whole, and the stall is reported.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError, HostMemoryExhausted, OutOfSpace, StagingError
from ckpt.storage.testing import Raise, Rule
from tests.kit.stores import Wrapped, faulty, wrap_stores

MIB = 1 << 20
STAGING = 176 * MIB  # a ring of 128 MiB, the smallest
WIDTH = 4800  # weight and two moments of 88 MiB each


class Net(nn.Module):
    """A network whose state passes twice through the ring.

    One weight is not contiguous, and one tensor crosses the end of the ring.
    """

    odd: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(64, WIDTH).t())
        self.register_buffer("odd", torch.randn(WIDTH * 13 + 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.turned + self.odd[:64]


def trained() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step(net, optimizer)
    return net, optimizer


def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.step()


def backward(net: Net) -> None:
    net.zero_grad()
    net(torch.randn(2, WIDTH)).square().mean().backward()


def bits(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        found |= {
            f"{name}.{key}": value.clone() for key, value in optimizer.state[parameter].items()
        }
    return found


def assert_restores(root: Path, expected: dict[str, torch.Tensor]) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with CheckpointManager(root) as manager:
        assert manager.restore({"net": net, "optimizer": optimizer})
    found = bits(net, optimizer)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_a_state_larger_than_the_staging_memory_is_saved_whole(tmp_path, caplog, overlap):
    caplog.set_level(logging.INFO, "ckpt")
    net, optimizer = trained()
    with CheckpointManager(tmp_path, host_memory=STAGING, overlap=overlap) as manager:
        for number in range(2):
            expected = bits(net, optimizer)
            backward(net)
            pending = manager.save_async({"net": net, "optimizer": optimizer}, number)
            assert pending.nbytes > 128 * MIB
            if overlap == "off":
                pending.wait_staged(0)  # nothing is left to copy on return
            with torch.no_grad():
                net.odd.zero_()  # no optimizer owns it: it was copied, or set aside
            optimizer.step()  # it waits for the last wave itself
            stalled = pending.stall_seconds
            pending.result()
            # the call waited for most of the streaming, and the report says so
            assert pending.durable_seconds is not None
            assert stalled > pending.durable_seconds / 8
            assert_restores(tmp_path, expected)
    assert "in waves" in caplog.text


def test_what_has_passed_through_is_taken_to_the_next_tier_from_the_nearest(tmp_path):
    net, optimizer = trained()
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager([near, far], host_memory=STAGING) as manager:
        expected = bits(net, optimizer)
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        step(net, optimizer)
        pending.result()
    assert_restores(near, expected)
    assert_restores(far, expected)


def test_a_disk_that_fails_under_way_lets_the_optimizer_go_on(tmp_path, monkeypatch):
    net, optimizer = trained()
    rules = [
        Rule(verb="write", key="safetensors", nth=9, fault=Raise(OutOfSpace("k", "disk full")))
    ]
    faulty(monkeypatch, tmp_path, rules)
    with CheckpointManager(tmp_path, host_memory=STAGING) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        step(net, optimizer)
        with pytest.raises(OutOfSpace):
            pending.result(30)
        expected = bits(net, optimizer)
        manager.save({"net": net, "optimizer": optimizer}, 2)
    assert_restores(tmp_path, expected)


def test_a_change_behind_our_back_while_waves_pass_fails_that_save(tmp_path):
    net, optimizer = trained()
    with CheckpointManager(tmp_path, host_memory=STAGING) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        with torch.no_grad():
            net.turned.add_(1)
        with pytest.raises(CkptError, match="net/turned"):
            pending.result(30)


def test_a_store_that_needs_all_parts_at_once_says_what_to_do(tmp_path):
    net, optimizer = trained()
    with CheckpointManager(Tier(f"dir::file://{tmp_path}"), host_memory=STAGING) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        with pytest.raises(StagingError, match="nearer tier"):
            pending.result(30)


def test_too_little_for_waves_is_said_before_the_first_save(tmp_path):
    net, optimizer = trained()
    with CheckpointManager(tmp_path, host_memory=64 * MIB) as manager:
        with pytest.raises(HostMemoryExhausted, match="64 MiB may be used"):
            manager.prepare({"net": net, "optimizer": optimizer})
        with pytest.raises(HostMemoryExhausted):
            manager.save_async({"net": net, "optimizer": optimizer})


def test_a_part_that_fails_for_good_while_the_ring_is_full_holds_up_nobody(tmp_path, monkeypatch):
    """The other writer continues until the ring is full. Both get the error, and so do the copy and
    the fence.
    """
    net, optimizer = trained()
    failing = threading.Event()

    class Slow(Wrapped):
        def upload(self, key, size):
            upload = self.inner.upload(key, size)
            write = upload.write

            def stubborn(offset: int, data: memoryview) -> None:
                if offset == 8 * MIB and not failing.is_set():
                    time.sleep(1.0)  # the time that retries take
                    failing.set()
                    raise OutOfSpace(key, "disk full")
                write(offset, data)

            upload.write = stubborn
            return upload

    wrap_stores(monkeypatch, lambda url, store: Slow(store))
    with CheckpointManager(tmp_path, host_memory=STAGING) as manager:
        pending = manager.save_async({"net": net, "optimizer": optimizer}, 1)
        with pytest.raises(OutOfSpace):
            pending.result(30)
        step(net, optimizer)


def test_what_is_set_aside_is_set_aside_once(tmp_path):
    """The memory for an eager tensor of many pieces is taken once, not once for each piece."""
    from ckpt.staging import snapshot

    assert snapshot.SPARE == 4
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
