"""The order of events on an accelerator, on a simulated one.

While an image passes through a ring, no source is read after the optimizer's step was released, no
byte is written or hashed before its copy has landed, and no frame is used again before its piece is
written and hashed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ckpt.errors import StagingError
from ckpt.staging import copies
from ckpt.staging.copies import Copy
from ckpt.staging.snapshot import Batch, Snapshot
from ckpt.staging.window import RingWindow, _Ranges
from tests.kit.examples import examples
from tests.kit.rings import ring_of
from tests.kit.simulated_device import Event, History, SimulatedCopies

FRAME = 16
"""The bytes of a frame, of a group of copies, and of a part."""


class Save:
    """One save from a simulated device, with a thread that copies, one that writes, one that hashes
    and one that trains. The writer and the hasher go on as far as ``let_use`` allows.
    """

    def __init__(self, sizes: list[int], frames: int, spill: int, header: int) -> None:
        self.history, self.header = History(), header
        self.device = SimulatedCopies(self.history)
        edges = list(accumulate(sizes, initial=header))
        self.size = edges[-1]
        self.data = bytes((7 * i + 3) % 251 for i in range(self.size))
        self.sources = [
            torch.frombuffer(bytearray(self.data[a:b]), dtype=torch.uint8)
            for a, b in pairwise(edges)
        ]
        late = [
            _copy(source, start, low, min(low // FRAME * FRAME + FRAME, start + len(source)))
            for source, start in zip(self.sources, edges, strict=False)
            for low in _cuts(start, start + len(source))
        ]
        self.ring = ring_of(frames, spill, step=FRAME)
        self.window = RingWindow(self.ring, self.size, self.data[:header])
        batch = Batch(eager=(), late_copies=tuple(late), checks=())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(copies.LateCopies, "of", self._device_of)
            self.snapshot = Snapshot(1, [batch], self.window)
        self.allowed = {"write": 0, "hash": 0}
        self.bytes = {"write": b"", "hash": b""}
        self.has_stepped = False
        self.errors: list[BaseException] = []
        self.training = threading.Thread(target=self._run, args=(self.snapshot.fence,), daemon=True)
        users = [("write", self.window.note_written), ("hash", self.window.note_hashed)]
        self.threads = [
            threading.Thread(target=self._run, args=work, daemon=True)
            for work in [(self.snapshot.copy_late,), *((self._use, *user) for user in users)]
        ]

    def _device_of(self, _: object) -> SimulatedCopies:
        return self.device

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except StagingError as error:
            self.errors.append(error)

    def _use(self, act: str, note: Callable[[int, int], None]) -> None:
        change = self.history.change
        for number, start in enumerate(range(0, self.size, FRAME // 2)):
            with change:
                change.wait_for(partial(self._may_use, act, number))
            end = min(self.size, start + FRAME // 2)
            view = self.window.view(start, end)
            self.history.add(Event(act, start, end))
            self.bytes[act] += bytes(view)
            note(start, end)

    def _may_use(self, act: str, number: int) -> bool:
        return self.allowed[act] > number

    def start(self) -> None:
        self.snapshot.copy_eager()
        for thread in self.threads:
            thread.start()

    def let_use(self, act: str, count: int) -> None:
        with self.history.change:
            self.allowed[act] += count
            self.history.change.notify_all()

    def train(self) -> None:
        """Let the optimizer come: its step is launched when the fence returns."""
        if self.training.ident is None:
            self.training.start()

    def train_until_launched(self) -> None:
        """Let the optimizer come when one copy has landed at most. Return when the fence has, which
        needs spill memory for all other copies.
        """
        self.train()
        with self.window._change:
            assert self.window._change.wait_for(lambda: self.window.hurries, 30)
        self.device.let_first_land()
        self.training.join(30)
        assert not self.training.is_alive()

    def step(self) -> None:
        """Run the optimizer's step on the device, if it was launched and waits for nothing."""
        is_launched = self.training.ident is not None and not self.training.is_alive()
        if is_launched and not self.has_stepped and self.device.may_step():
            self.has_stepped = True
            self.history.add(Event("step"))
            for source in self.sources:
                source.data.fill_(255)

    def finish(self) -> None:
        """Let everything come to its end."""
        self.train()
        self.step()
        for act in self.allowed:
            self.let_use(act, self.size)
        self.step()
        self.device.let_all_land()
        for thread in (self.training, *self.threads):
            thread.join(30)
            assert not thread.is_alive()
        self.step()
        assert self.has_stepped
        self.window.abandon()
        self.ring.reclaim()

    def faults(self) -> list[str]:
        return self.history.faults(FRAME, self.size, self.header)


