"""Copying the state into an image: what may change at any moment before the call returns, the rest while training goes on.

*Eager* sources are copied by ``copy_eager`` on the caller's thread. *Late* ones belong to an optimizer whose step is fenced: ``copy_late`` copies them on a
background thread, and ``fence`` holds that optimizer's step until it is done. Version counters of late sources are compared after the copy: one that
moved was changed behind our back, and the snapshot fails with its name instead of being torn.

Copies are made in the order of the file, and the window is told how far they have come, so that writing need not wait for all of them.

On CUDA the copies run on a side stream that waits for an event of the compute stream; the fence makes the compute *stream* wait, not the CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import torch

from ckpt.errors import CkptError, StagingError, TensorChanged
from ckpt.staging.copies import Copy, CudaCopies, groups, run
from ckpt.staging.digest import digest
from ckpt.staging.window import Window

SPARE: Final = 4
"""What must be copied at once into a ring is set aside if it is at most this part of it."""


@dataclass(frozen=True, slots=True)
class Check:
    """A tensor whose digest is compared with that of its replicas. ``boxes`` tells which parts of the global tensor lie in ``sources``."""

    name: str
    boxes: str
    sources: tuple[torch.Tensor, ...]
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Copies that belong together, and may be used again for another image in the same slot."""

    eager: tuple[Copy, ...]
    late: tuple[Copy, ...]
    checks: tuple[Check, ...]
    guarded: tuple[torch.Tensor, ...] = field(init=False)
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        watched = {id(copy.guarded): copy for copy in self.late}
        object.__setattr__(self, "guarded", tuple(copy.guarded for copy in watched.values()))
        object.__setattr__(self, "names", tuple(copy.name for copy in watched.values()))


_version = attrgetter("_version")


