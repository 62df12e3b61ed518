"""The memory of images that pass through memory in waves.

Such an image is divided into *pieces*. A *frame* is memory for one piece. The slot of the image, a
`Ring`, has a few frames, which hold one piece after another. If these frames are not enough, it
borrows frames of the *spill*, which all rings of a pool share.

The spill grows when an optimizer waits for the copy of its tensors. It keeps as many frames as the
last saves needed, since the first write to a page costs more than the copy, and frees the others.
So the memory settles at what the rhythm of the job needs: nothing if the image is written before
the optimizer's step, and the rest of the image otherwise.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from ckpt.errors import HostMemoryExhausted
from ckpt.locks import Condition
from ckpt.staging import slot_files
from ckpt.staging.device import Devices
from ckpt.staging.memory_budget import free_memory, measure
from ckpt.staging.slot import Slot, SlotCancelled, check_wanted

_log = logging.getLogger("ckpt")
RECENT_SAVES: Final = 8
"""The number of saves that decide how many frames the spill keeps, and a pool how many rings."""


class Frame:
    """Memory for one piece of an image.

    Args:
        memory: The memory, as a 1-D tensor of uint8.
        data: The same memory as bytes.
        slot: The slot that owns the memory; None if the memory belongs to a ring.
        populate: Touches the pages of the memory; None if they are touched.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        data: memoryview,
        slot: Slot | None = None,
        populate: Callable[[], None] | None = None,
    ) -> None:
        self.data, self._memory, self._slot = data, memory, slot
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._populate = populate

    @classmethod
    def of(cls, slot: Slot) -> Frame:
        """Return all memory of ``slot`` as a frame, which owns the slot."""
        return cls(slot.tensor, slot.view, slot)

    def populate(self) -> None:
        """Touch the pages of the memory, if that was not done before.

        Raises:
            HostMemoryExhausted: There is not enough memory.
        """
        if self._populate is not None:
            self._populate()
            self._populate = None

    def place(self, form: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the memory from ``offset`` on as a tensor with the dtype, the shape and the
        strides of ``form``.
        """
        view = self._views.get(form.dtype)
        if view is None:
            view = self._views[form.dtype] = self._memory.view(form.dtype)
        begin = view.storage_offset() + offset // form.itemsize
        return view.as_strided(form.shape, form.stride(), begin)

    def close(self) -> None:
        """Free the memory as soon as no view of it is in use."""
        if self._slot is not None:
            self._slot.close()


class Spill:
    """The frames that the rings of a pool share.

    ``_most_frames`` is the limit of the budget. ``_most_kept_frames`` is the limit for frames that
    stay between saves, which is smaller if little memory is free. The ``_ranks`` of the node
    together leave ``_node_reserve_bytes`` free for the training. ``_needed_frames`` says how many
    frames each of the last saves needed. While ``_is_out_of_memory`` is True, the spill does not
    grow. To *pin* a frame is to page-lock it for copies from a GPU.

    Args:
        is_wanted: Returns False once no more memory is to be taken (see `Slot`).
        frame_bytes: The size of a frame.

    Attributes:
        count: The number of frames, with those that are being made. It may grow up to
            ``_most_frames``. Free frames beyond ``_frames_to_keep`` are closed.

    Thread safety: any thread may call all methods. ``change`` guards all changes.
    """

    def __init__(self, is_wanted: Callable[[], bool], frame_bytes: int) -> None:
        self.change = Condition()
        """Is notified when a frame is free, and by the windows of the rings."""
        self.frame_bytes = frame_bytes
        self._is_wanted = is_wanted
        self._free: list[Frame] = []
        self.count = 0
        self._most_frames = self._most_kept_frames = 0
        """The most frames by the budget, and the most that the free memory allows to keep."""
        self._node_reserve_bytes, self._ranks = 0, 1
        self._is_out_of_memory = False
        """True if there was no memory for a frame since the last save began."""
        self._needed_frames: deque[int] = deque(maxlen=RECENT_SAVES)
        """How many frames each of the last saves needed."""

    def allow(self, nbytes: int, reserve_bytes: int = 0, ranks: int = 1) -> None:
        """Set the limits of the spill.

        Args:
            nbytes: The most bytes of all frames together.
            reserve_bytes: The bytes that each rank of the node leaves free.
            ranks: The ranks of the node, which share its memory.
        """
        with self.change:
            self._most_frames = self._most_kept_frames = nbytes // self.frame_bytes
            self._node_reserve_bytes, self._ranks = reserve_bytes * ranks, ranks
            self._trim()

    def need(self, frames: int) -> None:
        """Note how many frames the rings need at once, so that no optimizer waits for a store.

        Every save calls this once. The spill keeps the largest number of the last saves, or less if
        the training has taken what was to stay free.
        """
        shortage_bytes = 0
        if self.count:
            shortage_bytes = max(0, self._node_reserve_bytes - free_memory()) // self._ranks
        with self.change:
            old_count, self._is_out_of_memory = self._frames_to_keep, False
            self._needed_frames.append(frames)
            surplus_frames = -(-shortage_bytes // self.frame_bytes)
            most_kept_frames = (
                max(0, self.count - surplus_frames) if surplus_frames else self._most_frames
            )
            self._most_kept_frames = min(self._most_frames, most_kept_frames)
            new_count = self._frames_to_keep
            self._trim()
        if new_count != old_count:
            reason = (
                "the optimizer's step comes before the image is written"
                if new_count > old_count
                else f"the last {RECENT_SAVES} saves needed no more"
                if not shortage_bytes
                else "little memory is free"
            )
            size = new_count * self.frame_bytes >> 20
            _log.info("ckpt: %d MiB of spill memory are kept for images: %s", size, reason)

    @property
    def has_free(self) -> bool:
        """Return True if a frame is free."""
        return bool(self._free)

    def may_grow(self, *, hurries: bool = True) -> bool:
        """Return True if the spill may have one more frame.

        Args:
            hurries: Whether an optimizer waits. Otherwise, the spill only grows to what the last
                saves needed.
        """
        limit = self._most_frames if hurries else self._frames_to_keep
        return self.count < limit and not self._is_out_of_memory

    def take(self) -> Frame | None:
        """Return a free frame; None if there is none."""
        with self.change:
            return self._free.pop() if self._free else None

    def begin_growth(self) -> None:
        """Count one more frame. The caller must hold ``change``, and must call ``grow`` after it
        has released it.
        """
        self.count += 1

    def grow(self, devices: Devices) -> None:
        """Make the frame that ``begin_growth`` has counted. It is page-locked for copies from
        ``devices``.

        If there is no memory for it, the spill does not grow again before the next save. The free
        memory is measured for each frame, since other programs and the training itself may have
        taken what was free when the budget was made. What the budget leaves them stays free.
        """
        try:
            free = measure(slot_files.SHM, ranks=1).memory
            if self.frame_bytes + self._node_reserve_bytes > free:
                reserve = self._node_reserve_bytes >> 20
                raise HostMemoryExhausted(
                    self.frame_bytes,
                    f"{free >> 20} MiB are free, and {reserve} MiB are kept for the training",
                )
            slot = Slot(self.frame_bytes, None, self._is_wanted)
            slot.prefault()
            slot.pin(devices)
        except BaseException as error:
            with self.change:
                self.count -= 1
                self._is_out_of_memory = True
                self.change.notify_all()
            if not isinstance(error, HostMemoryExhausted | SlotCancelled):
                raise  # Ctrl-C in the call of a save
            if isinstance(error, HostMemoryExhausted):
                _log.warning(
                    "ckpt: %s; an optimizer's step may wait until more of the image is written",
                    error,
                )
            return
        with self.change:
            self._free.append(Frame.of(slot))
            self.change.notify_all()

    def give_back(self, frame: Frame) -> None:
        """Take a frame back. It is freed if the last saves did not need so many."""
        with self.change:
            self._free.append(frame)
            self._trim()
            self.change.notify_all()

    def close(self) -> None:
        """Free all frames, those that a ring still has as soon as it gives them back."""
        with self.change:
            self._most_frames = self._most_kept_frames = 0
            self._needed_frames.clear()
            self._trim()

    @property
    def _frames_to_keep(self) -> int:
        """The most frames that one of the last saves needed, within the limit."""
        return min(self._most_kept_frames, max(self._needed_frames, default=0))

    def _trim(self) -> None:
        """Close free frames until no more than ``_frames_to_keep`` exist, or none is free."""
        while self._free and self.count > self._frames_to_keep:
            self._free.pop().close()
            self.count -= 1


class Ring(Slot):
    """A slot of images that are larger than it.

    ``_own_frames`` are the frames of the slot, and ``_free`` are those that are not in use.
    ``_spill_frames`` are the frames that it has borrowed.

    Thread safety: any thread may call ``take`` and ``give_back``. The owner of the slot calls
    ``reclaim`` when no thread uses the image any more. ``spill.change`` guards the frames.

    Attributes:
        spill: The spill that the ring borrows frames from.
    """

    def __init__(self, nbytes: int, spill: Spill, is_wanted: Callable[[], bool]) -> None:
        """Create the ring, in anonymous memory.

        Args:
            nbytes: The size, a multiple of the size of a frame.
            spill: The spill.
            is_wanted: See `Slot`.

        Raises:
            HostMemoryExhausted: The memory cannot be mapped.
        """
        super().__init__(nbytes, None, is_wanted)
        self.spill, self._devices = spill, tuple[torch.device, ...]()
        frame_bytes = spill.frame_bytes
        self._own_frames = [
            Frame(
                self.tensor[start : start + frame_bytes],
                self.view[start : start + frame_bytes],
                populate=partial(self.populate, start, start + frame_bytes),
            )
            for start in range(0, nbytes, frame_bytes)
        ]
        self._free = list(self._own_frames)
        self._spill_frames: list[Frame] = []

    @property
    def frames(self) -> int:
        """The number of frames of the ring itself."""
        return len(self._own_frames)

    def prefault(self) -> None:
        for frame in self._own_frames:
            check_wanted(self._is_wanted)
            frame.populate()

    def pin(self, devices: Devices) -> None:
        super().pin(devices)
        self._devices = tuple(devices)

    @property
    def has_free(self) -> bool:
        """Return True if ``take`` has a frame now."""
        return bool(self._free) or self.spill.has_free

    def take(self) -> Frame | None:
        """Return a free frame of the ring or of the spill; None if there is none now."""
        with self.spill.change:
            return self._free.pop() if self._free else self._take_from_spill()

    def borrow(self) -> Frame | None:
        """Return a frame of the spill, which grows for it if necessary; None if it may not."""
        while True:
            with self.spill.change:
                if self.spill.has_free:
                    return self._take_from_spill()
                if not self.spill.may_grow():
                    return None
                self.spill.begin_growth()
            self.grow()

    def grow(self) -> None:
        """Make the frame that ``Spill.begin_growth`` has counted."""
        self.spill.grow(self._devices)

    def _take_from_spill(self) -> Frame | None:
        if (frame := self.spill.take()) is not None:
            self._spill_frames.append(frame)
        return frame

    def give_back(self, frame: Frame) -> None:
        """Take back a frame whose bytes no thread needs any more."""
        with self.spill.change:
            if frame in self._spill_frames:
                self._spill_frames.remove(frame)
                self.spill.give_back(frame)
            else:
                self._free.append(frame)
                self.spill.change.notify_all()

    def reclaim(self) -> None:
        """Take back all frames, and give those of the spill back to it."""
        with self.spill.change:
            frames, self._spill_frames, self._free = self._spill_frames, [], list(self._own_frames)
            for frame in frames:
                self.spill.give_back(frame)
