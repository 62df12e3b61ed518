"""Clocks, memory and the arithmetic of the numbers. No torch here: the parent stays small."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

_SAMPLE_SECONDS: Final = 0.02


@dataclass(frozen=True)
class Footprint:
    """What a process and its children hold."""

    memory_bytes: int
    descriptors: int
    threads: int


def _tree(pid: int) -> Iterator[int]:
    """The process and all below it; those that end meanwhile are left out."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                below = [int(child) for child in children.read().split()]
            for child in below:
                yield from _tree(child)


def _status(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        fields = (
            line.split(":", 1)
            for line in status
            if line.startswith(("RssAnon", "RssShmem", "Threads"))
        )
        return {key: int(value.split()[0]) for key, value in fields}
    return {}


def host_memory_bytes(pid: int) -> int:
    """Anonymous memory of a process and its children, plus their shared memory (``/dev/shm``).

    Mapped files of libraries are left out.

    Shared memory is that of the process that maps most of it: what a trainer shares with its writer
    is there once.
    """
    seen = [_status(each) for each in _tree(pid)]
    anonymous = sum(one.get("RssAnon", 0) for one in seen)
    return (anonymous + max(one.get("RssShmem", 0) for one in seen)) << 10


def footprint(pid: int) -> Footprint:
    """Memory, descriptors and threads of a process and its children now."""
    descriptors = threads = 0
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            descriptors += len(os.listdir(f"/proc/{each}/fd"))
        threads += _status(each).get("Threads", 0)
    return Footprint(host_memory_bytes(pid), descriptors, threads)


class MemorySampler:
    """The highest ``host_memory_bytes`` of another process while the ``with`` lasts; sampled by
    a thread of this one.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, host_memory_bytes(self._pid))
            if self._stop.wait(_SAMPLE_SECONDS):
                return


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of repeated measurements."""

    median: float
    low: float
    high: float
    all: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        kept = tuple(values)
        return cls(statistics.median(kept), min(kept), max(kept), kept)

    @classmethod
    def ratio(cls, values: Sequence[float], floors: Sequence[float]) -> Spread:
        """Each value over the floor taken beside it."""
        return cls.of(value / floor for value, floor in zip(values, floors, strict=True))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Spread:
        return cls(fields["median"], fields["low"], fields["high"], tuple(fields["all"]))


@dataclass(frozen=True)
class Step:
    """One training step beside a save: ``seconds`` without ``wait``, which belongs to the stall."""

    seconds: float
    wait: float


@dataclass(frozen=True)
class TrainedSave:
    """One save in a training loop.

    ``clean`` are the steps right before it and right after it was durable; ``beside`` those that
    began while it was under way.
    """

    call_seconds: float
    durable_seconds: float
    clean: Sequence[float]
    beside: Sequence[Step]

    @property
    def stall_seconds(self) -> float:
        """What the training thread lost in the call and at the fence."""
        return self.call_seconds + sum(step.wait for step in self.beside)

    @property
    def clean_step_seconds(self) -> float:
        return statistics.median(self.clean)

    @property
    def beside_step_seconds(self) -> float:
        """That of a clean one if the save was over when the call returned."""
        return statistics.median([step.seconds for step in self.beside] or self.clean)

    @property
    def drag_seconds(self) -> float:
        """How much longer the steps beside the save took than as many clean ones.

        Noise can make it negative: that is kept.

        Nothing if the save was over when the call returned.
        """
        return sum(step.seconds - self.clean_step_seconds for step in self.beside)


@dataclass(frozen=True)
class Block:
    """As many steps with a save each, and without, one lot right after the other."""

    saving: Sequence[float]
    clean: Sequence[float]

    @property
    def slowdown(self) -> float:
        """How much longer the steps with saves took: 0.03 is 3 %.

        Noise can make it negative: that is kept.
        """
        return statistics.fmean(self.saving) / statistics.fmean(self.clean) - 1


def slope(values: Sequence[float]) -> float:
    """Growth per value of the straight line nearest to them (least squares)."""
    return statistics.linear_regression(range(len(values)), values).slope


def tree_bytes(path: str) -> int:
    """Bytes of a file, or of all files below a folder."""
    if not os.path.isdir(path):
        return os.stat(path).st_size
    return sum(
        os.stat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(path)
        for name in names
    )
