"""Make the save plan of a collected state, and snapshots with this plan.

The plan is kept as long as the structure of the state (names, layouts and replicas) is the same.
Every save compares the structure, part by part, so a plan is never used for another structure. The
copies from a segment's tensors to their places in a slot are kept too, since the tensors of an
unchanged segment have the same memory.

The parts of a state are its segments, which are the named tensors of one module, optimizer or large
dict, and the named tensors outside of segments. A leaf describes a tensor without its data: its
name, its dtype and the boxes (rectangular regions) that this rank holds. A form is the layout and
the memory that a tensor has at one time. Replicas are ranks that hold the same boxes; each of them
writes a share. An image is a rank's part of the state in host memory, laid out as the rank's file,
and a slot is one of the reusable buffers that hold images. A *late* tensor is copied to the image
while training goes on, and an *eager* one before the call of the save returns.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, NamedTuple, Self

import torch

from ckpt.config import CheckMode, Copies, SaveConfig
from ckpt.errors import UnsupportedValue
from ckpt.model.box import BoxIndex
from ckpt.model.box_layouts import BOXES_PER_RANK
from ckpt.model.values import check_name
from ckpt.plan.copies_per_node import nonwriter_leaf, writers
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SPLIT_FROM_BYTES, SavePlan, plan_save
from ckpt.staging.copies import Copy
from ckpt.staging.device import Devices, is_ordered, refuse_capture
from ckpt.staging.image import Image, copyable
from ckpt.staging.slot import Slot
from ckpt.staging.snapshot import Batch, Check, Snapshot
from ckpt.staging.window import begin_image
from ckpt.state.tensors.layout import Form, check_storage, form_of, leaf_of, to_local
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.state.walk.collect import WalkResult
from ckpt.state.walk.optimizer_state import local_state_of
from ckpt.state.walk.segments import NamedTensor, Segment
from ckpt.storage.tiers import OpenTier

Part = Segment | NamedTensor

_SMALL_STATE_BYTES: Final = 512  # The size of a step counter and its entries in the header


class _Place(NamedTuple):
    """The source of one item of the save plan.

    Attributes:
        item: The index of the item in the plan.
        piece: The index of the box, among the boxes of the leaf, that the item is in.
        region: The slices of the box's memory that the item writes; None for all of the memory.
    """

    item: int
    piece: int
    region: tuple[slice, ...] | None


@dataclass(slots=True, eq=False, weakref_slot=True)
class PreparedPlan:
    """A save plan and the leaves that it was made for.

    Attributes:
        leaves: The leaves, in the order of the collected tensors.
        plan: The save plan.
        places_by_leaf: For each leaf, the sources of the plan's items that write it.
        devices: The devices of the tensors that are not in host memory.
        lock: The lock that a thread holds while it makes the image in a slot and the copies into
            this image, or looks them up.
    """

    leaves: tuple[Leaf, ...]
    plan: SavePlan
    places_by_leaf: tuple[tuple[_Place, ...], ...]
    devices: Devices = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def warm(
        self, slots: Iterable[Slot], parts: Sequence[Part], *, overlap: bool, check: CheckMode
    ) -> None:
        """Match the tensors of ``parts`` with their places in ``slots`` ahead of time, so that the
        first save need not do it. The arguments are those of ``snapshot``.

        Thread safety:
            Any thread may call this method.
        """
        for slot in slots:
            with self.lock:
                batches = self._batches(slot, parts, overlap)
                if check == "sampled":  # Choose the bytes of late tensors that saves compare
                    for batch in batches:
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
        """Return the snapshot of ``parts`` for a save to ``slot``.

        No tensor is copied yet. The call records the version counters of the late sources, and
        reads the bytes of these sources that ``check`` compares later.

        Args:
            slot: The slot. The call writes the header of the image to it.
            parts: The collected tensors, which must have the structure of the plan.
            step: The number of the step.
            overlap: True if late tensors may be copied while training goes on; False if all tensors
                are copied before the save returns.
            check: The ``check`` of ``SaveConfig``.
        """
        with self.lock:
            batches = self._batches(slot, parts, overlap)
            # The window is the view of the image through which it is copied and written.
            window = begin_image(slot, self.plan.size, self.plan.header)
            return Snapshot(step, batches, window, check=check)

    def _batches(self, slot: Slot, parts: Sequence[Part], overlap: bool) -> list[Batch]:
        """Return the copies of each of ``parts`` into the image in ``slot``. The image and the
        copies of segments are kept with the slot.
        """
        layout: tuple[Image, dict[tuple[int, bool], tuple[Part, Batch]]] | None = slot.layouts.get(
            self
        )
        if layout is None:
            layout = slot.layouts[self] = Image(self.plan, self.leaves, slot), {}
        image, known_batches = layout
        part_batches: list[Batch] = []
        leaf_index = 0
        for index, part in enumerate(parts):
            known_part, batch = known_batches.get((index, overlap), (None, None))
            if batch is None or known_part is not part:
                batch = self._batch(image, part, leaf_index, overlap)
                # A tensor outside of a segment may be temporary, so it is not kept alive.
                if isinstance(part, Segment):
                    known_batches[(index, overlap)] = (part, batch)
            part_batches.append(batch)
            leaf_index += len(part.named_tensors) if isinstance(part, Segment) else 1
        return part_batches

    def _batch(self, image: Image, part: Part, leaf_index: int, overlap: bool) -> Batch:
        """Return the copies of ``part`` into ``image``. ``leaf_index`` is the index of the first
        leaf of the part.

        Each copy fills a view of the image, whose last byte is before ``end``. A check compares the
        bytes of a tensor on all of its replicas. The wrappers of a late tensor are the DTensor and
        the tensors of other subclasses around it, whose version counters are compared too.
        """
        eager_copies: list[Copy] = []
        late_copies: list[Copy] = []
        checks: list[Check] = []
        wrappers: list[tuple[str, torch.Tensor]] = []
        for offset, (named_tensor, form) in enumerate(_forms(part)):
            leaf = self.leaves[leaf_index + offset]
            # These tensors are aliases of the memory that the source has when the save is called.
            # If ``parameter.data = other`` replaces this memory during the copy, the old memory is
            # still copied.
            memories = form.memories(leaf.boxes)
            # A cached plan guarantees shapes, but not that the memory still exists.
            for memory in memories:
                check_storage(named_tensor.name, memory)
            is_late = (
                overlap
                and named_tensor.is_late
                and all(map(_may_be_late, (*memories, *named_tensor.outer_tensors)))
            )
            for item_index, piece_index, region in self.places_by_leaf[leaf_index + offset]:
                memory = memories[piece_index]
                source = copyable(memory, leaf.dtype)
                source = source if region is None else source[region]
                address = source.data_ptr()
                (late_copies if is_late else eager_copies).extend(
                    Copy(named_tensor.name, source, view, memory, end, part_range, address)
                    for view, end, part_range in image.targets(
                        item_index, flat=source.is_contiguous()
                    )
                )
            if is_late:
                dtensors = () if form.wrapper is None else (form.wrapper,)
                wrappers += [
                    (named_tensor.name, outer_tensor)
                    for outer_tensor in (*dtensors, *named_tensor.outer_tensors)
                ]
            if len(leaf.replicas) > 1 and leaf.nbytes:
                boxes = ";".join(f"{box.offsets}{box.shape}" for box in leaf.boxes)
                checks.append(Check(leaf.name, boxes, tuple(memories), is_late))
        # The snapshot sorts the late copies of all batches together. This is fast if each batch is
        # sorted already.
        late_copies.sort(key=attrgetter("end"))
        return Batch(
            eager=tuple(eager_copies),
            late_copies=tuple(late_copies),
            checks=tuple(checks),
            wrappers=tuple(wrappers),
        )


class PlanCache:
    """Keeps the save plan as long as the structure of the state is the same.

    Thread safety:
        Only the training thread uses it.
    """

    def __init__(
        self, rank: int, chunk_bytes: int, *, node_of: Sequence[int] = (), copies: Copies = "one"
    ) -> None:
        """Make an empty cache.

        Args:
            rank: The number of this rank.
            chunk_bytes: The most bytes of a chunk.
            node_of: The node of each rank if nodes have tiers of their own, else empty.
            copies: The ``copies`` of ``SaveConfig``.
        """
        self._rank, self._chunk_bytes, self._node_of = rank, chunk_bytes, node_of
        # Even with "one", each node writes a copy of tensors below this size, such as counters and
        # buffers.
        self._node_copy_bytes = SPLIT_FROM_BYTES if copies == "one" else float("inf")
        self._structure: list[Segment | Hashable] = []
        self._plan: PreparedPlan | None = None

    @classmethod
    def of(cls, rank: int, config: SaveConfig, tiers: Sequence[OpenTier]) -> Self:
        """Return an empty cache for saves to ``tiers``."""
        node_of = next((tier.nodes.of for tier in tiers if tier.nodes), ())
        return cls(rank, config.chunk_bytes, node_of=node_of, copies=config.copies)

    def prepare(self, walk_result: WalkResult) -> PreparedPlan:
        """Return the plan for ``walk_result``: the last plan if the structure is the same, else a
        new one.

        Raises:
            UnsupportedValue: A tensor cannot be saved, or two tensors have the same name. The error
                has the name.
            StagingError: A device of the tensors is capturing a graph.
        """
        structure = [
            part if isinstance(part, Segment) else _signature(part, form_of(part.tensor))
            for part in walk_result.parts
        ]
        if self._plan is None or not _same_structure(self._structure, structure):
            self._plan = self._make_plan(walk_result.named_tensors)
        self._structure = structure
        if self._plan.devices:
            refuse_capture(self._plan.devices, "save_async")
        return self._plan

    def forget(self) -> None:
        """Forget the plan and the tensors. The slots then drop the copies that they keep for it."""
        self._plan = None
        self._structure = []

    def _make_plan(self, tensors: Sequence[NamedTensor]) -> PreparedPlan:
        """Return a new plan for ``tensors``."""
        names: set[str] = set()
        for item in tensors:
            if item.name in names:
                raise UnsupportedValue(
                    item.name, "name that two values share", "rename one of them"
                )
            check_name(item.name, item.name)
            names.add(item.name)
        leaves = tuple(self._leaf(item) for item in tensors)
        plan = plan_save(leaves, rank=self._rank, chunk_bytes=self._chunk_bytes)
        places_by_leaf: list[list[_Place]] = [[] for _ in leaves]
        box_indices = [BoxIndex(leaf.boxes) for leaf in leaves]
        for index, write_item in enumerate(plan.items):
            if write_item.nbytes:
                boxes = leaves[write_item.leaf].boxes
                candidates = box_indices[write_item.leaf].search(write_item.box)
                piece_index = next(
                    i
                    for i in candidates
                    if write_item.box == boxes[i] or boxes[i].contains(write_item.box)
                )
                whole_box = boxes[piece_index]
                region = (
                    None
                    if write_item.box == whole_box
                    else write_item.box.relative_to(whole_box).slices()
                )
                places_by_leaf[write_item.leaf].append(_Place(index, piece_index, region))
        return PreparedPlan(
            leaves=leaves,
            plan=plan,
            places_by_leaf=tuple(map(tuple, places_by_leaf)),
            devices=_devices(tensors),
        )

    def _leaf(self, item: NamedTensor) -> Leaf:
        """Return the leaf of a tensor, whose replicas are the ranks that share its writing.

        A delegated tensor is one that another replica saves, and this rank does not. If nodes have
        tiers of their own, ``_node_of`` gives the node of each rank, and each node writes a copy of
        a small tensor.
        """
        leaf = leaf_of(item.name, item.tensor, () if item.is_delegated else item.replicas)
        is_local_shards = isinstance(item.tensor, LocalShards)
        if is_local_shards and leaf.replicas and self._rank not in leaf.replicas:
            raise UnsupportedValue(
                item.name,
                f"LocalShards whose replicas lack this rank ({self._rank})",
                "give the numbers of all ranks that hold the same shards",
            )
        node_of = self._node_of if leaf.nbytes < self._node_copy_bytes else ()
        if len(leaf.boxes) > BOXES_PER_RANK:
            raise UnsupportedValue(
                item.name,
                f"tensor in {len(leaf.boxes)} parts on one rank, of which ckpt stores at most "
                f"{BOXES_PER_RANK}",
                "join parts that are next to each other, or put them into several tensors",
            )
        if item.is_delegated:
            return nonwriter_leaf(leaf, item.replicas, self._rank, node_of)
        replicas = writers(leaf.replicas, self._rank, node_of) if node_of else leaf.replicas
        is_frozen = _is_frozen((item.tensor, *item.outer_tensors))
        if not is_frozen and replicas == leaf.replicas:
            return leaf
        return replace(leaf, replicas=replicas, is_frozen=is_frozen)


def _is_frozen(tensors: Iterable[object]) -> bool:
    """Return True if one of ``tensors``, a saved tensor and the wrappers around it, is a parameter
    that needs no gradient.
    """
    return any(
        isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad for tensor in tensors
    )


def _same_structure(old: Sequence[Segment | Hashable], new: Sequence[Segment | Hashable]) -> bool:
    if len(old) == len(new) and all(a is b or a == b for a, b in zip(old, new, strict=True)):
        return True
    return _signatures(old) == _signatures(new)


def _signatures(parts: Sequence[Segment | Hashable]) -> list[Hashable]:
    """Return the signatures of the tensors of segments, in order. Other parts are signatures."""
    signatures: list[Hashable] = []
    for part in parts:
        signatures += (
            [_signature(item, form) for item, form in _forms(part)]
            if isinstance(part, Segment)
            else [part]
        )
    return signatures


def _forms(part: Part) -> Iterable[tuple[NamedTensor, Form]]:
    """Return each tensor of ``part`` with its form."""
    if isinstance(part, Segment):
        return zip(part.named_tensors, part.forms, strict=True)
    return [(part, form_of(part.tensor))]


def _signature(item: NamedTensor, form: Form) -> Hashable:
    return (item.name, form.signature, item.replicas, item.is_delegated)


def first_step_growth(walk_result: WalkResult, leaves: Sequence[Leaf]) -> int:
    """Return an estimate of how many bytes this rank's image grows by when the optimizers make
    their first step.

    The settings of an optimizer show how many tensors it probably keeps for a parameter.
    ``leaves`` are those of ``walk_result.named_tensors``, in the same order.
    """
    named_leaves = zip(walk_result.named_tensors, leaves, strict=True)
    replica_counts = {id(item.tensor): len(leaf.replicas) or 1 for item, leaf in named_leaves}
    growth_bytes = 0
    for optimizer in walk_result.optimizers:
        local_state = local_state_of("", optimizer)
        for group in optimizer.param_groups:
            # Adam has two moments, and a third one with amsgrad. SGD has a buffer with momentum.
            tensor_count = (
                (3 if group.get("amsgrad") else 2)
                if "betas" in group
                else 1
                if group.get("momentum", 1)
                else 0
            )
            for parameter in group["params"]:
                if local_state.keeps(parameter) and not local_state.by_parameter.get(parameter):
                    growth_bytes += (
                        tensor_count * _nbytes(parameter) // replica_counts.get(id(parameter), 1)
                        + _SMALL_STATE_BYTES
                    )
    return growth_bytes


def _nbytes(parameter: TensorOrShards) -> int:
    if isinstance(parameter, LocalShards):
        return sum(part.nbytes for part in parameter.tensors)
    return to_local(parameter).nbytes


def _may_be_late(memory: torch.Tensor) -> bool:
    """Return True if ``memory`` may be copied while training goes on, and False if it must be
    copied before the call of the save returns.

    The result is False on an accelerator without streams, and for a tensor made in inference mode,
    which has no version counter. It is also False for a lazily conjugated or negated view, whose
    memory has other values than the view.
    """
    return is_ordered(memory.device) and not (
        memory.is_inference() or memory.is_conj() or memory.is_neg()
    )


def _devices(items: Iterable[NamedTensor]) -> Devices:
    """Return the devices of the tensors that are not in host memory."""
    sources = (item.tensor for item in items)
    devices = {
        part.device
        for source in sources
        for part in (source.tensors if isinstance(source, LocalShards) else (to_local(source),))
    }
    return tuple(sorted((device for device in devices if device.type != "cpu"), key=str))
