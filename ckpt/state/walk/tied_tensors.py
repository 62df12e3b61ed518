"""Register the tensors of a walk, alone or as segments, and find the tensors that share memory.

A segment has the named tensors of one module, optimizer or large dict. It is used again by the next
walk if nothing in it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from ckpt.model.values import check_name
from ckpt.state.tensors.layout import check_initialized
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.walk.segments import NamedTensor, Segment, TensorsByAddress, address_of, same_view


class Registry:
    """The tensors that a walk has registered so far, in the order of the walk.

    Two tensors are tied if they are the same object, or have the same memory and the same elements.
    The bytes of tied tensors are stored once, under the name of the tensor that came first.

    Attributes:
        parts: The segments, and the tensors that belong to no segment.
        ties: The name of each tensor that is tied to an earlier one -> the name under which the
            bytes of the earlier tensor are stored.

    ``_names_by_id`` maps the identity (``id``) of each tensor to the name under which its bytes are
    stored, and ``_by_address`` the address of its memory to the tensors there. The segments in
    ``_pending_segments`` are not yet in these two tables. Each segment has such tables of its own.
    A segment is ``apart_from`` the earlier segments with which it is known to share no memory.
    """

    def __init__(self, segments: dict[str, Segment]) -> None:
        """``segments`` has the segment of the last walk for each path. The registry replaces those
        that have changed.
        """
        self.parts: list[Segment | NamedTensor] = []
        self.ties: dict[str, str] = {}
        self._segments: Final = segments
        self._names_by_id: dict[int, str] = {}
        self._by_address: TensorsByAddress = {}
        self._pending_segments: list[Segment] = []

    def add_untied(self, item: NamedTensor) -> None:
        """Register a tensor that is never tied to another one."""
        self.parts.append(item)

    def add(self, item: NamedTensor) -> str:
        """Register a tensor, and return the name under which its bytes are stored."""
        stored_name = self._stored_name(item.name, item.tensor, self._names_by_id, self._by_address)
        if stored_name == item.name:
            self.parts.append(item)
        else:
            self.ties[item.name] = stored_name
        return stored_name

    def add_segment(
        self,
        path: str,
        key: Sequence[object],
        tensors: Sequence[TensorOrShards],
        make: Callable[[], Iterator[NamedTensor]],
        *,
        is_made: bool = True,
    ) -> Segment:
        """Register ``tensors`` as the segment at ``path``, and return the segment. ``is_made`` is
        that of ``Segment``.

        It is the segment of the last walk if that can be used again (see ``add_known``). Otherwise
        it is a new one with the tensors that ``make`` yields.
        """
        segment = self.add_known(path, key, tensors)
        return segment or self.add_new(path, key, tensors, make(), is_made=is_made)

    def add_known(
        self, path: str, key: Sequence[object], tensors: Sequence[TensorOrShards]
    ) -> Segment | None:
        """Register the segment of the last walk at ``path``, and return it.

        Return None if there is no such segment, if ``key`` or the tensors have changed, or if a
        tensor of the segment was tied to a tensor outside of it. Return None also if an earlier
        tensor of this walk is the same object as one of the segment, or is at the same address.
        """
        segment = self._segments.get(path)
        if segment is None or not segment.closed or not segment.is_unchanged(key, tensors):
            return None
        earlier_segments = self._segments_before()
        # Segments compare by identity. If the segments before this one are the same as in the last
        # walk, they are known to share no memory with this one.
        if earlier_segments is None or earlier_segments != segment.apart_from:
            self._index_pending()
            if not (
                self._names_by_id.keys().isdisjoint(segment.names_by_id)
                and self._by_address.keys().isdisjoint(segment.by_address)
            ):
                return None
            segment.apart_from = earlier_segments
        return self._add(path, segment)

    def add_new(
        self,
        path: str,
        key: Sequence[object],
        tensors: Sequence[TensorOrShards],
        candidates: Iterator[NamedTensor],
        *,
        is_made: bool = True,
    ) -> Segment:
        """Register a new segment of ``candidates`` at ``path``, and return it. ``key``, ``tensors``
        and ``is_made`` are as for ``Segment``.
        """
        named_tensors: list[NamedTensor] = []
        ties: dict[str, str] = {}
        names_by_id: dict[int, str] = {}
        by_address: TensorsByAddress = {}
        for item in candidates:
            if item.is_untied:
                named_tensors.append(item)
                continue
            stored_name = self._stored_name(item.name, item.tensor, names_by_id, by_address)
            if stored_name == item.name:
                named_tensors.append(item)
            else:
                check_name(item.name, item.name)  # A save plan checks the names of all others
                ties[item.name] = stored_name
        # ``_stored_name`` has not called this method if there are no candidates.
        self._index_pending()
        # A later call of it replaces the list at each of these addresses by the list of this
        # segment. So this list must have the earlier tensors too.
        for address in by_address.keys() & self._by_address.keys():
            by_address[address] = [*self._by_address[address], *by_address[address]]
        segment = Segment(
            key,
            tensors,
            named_tensors=named_tensors,
            ties=ties,
            names_by_id=names_by_id,
            by_address=by_address,
        )
        segment.is_made = is_made
        return self._add(path, segment)

    def _add(self, path: str, segment: Segment) -> Segment:
        """Add ``segment`` to the result of the walk, and keep it for the next walk."""
        self._segments[path] = segment
        self._pending_segments.append(segment)
        self.ties.update(segment.ties)
        self.parts.append(segment)
        return segment

    def _segments_before(self) -> list[Segment] | None:
        """Return the segments that were registered so far, or None if other tensors were registered
        too.
        """
        segments = [part for part in self.parts if isinstance(part, Segment)]
        return segments if len(segments) == len(self.parts) else None

    def _index_pending(self) -> None:
        """Add the tensors of all segments so far to ``_names_by_id`` and ``_by_address``.

        The registry calls this method as late as possible, since it needs neither table if the walk
        takes all segments of the last walk in the same order.
        """
        for segment in self._pending_segments:
            self._names_by_id.update(segment.names_by_id)
            self._by_address.update(segment.by_address)
        self._pending_segments.clear()

    def _stored_name(
        self,
        name: str,
        tensor: TensorOrShards,
        names_by_id: dict[int, str],
        by_address: TensorsByAddress,
    ) -> str:
        """Return the name under which the bytes of ``tensor`` are stored: ``name``, or that of an
        earlier tensor to which it is tied.

        ``names_by_id`` and ``by_address`` are ``_names_by_id`` and ``_by_address`` of this
        registry, or the tables of a segment that is being built. The call adds the tensor to them
        if it is stored under ``name``. The result of the walk keeps such a tensor alive, so no
        other tensor can have the same identity.
        """
        check_initialized(name, tensor)
        self._index_pending()
        stored_name = self._names_by_id.get(id(tensor)) or names_by_id.get(id(tensor))
        if stored_name is None:
            stored_name = name
            if isinstance(tensor, torch.Tensor) and (address := address_of(tensor)):
                candidates = (
                    [*self._by_address.get(address, ()), *by_address.get(address, ())]
                    if by_address is not self._by_address
                    else by_address.get(address, [])
                )
                stored_name = next(
                    (
                        earlier_name
                        for earlier, earlier_name in candidates
                        if same_view(earlier, tensor)
                    ),
                    name,
                )
                if stored_name == name:
                    by_address.setdefault(address, []).append((tensor, name))
            if (
                stored_name == name
            ):  # A tied tensor may be freed, and another one may get its identity
                names_by_id[id(tensor)] = name
        return stored_name
