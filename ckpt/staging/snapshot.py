"""Copy the state into an image.

Tensors that may change at any time are *eager* sources. ``copy_eager`` copies them on the caller's
thread, before the call of the save returns. Tensors that belong to an optimizer are *late* sources.
``copy_late`` copies them on a background thread while training goes on, and ``fence`` holds the
optimizer's step until the copies are complete. After the copies, the version counters of late
sources are compared with those at the call. If one has moved, the tensor was changed during the
copies, and the snapshot fails with the name of the tensor, since the image would mix two states. A
witness (see ``witness``) also compares bytes of the sources at the call with the image, which
detects changes that move no counter.

Late copies are made in the order of the file. The window records which bytes have been copied, so
that they can be written to a tier before all copies are complete.

Late copies from an accelerator run on a side stream that waits for an event of the caller's stream.
The fence makes the current *stream* wait for them, not the CPU. Eager copies run on the caller's
stream, and the call waits for them. All sources on an accelerator without streams are eager (see
``device``).

A *window* shows an image to the threads that write it to a tier. If memory is short, an image
passes through a *ring*, a few pieces at a time, and ``window.whole`` is False.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import torch

from ckpt.config import CheckMode
from ckpt.errors import CkptError, StagingError, TensorChanged
from ckpt.locks import Event
from ckpt.staging.copies import Copy, Events, LateCopies, copy_now, devices_of, groups
from ckpt.staging.digest import digest, digest_of, fold
from ckpt.staging.window import Window
from ckpt.staging.witness import FullWitness, Placement, Sample, SampledWitness, Witness

SMALL_DIVISOR: Final = 4
"""The eager sources of an image in a ring are first copied to other memory if they need at most
``1 / SMALL_DIVISOR`` of the size of the ring (see ``Snapshot._copy_later``).
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A tensor that several ranks hold. The commit compares the digests of these replicas.

    Attributes:
        name: The name of the tensor.
        boxes: The boxes that this rank holds, as text.
        sources: The tensors with the elements of these boxes.
        is_late: Whether the sources are copied late.
    """

    name: str
    boxes: str
    sources: tuple[torch.Tensor, ...]
    is_late: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The copies for a part of the state, such as one module. Later snapshots into the same slot
    use the batch again.

    Attributes:
        eager: The copies of eager sources.
        late_copies: The copies of late sources, in the order of the image.
        checks: The tensors whose digests are computed.
        wrappers: Names and tensors whose version counters are compared besides those of the late
            sources. For example, an operation on a DTensor moves the counter of the DTensor, and
            not that of its local tensor.
        guarded: All tensors whose version counters are compared.
        names: The names of the tensors in ``guarded``.
        sample: The sample of the late sources, for a `SampledWitness` witness.
        eager_devices: The devices of the eager sources.
        late_devices: The devices of the late sources.
    """

    eager: tuple[Copy, ...]
    late_copies: tuple[Copy, ...]
    checks: tuple[Check, ...]
    wrappers: tuple[tuple[str, torch.Tensor], ...] = ()
    guarded: tuple[torch.Tensor, ...] = field(init=False)
    names: tuple[str, ...] = field(init=False)
    sample: Sample = field(init=False)
    eager_devices: frozenset[torch.device] = field(init=False)
    late_devices: frozenset[torch.device] = field(init=False)

    def __post_init__(self) -> None:
        guards = {id(copy.guarded): (copy.name, copy.guarded) for copy in self.late_copies}
        named_tensors = (*guards.values(), *self.wrappers)
        object.__setattr__(self, "names", tuple(name for name, _ in named_tensors))
        object.__setattr__(self, "guarded", tuple(tensor for _, tensor in named_tensors))
        object.__setattr__(self, "sample", Sample(self.late_copies))
        object.__setattr__(self, "eager_devices", devices_of(self.eager))
        object.__setattr__(self, "late_devices", devices_of(self.late_copies))


_version = attrgetter("_version")


def _witness(check: CheckMode, batches: Sequence[Batch]) -> Witness | None:
    """Read the late sources now, as ``check`` says. Return None if nothing is to be compared."""
    late_batches = [batch for batch in batches if batch.late_copies]
    if not late_batches or check == "off":
        return None
    if check == "full":
        return FullWitness(copy for batch in late_batches for copy in batch.late_copies)
    for batch in late_batches:
        batch.sample.build()
    return SampledWitness(batch.sample for batch in late_batches)


def _on_no_stream(_: torch.Tensor) -> AbstractContextManager[None]:
    return nullcontext()


class _Launch(NamedTuple):
    """A group of copies that was launched on side streams, or made.

    Attributes:
        group: The copies of the batches.
        targets: The same copies with the memory that they have in this save.
        end: The offset in the image up to which all bytes have landed once the copies are complete.
        events: The events after the copies.
    """

    group: Sequence[Copy]
    targets: Sequence[Copy]
    end: int
    events: Events