def _cuts(start: int, end: int) -> list[int]:
    return [start, *range(start // FRAME * FRAME + FRAME, end, FRAME)] if start < end else []


def _copy(source: torch.Tensor, start: int, low: int, high: int) -> Copy:
    form = torch.empty(high - low, dtype=torch.uint8, device="meta")
    part = slice(low - start, high - start)
    return Copy("x", source, form, source, end=high, part=part, address=source.data_ptr())


class Orders(RuleBasedStateMachine):
    """A save in any order of landings, writes, hashes, the optimizer's step and a failure."""

    save: Save

    @initialize(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
        frames=st.integers(3, 6),
        spill=st.integers(0, 12),
        header=st.integers(0, 3 * FRAME),
    )
    def begin(self, sizes: list[int], frames: int, spill: int, header: int) -> None:
        self.has_failed = False
        self.save = Save(sizes, frames, spill, header)
        self.save.start()

    @rule(count=st.integers(1, 4))
    def land(self, count: int) -> None:
        self.save.device.let_land(count)

    @rule(act=st.sampled_from(["write", "hash"]), count=st.integers(1, 6))
    def use(self, act: str, count: int) -> None:
        self.save.let_use(act, count)

    @rule()
    def train(self) -> None:
        self.save.train()

    @rule()
    def step(self) -> None:
        self.save.step()

    @precondition(lambda self: not self.has_failed)
    @rule()
    def fail(self) -> None:
        self.has_failed = True
        self.save.window.note_loss(StagingError("disk full"))

    def teardown(self) -> None:
        if hasattr(self, "save"):
            self.save.finish()
            assert self.save.faults() == []
            for read in self.save.bytes.values():
                assert self.save.data.startswith(read)
                assert self.has_failed or read == self.save.data
            assert self.has_failed or not self.save.errors


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=examples(60), stateful_step_count=20, deadline=None)


@contextmanager
def save_of(spill: int) -> Generator[Save]:
    """A save of eight pieces through three frames."""
    save = Save([5 * FRAME, 3 * FRAME], 3, spill, header=0)
    save.start()
    yield save
    save.finish()


def test_the_step_waits_on_the_device_for_the_copies_that_the_fence_has_launched():
    with save_of(spill=8) as save:
        save.train_until_launched()
        assert save.history.count("land") == 1
        assert save.ring.spill.count == 5
        save.step()
        assert not save.has_stepped
        save.device.let_land(6)
        save.step()
        assert not save.has_stepped
        save.device.let_land()
        save.step()
        assert save.has_stepped
    assert save.faults() == []
    assert save.bytes == {"write": save.data, "hash": save.data}


# -- the check can fail ----------------------------------------------------------------------------


def test_a_fence_that_does_not_wait_is_noticed(monkeypatch):
    monkeypatch.setattr(Snapshot, "fence", Snapshot.settle)
    with save_of(spill=8) as save:
        save.train()
        save.training.join(30)
        save.step()
        assert save.has_stepped
    assert any("after the step" in fault for fault in save.faults())


def test_a_step_that_does_not_wait_for_the_side_stream_is_noticed(monkeypatch):
    monkeypatch.setattr(SimulatedCopies, "hold_current_streams", lambda _: None)
    with save_of(spill=8) as save:
        save.train_until_launched()
        save.step()
        assert save.has_stepped
    assert any("after the step" in fault for fault in save.faults())


def test_a_group_that_is_reported_before_it_has_landed_is_noticed(monkeypatch):
    monkeypatch.setattr("tests.kit.simulated_device._Landing.synchronize", lambda _: None)
    monkeypatch.setattr(Snapshot, "_ask_witness", lambda *_: None)
    with save_of(spill=8) as save:
        save.let_use("write", 2)
        with save.history.change:
            assert save.history.change.wait_for(lambda: save.history.count("write"), 30)
    assert any("write of" in fault and "landed" in fault for fault in save.faults())


def test_a_frame_that_is_used_again_before_its_piece_is_hashed_is_noticed(monkeypatch):
    add = _Ranges.add

    def add_to_both(window: RingWindow, use: int, start: int, end: int) -> None:
        with window._change:
            add(window._uses[1 - use], start, end)
        original(window, use, start, end)

    original = RingWindow._note_use
    monkeypatch.setattr(RingWindow, "_note_use", add_to_both)
    with save_of(spill=0) as save:
        save.device.let_all_land()
        save.let_use("write", save.size)
        save.threads[1].join(30)
        save.window.fail(StagingError("the bytes to hash are gone"))
    assert any("still in use" in fault for fault in save.faults())
