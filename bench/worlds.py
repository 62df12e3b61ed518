"""Worlds of ranks that no machine here could start: what each rank holds, and the fragment that it
would put.

Simulated: the ranks. What each holds is reckoned as ``torch.chunk`` cuts a mesh, and its checksums
are random numbers. Real: ``plan.save``, fragments and their encoding. Ranks that differ only in
where their boxes begin share the work of ``plan.save``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import zstandard

from ckpt.model import manifest as model
from ckpt.model.box import Box
from ckpt.model.fragment_columns import pack_fragment
from ckpt.model.keys import data_name
from ckpt.model.manifest import Chunk, File, Fragment, Packed
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan, plan_save

CHUNK_BYTES: Final = 16 << 20
HIDDEN: Final = 8192
LAYERS: Final = 27
_TP: Final = 8
_NONE: Final = Box((), (0,))
_DIMS: Final = 2  # of the matrices, which nearly all ranks hold some of


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the model: ``stage`` of the pipeline from 0 to 1, and the dimension that
    tensor parallelism cuts (None: none).
    """

    name: str
    shape: tuple[int, ...]
    stage: float
    cut: int | None


def model_of(tensors: int) -> list[Named]:
    """A GPT's parameters under AdamW, in order: every parameter, then its two moments; the last
    is a step counter that all ranks hold.
    """
    h = HIDDEN
    block: list[tuple[str, tuple[int, ...], int | None]] = [
        ("ln_1.weight", (h,), None),
        ("ln_1.bias", (h,), None),
        ("attn.qkv.weight", (3 * h, h), 0),
        ("attn.qkv.bias", (3 * h,), 0),
        ("attn.proj.weight", (h, h), 1),
        ("attn.proj.bias", (h,), None),
        ("ln_2.weight", (h,), None),
        ("ln_2.bias", (h,), None),
        ("mlp.fc.weight", (4 * h, h), 0),
        ("mlp.fc.bias", (4 * h,), 0),
        ("mlp.proj.weight", (h, 4 * h), 1),
        ("mlp.proj.bias", (h,), None),
    ]
    parameters = [
        Named("wte.weight", (50257, h), 0.0, 0),
        Named("wpe.weight", (4096, h), 0.0, None),
    ]
    layer = 0
    while len(parameters) < (tensors - 1) // 3:
        stage = min(0.999, layer / LAYERS)
        parameters += [
            Named(f"layers.{layer}.{name}", shape, stage, cut) for name, shape, cut in block
        ]
        layer += 1
    del parameters[(tensors - 1) // 3 :]
    found = [Named(f"model/{each.name}", each.shape, each.stage, each.cut) for each in parameters]
    for key in ("exp_avg", "exp_avg_sq"):
        found += [
            Named(f"optimizer/{each.name}/{key}", each.shape, each.stage, each.cut)
            for each in parameters
        ]
    return [*found, Named("optimizer/step", (), 0.0, None)]


@dataclass(frozen=True, slots=True)
class World:
    """A mesh.

    ``mesh``: its dimensions, outermost first. ``hsdp`` shards over 256 ranks at most, ``hsdp2``
    over half of them.
    """

    layout: str
    ranks: int
    model: Sequence[Named]

    @property
    def mesh(self) -> tuple[int, ...]:
        if self.layout == "3d":  # pipeline, data, tensor
            stages = min(16, max(1, self.ranks // (_TP * 2)))
            return stages, self.ranks // (stages * _TP), _TP
        if self.layout == "hsdp":
            return max(2, self.ranks // 256), min(256, self.ranks // 2)
        return (2, self.ranks // 2) if self.layout == "hsdp2" else (self.ranks,)

    def alike(self, rank: int) -> tuple[int, ...]:
        """The same for ranks that hold the same replicas."""
        at = tuple(map(int, np.unravel_index(rank, self.mesh)))
        return {"fsdp2": (), "3d": at[:2]}.get(self.layout, at[1:])

    def leaves(self, rank: int) -> list[Leaf]:
        """What ``rank`` holds."""
        at = tuple(map(int, np.unravel_index(rank, self.mesh)))
        held = {"fsdp2": self._fsdp2, "hsdp": self._hsdp, "hsdp2": self._hsdp, "3d": self._three}[
            self.layout
        ](rank, at)
        known: dict[tuple[Any, ...], Leaf | None] = {}
        found: list[Leaf] = []
        for each in self.model:
            if not each.shape:
                found.append(Leaf(each.name, "float32", (), (Box((), ()),), _everybody(self.ranks)))
                continue
            key = each.shape, each.cut, each.stage
            if key not in known:
                known[key] = held(each)
            if (like := known[key]) is not None:
                found.append(Leaf(each.name, "float32", each.shape, like.boxes, like.replicas))
        return found

    def _fsdp2(self, rank: int, at: tuple[int, ...]) -> Callable[[Named], Leaf | None]:
        del at
        return lambda each: _sharded(each, Box.whole(each.shape), self.ranks, rank, ())

    def _hsdp(self, rank: int, at: tuple[int, ...]) -> Callable[[Named], Leaf | None]:
        del rank
        shards, index = self.mesh[1], at[1]
        replicas = tuple(range(index, self.ranks, shards))
        return lambda each: _sharded(each, Box.whole(each.shape), shards, index, replicas)

    def _three(self, rank: int, at: tuple[int, ...]) -> Callable[[Named], Leaf | None]:
        (stages, data, _), (stage, row, column) = self.mesh, at
        replicas = tuple(range(rank - column, rank - column + _TP))

        def held(each: Named) -> Leaf | None:
            if int(each.stage * stages) != stage:
                return None
            box = Box.whole(each.shape)
            if each.cut is None:
                return _sharded(each, box, data, row, replicas)
            return _sharded(each, _chunk(box, each.cut, _TP, column), data, row, ())

        return held


_known_worlds: dict[int, tuple[int, ...]] = {}


def _everybody(ranks: int) -> tuple[int, ...]:
    return _known_worlds.setdefault(ranks, tuple(range(ranks)))


def _chunk(box: Box, dim: int, count: int, index: int) -> Box:
    """As ``torch.chunk``: pieces of ceil(n / count), the last shorter, those after it empty."""
    size = -(-box.shape[dim] // count)
    start = min(index * size, box.shape[dim])
    length = min(size, box.shape[dim] - start)
    offsets, shape = list(box.offsets), list(box.shape)
    offsets[dim], shape[dim] = offsets[dim] + start, length
    return Box(tuple(offsets), tuple(shape))


def _sharded(each: Named, box: Box, count: int, index: int, replicas: tuple[int, ...]) -> Leaf:
    held = _chunk(box, 0, count, index)
    return Leaf(each.name, "float32", each.shape, (held,) if held.numel else (), replicas)


@dataclass(slots=True)
class Plans:
    """``plan.save`` of every rank: done once for ranks that differ in offsets only, which are
    then put in their place.
    """

    world: World
    known: dict[tuple[Any, ...], tuple[SavePlan, list[Leaf]]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def key(self, rank: int, leaves: list[Leaf]) -> tuple[Any, ...]:
        """The same for ranks whose plans differ in offsets only: boxes of the same shapes, of
        which they write the same share.
        """
        shares = {
            leaf.replicas: leaf.replicas.index(rank) if leaf.shape else rank == 0
            for leaf in leaves
            if len(leaf.replicas) > 1
        }
        return (
            len(leaves),
            leaves[0].name,
            *(box.shape for leaf in leaves for box in leaf.boxes or (_NONE,)),
            *shares.values(),
        )

    def of(self, rank: int, leaves: list[Leaf]) -> tuple[SavePlan, tuple[model.Tensor, ...]]:
        key = self.key(rank, leaves)
        if key not in self.known:
            start = time.process_time()
            plan = plan_save(leaves, rank=rank, chunk_bytes=CHUNK_BYTES)
            self.seconds.append(time.process_time() - start)
            self.known[key] = plan, leaves
        plan, like = self.known[key]
        return plan, tuple(
            tensor if not tensor.shards else _moved(tensor, rank, mine, theirs)
            for tensor, mine, theirs in zip(plan.tensors, leaves, like, strict=True)
        )


def _moved(tensor: model.Tensor, rank: int, mine: Leaf, like: Leaf) -> model.Tensor:
    """The same tensor on another rank."""
    if not mine.shape:
        return model.Tensor(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            (model.Shard(rank, tensor.shards[0].offset, (), ()),),
        )
    by = [a - b for a, b in zip(mine.boxes[0].offsets, like.boxes[0].offsets, strict=True)]
    shards = tuple(
        model.Shard(
            rank,
            shard.offset,
            tuple(o + d for o, d in zip(shard.offsets, by, strict=True)),
            shard.shape,
        )
        for shard in tensor.shards
    )
    return model.Tensor(tensor.name, tensor.dtype, tensor.shape, shards)


class Job:
    """A world that saves. ``fragment`` gives the bytes that a rank would put, of save ``step``."""

    def __init__(self, world: World) -> None:
        self.world, self.plans = world, Plans(world)
        self._tree = _tree(world.model)
        self._kinds: dict[Any, tuple[Packed, Any, Any]] = {}
        self._marks: dict[Any, bytes] = {}

    def fragment(self, rank: int, step: int, leaves: list[Leaf]) -> Fragment:
        plan, tensors = self.plans.of(rank, leaves)
        random = _random(rank, step, 16 * len(plan.chunks)).hex()
        chunks = tuple(Chunk(n, random[32 * i : 32 * i + 32]) for i, n in enumerate(plan.chunks))
        marks = self._digests_of(rank, leaves, step)
        return Fragment(
            format=model.FORMAT,
            step=step,
            attempt="abcxyzdefuvw",
            rank=rank,
            world_size=self.world.ranks,
            created_at=float(step),
            chunk_bytes=CHUNK_BYTES,
            file=File(data_name(rank), rank, plan.size, chunks),
            tensors=tensors,
            tied={},
            tree=self._tree,
            per_rank=msgspec.Raw(msgspec.json.encode({"rng": {"$": "bytes", "v": "A" * 6744}})),
            replicas=marks,
            metadata=msgspec.Raw(b"{}"),
        )

    def _digests_of(self, rank: int, leaves: list[Leaf], step: int) -> dict[str, str]:
        """Of the replicas that a rank holds: as a save tells them, and as long.

        What everybody holds has one digest.
        """
        held = [leaf for leaf in leaves if len(leaf.replicas) > 1 and leaf.boxes]
        random = np.random.default_rng((*self.world.alike(rank), step)).bytes(32 * len(held)).hex()
        boxes = {id(leaf.boxes): f"{leaf.boxes[0].offsets}{leaf.boxes[0].shape}=" for leaf in held}
        digests = (random[at : at + 64] for at in range(0, len(random), 64))
        return {
            leaf.name: boxes[id(leaf.boxes)] + (digest if leaf.shape else f"{step:064}")
            for leaf, digest in zip(held, digests, strict=True)
        }

    def packed(self, rank: int, step: int, leaves: list[Leaf]) -> Packed:
        """As ``pack_fragment`` gives it: by itself on the first rank of a kind, which is
        compared with the shortcut taken for the others.
        """
        if max(len(leaf.shape) for leaf in leaves) != _DIMS:
            return pack_fragment(self.fragment(rank, step, leaves))
        key = self.plans.key(rank, leaves)
        if key not in self._kinds:
            whole = pack_fragment(self.fragment(rank, step, leaves))
            plan, like = self.plans.known[key]
            # rows of the form
            index = np.array(sorted(item.leaf for item in plan.items), dtype=np.int64)
            starts = _starts(like)
            within = (
                np.frombuffer(zstandard.decompress(whole.offsets), "<i8").reshape(len(index), -1)
                - starts[index]
            )
            self._kinds[key] = whole, index, within
            assert self.packed(rank, step, leaves) == whole
        like_that, index, within = self._kinds[key]
        file, offsets = like_that.file, _starts(leaves)[index] + within
        return self.again(
            msgspec.structs.replace(
                like_that, rank=rank, offsets=zstandard.compress(offsets.tobytes(), 3),
                file=File(data_name(rank), rank, file.size, ()) if file else None,
            ), rank, step, leaves,
        )  # fmt: skip

    def again(self, packed: Packed, rank: int, step: int, leaves: list[Leaf]) -> Packed:
        """The next save of a rank: other bytes in the same places."""
        mark = step, self.world.alike(rank)
        if mark not in self._marks:
            digests = self._digests_of(rank, leaves, step)
            self._marks[mark] = (
                zstandard.compress(msgspec.json.encode(digests, order="deterministic"), 3)
                if digests
                else b""
            )
        return msgspec.structs.replace(
            packed,
            step=step,
            created_at=float(step),
            replicas=self._marks[mark],
            checksums=_random(rank, step, len(packed.checksums)),
        )


def _starts(leaves: Sequence[Leaf]) -> Any:
    rows = [
        (*leaf.boxes[0].offsets, 0, 0)[:_DIMS] if leaf.boxes else (0,) * _DIMS for leaf in leaves
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, _DIMS)


def _random(rank: int, step: int, nbytes: int) -> bytes:
    return np.random.default_rng((rank, step)).bytes(nbytes)


def _tree(named: Sequence[Named]) -> msgspec.Raw:
    names = [each.name.removeprefix("model/") for each in named if each.name.startswith("model/")]
    group = {
        "params": names,
        "values": {"lr": 0.1, "betas": {"$": "tuple", "v": [0.9, 0.95]}, "eps": 1e-8},
    }
    node = {
        "model": {"$": "module", "values": {}},
        "optimizer": {"$": "optimizer", "groups": [group], "state": {}},
        "step": 1200,
        "rng": {"$": "per_rank"},
    }
    return msgspec.Raw(msgspec.json.encode(node))
