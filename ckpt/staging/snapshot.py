"""The copy of the state into an image: what may change at any moment is copied before the call
returns, and the rest while training goes on.

*Eager* sources are copied by ``copy_eager`` on the caller's thread. *Late* ones belong to an
optimizer whose step is fenced: ``copy_late`` copies them on a background thread, and ``fence``
holds that optimizer's step until it is done. Version counters of late sources are compared after
the copy. If one has moved, the tensor was changed meanwhile, and the snapshot fails with its name
instead of being torn. A witness (see ``witness``) compares what the sources held at the call with
the image. This shows changes that move no counter.

Copies are made in the order of the file, and the window knows how far they have come, so that the
writer need not wait for all of them.

Late copies from an accelerator run on a side stream that waits for an event of the caller's stream;
the fence makes the current *stream* wait, not the CPU. Eager ones run on the caller's stream, and
the call waits for them. A device without streams is copied eagerly altogether (see ``device``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Final

import torch

from ckpt.config import CheckMode
from ckpt.errors import CkptError, StagingError, TensorChanged
from ckpt.locks import Event
from ckpt.staging.copies import Copy, Events, Late, copy_now, devices_of, groups
from ckpt.staging.digest import digest, digest_of, folded
from ckpt.staging.window import Window
from ckpt.staging.witness import Full, Sample, Sampled, Witness

SPARE: Final = 4
"""Sources that must be copied at once are set aside if they fit into ``1 / SPARE`` of a ring."""


@dataclass(frozen=True, slots=True)
class Check:
    """A tensor whose digest is compared with that of its replicas.

    ``boxes`` names the parts of the global tensor that are in ``sources``.
    """

    name: str
    boxes: str
    sources: tuple[torch.Tensor, ...]
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Copies that belong together, and may be used again for another image in the same slot.

    Attributes:
        wrappers: Names and tensors whose versions are watched besides those of the late sources: an
            operation on a DTensor counts in the DTensor, and not in its local tensor.
    """

    eager: tuple[Copy, ...]
    late: tuple[Copy, ...]
    checks: tuple[Check, ...]
    wrappers: tuple[tuple[str, torch.Tensor], ...] = ()
    guarded: tuple[torch.Tensor, ...] = field(init=False)
    names: tuple[str, ...] = field(init=False)
    sample: Sample = field(init=False)
    eager_devices: frozenset[torch.device] = field(init=False)
    late_devices: frozenset[torch.device] = field(init=False)

    def __post_init__(self) -> None:
        watched = {id(copy.guarded): (copy.name, copy.guarded) for copy in self.late}
        pairs = (*watched.values(), *self.wrappers)
        object.__setattr__(self, "names", tuple(name for name, _ in pairs))
        object.__setattr__(self, "guarded", tuple(tensor for _, tensor in pairs))
        object.__setattr__(self, "sample", Sample(self.late))
        object.__setattr__(self, "eager_devices", devices_of(self.eager))
        object.__setattr__(self, "late_devices", devices_of(self.late))


_version = attrgetter("_version")


def _witness(check: CheckMode, batches: Sequence[Batch]) -> Witness | None:
    late = [batch for batch in batches if batch.late]
    if not late or check == "off":
        return None
    if check == "full":
        return Full(copy for batch in late for copy in batch.late)
    for batch in late:
        batch.sample.build()
    return Sampled(batch.sample for batch in late)


def _beside_nothing(_: torch.Tensor) -> AbstractContextManager[None]:
    return nullcontext()


