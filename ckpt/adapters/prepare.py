"""What was collected -> a plan, kept while the structure is the same, and a snapshot to take by it.

The structure is compared on every save, tensor by tensor: a plan is never used for a state it was not made for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.adapters.collect import Collected, Held
from ckpt.adapters.layout import leaf_of, local, signature
from ckpt.errors import UnsupportedValue
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan, plan_save
from ckpt.staging.image import Image, copyable
from ckpt.staging.slots import Slot
from ckpt.staging.snapshot import Check, Copy, Snapshot


@dataclass(slots=True)
class Prepared:
    """A plan, the leaves it was made for, and its images in the slots met so far."""

    leaves: tuple[Leaf, ...]
    plan: SavePlan
    slices: tuple[tuple[slice, ...] | None, ...]
    images: dict[int, Image] = field(default_factory=dict[int, Image])

    def snapshot(self, slot: Slot, held: Sequence[Held], step: int, *, overlap: bool) -> Snapshot:
        """Sources matched with their places in ``slot``. Nothing is copied yet."""
        image = self.images.get(id(slot))
        if image is None or image.slot is not slot:
            image = self.images[id(slot)] = Image(self.plan, self.leaves, slot)
        eager: list[Copy] = []
        late: list[Copy] = []
        for item, part, target in zip(self.plan.items, self.slices, image.views, strict=True):
            if not item.nbytes:
                continue
            source = held[item.leaf]
            memory = copyable(local(source.tensor), self.leaves[item.leaf].dtype)
            copy = Copy(source.name, memory if part is None else memory[part], target, source.tensor)
            (late if overlap and source.late else eager).append(copy)
        return Snapshot(step, eager, late, self._checks(held, overlap))

    def _checks(self, held: Sequence[Held], overlap: bool) -> list[Check]:
        """Leaves that other ranks hold too, and of which each writes only a part: their digests must agree."""
        return [
            Check(
                leaf.name,
                ";".join(f"{box.offsets}{box.shape}" for box in leaf.boxes),
                local(source.tensor),
                overlap and source.late,
            )
            for leaf, source in zip(self.leaves, held, strict=True)
            if len(leaf.replicas) > 1 and leaf.nbytes
        ]


class PlanCache:
    """The plan of the last structure seen.

    Threads: the training thread.
    """

    def __init__(self, rank: int, chunk_bytes: int) -> None:
        self._rank, self._chunk_bytes = rank, chunk_bytes
        self._signature: list[tuple[Any, ...]] | None = None
        self._prepared: Prepared | None = None

    def prepare(self, collected: Collected) -> Prepared:
        """The plan for what was collected: the last one if the structure is the same, else a new one.

        Raises:
            UnsupportedValue: A tensor that cannot be saved, with its name.
        """
        found: list[tuple[Hashable, ...]] = [
            (h.name, signature(h.tensor), h.replicas) for h in collected.held
        ]
        if self._prepared is None or found != self._signature:
            self._prepared = self._new(collected.held)
            self._signature = found
        return self._prepared

    def forget(self) -> None:
        """Let go of slots and tensors."""
        self._prepared = self._signature = None

    def _new(self, held: Sequence[Held]) -> Prepared:
        names: set[str] = set()
        for item in held:
            if item.name in names:
                raise UnsupportedValue(item.name, "name that two values share", "rename one of them")
            names.add(item.name)
        leaves = tuple(leaf_of(item.name, item.tensor, item.replicas) for item in held)
        plan = plan_save(leaves, rank=self._rank, chunk_bytes=self._chunk_bytes)
        return Prepared(
            leaves=leaves,
            plan=plan,
            slices=tuple(_part(leaves, plan, index) for index in range(len(plan.items))),
        )


def _part(leaves: Sequence[Leaf], plan: SavePlan, index: int) -> tuple[slice, ...] | None:
    """Where an item lies in the local tensor of its leaf; None if it is all of it."""
    item = plan.items[index]
    whole = leaves[item.leaf].boxes[0]
    return None if item.box == whole else item.box.relative_to(whole).slices()
