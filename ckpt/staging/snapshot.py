"""Copying the state into an image: what may change at any moment before the call returns, the rest while training goes on.

*Eager* sources are copied by ``copy_eager`` on the caller's thread. *Late* ones belong to an optimizer whose step is fenced: ``copy_late`` copies them on a
background thread, and ``wait_landed`` holds that optimizer's step until it is done. Version counters of late sources are compared after the copy: one that
moved was changed behind our back, and the snapshot fails with its name instead of being torn.

On CUDA the copies run on a side stream that waits for an event of the compute stream; the fence makes the compute *stream* wait, not the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from ckpt.errors import CkptError, StagingError, TensorChanged
from ckpt.model.checksum import checksum

_GROUP_BYTES: Final = 64 << 20
"""Late copies are issued in groups of about this size, so that none holds up a shutdown for long."""


class Copy(NamedTuple):
    """One source and its place in the image. ``guarded`` is the tensor whose version is watched."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    guarded: torch.Tensor


_DIGEST_ROW: Final = 1021


@dataclass(frozen=True, slots=True)
class Check:
    """A tensor whose digest is compared with that of its replicas. ``boxes`` tells which part of the global tensor it is."""

    name: str
    boxes: str
    source: torch.Tensor
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Copies that belong together, and may be used again for another image in the same slot."""

    eager: tuple[Copy, ...]
    late: tuple[Copy, ...]
    checks: tuple[Check, ...]


class Snapshot:
    """One image being filled.

    Threads: built and ``copy_eager`` by the training thread; ``copy_late`` once, by a background thread; ``fence`` and ``wait_landed`` by any.
    """

    def __init__(self, step: int, batches: Sequence[Batch]) -> None:
        self.step = step
        self.digests: dict[str, str] = {}
        """name -> "boxes=digest" of the checks; complete once it has landed."""
        self._eager = [copy for batch in batches for copy in batch.eager]
        self._late = [copy for batch in batches for copy in batch.late]
        self._checks = [check for batch in batches for check in batch.checks]
        self._guards = [(copy.name, copy.guarded, copy.guarded._version) for copy in self._late]
        self._settling = threading.Lock()
        self._landed = threading.Event()
        self._launched = threading.Event()
        self._error: CkptError | None = None
        self._cuda = _CudaCopies([*self._eager, *self._late]) if torch.cuda.is_available() else None

    @property
    def landed(self) -> bool:
        """Whether every byte is in the image (or the snapshot has failed)."""
        return self._landed.is_set()

    def copy_eager(self) -> None:
        """Copy what may not wait. On return the eager sources may change."""
        _copy(self._eager, self._cuda)
        self._digest(late=False)
        if self._cuda:
            self._cuda.synchronize()
        if not self._late and not any(check.late for check in self._checks):
            self._finish(None)

    def copy_late(self) -> None:
        """Copy the rest and compare versions. Errors are kept for ``wait_landed``."""
        if self._landed.is_set():
            return
        try:
            group: list[Copy] = []
            size = 0
            for copy in self._late:
                group.append(copy)
                size += copy.target.nbytes
                if size >= _GROUP_BYTES:
                    _copy(group, self._cuda)
                    group, size = [], 0
            _copy(group, self._cuda)
            self._digest(late=True)
            if self._cuda:
                self._cuda.mark_launched()
            self._launched.set()
            if self._cuda:
                self._cuda.synchronize()
            self._finish(self._changed())  # what is seen now need not wait; `settle` has the last word
        except Exception as error:  # noqa: BLE001 - a source freed or moved under the copy; the waiter gets it
            self._finish(
                error
                if isinstance(error, CkptError)
                else StagingError(f"step {self.step} could not be copied: {error}")
            )

    def fence(self) -> None:
        """Return when late sources may change: the copy is done, or (CUDA) the current stream will wait for it."""
        if self._cuda and self._cuda.has_work and not self._landed.is_set():
            self._launched.wait()
            if not self._landed.is_set():
                self._cuda.hold_current_stream()
        else:
            self._landed.wait()
        with suppress(TensorChanged):
            self.settle()

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

    def _digest(self, *, late: bool) -> None:
        for check in self._checks:
            if check.late is late:
                with torch.no_grad(), self._cuda.beside(check.source) if self._cuda else nullcontext():
                    self.digests[check.name] = f"{check.boxes}={digest(check.source)}"

    def _changed(self) -> CkptError | None:
        return next(
            (TensorChanged(name, self.step) for name, tensor, was in self._guards if tensor._version != was),
            None,
        )

    def _finish(self, error: CkptError | None) -> None:
        self._error = self._error or error
        self._eager, self._late, self._checks = [], [], []  # sources may be freed
        self._launched.set()
        self._landed.set()


def _copy(copies: Sequence[Copy], cuda: _CudaCopies | None) -> None:
    here = [copy for copy in copies if not copy.source.is_cuda]
    with torch.no_grad():
        if here:
            torch._foreach_copy_([copy.target for copy in here], [copy.source for copy in here])
        if cuda and len(here) < len(copies):
            cuda.launch([copy for copy in copies if copy.source.is_cuda])


def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _CudaCopies:
    """Device to host on one side stream per device, after what the compute stream held when the snapshot was made."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        devices = sorted({copy.source.device.index for copy in copies if copy.source.is_cuda})
        self._streams = {index: _stream(index) for index in devices}
        self._done: Mapping[int, Any] = {}
        for index, stream in self._streams.items():
            stream.wait_event(torch.cuda.current_stream(index).record_event())

    @property
    def has_work(self) -> bool:
        return bool(self._streams)

    def launch(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            with (
                torch.cuda.device(copy.source.device),
                torch.cuda.stream(self._streams[copy.source.device.index]),
            ):
                copy.target.copy_(copy.source, non_blocking=True)

    def beside(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """The side stream of a tensor's device, for work that must see what the copies see."""
        return torch.cuda.stream(self._streams.get(tensor.device.index)) if tensor.is_cuda else nullcontext()

    def mark_launched(self) -> None:
        self._done = {index: stream.record_event() for index, stream in self._streams.items()}

    def hold_current_stream(self) -> None:
        for index, event in self._done.items():
            torch.cuda.current_stream(index).wait_event(event)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def digest(tensor: torch.Tensor) -> str:
    """Tells replicas that have drifted apart; it is no checksum of stored data. Large tensors are folded on their own device first: each row of words to its xor.
    A row has an odd number of words, so that constants do not cancel out.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rows = flat.numel() // (8 * _DIGEST_ROW)
    if not rows:
        return checksum(flat.cpu().numpy().data)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    folded = rows * 8 * _DIGEST_ROW
    words = flat[:folded].view(torch.int64).view(rows, _DIGEST_ROW)
    xors = torch.hash_tensor(words, dim=1).view(torch.int64)
    return f"{checksum(xors.cpu().numpy().data)}{checksum(flat[folded:].cpu().numpy().data)}"
