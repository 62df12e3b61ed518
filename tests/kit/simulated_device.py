"""A device in host memory whose side stream runs one copy at a time, when a test lets it.

It stands for ``ckpt.staging.copies.LateCopies``, and writes down what happens in which order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Condition
from typing import NamedTuple

import torch

from ckpt.staging.copies import Copy

DEVICE = torch.device("cpu")


class Event(NamedTuple):
    """One event: bytes of the image have landed in the memory at ``address``, were handed to a
    writer or a hasher, or the optimizer's step has changed all sources.
    """

    act: str
    start: int = 0
    end: int = 0
    address: int = 0


class History:
    """The events in their order. Thread safety: any thread may call all methods."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.change = Condition()

    def add(self, event: Event) -> None:
        with self.change:
            self.events.append(event)
            self.change.notify_all()

    def count(self, act: str) -> int:
        with self.change:
            return sum(event.act == act for event in self.events)

    def faults(self, frame_bytes: int, size: int, header: int) -> list[str]:
        """Return what happened in a wrong order."""
        with self.change:
            return _faults(self.events, frame_bytes, size, header)


def _faults(events: Sequence[Event], frame_bytes: int, size: int, header: int) -> list[str]:
    landed = set(range(header))
    uses: dict[str, set[int]] = {"write": set(), "hash": set()}
    pieces: dict[int, int] = {}
    has_stepped, faults = False, list[str]()
    for event in events:
        extent = range(event.start, event.end)
        match event.act:
            case "step":
                has_stepped = True
            case "land":
                if has_stepped:
                    faults.append(f"{extent} was read from its source after the step")
                piece = event.start // frame_bytes
                frame = event.address - event.start % frame_bytes
                earlier = pieces.setdefault(frame, piece)
                own = range(earlier * frame_bytes, min(size, (earlier + 1) * frame_bytes))
                if earlier != piece and not all(set(own) <= use for use in uses.values()):
                    faults.append(f"{extent} took the frame of {own}, which was still in use")
                pieces[frame] = piece
                landed |= set(extent)
            case act:
                if not set(extent) <= landed:
                    faults.append(f"{act} of {extent} before all of it has landed")
                uses[act] |= set(extent)
    return faults


class _Landing:
    """A torch event: it is complete when the copies that were launched before it have landed."""

    def __init__(self, copies: SimulatedCopies, count: int) -> None:
        self._copies, self.count = copies, count

    def synchronize(self) -> None:
        self._copies.wait_landed(self.count)


class SimulatedCopies:
    """Late copies from a simulated device.

    The device makes as many copies as ``let_land`` allows. ``hold_current_streams`` makes the
    stream of the training wait: ``may_step`` then tells whether this wait is over.
    """

    def __init__(self, history: History) -> None:
        self._history, self._change = history, history.change
        self._queue: deque[Copy] = deque()
        self._launch_count = self._land_count = 0
        self._end = self._hold = 0
        self._is_free = False

    def thread_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_stream(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_queued_work(self) -> None: ...

    def run(self, copies: Sequence[Copy]) -> None:
        with self._change:
            self._queue.extend(copies)
            self._launch_count += len(copies)
            self._change.notify_all()
        if self._is_free:
            self.let_all_land()

    def events(self) -> dict[torch.device, _Landing]:
        return {DEVICE: _Landing(self, self._launch_count)}

    def mark_launched(self) -> None:
        self._end = self._launch_count

    def hold_current_streams(self) -> None:
        self._hold = self._end

    def may_step(self) -> bool:
        with self._change:
            return self._land_count >= self._hold

    def synchronize(self) -> None:
        self.wait_landed(self._launch_count)

    def wait_landed(self, count: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._land_count >= count)

    def let_land(self, count: int = 1) -> None:
        """Make the next copies of the side stream, if there are so many."""
        with self._change:
            for _ in range(min(count, len(self._queue))):
                copy = self._queue.popleft()
                copy.target.copy_(copy.elements)
                self._land_count += 1
                self._history.add(Event("land", copy.start, copy.end, copy.target.data_ptr()))

    def let_first_land(self) -> None:
        """Wait for the first copy, and make it."""
        with self._change:
            self._change.wait_for(lambda: self._launch_count)
            self.let_land()

    def let_all_land(self) -> None:
        """Make all copies, now and from now on."""
        with self._change:
            self._is_free = True
            self.let_land(len(self._queue))
