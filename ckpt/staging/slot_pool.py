"""The pool of slots, the reusable buffers that hold images.

A slot is usually a file in ``/dev/shm``. The file outlives the trainer, another process can map it,
and direct I/O can write from it. ``posix_fallocate`` allocates the pages of the file before use, so
that a full ``/dev/shm`` causes an error at once, and not a SIGBUS later. If ``/dev/shm`` has no
room, the slot is anonymous memory, which is as fast but ends with the process. If memory is short,
slots are *rings*, which are smaller than the images that pass through them in waves.

The name of a file contains the process id, the start time and the program of its process. When a
pool is created, it removes the files of processes that have ended, and those of programs that this
process ran before ``os.execv``.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt.errors import CommitError, HostMemoryExhausted, ManagerClosed
from ckpt.locks import Condition
from ckpt.staging import slot_files
from ckpt.staging.copies import PIECE_BYTES
from ckpt.staging.device import Devices
from ckpt.staging.memory_budget import (
    Budget,
    Reservation,
    Room,
    Siblings,
    decide,
    free_memory,
    measure,
)
from ckpt.staging.ring import RECENT_SAVES, Ring, Spill
from ckpt.staging.slot import Slot, SlotCancelled, SlotLost, capacity_of

_log = logging.getLogger("ckpt")


def _no_limit(nbytes: int) -> int | None:  # noqa: ARG001 - a limit may depend on it
    return None


class SlotContents(Protocol):
    """The steps that the files of slots hold between two saves.

    Attributes:
        reservation: The host memory that saves keep outside of slots.

    Thread safety: any thread may call the methods.
    """

    reservation: Reservation

    def evict(self, path: str) -> None:
        """Remove the step that the file ``path`` holds from the tiers in memory, because the slot
        is about to be closed or filled with another image.

        Raises:
            StorageError: A tier did not delete a file of the step.
        """
        ...

    def step_in(self, path: str) -> int:
        """Return the step that the file ``path`` holds; -1 if it holds none."""
        ...

    def is_needed(self, path: str) -> bool:
        """Return True if the slot should not be overwritten, because the step that the file
        ``path`` holds may be the newest checkpoint of the job.

        This is so if durable tiers have only older steps, and the step is the newest committed step
        in memory, or its outcome is not known yet.
        """
        ...


class NoContents:
    """The `SlotContents` of a job without tiers in memory: no slot holds a step between saves.

    Args:
        reservation: The host memory that saves keep outside of slots; None for a new object.
    """

    def __init__(self, reservation: Reservation | None = None) -> None:
        self.reservation = Reservation() if reservation is None else reservation

    def evict(self, path: str) -> None: ...

    def step_in(self, path: str) -> int:  # noqa: ARG002 - part of the protocol
        return -1

    def is_needed(self, path: str) -> bool:  # noqa: ARG002 - part of the protocol
        return False


@dataclass(slots=True, eq=False)
class _Request:
    """A call of ``acquire`` or ``reserve``, with the slot that it takes or creates.

    Attributes:
        slot: The slot; None before it was taken or created.
    """

    slot: Slot | None = None


class SlotPool:
    """Up to ``count`` slots of one size, which are created ahead of time (``reserve``) or when they
    are first needed, and kept.

    The *budget* says for images of one size how many slots there are, how large they are, and
    whether they are files in ``/dev/shm``. A slot that is smaller than its images is a *ring*, and
    ``_spill`` is further memory, which all rings share. To *pin* a slot is to page-lock its memory
    for copies from a GPU. ``slot_files`` names the files of slots and knows those of other ranks of
    this node, and ``_node_memory`` is the free memory of the node as its first rank has measured
    it. A *tier in memory* leaves its steps in the slots between two saves, and a slot whose step
    may be the newest checkpoint is *needed*. ``_make_room`` closes free slots that are too small,
    and says whether one more may be created. ``_give_back`` ends a request for a slot, and puts its
    slot among the free ones.

    Args:
        count: The most slots.
        ranks: The number of ranks of this job on this node, which all need as much memory.
        limit: Returns the most bytes that this rank may use for images and reservation of a size in
            bytes; None for what the machine has.
        elastic: Whether large images may pass through memory in waves even if there is memory for
            whole images. The slots are then rings (see ``ckpt.staging.ring``), and only a save
            that finds the first one in use creates the second, which is closed when the last saves
            did not need it.
        part_bytes: The largest part or chunk of an image (see ``budget.decide``).
        contents: The steps that slots hold between two saves. ``acquire`` prefers the slot with the
            oldest step.

    Attributes:
        reservation: The host memory that saves keep outside of slots. Its bytes are known before
            the first slot is made.

    Each call in ``_requests`` is about to create a slot.

    Thread safety: The training thread may call ``acquire``, ``plan`` and ``release``, a background
    thread may call ``reserve``, the threads that have streamed an image may call ``release``,
    ``wake_waiters`` and ``reconsider``, and the owner may call ``stop`` and, once, ``close``. Any
    thread may use ``slots``, ``nbytes`` and ``has_all``. ``_change`` guards all fields except
    ``_is_shm_full``, for which a lost update changes no more than the level of a log line. All of
    these threads call ``contents``, some of them under the lock.
    """

    def __init__(
        self,
        count: int,
        *,
        ranks: int = 1,
        limit: Callable[[int], int | None] = _no_limit,
        elastic: bool = False,
        part_bytes: int = 0,
        contents: SlotContents | None = None,
    ) -> None:
        self._most_slots, self._ranks, self._limit = count, ranks, limit
        self._elastic, self._part_bytes = elastic, part_bytes
        self._contents = contents or NoContents()
        self.reservation = self._contents.reservation
        self._free: list[Slot] = []
        self._slots: list[Slot] = []
        self._requests: list[_Request] = []
        self._budget: Budget | None = None
        self._closed = False
        self._is_shm_full = False
        """True if /dev/shm had no room for a slot that the budget puts there. Further warnings
        about this are then logged at level DEBUG, until /dev/shm has room again.
        """
        self._change = Condition()
        self._spill = Spill(self._is_open, PIECE_BYTES)
        self._node_memory = slot_files.NodeMemory()
        self._busy_ring_counts: deque[int] = deque(maxlen=RECENT_SAVES)
        """The number of rings that were in use at the end of each of the last saves."""
        self._serials = itertools.count(1)
        slot_files.remove_orphans()

    @property
    def slots(self) -> list[Slot]:
        """Return all existing slots, in use or free."""
        with self._change:
            return list(self._slots)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all existing slots together, and of the spill."""
        spill_bytes = self._spill.count * self._spill.frame_bytes
        return sum(slot.capacity for slot in self.slots) + spill_bytes

    def has_all(self, nbytes: int) -> bool:
        """Return True if all slots for images of ``nbytes`` exist that ``reserve`` creates."""
        with self._change:
            return self._budget is not None and (
                self._budget.nbytes >= nbytes
                and len(self._slots) >= self._reserve_count(self._budget)
                and all(self._fits(slot, self._budget.nbytes) for slot in self._slots)
            )

    def plan(self, nbytes: int) -> None:
        """Decide now how many slots for images of ``nbytes`` there will be, without creating them.

        Free slots that are too small for such images are closed, unless their steps are needed.

        Raises:
            HostMemoryExhausted: There is not enough memory, even for one slot that is smaller than
                an image.
            StorageError: A tier in memory did not delete the step in a slot that was closed.
        """
        with self._change:
            self._make_room(nbytes)

    def reserve(self, nbytes: int, devices: Devices = ()) -> None:
        """Create all slots for images of ``nbytes`` and touch their pages, so that no save has to
        wait for this. If the slots are rings, create only one. Page-lock them for copies from
        ``devices``.

        Free slots that are too small for such images are closed, unless their steps are needed.
        ``stop`` ends the call early.

        Raises:
            HostMemoryExhausted: There is not enough memory for a slot.
            StorageError: A tier in memory did not delete the step in a slot that was closed.
        """
        try:
            while self._create_ahead(nbytes):
                pass
        finally:
            for slot in self.slots:
                slot.pin(devices)

    def _create_ahead(self, nbytes: int) -> bool:
        """Create one of the slots that ``reserve`` creates. Return False if there is none to
        create.
        """
        request = _Request()
        try:
            with self._change:
                if self._closed or not self._make_room(nbytes) or self.has_all(nbytes):
                    return False
                self._requests.append(request)
            self._create_slot(request, nbytes, ahead=True)
        except SlotCancelled:
            return False
        finally:
            self._give_back(request)
        return True

    def acquire(self, nbytes: int, *, wait: bool, devices: Devices = ()) -> Slot | None:
        """Return a free slot for an image of ``nbytes``, or create one, page-locked for copies from
        ``devices``. If no slot is free and none can be created, wait until one is free if ``wait``
        is True, else return None.

        If images pass through memory in waves, the slot is smaller than the image. If the slot
        holds a step, the step is removed from the tiers in memory.

        A slot whose step is needed (see ``SlotContents.is_needed``) is not taken as long as another
        slot can be created or is in use. The save in the other slot may commit a newer step, and
        the first slot is then not needed any more. Even without ``wait``, the call waits while
        another thread creates the first slot. If the file of a slot was removed, or cannot be
        extended to its full length, the slot is replaced with a new one.

        Raises:
            HostMemoryExhausted: There is not enough memory for the slot.
            CommitError: No slot is in use, no other slot can be created, and there are several free
                slots, which all hold steps that are needed.
            StorageError: A tier in memory did not delete the step in the slot, or in a slot that
                was closed because it is too small.
            ManagerClosed: ``stop`` was called before the new slot was complete.
        """
        request = _Request()
        try:
            with self._change:
                while not self._take(request, nbytes):
                    if self._make_room(nbytes):
                        self._requests.append(request)
                        break
                    if not wait and (self._slots or not self._requests):
                        return None
                    self._change.wait()
            self._renew(request)
            slot = request.slot or self._create_slot(request, nbytes)
            slot.pin(devices)
            return slot
        except SlotCancelled:
            self._give_back(request)
            raise ManagerClosed from None
        except BaseException:  # Ctrl-C included, after which the next call must not wait forever
            self._give_back(request)
            raise

    def release(self, slot: Slot) -> bool:
        """Take back a slot whose image is no longer needed.

        The slot is closed if it is smaller than the budget now requires, unless its step is needed.
        A ring is closed if the last saves did not need so many.

        Return True if /dev/shm has room again for slots that had to be in anonymous memory. The
        free slots in anonymous memory were then closed (see ``reconsider``), and the caller should
        call ``reserve``, which creates slots in /dev/shm in their place.
        """
        if isinstance(slot, Ring):
            slot.reclaim()
        with self._change:
            self._free.append(slot)
            self._change.notify_all()
            fits = self._budget is None or self._fits(slot, self._budget.nbytes)
            if isinstance(slot, Ring):
                self._count_rings()
            if (not fits and not self._is_needed(slot)) or self._is_spare_ring(slot):
                self._close_free_slot(slot)
            return not slot.is_shared and self._reconsider()

    def _count_rings(self) -> None:
        """Note how many rings were in use at the end of a save, whose ring was just released. If
        two saves overlap, two rings are in use when the first one ends. The caller must hold the
        lock.
        """
        free_rings = sum(isinstance(slot, Ring) for slot in self._free)
        self._busy_ring_counts.append(self._ring_count() - free_rings + 1)

    def _ring_count(self) -> int:
        return sum(isinstance(slot, Ring) for slot in self._slots)

    def _is_spare_ring(self, slot: Slot) -> bool:
        """Return True if ``slot`` is a ring, and there are more rings than the last saves needed.
        The caller must hold the lock.
        """
        is_spare = (
            isinstance(slot, Ring)
            and len(self._busy_ring_counts) == RECENT_SAVES
            and self._ring_count() > max(self._busy_ring_counts)
        )
        if is_spare:
            _log.info(
                "ckpt: %d MiB of host memory are given back: the last %d saves needed no more "
                "rings",
                slot.capacity >> 20,
                RECENT_SAVES,
            )
        return is_spare

    def wake_waiters(self) -> None:
        """Wake the threads that wait for a slot. Call this when the step in a slot may no longer be
        needed.
        """
        with self._change:
            self._change.notify_all()

    def stop(self) -> None:
        """Create no more slots, and cancel the creation of a slot that is under way."""
        with self._change:
            self._closed = True

    def close(self) -> None:
        """Close all slots. No image may be in use."""
        self.stop()
        with self._change:
            for slot in list(self._slots):
                self._close_slot(slot)
            self._free.clear()
        self._spill.close()
        self._node_memory.close()

    def reconsider(self) -> bool:
        """If slots are in anonymous memory and /dev/shm has room now, decide a new budget, and
        close the free slots in anonymous memory. Return True if a new budget was decided.
        """
        with self._change:
            return self._reconsider()

    def _reconsider(self) -> bool:
        """Do the work of ``reconsider``. The caller must hold the lock."""
        budget = self._budget
        private_slots = [slot for slot in self._slots if not slot.is_shared]
        if self._closed or budget is None or not private_slots or budget.slot_bytes < budget.nbytes:
            return False
        # /dev/shm must have room for one slot more than those that exist.
        if capacity_of(budget.nbytes) > self._room(budget.nbytes).shared_bytes:
            return False
        self._budget = decide(
            budget.nbytes, most_slots=self._most_slots, room=self._room(budget.nbytes, self._slots)
        )
        self._is_shm_full = False
        _log.info("ckpt: %s", self._budget.sentence)
        for slot in [slot for slot in self._free if not slot.is_shared]:
            self._close_free_slot(slot)
        return True

    def _room(self, nbytes: int, slots: Sequence[Slot] = ()) -> Room:
        """Return the memory that this rank may use for images of ``nbytes``, as if the slots
        ``slots`` were closed.
        """
        siblings = None
        if self._ranks > 1:
            siblings = Siblings(
                node_memory=self._node_memory.first_measurement(free_memory)
                - self._ranks * self.reservation.used_bytes,
                shm_bytes=slot_files.sibling_slot_bytes(),
            )
        room = measure(
            slot_files.SHM,
            ranks=self._ranks,
            limit=self._limit(nbytes + self.reservation.last_step_bytes),
            siblings=siblings,
            reclaimable=sum(slot.capacity for slot in slots),
            reclaimable_in_shm=sum(slot.capacity for slot in slots if slot.is_shared),
        )
        return self.reservation.reduce(room) if self.reservation.last_step_bytes else room

    def _renew(self, request: _Request) -> None:
        """Remove the step in the slot of ``request``, and extend the file to its full length again.
        If the file was removed or cannot be extended, drop the slot, and count ``request`` among
        those that create one.

        If ``request`` has no slot, do nothing.
        """
        if (slot := request.slot) is None:
            return
        try:
            if slot.path:
                self._contents.evict(slot.path)
            slot.regrow()
        except (SlotLost, HostMemoryExhausted):
            with self._change:
                self._close_slot(slot)
                self._requests.append(request)
                request.slot = None

    def _give_back(self, request: _Request) -> None:
        """Put the slot of ``request`` among the free slots, or close it if it is not complete.

        Other callers may then take it, or create a slot in place of it.
        """
        with self._change:
            if request in self._requests:
                self._requests.remove(request)
            if (slot := request.slot) is not None:
                if slot not in self._slots:
                    slot.close()
                elif slot not in self._free:
                    self._free.append(slot)
            self._change.notify_all()

    def _take(self, request: _Request, nbytes: int) -> bool:
        """Take a free slot into ``request``, and return True. If no slot may be taken now, return
        False. The caller must hold the lock.
        """
        fits = [slot for slot in self._free if self._fits(slot, nbytes)]
        spare = [slot for slot in fits if not self._is_needed(slot)]
        if not spare:
            # If this returns False, the caller calls ``_make_room``, which closes slots that are
            # too small and not needed.
            has_small_spare = not all(map(self._is_needed, self._free))
            if has_small_spare or self._is_any_in_use() or not self._is_full():
                return False
            if len(self._free) > 1:  # The outcome of a save is not known, so its step is needed too
                raise CommitError(
                    "no slot is free: whether the last step in memory was committed cannot be "
                    "seen, since the job's store is gone; start the job again, and restore"
                )
            if not fits:
                return False
        # A slot without a step comes first, and then the slot with the oldest step.
        request.slot = min(
            spare or fits,
            key=lambda slot: self._contents.step_in(slot.path) if slot.path else -1,
        )
        self._free.remove(request.slot)
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Close the free slots that are too small for images of ``nbytes``, decide the budget if
        there is none for images of this size, and return True if one more slot may be created.

        A slot stays if its step may be the newest checkpoint of the job (see
        ``SlotContents.is_needed``), unless it is the only slot and the budget allows only one. The
        caller must hold the lock.
        """
        small = [slot for slot in self._free if not self._fits(slot, nbytes)]
        needed_slots = list(filter(self._is_needed, small))
        for slot in small:
            if slot not in needed_slots:
                self._close_free_slot(slot)
        if self._budget is None or self._budget.nbytes < nbytes:
            # The needed slots will be freed before all new slots exist, so their memory counts as
            # free.
            room = self._room(nbytes, needed_slots)
            self._budget = decide(
                nbytes,
                most_slots=self._most_slots,
                room=room,
                elastic=self._elastic,
                part_bytes=self._part_bytes,
            )
            if self._budget.frame_bytes != self._spill.frame_bytes:
                self._spill.close()
                self._spill = Spill(self._is_open, self._budget.frame_bytes)
            self._spill.allow(self._budget.spill_bytes, self._budget.reserve_bytes, self._ranks)
            _log.log(self._log_level(self._budget, room), "ckpt: %s", self._budget.sentence)
        if (
            self._is_full()
            and needed_slots == self._slots
            and len(needed_slots) == 1
            and not self._requests
        ):
            self._close_free_slot(needed_slots[0])
        return not self._is_full()

    def _log_level(self, budget: Budget, room: Room) -> int:
        """Return the level of the log line about a budget: WARNING if the machine has less memory
        than the settings allow, and INFO if the settings alone decide.
        """
        is_ring = budget.slot_bytes < budget.nbytes
        is_as_set = budget.slots == self._most_slots and (self._elastic or not is_ring)
        # An image in anonymous memory is lost if the process dies, which deserves a warning. A ring
        # never holds a whole image, so it has nothing to lose.
        needs_no_warning = budget.is_shared or self._elastic or is_ring
        is_usual = (is_as_set or room.is_at_limit) and needs_no_warning and not room.is_short
        return logging.INFO if is_usual else logging.WARNING

    def _is_full(self) -> bool:
        """Return True if there are as many slots as the budget allows, including those that are
        being created.
        """
        count = len(self._slots) + len(self._requests)
        return self._budget is not None and count >= self._budget.slots

    def _reserve_count(self, budget: Budget) -> int:
        """Return the number of slots that ``reserve`` creates. One ring suffices if a save never
        comes before the previous one is written.
        """
        return 1 if budget.slot_bytes < budget.nbytes else budget.slots

    def _is_any_in_use(self) -> bool:
        return len(self._slots) + len(self._requests) > len(self._free)

    def _is_needed(self, slot: Slot) -> bool:
        return slot.path is not None and self._contents.is_needed(slot.path)

    def _fits(self, slot: Slot, nbytes: int) -> bool:
        """Return True if an image of ``nbytes`` may use the slot: the whole image fits into it, or
        the slot is a ring of the size through which the budget lets such images pass in waves.
        """
        is_ring = isinstance(slot, Ring) and slot.capacity == self._slot_bytes(nbytes)
        return slot.capacity >= nbytes or is_ring

    def _slot_bytes(self, nbytes: int) -> int:
        """Return the least bytes of a slot for an image of ``nbytes``. They are less than
        ``nbytes`` if images pass through memory in waves.
        """
        is_known = self._budget is not None and self._budget.nbytes >= nbytes
        return min(nbytes, self._budget.slot_bytes) if is_known and self._budget else nbytes

    def _create_slot(self, request: _Request, nbytes: int, *, ahead: bool = False) -> Slot:
        """Create a slot in ``request``, add it to the pool, and return it. With ``ahead``, the slot
        is free at once, so that a caller of ``acquire`` that waits for it finds no slot in use. It
        is closed if a save has created the last one that ``reserve`` creates.

        ``request`` must be in ``_requests``. After an error the caller gives it back. The caller
        must not hold the lock, since touching the pages takes long. The pages of a ring that a save
        waits for are touched later, by the thread that copies to them.
        """
        request.slot = slot = self._map_slot(self._slot_bytes(nbytes))
        if ahead or not isinstance(slot, Ring):
            slot.prefault()
        with self._change:
            self._requests.remove(request)
            has_all = self.has_all(nbytes)  # A save may have created a ring meanwhile
            self._slots.append(slot)
            if self._closed or (ahead and has_all):
                self._close_slot(slot)
            elif ahead:
                self._free.append(slot)
            if ahead:
                request.slot = None
            self._change.notify_all()
        return slot

    def _map_slot(self, nbytes: int) -> Slot:
        """Return a new slot, in /dev/shm if the budget says so and there is room."""
        with self._change:
            budget, spill = self._budget, self._spill
        is_ring = budget is not None and nbytes == budget.slot_bytes < budget.nbytes
        if budget is None or budget.is_shared:
            path = slot_files.new_path(next(self._serials))
            try:
                return Slot(nbytes, path, self._is_open)
            except OSError as error:
                # /dev/shm has filled up since it was measured.
                _log.log(
                    logging.DEBUG if self._is_shm_full else logging.WARNING,
                    "ckpt: %s for a slot of %d MiB in %s; using anonymous memory: as fast, but "
                    "lost with the process",
                    os.strerror(error.errno or 0),
                    nbytes >> 20,
                    slot_files.SHM,
                )
                self._is_shm_full = True
        # The process that has filled /dev/shm may also have used this memory.
        if nbytes > (memory := measure(slot_files.SHM, ranks=1).memory):
            raise HostMemoryExhausted(
                nbytes, f"{memory >> 20} MiB are left since the budget was made"
            )
        if is_ring:
            return Ring(nbytes, spill, self._is_open)
        return Slot(nbytes, None, self._is_open)

    def _is_open(self) -> bool:
        return not self._closed

    def _close_free_slot(self, slot: Slot) -> None:
        """Remove a free slot from the pool and close it. The caller must hold the lock."""
        self._free.remove(slot)
        self._close_slot(slot)

    def _close_slot(self, slot: Slot) -> None:
        """Remove a slot from the pool, remove the step in it, and close it. The caller must hold
        the lock.

        Waiting threads may create a slot in its place even if the step cannot be removed.
        """
        self._slots.remove(slot)
        self._change.notify_all()
        try:
            if slot.path and not self._closed:
                self._contents.evict(slot.path)
        finally:
            slot.close()
