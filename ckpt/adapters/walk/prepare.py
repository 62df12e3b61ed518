"""The plan for a collected state, kept while the structure is the same, and its snapshots.

The structure is compared on every save, part by part, so a plan is never used for another state.
Copies of a segment's tensors are kept too, for each slot, since an unchanged segment means that its
tensors have the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, NamedTuple, Self

import torch

from ckpt.adapters.tensors.layout import Form, check_storage, form_of, leaf_of, local
from ckpt.adapters.tensors.local_shards import LocalShards, Source
from ckpt.adapters.tensors.zero import keeper_of
from ckpt.adapters.walk.collect import Collected
from ckpt.adapters.walk.segments import Held, Segment
from ckpt.config import CheckMode, Copies, SaveConfig
from ckpt.errors import UnsupportedValue
from ckpt.model.values import check_name
from ckpt.plan.copies_per_node import left, writers
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SPLIT_FROM_BYTES, SavePlan, plan_save
from ckpt.staging.copies import Copy
from ckpt.staging.device import Devices, is_ordered, refuse_capture
from ckpt.staging.image import Image, copyable
from ckpt.staging.slot import Slot
from ckpt.staging.snapshot import Batch, Check, Snapshot
from ckpt.storage.tiers import OpenTier

Part = Segment | Held

_SMALL_STATE_BYTES: Final = 512  # A step counter and its entries in the header


class _Place(NamedTuple):
    """The source of an item of the plan.

    It is ``region`` of the memory of box ``piece`` of its leaf; None stands for all of it.
    """

    item: int
    piece: int
    region: tuple[slice, ...] | None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prepared:
    """A plan and the leaves it was made for.

    Attributes:
        by_leaf: For each leaf the plan's items of it.
        devices: Those of the sources that are not in host memory.
    """

    leaves: tuple[Leaf, ...]
    plan: SavePlan
    by_leaf: tuple[tuple[_Place, ...], ...]
    devices: Devices = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def warm(
        self, slots: Iterable[Slot], parts: Sequence[Part], *, overlap: bool, check: CheckMode
    ) -> None:
        """Lay the plan over ``slots`` ahead, so that the first save need not.

        Any thread may call it.
        """
        for slot in slots:
            with self.lock:
                _, chosen = self._lay(slot, parts, overlap)
                if check == "sampled":
                    for batch in chosen:
                        batch.sample.build()

    def snapshot(
        self,
        slot: Slot,
        parts: Sequence[Part],
        step: int,
        *,
        overlap: bool,
        check: CheckMode = "sampled",
    ) -> Snapshot:
        """Return a snapshot: sources matched with their places in ``slot``, and sampled as
        ``check`` says.

        Nothing is copied yet.
        """
        with self.lock:
            image, chosen = self._lay(slot, parts, overlap)
            return Snapshot(step, chosen, image.window(), check=check)

    def _lay(self, slot: Slot, parts: Sequence[Part], overlap: bool) -> tuple[Image, list[Batch]]:
        laid: tuple[Image, dict[tuple[int, bool], tuple[Part, Batch]]] | None = slot.laid.get(self)
        if laid is None:
            laid = slot.laid[self] = Image(self.plan, self.leaves, slot), {}
        image, batches = laid
        chosen: list[Batch] = []
        first = 0
        for index, part in enumerate(parts):
            known = batches.get((index, overlap))
            if known is None or known[0] is not part:
                known = (part, self._batch(image, part, first, overlap))
                # A tensor outside of a segment may be temporary, so it is not kept alive.
                if isinstance(part, Segment):
                    batches[(index, overlap)] = known
            chosen.append(known[1])
            first += len(part.held) if isinstance(part, Segment) else 1
        return image, chosen

    def _batch(self, image: Image, part: Part, first: int, overlap: bool) -> Batch:
        eager: list[Copy] = []
        late: list[Copy] = []
        checks: list[Check] = []
        wrappers: list[tuple[str, torch.Tensor]] = []
        for offset, (held, form) in enumerate(_forms(part)):
            leaf = self.leaves[first + offset]
            # These are aliases: ``parameter.data = other`` during the copy changes the parameter,
            # but not what is copied.
            parts = form.memories(leaf.boxes)
            # A cached plan guarantees shapes, but not that the memory still exists.
            for memory in parts:
                check_storage(held.name, memory)
            is_late = overlap and held.late and all(map(_may_be_late, (*parts, *held.watched)))
            for item, piece, region in self.by_leaf[first + offset]:
                memory = parts[piece]
                source = copyable(memory, leaf.dtype)
                source = source if region is None else source[region]
                address = source.data_ptr()
                (late if is_late else eager).extend(
                    Copy(held.name, source, view, memory, end, cut, address)
                    for view, end, cut in image.targets(item, flat=source.is_contiguous())
                )
            if is_late:
                own = () if form.wrapper is None else (form.wrapper,)
                wrappers += [(held.name, each) for each in (*own, *held.watched)]
            if len(leaf.replicas) > 1 and leaf.nbytes:
                boxes = ";".join(f"{box.offsets}{box.shape}" for box in leaf.boxes)
                checks.append(Check(leaf.name, boxes, tuple(parts), is_late))
        # If each batch is sorted, sorting all batches together is a merge.
        late.sort(key=attrgetter("end"))
        return Batch(
            eager=tuple(eager), late=tuple(late), checks=tuple(checks), wrappers=tuple(wrappers)
        )


class PlanCache:
    """The plan of the last structure.

    Thread safety:
        The training thread.
    """

    def __init__(
        self, rank: int, chunk_bytes: int, *, node_of: Sequence[int] = (), copies: Copies = "one"
    ) -> None:
        """``node_of`` is the node of each rank, if nodes have tiers of their own."""
        self._rank, self._chunk_bytes, self._node_of = rank, chunk_bytes, node_of
        # Each node has a copy of small tensors, such as counters and buffers, in any case.
        self._from_bytes = SPLIT_FROM_BYTES if copies == "one" else float("inf")
        self._known: list[Segment | Hashable] = []
        self._prepared: Prepared | None = None

    @classmethod
    def of(cls, rank: int, config: SaveConfig, tiers: Sequence[OpenTier]) -> Self:
        """Return the cache for saves to ``tiers``."""
        node_of = next((tier.nodes.of for tier in tiers if tier.nodes), ())
        return cls(rank, config.chunk_bytes, node_of=node_of, copies=config.copies)

    def prepare(self, collected: Collected) -> Prepared:
        """Return the plan for what was collected: the last plan if the structure is the same, else
        a new one.

        Raises:
            UnsupportedValue: A tensor that cannot be saved, with its name.
            StagingError: A graph is being captured.
        """
        found = [
            part if isinstance(part, Segment) else _signature(part, form_of(part.tensor))
            for part in collected.parts
        ]
        if self._prepared is None or not _same_structure(self._known, found):
            self._prepared = self._new(collected.held)
        self._known = found
        refuse_capture(self._prepared.devices, "save_async")
        return self._prepared

    def forget(self) -> None:
        """Let go of slots and tensors."""
        self._prepared = None
        self._known = []

    def _new(self, held: Sequence[Held]) -> Prepared:
        names: set[str] = set()
        for item in held:
            if item.name in names:
                raise UnsupportedValue(
                    item.name, "name that two values share", "rename one of them"
                )
            check_name(item.name, item.name)
            names.add(item.name)
        leaves = tuple(self._leaf(item) for item in held)
        plan = plan_save(leaves, rank=self._rank, chunk_bytes=self._chunk_bytes)
        by_leaf: list[list[_Place]] = [[] for _ in leaves]
        for index, write in enumerate(plan.items):
            if write.nbytes:
                boxes = leaves[write.leaf].boxes
                piece = next(i for i, box in enumerate(boxes) if box.contains(write.box))
                whole = boxes[piece]
                region = None if write.box == whole else write.box.relative_to(whole).slices()
                by_leaf[write.leaf].append(_Place(index, piece, region))
        return Prepared(
            leaves=leaves, plan=plan, by_leaf=tuple(map(tuple, by_leaf)), devices=_devices(held)
        )

    def _leaf(self, held: Held) -> Leaf:
        leaf = leaf_of(held.name, held.tensor, () if held.left else held.replicas)
        node_of = self._node_of if leaf.nbytes < self._from_bytes else ()
        if held.left:
            return left(leaf, held.replicas, self._rank, node_of)
        return replace(leaf, replicas=writers(leaf.replicas, self._rank, node_of))


def _same_structure(
    before: Sequence[Segment | Hashable], now: Sequence[Segment | Hashable]
) -> bool:
    if len(before) == len(now) and all(
        one is two or one == two for one, two in zip(before, now, strict=True)
    ):
        return True
    return _flat(before) == _flat(now)


def _flat(parts: Sequence[Segment | Hashable]) -> list[Hashable]:
    found: list[Hashable] = []
    for part in parts:
        found += (
            [_signature(*pair) for pair in _forms(part)] if isinstance(part, Segment) else [part]
        )
    return found


def _forms(part: Part) -> Iterable[tuple[Held, Form]]:
    """Return the tensors of ``part``, each with the form that it is saved in."""
    if isinstance(part, Segment):
        return zip(part.held, part.forms, strict=True)
    return [(part, form_of(part.tensor))]


def _signature(held: Held, form: Form) -> Hashable:
    return (held.name, form.signature, held.replicas, held.left)


def growth_of(collected: Collected, leaves: Sequence[Leaf]) -> int:
    """Return how many bytes this rank's image will grow by once its optimizers have stepped.

    It is a guess by what optimizers of the kind keep for a parameter. ``leaves`` are those of
    ``collected.held``, in the same order.
    """
    pairs = zip(collected.held, leaves, strict=True)
    shares = {id(held.tensor): len(leaf.replicas) or 1 for held, leaf in pairs}
    growth = 0
    for optimizer in collected.optimizers:
        keeper = keeper_of("", optimizer)
        for group in optimizer.param_groups:
            copies = (
                (3 if group.get("amsgrad") else 2)
                if "betas" in group
                else 1
                if group.get("momentum", 1)
                else 0
            )
            for parameter in group["params"]:
                if keeper.keeps(parameter) and not keeper.state.get(parameter):
                    growth += (
                        copies * _nbytes(parameter) // shares.get(id(parameter), 1)
                        + _SMALL_STATE_BYTES
                    )
    return growth


def _nbytes(parameter: Source) -> int:
    if isinstance(parameter, LocalShards):
        return sum(part.nbytes for part in parameter.tensors)
    return local(parameter).nbytes


def _may_be_late(memory: torch.Tensor) -> bool:
    """Return False for a tensor that must be copied at once. A tensor made in inference mode has no
    version to watch, and the memory of a lazy view has other values than the view.
    """
    return is_ordered(memory.device) and not (
        memory.is_inference() or memory.is_conj() or memory.is_neg()
    )


def _devices(held: Iterable[Held]) -> Devices:
    sources = (item.tensor for item in held)
    found = {
        part.device
        for source in sources
        for part in (source.tensors if isinstance(source, LocalShards) else (local(source),))
    }
    return tuple(sorted((device for device in found if device.type != "cpu"), key=str))