class Snapshot:
    """One image being filled.

    Threads: built and ``copy_eager`` by the training thread; ``copy_late`` once, by a background thread (by the training thread if ``foreground``); ``fence`` and
    ``wait_landed`` by any.

    Attributes:
        window: What has landed; it can be streamed while the rest is copied.
        digests: name -> "boxes=digest" of the checks; complete once it has landed.
        foreground: Too much that may not wait for a buffer too small: ``copy_late`` must be run before the call returns, beside the streaming.
        held_seconds: What the fence has cost so far, wait by wait.
    """

    def __init__(self, step: int, batches: Sequence[Batch], window: Window | None = None) -> None:
        self.step = step
        self.window = window or Window(memoryview(b""), 0)
        self.digests: dict[str, str] = {}
        self.foreground = False
        self.held_seconds: list[float] = []
        self._eager = [copy for batch in batches for copy in batch.eager]
        self._late = [copy for batch in batches for copy in batch.late]
        self._checks = [check for batch in batches for check in batch.checks]
        self._guards = [(batch, list(map(_version, batch.guarded))) for batch in batches]
        self._settling = threading.Lock()
        self._landed = threading.Event()
        self._launched = threading.Event()
        self._error: CkptError | None = None
        self._cuda = CudaCopies([*self._eager, *self._late]) if torch.cuda.is_available() else None

    @property
    def landed(self) -> bool:
        """Whether every byte is in the image (or the snapshot has failed)."""
        return self._landed.is_set()

    def copy_eager(self) -> None:
        """Copy what may not wait. On return the eager sources may change, unless it says ``foreground``."""
        try:
            if self.window.whole:
                run(self._eager, self._cuda)
            else:
                self._set_aside()
            self._digest(late=False)
        finally:  # also when it fails: the slot is another's then
            if self._cuda:
                self._cuda.synchronize()
        if not self._late and not any(check.late for check in self._checks):
            self._finish(None)

    def copy_late(self) -> None:
        """Copy the rest and compare versions. Errors are kept for ``wait_landed``."""
        if self._landed.is_set():
            return
        try:
            launched = self._copy_in_order()
            self._digest(late=True)
            if self._cuda:
                self._cuda.mark_launched()
            self._launched.set()
            for events, end in launched:
                for event in events.values():
                    event.synchronize()
                self.window.land(end)
            with (
                self._settling
            ):  # a fence that settles lets the optimizer go on: then nothing is compared any more
                self._finish(self._changed())
        except Exception as error:  # noqa: BLE001 - a source freed or moved under the copy; the waiter gets it
            self._finish(
                error
                if isinstance(error, CkptError)
                else StagingError(f"step {self.step} could not be copied: {error}")
            )
        except BaseException:
            self._finish(StagingError(f"the copying of step {self.step} was interrupted"))
            raise

    def fence(self) -> None:
        """Return when late sources may change: the copy is done, or (CUDA) the current stream will wait for it."""
        began = time.perf_counter()
        if self._cuda and self._cuda.has_work and not self._landed.is_set():
            self._launched.wait()
            if not self._landed.is_set():
                self._cuda.hold_current_stream()
        else:
            self._landed.wait()
        with suppress(TensorChanged):
            self.settle()
        self.held_seconds.append(time.perf_counter() - began)

    def settle(self) -> None:
        """Compare versions for the last time; whatever changes from then on is none of this snapshot's business.

        An operation moves a version counter only when it has ended, so a thread that has called one sees it for sure when it asks here itself: the fence does, on the training thread.

        Raises:
            TensorChanged: A late source was written to since the call.
        """
        with self._settling:
            self._error = self._error or self._changed()
            self._guards = []
        if isinstance(self._error, TensorChanged):
            raise self._error

    def wait_ended(self) -> None:
        """Return when the image is complete or lost; raises nothing, and uses no stream."""
        self._landed.wait()

    def wait_landed(self, timeout: float | None = None) -> None:
        """Return when the image is complete. Raises what went wrong, or ``TimeoutError``."""
        if not self._landed.wait(timeout):
            raise TimeoutError(f"step {self.step} is not staged after {timeout} s")
        if self._error:
            raise self._error

    def replicas(self) -> dict[str, str]:
        """The digests, once all has landed. Raises what ``wait_landed`` raises."""
        self.wait_landed()
        return self.digests

    def _copy_in_order(self) -> list[tuple[dict[int, Any], int]]:
        """Late copies, each group told to the window when it is there. Returns what is only launched: events, and what has landed with them."""
        launched: list[tuple[dict[int, Any], int]] = []
        waiting = list(groups(sorted(self._late, key=attrgetter("end"))))
        ends = [group[0].start for group in waiting[1:]]
        for group, end in zip(waiting, [*ends, self.window.size], strict=False):
            if not self.window.whole:
                self.window.wait_room(group[-1].end)
            self._check_there(group)
            run(group, self._cuda)
            self._check_there(group)
            if not self._cuda:
                self.window.land(end)
            elif self.window.whole:
                launched.append((self._cuda.events(), end))
            else:
                self._cuda.synchronize()
                self.window.land(end)
        return launched

    def _check_there(self, group: Sequence[Copy]) -> None:
        if moved := next((copy.name for copy in group if copy.moved), None):
            raise TensorChanged(moved, self.step)

    def _set_aside(self) -> None:
        """Eager sources of an image that passes through a ring: copied where they keep, if they are few, to take their turn later."""
        self.foreground = sum(copy.target.nbytes for copy in self._eager) > self.window.capacity // SPARE
        if not self.foreground:
            self._eager = [
                copy._replace(source=copy.elements.detach().to("cpu", copy=True), part=None, address=0)
                for copy in self._eager
            ]
        self._late += self._eager
        self._eager = []

    def _digest(self, *, late: bool) -> None:
        for check in self._checks:
            if check.late is late:
                with torch.no_grad(), self._cuda.beside(check.sources[0]) if self._cuda else nullcontext():
                    told = "".join(map(digest, check.sources))
                self.digests[check.name] = f"{check.boxes}={told}"

    def _changed(self) -> CkptError | None:
        for batch, versions in self._guards:
            now = list(map(_version, batch.guarded))
            if now != versions:
                name = next(n for n, a, b in zip(batch.names, now, versions, strict=True) if a != b)
                return TensorChanged(name, self.step)
        return None

    def _finish(self, error: CkptError | None) -> None:
        self._error = self._error or error
        if self._error and self._cuda:
            with suppress(RuntimeError):
                self._cuda.synchronize()  # what was launched is still written to the slot, which is another's next
        self._eager, self._late, self._checks = [], [], []  # sources may be freed
        if self._error:
            self.window.fail(self._error)
        else:
            self.window.land(self.window.size)
        self._launched.set()
        self._landed.set()
