"""Register the tensors of a walk, alone or as segments, and find the tensors that share memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from ckpt.adapters.tensors.layout import check_initialized
from ckpt.adapters.tensors.local_shards import Source
from ckpt.adapters.walk.segments import At, Held, Segment, place_of, same_view
from ckpt.model.values import check_name


class Registry:
    """The tensors that a walk has registered so far, in the order of the walk.

    Two tensors are tied if they are the same object, or have the same memory and the same elements.
    The bytes of tied tensors are stored once, under the name of the tensor that came first.

    Attributes:
        parts: The segments, and the tensors that belong to no segment.
        tied: The name of each tensor that is tied to an earlier one -> the name under which the
            bytes of the earlier tensor are stored.
    """

    def __init__(self, segments: dict[str, Segment]) -> None:
        """``segments`` has the segment of the last walk for each path. The registry replaces those
        that have changed.
        """
        self.parts: list[Segment | Held] = []
        self.tied: dict[str, str] = {}
        self._segments: Final = segments
        self._seen: dict[int, str] = {}
        self._at: At = {}
        self._unread: list[Segment] = []  # Segments that are not yet in ``_seen`` and ``_at``

    def add_untied(self, item: Held) -> None:
        """Register a tensor that is never tied to another one."""
        self.parts.append(item)

    def add(self, item: Held) -> str:
        """Register a tensor, and return the name under which its bytes are stored."""
        stored = self._stored(item.name, item.tensor, self._seen, self._at)
        if stored == item.name:
            self.parts.append(item)
        else:
            self.tied[item.name] = stored
        return stored

    def add_segment(
        self,
        path: str,
        key: Sequence[object],
        tensors: Sequence[Source],
        make: Callable[[], Iterator[Held]],
        *,
        is_made: bool = True,
    ) -> Segment:
        """Register ``tensors`` as the segment at ``path``, and return the segment. ``is_made`` is
        that of ``Segment``.

        It is the segment of the last walk if that can be used again (see ``add_known``). Otherwise
        it is a new one with the tensors that ``make`` yields.
        """
        known = self.add_known(path, key, tensors)
        return known or self.add_new(path, key, tensors, make(), is_made=is_made)

    def add_known(
        self, path: str, key: Sequence[object], tensors: Sequence[Source]
    ) -> Segment | None:
        """Register the segment of the last walk at ``path``, and return it.

        Return None if there is no such segment, if ``key`` or the tensors have changed, or if a
        tensor of the segment was tied to a tensor outside of it. Return None also if an earlier
        tensor of this walk is the same object as one of the segment, or is at the same address.
        """
        segment = self._segments.get(path)
        if segment is None or not segment.closed or not segment.still(key, tensors):
            return None
        before = self._segments_before()
        # Segments compare by identity. If the segments before this one are the same as in the last
        # walk, they are known to share no memory with this one.
        if before is None or before != segment.apart_from:
            self._read()
            if not (
                self._seen.keys().isdisjoint(segment.seen)
                and self._at.keys().isdisjoint(segment.at)
            ):
                return None
            segment.apart_from = before
        return self._add(path, segment)

    def add_new(
        self,
        path: str,
        key: Sequence[object],
        tensors: Sequence[Source],
        candidates: Iterator[Held],
        *,
        is_made: bool = True,
    ) -> Segment:
        """Register a new segment of ``candidates`` at ``path``, and return it."""
        held: list[Held] = []
        tied: dict[str, str] = {}
        seen: dict[int, str] = {}
        at: At = {}
        for item in candidates:
            if item.untied:
                held.append(item)
                continue
            stored = self._stored(item.name, item.tensor, seen, at)
            if stored == item.name:
                held.append(item)
            else:
                check_name(item.name, item.name)  # A save plan checks the names of all others
                tied[item.name] = stored
        self._read()  # ``_stored`` has not called this method if there are no candidates
        # A later call of ``_read`` replaces the list at each of these addresses by the list of this
        # segment. So this list must have the earlier tensors too.
        for address in at.keys() & self._at.keys():
            at[address] = [*self._at[address], *at[address]]
        segment = Segment(key, tensors, held=held, tied=tied, seen=seen, at=at)
        segment.is_made = is_made
        return self._add(path, segment)

    def _add(self, path: str, segment: Segment) -> Segment:
        self._segments[path] = segment
        self._unread.append(segment)
        self.tied.update(segment.tied)
        self.parts.append(segment)
        return segment

    def _segments_before(self) -> list[Segment] | None:
        """Return the segments that were registered so far, or None if other tensors were registered
        too.
        """
        found = [part for part in self.parts if isinstance(part, Segment)]
        return found if len(found) == len(self.parts) else None

    def _read(self) -> None:
        """Add the tensors of all segments so far to ``_seen`` and ``_at``.

        The registry calls this method as late as possible, since it needs neither table if the walk
        takes all segments of the last walk in the same order.
        """
        for segment in self._unread:
            self._seen.update(segment.seen)
            self._at.update(segment.at)
        self._unread.clear()

    def _stored(self, name: str, tensor: Source, seen: dict[int, str], at: At) -> str:
        """Return the name under which the bytes of ``tensor`` are stored: ``name``, or that of an
        earlier tensor to which it is tied.

        ``seen`` and ``at`` are ``_seen`` and ``_at`` of this registry, or the tables of a segment
        that is being built. The call adds the tensor to them if it is stored under ``name``. The
        result of the walk keeps such a tensor alive, so no other tensor can have the same identity.
        """
        check_initialized(name, tensor)
        self._read()
        stored = self._seen.get(id(tensor)) or seen.get(id(tensor))
        if stored is None:
            stored = name
            if isinstance(tensor, torch.Tensor) and (address := place_of(tensor)):
                others = (
                    [*self._at.get(address, ()), *at.get(address, ())]
                    if at is not self._at
                    else at.get(address, [])
                )
                stored = next((known for other, known in others if same_view(other, tensor)), name)
                if stored == name:
                    at.setdefault(address, []).append((tensor, name))
            if stored == name:  # A tied tensor may be freed, and another one may get its identity
                seen[id(tensor)] = name
        return stored