class Snapshot:
    """One image being filled.

    Thread safety: the training thread builds it and calls ``copy_eager``. A background thread calls
    ``copy_late`` once; the training thread does so if ``foreground`` is set. Any thread may call
    ``fence`` and ``wait_landed``.

    Attributes:
        window: What has landed; it can be streamed while the rest is copied.
        digests: name -> "boxes=digest" of the checks; complete once it has landed.
        foreground: Whether ``copy_late`` must run before the call returns, beside the streaming,
            since the buffer is too small for what may not wait.
        held_seconds: What the fence has cost so far, wait by wait.
    """

    def __init__(
        self,
        step: int,
        batches: Sequence[Batch],
        window: Window | None = None,
        *,
        check: CheckMode = "sampled",
    ) -> None:
        self.step = step
        self.window = window or Window(memoryview(b""), 0)
        self.digests: dict[str, str] = {}
        self.foreground = False
        self.held_seconds: list[float] = []
        self._eager = [copy for batch in batches for copy in batch.eager]
        # The thread that copies joins these.
        self._late = [batch.late for batch in batches if batch.late]
        self._checks = [check for batch in batches for check in batch.checks]
        self._guards = [(batch, list(map(_version, batch.guarded))) for batch in batches]
        self._settling = threading.Lock()
        self._begun = threading.Lock()
        self._landed = Event()
        self._launched = Event()
        self._compared = Event()
        self._error: CkptError | None = None
        self._eager_devices = frozenset[torch.device]().union(
            *(batch.eager_devices for batch in batches)
        )
        # The witness comes before the side streams, which follow what is queued by now.
        self._witness = _witness(check, batches)
        self._device = Late.of(
            frozenset[torch.device]().union(*(batch.late_devices for batch in batches))
        )

    @property
    def landed(self) -> bool:
        """Whether every byte is in the image (or the snapshot has failed)."""
        return self._landed.is_set()

    def copy_eager(self) -> None:
        """Copy what may not wait.

        On return the eager sources may change, unless ``foreground`` is set.
        """
        if self.window.whole:
            copy_now(self._eager, self._eager_devices)
        else:
            self._set_aside()
        self._digest(late=False)()
        if not self._late and not any(check.late for check in self._checks):
            self._finish(None)
            self._compared.set()

    def copy_late(self) -> None:
        """Copy the rest, compare versions, and ask the witness.

        Errors are kept for ``wait_landed`` and ``confirm``.
        """
        if self._landed.is_set() or not self._begun.acquire(blocking=False):
            return
        try:
            with self._device.thread() if self._device else nullcontext():
                self._copy_late()
                self._compare()
        except Exception as error:  # noqa: BLE001
            # A source may be freed or moved during the copy. Callers that wait get the error.
            self._finish(
                error
                if isinstance(error, CkptError)
                else StagingError(f"step {self.step} could not be copied: {error}")
            )
        except BaseException:
            self._finish(StagingError(f"the copying of step {self.step} was interrupted"))
            raise
        finally:
            self._compared.set()

    def give_up(self, error: CkptError) -> None:
        """Fail with ``error``, since no thread will call ``copy_late``.

        Does nothing if the copying has begun. May be called from any thread.
        """
        if self._begun.acquire(blocking=False):
            self._finish(error)
            self._compared.set()

    def _copy_late(self) -> None:
        launched = self._copy_in_order()
        finish_digests = self._digest(late=True)
        if self._device:
            self._device.mark_launched()
        self._launched.set()
        for group, events, end in launched:
            for event in events.values():
                event.synchronize()
            self._check_there(group)
            self.window.land(end)
        finish_digests()
        # Once the fence has settled this, the optimizer goes on, and nothing is compared any more.
        with self._settling:
            self._finish(self._changed())

    def fence(self) -> None:
        """Return when late sources may change: the copy is done, or (on an accelerator) the
        current stream waits for it.
        """
        began = time.perf_counter()
        if self._device and not self._landed.is_set():
            self._launched.wait()
            if not self._landed.is_set():
                self._device.hold_current_streams()
        else:
            self._landed.wait()
        with suppress(TensorChanged):
            self.settle()
        self.held_seconds.append(time.perf_counter() - began)

    def settle(self) -> None:
        """Compare versions for the last time. Later changes do not concern this snapshot.

        An operation moves a version counter only when it has ended. A thread that has called one
        sees the move for certain if it calls this itself, as the fence does on the training thread.

        Raises:
            TensorChanged: A late source was written to since the call.
        """
        with self._settling:
            self._error = self._error or self._changed()
            self._guards = []
        if isinstance(self._error, TensorChanged):
            raise self._error

    def confirm(self) -> None:
        """Return when the image is known to hold what the sources held at the call, as far as
        versions and the witness show.

        Raises:
            TensorChanged: It does not.
        """
        self._compared.wait()
        self.settle()

    def wait_ended(self) -> None:
        """Return when the image is complete or lost, and not read here any more; raises nothing,
        and uses no stream.
        """
        self._landed.wait()
        self._compared.wait()

    def wait_landed(self, timeout: float | None = None) -> None:
        """Return when the image is complete. Raises what went wrong, or ``TimeoutError``."""
        if not self._landed.wait(timeout):
            raise TimeoutError(f"step {self.step} is not staged after {timeout} s")
        if self._error:
            raise self._error

    def replicas(self) -> dict[str, str]:
        """Return the digests, once all has landed. Raises what ``wait_landed`` raises."""
        self.wait_landed()
        return self.digests

    def _copy_in_order(self) -> list[tuple[list[Copy], Events, int]]:
        """Make the late copies, and let the window know of each group that has landed.

        Returns what is only launched: a group, its events, and what has landed with them.
        """
        launched: list[tuple[list[Copy], Events, int]] = []
        if self._device:
            self._device.begin()
        waiting = list(groups(sorted(chain.from_iterable(self._late), key=attrgetter("end"))))
        ends = [group[0].start for group in waiting[1:]]
        for group, end in zip(waiting, [*ends, self.window.size], strict=False):
            if not self.window.whole:
                self.window.wait_room(group[-1].end)
            self._check_there(group)
            if self._device and self.window.whole:
                self._device.run(group)
                launched.append((group, self._device.events(), end))
                continue
            if self._device:
                self._device.run(group)
                self._device.synchronize()
            else:
                copy_now(group)
            self._check_there(group)
            if not self.window.whole:  # In a ring, other bytes take the place of these soon
                self._ask_witness(group)
            self.window.land(end)
        return launched

    def _compare(self) -> None:
        """Ask the witness about an image that has landed.

        The fence does not wait for that: the sources are not read.
        """
        if self._error is None and self.window.whole:
            try:
                self._ask_witness(None)
            except Exception as error:  # noqa: BLE001 - the callers that wait for the save get it
                with self._settling:
                    self._error = (
                        error
                        if isinstance(error, CkptError)
                        else StagingError(
                            f"step {self.step} could not be compared with its sources: {error}"
                        )
                    )
        self._witness = None  # It holds the copies

    def _ask_witness(self, copies: Sequence[Copy] | None) -> None:
        if self._witness is not None:
            beside = self._device.beside if self._device else _beside_nothing
            if (name := self._witness.changed(copies, beside)) is not None:
                raise TensorChanged(name, self.step)

    def _check_there(self, group: Sequence[Copy]) -> None:
        if moved := next((copy.name for copy in group if copy.moved), None):
            raise TensorChanged(moved, self.step)

    def _set_aside(self) -> None:
        """Copy the eager sources of an image that passes through a ring to memory of their own, if
        they are few. They are copied into the image later, in their turn.
        """
        self.foreground = (
            sum(copy.target.nbytes for copy in self._eager) > self.window.capacity // SPARE
        )
        if not self.foreground:
            self._eager = [
                copy._replace(
                    source=copy.elements.detach().to("cpu", copy=True), part=None, address=0
                )
                for copy in self._eager
            ]
        if self._eager:
            self._late.append(tuple(self._eager))
        self._eager = []

    def _digest(self, *, late: bool) -> Callable[[], None]:
        """Begin the digests. The function that is returned ends them.

        Digests on an accelerator are only queued there, beside the copies, since the fence must not
        wait for them on the CPU. Host memory is read before the call returns.
        """
        begun: list[tuple[Check, list[str | tuple[torch.Tensor, ...]]]] = []
        for check in self._checks:
            if check.late is late:
                with torch.no_grad(), self._beside(check):
                    parts = [
                        digest(source) if source.device.type == "cpu" else folded(source)
                        for source in check.sources
                    ]
                begun.append((check, parts))

        def finish() -> None:
            for check, parts in begun:
                with torch.no_grad(), self._beside(check):
                    joined = "".join(
                        part if isinstance(part, str) else digest_of(part) for part in parts
                    )
                self.digests[check.name] = f"{check.boxes}={joined}"

        return finish

    def _beside(self, check: Check) -> AbstractContextManager[None]:
        return (
            self._device.beside(check.sources[0]) if check.late and self._device else nullcontext()
        )

    def _changed(self) -> CkptError | None:
        for batch, versions in self._guards:
            now = list(map(_version, batch.guarded))
            if now != versions:
                name = next(n for n, a, b in zip(batch.names, now, versions, strict=True) if a != b)
                return TensorChanged(name, self.step)
        return None

    def _finish(self, error: CkptError | None) -> None:
        self._error = self._error or error
        if self._error and self._device:
            with suppress(RuntimeError):
                # Launched copies still write to the slot, which another save gets next.
                self._device.synchronize()
        self._eager, self._late, self._checks = [], [], []  # The sources may be freed now
        if self._error:
            self.window.fail(self._error)
        else:
            self.window.land(self.window.size)
        self._launched.set()
        self._landed.set()
