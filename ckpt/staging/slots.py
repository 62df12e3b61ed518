"""The reusable buffers that hold images.

A slot is a file in ``/dev/shm``: it outlives the trainer, another process can map it, and it is the
source of direct writes. ``posix_fallocate`` reserves its pages before use, so a full ``/dev/shm``
is an error here and never a SIGBUS later. If the file does not fit, the slot is anonymous memory:
as fast, but gone with the process.

Files are named by process and start time. The files of processes that are gone are removed when the
next pool is built.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ckpt.errors import CommitError, HostMemoryExhausted
from ckpt.locks import Condition
from ckpt.processes import namespace
from ckpt.staging import slot_files
from ckpt.staging.budget import Budget, Room, decide, measure
from ckpt.staging.slot import NotWanted, Slot, SlotLost, capacity_of

_log = logging.getLogger("ckpt")


class SlotContents(Protocol):
    """What the files of slots hold between two saves. Thread safety: any thread may call it."""

    def evict(self, path: str) -> None:
        """Give up what the file ``path`` holds: the slot is dropped, or is about to be filled
        again.
        """
        ...

    def step_in(self, path: str) -> int:
        """Return the step that the file ``path`` holds; -1 if it holds none."""
        ...

    def is_needed(self, path: str) -> bool:
        """Return whether the file ``path`` holds the newest step that memory has, or one whose
        outcome is not known yet, and no durable tier has a step as new.
        """
        ...


class NoContents:
    """Slots whose files hold nothing between two saves."""

    def evict(self, path: str) -> None: ...

    def step_in(self, path: str) -> int:  # noqa: ARG002 - part of the protocol
        return -1

    def is_needed(self, path: str) -> bool:  # noqa: ARG002 - part of the protocol
        return False


class SlotPool:
    """Up to ``count`` slots of one size, made ahead (``reserve``) or when first needed, and kept.

    Args:
        count: The most slots there may be.
        ranks: Ranks of this job on this node. Each asks for as many bytes.
        limit: Bytes to stay below, beside what the machine has.
        contents: What the slots hold between two saves. The slot with the oldest step is taken
            first.

    Thread safety: ``acquire`` and ``plan`` may be called from the training thread, ``reserve`` from
    a background thread, ``release`` and ``reconsider`` from the threads that have streamed an
    image, and ``close`` from the owner, once. ``_changed`` guards all fields, except for
    ``_displaced``, of which a lost update changes the level of a log line at most. All of these
    threads call ``contents``, some of them under the lock.
    """

    def __init__(
        self,
        count: int,
        *,
        ranks: int = 1,
        limit: int | None = None,
        contents: SlotContents | None = None,
    ) -> None:
        self._count, self._ranks, self._limit = count, ranks, limit
        self._contents = contents or NoContents()
        self._free: list[Slot] = []
        self._made: list[Slot] = []
        self._making = 0
        self._budget: Budget | None = None
        self._closed = False
        self._displaced = False
        """Whether /dev/shm had no room for a slot that belongs there. One log line says so, until
        there is room again.
        """
        self._changed = Condition()
        self._serials = itertools.count(1)
        slot_files.remove_orphans()

    @property
    def made(self) -> list[Slot]:
        """All slots there are, in use or not."""
        with self._changed:
            return list(self._made)

    @property
    def nbytes(self) -> int:
        """The size of all slots there are."""
        return sum(slot.capacity for slot in self.made)

    def has_all(self, nbytes: int) -> bool:
        """Return True if all slots for images of ``nbytes`` are there, so that ``reserve`` has
        nothing to do.
        """
        with self._changed:
            return self._budget is not None and (
                self._budget.nbytes >= nbytes
                and len(self._made) >= self._budget.slots
                and all(slot.capacity >= self._budget.slot_bytes for slot in self._made)
            )

    def plan(self, nbytes: int) -> None:
        """Decide now how many slots of ``nbytes`` there will be. Raises ``HostMemoryExhausted`` if
        there is no memory for one.
        """
        with self._changed:
            self._may_make(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make all slots for images of ``nbytes`` now, pages touched, so that no save has to.

        Raises:
            HostMemoryExhausted: There is no memory for one.
        """
        while True:
            with self._changed:
                if self._closed or not self._may_make(nbytes):
                    return
                self._making += 1
            try:
                self._make(nbytes, free=True)
            except NotWanted:
                return

    def acquire(self, nbytes: int, *, wait: bool) -> Slot | None:
        """Return a free slot for an image of ``nbytes``. With ``wait``, wait until one is free;
        else return None if none is.

        If the budget chose waves, the slot is smaller than the image.

        A slot whose contents are needed is not taken while another slot may be made or is in use:
        the image in that other slot may replace these contents. Even without ``wait``, the call
        waits while another thread makes the first slot. A slot whose file has vanished, or cannot
        grow back to its length, is replaced by another.

        Raises:
            HostMemoryExhausted: There is no memory for it.
            CommitError: The contents of several slots are needed, and no other slot may be made.
        """
        with self._changed:
            while (slot := self._take(nbytes)) is None:
                if self._may_make(nbytes):
                    self._making += 1
                    break
                if not wait and (self._made or not self._making):
                    return None
                self._changed.wait()
        return self._make(nbytes, free=False) if slot is None else self._renew(slot, nbytes)

    def release(self, slot: Slot) -> bool:
        """Take back a slot whose image is no longer needed.

        Returns whether /dev/shm has room again for slots that had to be elsewhere. ``reserve``
        makes them.
        """
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()
            is_small = self._budget and slot.capacity < self._budget.slot_bytes
            if is_small and not self._is_needed(slot):
                self._let_go(slot)
            return not slot.shared and self._return()

    def look_again(self) -> None:
        """Let threads that wait for a slot look again, since some contents are not needed now."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Make no more slots; one that is being made ahead is given up."""
        with self._changed:
            self._closed = True

    def close(self) -> None:
        """Free all slots. No image may be in use."""
        self.stop()
        with self._changed:
            for slot in list(self._made):
                self._drop(slot)
            self._free.clear()

    def reconsider(self) -> bool:
        """Decide again if slots are elsewhere and /dev/shm may have room now. Returns whether it
        has.
        """
        with self._changed:
            return self._return()

    def _return(self) -> bool:
        """Go back to /dev/shm if slots are elsewhere and there is room again. Holds the lock."""
        known = self._budget
        elsewhere = [slot for slot in self._made if not slot.shared]
        if self._closed or known is None or not elsewhere or known.slot_bytes < known.nbytes:
            return False
        room = self._room()
        # /dev/shm must have room for one more slot, beside what is there.
        if capacity_of(known.nbytes) > room.shared:
            return False
        room = _beside(room, self._made)
        self._budget = decide(known.nbytes, wanted=self._count, room=room)
        self._displaced = False
        _log.info("ckpt: %s", self._budget.sentence)
        for slot in [slot for slot in self._free if not slot.shared]:
            self._let_go(slot)
        return True

    def _room(self) -> Room:
        held = slot_files.held_by_siblings() if self._ranks > 1 else 0
        return measure(slot_files.SHM, ranks=self._ranks, limit=self._limit, held=held)

    def _renew(self, slot: Slot, nbytes: int) -> Slot:
        """Return ``slot``, ready to be filled. If its file, or the part that was cut off, is gone,
        return another slot.
        """
        try:
            if slot.path:
                self._contents.evict(slot.path)
            slot.regrow()
            return slot
        except (SlotLost, HostMemoryExhausted):
            with self._changed:
                self._drop(slot)
                self._making += 1
        except BaseException:
            self.release(slot)
            raise
        return self._make(nbytes, free=False)

    def _take(self, nbytes: int) -> Slot | None:
        fitting = [slot for slot in self._free if slot.capacity >= self._slot_bytes(nbytes)]
        others = [slot for slot in fitting if not self._is_needed(slot)]
        if not others:
            is_any_small = not all(map(self._is_needed, self._free))  # It makes room for another
            if is_any_small or self._is_any_in_use() or not self._is_full():
                return None
            if len(self._free) > 1:  # The save after the last commit has no verdict
                raise CommitError(
                    "no slot is free: whether the last step in memory was committed cannot be "
                    "seen, since the job's store is gone; start the job again, and restore"
                )
            if not fitting:
                return None
        slot = min(
            others or fitting,
            key=lambda slot: self._contents.step_in(slot.path) if slot.path else -1,
        )
        self._free.remove(slot)
        return slot

    def _may_make(self, nbytes: int) -> bool:
        """Return True if one more slot of this size is due, and free those that are too small. One
        whose contents are needed stays, unless it is the only slot that there may be. Holds the
        lock.
        """
        small = [slot for slot in self._free if slot.capacity < self._slot_bytes(nbytes)]
        needed = list(filter(self._is_needed, small))
        for slot in small:
            if slot not in needed:
                self._let_go(slot)
        if self._budget is None or self._budget.nbytes < nbytes:
            # What is needed now will be let go of, before all slots are made.
            self._budget = decide(nbytes, wanted=self._count, room=_beside(self._room(), needed))
            _log.log(
                logging.INFO if self._budget.shared else logging.WARNING,
                "ckpt: %s",
                self._budget.sentence,
            )
        if self._is_full() and needed == self._made and len(needed) == 1 and not self._making:
            self._let_go(needed[0])
        return not self._is_full()

    def _is_full(self) -> bool:
        """Return whether there are as many slots as the budget allows."""
        there = len(self._made) + self._making
        return self._budget is not None and there >= self._budget.slots

    def _is_any_in_use(self) -> bool:
        return len(self._made) + self._making > len(self._free)

    def _is_needed(self, slot: Slot) -> bool:
        return slot.path is not None and self._contents.is_needed(slot.path)

    def _slot_bytes(self, nbytes: int) -> int:
        """Return the size of the slot for an image of ``nbytes``."""
        known = self._budget is not None and self._budget.nbytes >= nbytes
        return min(nbytes, self._budget.slot_bytes) if known and self._budget else nbytes

    def _make(self, nbytes: int, *, free: bool) -> Slot:
        """Make a slot that was counted in ``_making``. Does not hold the lock: touching pages takes
        its time.
        """
        made: list[Slot] = []
        try:
            slot = self._new(self._slot_bytes(nbytes))
            try:
                slot.prefault()
            except BaseException:
                slot.close()
                raise
            made.append(slot)
        finally:
            with self._changed:
                self._making -= 1
                self._made += made
                for slot in made:
                    if self._closed:
                        self._drop(slot)
                    elif free:
                        self._free.append(slot)
                self._changed.notify_all()
        return made[0]

    def _new(self, nbytes: int) -> Slot:
        if self._budget is None or self._budget.shared:
            name = f"{next(self._serials)}-{namespace()}.{time.monotonic_ns():x}"
            path = f"{slot_files.SHM}/{slot_files.own_prefix()}-{name}"
            try:
                return Slot(nbytes, path, self._is_open)
            except OSError as error:
                # /dev/shm has filled up since it was measured.
                _log.log(
                    logging.DEBUG if self._displaced else logging.WARNING,
                    "ckpt: %s for a slot of %d MiB in %s; using anonymous memory: as fast, but "
                    "lost with the process",
                    os.strerror(error.errno or 0),
                    nbytes >> 20,
                    slot_files.SHM,
                )
                self._displaced = True
        # What has filled /dev/shm may have taken this memory, too.
        if nbytes > (left := measure(slot_files.SHM, ranks=1).memory):
            raise HostMemoryExhausted(
                nbytes, f"{left >> 20} MiB are left since the budget was made"
            )
        return Slot(nbytes, None, self._is_open)

    def _is_open(self) -> bool:
        return not self._closed

    def _let_go(self, slot: Slot) -> None:
        """Drop a free one. Holds the lock."""
        self._free.remove(slot)
        self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        """Free a slot. Holds the lock.

        Waiting threads may make a slot in its place, even if the step in it cannot be removed.
        """
        self._made.remove(slot)
        self._changed.notify_all()
        try:
            if slot.path and not self._closed:
                self._contents.evict(slot.path)
        finally:
            slot.close()


def _beside(room: Room, slots: Sequence[Slot]) -> Room:
    """Return the room that there is without ``slots``."""
    nbytes = sum(slot.capacity for slot in slots)
    in_shm = sum(slot.capacity for slot in slots if slot.shared)
    return replace(room, memory=room.memory + nbytes, shared=room.shared + in_shm)