class Snapshot:
    """The copy of the state of one save into its image.

    The snapshot has *landed* when the whole state is in the image.

    ``_device_copies`` makes the late copies on side streams; it is None if no device of a late
    source has such a stream. ``_launch_event`` is set once all late copies are queued there,
    ``_land_event`` once the image is complete or the snapshot has failed with ``_error``, and
    ``_comparison_end`` once the witness has compared too. ``_finish`` declares that the copies have
    ended. ``_begin_lock`` is taken for good by the one call that copies the late sources or gives
    up, and ``_settle_lock`` guards ``_error`` and ``_guards``, the version counters at the call of
    the save.

    Thread safety: the training thread creates the object and calls ``copy_eager``. A background
    thread calls ``copy_late`` once; if ``foreground`` is set, the training thread calls it. Any
    thread may call ``fence``, ``confirm``, ``replicas``, ``wait_ended`` and ``wait_landed``.

    Attributes:
        step: The number of the step.
        window: The window of the image. Bytes that have landed can be streamed while others are
            still being copied.
        digests: The digests of the checks by name, each as the text ``boxes=digest``. They are
            complete once the snapshot has landed.
        foreground: Whether ``copy_late`` must run before the call of the save returns, because the
            image passes through a ring, and there is no memory for its eager sources. The image is
            streamed at the same time.
        held_seconds: The seconds that each call of ``fence`` has waited, in order.
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
        # The copying thread joins and sorts these, so that the training thread need not.
        self._late_copies = [batch.late_copies for batch in batches if batch.late_copies]
        self._checks = [check for batch in batches for check in batch.checks]
        # The version counters at the call of the save, to compare with those after the copies
        self._guards = [(batch, list(map(_version, batch.guarded))) for batch in batches]
        self._settle_lock = threading.Lock()
        self._begin_lock = threading.Lock()
        self._land_event = Event()
        self._launch_event = Event()
        self._comparison_end = Event()
        self._error: CkptError | None = None
        self._eager_devices = frozenset[torch.device]().union(
            *(batch.eager_devices for batch in batches)
        )
        # Create the witness before ``LateCopies``. Its reads of the sources are then queued before
        # the events that the side streams wait for.
        self._witness = _witness(check, batches)
        self._device_copies = LateCopies.of(
            frozenset[torch.device]().union(*(batch.late_devices for batch in batches))
        )

    @property
    def has_landed(self) -> bool:
        """Return True if all bytes are in the image, or the snapshot has failed."""
        return self._land_event.is_set()

    def copy_eager(self) -> None:
        """Copy the eager sources.

        When this returns, the eager sources may change, unless ``foreground`` is set. If nothing
        has to be copied later, the snapshot has landed then.
        """
        if self.window.whole or self._reserve_eager():
            copy_now(self._with_memory(self._eager), self._eager_devices)
        else:
            self._copy_later()
        self._begin_digests(is_late=False)()
        if not self._late_copies and not any(check.is_late for check in self._checks):
            self._finish(None)
            self._comparison_end.set()

    def copy_late(self) -> None:
        """Copy the late sources. Then check that they were not changed meanwhile: compare the
        version counters, and compare the bytes of the image (see ``ckpt.staging.witness``).

        If the copy or the check fails, this call does not raise the error. ``wait_landed`` raises
        it later, and ``confirm`` raises it if it is a ``TensorChanged``. Only an interruption, such
        as Ctrl-C, is raised here too. The second and later calls do nothing.
        """
        if self._land_event.is_set() or not self._begin_lock.acquire(blocking=False):
            return
        try:
            with self._device_copies.thread_context() if self._device_copies else nullcontext():
                self._copy_late()
                self._compare()
        except Exception as error:  # noqa: BLE001
            # A source may have been freed or moved during the copy. ``wait_landed`` raises this.
            self._finish(
                error
                if isinstance(error, CkptError)
                else StagingError(f"step {self.step} could not be copied: {error}")
            )
        except BaseException:
            self._finish(StagingError(f"the copying of step {self.step} was interrupted"))
            raise
        finally:
            self._comparison_end.set()

    def give_up(self, error: CkptError) -> None:
        """Make the snapshot fail with ``error``, because no thread will call ``copy_late``.

        Do nothing if the snapshot has landed or failed already.

        If ``foreground`` is not set, any thread may call this. The call then does nothing if
        ``copy_late`` has begun to copy. If ``foreground`` is set, only the training thread may call
        this, after its ``copy_late`` has ended or was interrupted.
        """
        if self._begin_lock.acquire(blocking=False) or self.foreground:
            if not self._land_event.is_set():
                self._finish(error)
            self._comparison_end.set()

    def _copy_late(self) -> None:
        """Copy the late sources, and compare their version counters."""
        launches = self._copy_in_order()
        finish_digests = self._begin_digests(is_late=True)
        if self._device_copies:
            self._device_copies.mark_launched()
        self._launch_event.set()
        for launch in launches:
            self._land(launch)
        finish_digests()
        # The lock is needed because ``settle`` also compares the version counters, and clears them
        # before the optimizer goes on.
        with self._settle_lock:
            self._finish(self._change_error())

    def fence(self) -> None:
        """Wait until the late sources may change: their copies are complete or have failed, or the
        current stream of their accelerator waits for the copies.

        Then compare the version counters (see ``settle``), and add the seconds of this call to
        ``held_seconds``. A ``TensorChanged`` is not raised here.
        """
        began = time.perf_counter()
        self.window.hurry()
        if self._device_copies and not self._land_event.is_set():
            self._launch_event.wait()
            if not self._land_event.is_set():
                self._device_copies.hold_current_streams()
        else:
            self._land_event.wait()
        with suppress(TensorChanged):
            self.settle()
        self.held_seconds.append(time.perf_counter() - began)

    def settle(self) -> None:
        """Compare the version counters for the last time. Later changes do not affect the snapshot.

        An operation moves a version counter only when it ends. So only the thread that runs the
        operations, which is the training thread, can be sure that the comparison includes all of
        its operations. The fence calls this on the training thread.

        Raises:
            TensorChanged: A late source was changed since the call of the save.
        """
        with self._settle_lock:
            self._error = self._error or self._change_error()
            self._guards = []
        if isinstance(self._error, TensorChanged):
            raise self._error

    def confirm(self) -> None:
        """Wait until both checks for changed sources have ended: that of the version counters, and
        that of the bytes in the image (see ``ckpt.staging.witness``).

        Raises:
            TensorChanged: A source was changed during the copies, so the image does not hold the
                values that the sources had at the call of the save.
        """
        self._comparison_end.wait()
        self.settle()

    def wait_ended(self) -> None:
        """Wait until the image is complete and compared, or the snapshot has failed.

        The call raises no error of the snapshot, and uses no stream of a device.
        """
        self._land_event.wait()
        self._comparison_end.wait()

    def wait_landed(self, timeout: float | None = None) -> None:
        """Wait until the image is complete.

        Args:
            timeout: The most seconds to wait; None for no limit.

        Raises:
            TimeoutError: The image is not complete after ``timeout`` seconds.
            CkptError: The snapshot has failed with this error.
        """
        if not self._land_event.wait(timeout):
            raise TimeoutError(f"step {self.step} is not staged after {timeout} s")
        if self._error:
            raise self._error

    def replicas(self) -> dict[str, str]:
        """Wait until the image is complete, and return ``digests``. Raises the same errors as
        ``wait_landed``.
        """
        self.wait_landed()
        return self.digests

    def _copy_in_order(self) -> Sequence[_Launch]:
        """Make the late copies in the order of the image, group by group, and report each complete
        group to the window. Return the groups that were only launched on a side stream.
        """
        launches: deque[_Launch] = deque()
        if self._device_copies:
            self._device_copies.wait_for_queued_work()
        copy_groups = list(
            groups(
                sorted(chain.from_iterable(self._late_copies), key=attrgetter("end")),
                self.window.piece_bytes,
            )
        )
        ends = [group[0].start for group in copy_groups[1:]]
        for group, end in zip(copy_groups, [*ends, self.window.size], strict=False):
            # The writers wait for launched groups to land, and give their memory back then.
            while launches and not self.window.has_room(group[-1].end):
                self._land(launches.popleft())
            self.window.wait_room(group[-1].end)
            self._check_addresses(group)
            targets = self._with_memory(group)
            if self._device_copies:
                self._device_copies.run(targets)
                launches.append(_Launch(group, targets, end, self._device_copies.events()))
            else:
                copy_now(targets)
                self._land(_Launch(group, targets, end, {}))
            while launches and not self.window.hurries:
                self._land(launches.popleft())
        return launches

    def _with_memory(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        """Return the copies with the memory that they have in this save."""
        if self.window.whole:
            return copies
        place = self.window.place
        return [copy._replace(target=place(copy.target, copy.start)) for copy in copies]

    def _land(self, launch: _Launch) -> None:
        """Wait until the copies of a group are complete, check them and report them to the
        window.
        """
        for event in launch.events.values():
            event.synchronize()
        self._check_addresses(launch.group)
        if not self.window.whole:  # Compare now, since the memory is given back soon
            self._ask_witness(list(zip(launch.group, launch.targets, strict=True)))
        self.window.land(launch.end)

    def _compare(self) -> None:
        """Compare an image that has landed with the bytes that the witness has read. If they
        differ, or the comparison fails, the snapshot fails. Then drop the witness.

        Nothing is compared if the snapshot has failed already, or if the image passed through a
        ring, since each group of copies was then compared on its own. The fence does not wait for
        the comparison, since the witness does not read the sources any more.
        """
        if self._error is None and self.window.whole:
            try:
                self._ask_witness(None)
            except Exception as error:  # noqa: BLE001 - the callers that wait for the save get it
                with self._settle_lock:
                    self._error = (
                        error
                        if isinstance(error, CkptError)
                        else StagingError(
                            f"step {self.step} could not be compared with its sources: {error}"
                        )
                    )
        self._witness = None  # It has references to the sources

    def _ask_witness(self, placements: Sequence[Placement] | None) -> None:
        """Raise ``TensorChanged`` if the bytes of late copies in the image are not those that the
        witness has read. ``placements`` are the copies to compare; None for all.
        """
        if self._witness is not None:
            on_stream = self._device_copies.on_stream if self._device_copies else _on_no_stream
            if (name := self._witness.changed_name(placements, on_stream)) is not None:
                raise TensorChanged(name, self.step)

    def _check_addresses(self, group: Sequence[Copy]) -> None:
        """Raise ``TensorChanged`` if a source has moved: its storage was resized or freed."""
        if name := next((copy.name for copy in group if copy.has_moved), None):
            raise TensorChanged(name, self.step)

    def _reserve_eager(self) -> bool:
        """Take the memory of the eager sources in an image that passes through a ring, and return
        True. Return False if they are small, or if there is not enough memory.

        Small sources may be everywhere in the image, and would take the memory of all of it.
        """
        nbytes = sum(copy.target.nbytes for copy in self._eager)
        return nbytes > self.window.ring_bytes // SMALL_DIVISOR and self.window.reserve(
            (copy.start, copy.end) for copy in self._eager
        )

    def _copy_later(self) -> None:
        """Let ``copy_late`` copy the eager sources into an image that passes through a ring.

        If they are small (see ``SMALL_DIVISOR``), copy them to other memory now. Otherwise set
        ``foreground``.
        """
        nbytes = sum(copy.target.nbytes for copy in self._eager)
        self.foreground = nbytes > self.window.ring_bytes // SMALL_DIVISOR
        if not self.foreground:
            self._eager = [
                copy._replace(
                    source=copy.elements.detach().to("cpu", copy=True), part=None, address=0
                )
                for copy in self._eager
            ]
        if self._eager:
            self._late_copies.append(tuple(self._eager))
        self._eager = []

    def _begin_digests(self, *, is_late: bool) -> Callable[[], None]:
        """Begin to compute the digests of the checks with this value of ``Check.is_late``, and
        return a function that completes them and stores them in ``digests``.

        On an accelerator, this only queues work, on the same stream as the copies, since the fence
        must not wait for it on the CPU. Tensors in host memory are read before this returns.
        """
        digests: list[tuple[Check, list[str | tuple[torch.Tensor, ...]]]] = []
        for check in self._checks:
            if check.is_late is is_late:
                with torch.no_grad(), self._on_stream(check):
                    parts = [
                        digest(source) if source.device.type == "cpu" else fold(source)
                        for source in check.sources
                    ]
                digests.append((check, parts))

        def finish() -> None:
            for check, parts in digests:
                with torch.no_grad(), self._on_stream(check):
                    text = "".join(
                        part if isinstance(part, str) else digest_of(part) for part in parts
                    )
                self.digests[check.name] = f"{check.boxes}={text}"

        return finish

    def _on_stream(self, check: Check) -> AbstractContextManager[None]:
        """Return the context manager in which the sources of ``check`` are read."""
        return (
            self._device_copies.on_stream(check.sources[0])
            if check.is_late and self._device_copies
            else nullcontext()
        )

    def _change_error(self) -> CkptError | None:
        """Return the error that names a late source whose version counter has moved, or None."""
        for batch, versions in self._guards:
            current_versions = list(map(_version, batch.guarded))
            if current_versions != versions:
                name = next(
                    name
                    for name, current, old in zip(
                        batch.names, current_versions, versions, strict=True
                    )
                    if current != old
                )
                return TensorChanged(name, self.step)
        return None

    def _finish(self, error: CkptError | None) -> None:
        """Declare that the image is complete, or that the snapshot has failed with ``error``."""
        self._error = self._error or error
        if self._error and self._device_copies:
            with suppress(RuntimeError):
                # Wait for launched copies. Another save gets the slot next, and these copies would
                # overwrite the image of that save.
                self._device_copies.synchronize()
        self._eager, self._late_copies, self._checks = [], [], []  # The sources may be freed now
        if self._error:
            self.window.fail(self._error)
        else:
            self.window.land(self.window.size)
        self._launch_event.set()
        self._land_event.set()
