"""Clocks, memory and the arithmetic of the three numbers. No torch here: the parent stays small."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

_SAMPLE_SECONDS: Final = 0.02


def host_memory_bytes(pid: int) -> int:
    """Anonymous plus shared (``/dev/shm``) resident memory of a process and its children. Mapped files of libraries are left out."""
    total = 0
    with contextlib.suppress(OSError):  # it has ended
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) << 10
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                total += sum(host_memory_bytes(int(child)) for child in children.read().split())
    return total


class MemorySampler:
    """The highest ``host_memory_bytes`` of another process while the ``with`` lasts; sampled by a thread of this one."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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


@dataclass(frozen=True)
class Step:
    """One training step beside a save: ``seconds`` without ``wait``, which belongs to the stall."""

    seconds: float
    wait: float


@dataclass(frozen=True)
class TrainedSave:
    """One save in a training loop.

    ``clean`` are the steps right before it and right after it was durable; ``beside`` those that began while it was under way.
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
        """How much longer the steps beside the save took than as many clean ones. Noise can make it negative: that is kept.

        Nothing if the save was over when the call returned.
        """
        return sum(step.seconds - self.clean_step_seconds for step in self.beside)


def tree_bytes(folder: str) -> int:
    """Bytes of all files below ``folder``."""
    return sum(
        os.stat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names
    )
