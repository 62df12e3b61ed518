"""Scenario: a commit and a restore of worlds that no machine here could start, as far as they are not bytes of tensors.

Simulated: the ranks. What each holds is reckoned by NumPy (ceil-chunks of a mesh), and its checksums are random numbers. Real: ``plan.save``, fragments and their encoding, the words in a TCPStore, reading, checking and merging
fragments, the manifest's encoding and decoding, and the plan of a restoring rank. Ranks that differ only in where their boxes begin share the work of ``plan.save``, not that of everything after it.
"""

from __future__ import annotations

import gc
import hashlib
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import zstandard

from bench.scenarios import told
from ckpt.model import manifest as model
from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack, unpack
from ckpt.model.layout import data_name, fragment_name
from ckpt.model.manifest import Chunk, File, Fragment, FragmentRef, Manifest
from ckpt.model.packed import Packed, pack_fragment, read_fragment, read_part
from ckpt.model.reference import fill, ranks_of
from ckpt.model.validate import check_fragment, check_manifest
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import Known, merge
from ckpt.plan.restore import plan_restore
from ckpt.plan.save import SavePlan, plan_save

T = TypeVar("T")

CHUNK_BYTES: Final = 16 << 20
HIDDEN: Final = 8192
LAYERS: Final = 27
_TP: Final = 8
_NONE: Final = Box((), (0,))


@dataclass(frozen=True, kw_only=True)
class Options:
    ranks: tuple[int, ...] = told((64, 256, 1024, 4096, 16384), "sizes of the worlds")
    layouts: tuple[str, ...] = told(("fsdp2", "hsdp", "3d"), "fsdp2, hsdp, 3d")
    tensors: int = told(1000, "of the model and its optimizer")
    plain_to: int = told(1024, "the largest world that is also committed with everything in one manifest")
    budget_seconds: float = told(900.0, "not kept to: each world is simulated to its end")


QUICK = Options(ranks=(64, 128), plain_to=64)


# -- the model -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the model: ``stage`` of the pipeline from 0 to 1, and the dimension that tensor parallelism cuts (None: none)."""

    name: str
    shape: tuple[int, ...]
    stage: float
    cut: int | None


def model_of(tensors: int) -> list[Named]:
    """A GPT's parameters under AdamW, in order: every parameter, then its two moments; the last is a step counter that all ranks hold."""
    h = HIDDEN
    block: list[tuple[str, tuple[int, ...], int | None]] = [
        ("ln_1.weight", (h,), None), ("ln_1.bias", (h,), None), ("attn.qkv.weight", (3 * h, h), 0), ("attn.qkv.bias", (3 * h,), 0),
        ("attn.proj.weight", (h, h), 1), ("attn.proj.bias", (h,), None), ("ln_2.weight", (h,), None), ("ln_2.bias", (h,), None),
        ("mlp.fc.weight", (4 * h, h), 0), ("mlp.fc.bias", (4 * h,), 0), ("mlp.proj.weight", (h, 4 * h), 1), ("mlp.proj.bias", (h,), None),
    ]  # fmt: skip
    parameters = [Named("wte.weight", (50257, h), 0.0, 0), Named("wpe.weight", (4096, h), 0.0, None)]
    layer = 0
    while len(parameters) < (tensors - 1) // 3:
        stage = min(0.999, layer / LAYERS)
        parameters += [Named(f"layers.{layer}.{name}", shape, stage, cut) for name, shape, cut in block]
        layer += 1
    del parameters[(tensors - 1) // 3 :]
    found = [Named(f"model/{each.name}", each.shape, each.stage, each.cut) for each in parameters]
    for key in ("exp_avg", "exp_avg_sq"):
        found += [
            Named(f"optimizer/{each.name}/{key}", each.shape, each.stage, each.cut) for each in parameters
        ]
    return [*found, Named("optimizer/step", (), 0.0, None)]


@dataclass(frozen=True, slots=True)
class World:
    """A mesh. ``mesh``: its dimensions, outermost first."""

    layout: str
    ranks: int
    model: Sequence[Named]

    @property
    def mesh(self) -> tuple[int, ...]:
        if self.layout == "3d":  # pipeline, data, tensor
            stages = min(16, max(1, self.ranks // (_TP * 2)))
            return stages, self.ranks // (stages * _TP), _TP
        return (
            (max(2, self.ranks // 256), min(256, self.ranks // 2)) if self.layout == "hsdp" else (self.ranks,)
        )

    def leaves(self, rank: int) -> list[Leaf]:
        """What ``rank`` holds."""
        at = tuple(map(int, np.unravel_index(rank, self.mesh)))
        held = {"fsdp2": self._fsdp2, "hsdp": self._hsdp, "3d": self._three}[self.layout](rank, at)
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


# -- what ranks write ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Plans:
    """``plan.save`` of every rank: done once for ranks that differ in offsets only, which are then put in their place."""

    world: World
    known: dict[tuple[Any, ...], tuple[SavePlan, list[Leaf]]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def key(self, rank: int, leaves: list[Leaf]) -> tuple[Any, ...]:
        """The same for ranks whose plans differ in offsets only: boxes of the same shapes, of which they write the same share."""
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
            tensor.name, tensor.dtype, tensor.shape, (model.Shard(rank, tensor.shards[0].offset, (), ()),)
        )
    by = [a - b for a, b in zip(mine.boxes[0].offsets, like.boxes[0].offsets, strict=True)]
    shards = tuple(
        model.Shard(
            rank, shard.offset, tuple(o + d for o, d in zip(shard.offsets, by, strict=True)), shard.shape
        )
        for shard in tensor.shards
    )
    return model.Tensor(tensor.name, tensor.dtype, tensor.shape, shards)


class Job:
    """A world that saves. ``fragment`` gives the bytes that a rank would put, of save ``step``."""

    def __init__(self, world: World, *, by_reference: bool) -> None:
        self.world, self.plans, self.by_reference = world, Plans(world), by_reference
        self._tree = _tree(world.model)
        self._kinds: dict[Any, tuple[Packed, Any, Any]] = {}
        self._marks: dict[Any, bytes] = {}
        self._digests = {
            each.name: hashlib.blake2b(each.name.encode(), digest_size=8).hexdigest() for each in world.model
        }

    def fragment(self, rank: int, step: int, leaves: list[Leaf]) -> Fragment:
        plan, tensors = self.plans.of(rank, leaves)
        random = _random(rank, step, 16 * len(plan.chunks)).hex()
        chunks = tuple(Chunk(n, random[32 * i : 32 * i + 32]) for i, n in enumerate(plan.chunks))
        marks = self._digests_of(leaves, step)
        return Fragment(
            format=model.FORMAT, step=step, attempt="abc123def456", rank=rank, world_size=self.world.ranks, created_at=float(step),
            chunk_bytes=CHUNK_BYTES, file=File(data_name(rank), rank, plan.size, chunks), tensors=tensors, tied={},
            tree=self._tree, per_rank=msgspec.Raw(msgspec.json.encode({"rng": {"$": "bytes", "v": "A" * 6744}})), replicas=marks,
            metadata=msgspec.Raw(b"{}"),
        )  # fmt: skip

    def _digests_of(self, leaves: list[Leaf], step: int) -> dict[str, str]:
        """Of the replicas that a rank holds: as a save tells them."""
        return {
            leaf.name: f"{leaf.boxes[0].offsets}{leaf.boxes[0].shape}={self._digests[leaf.name]}{step}"
            for leaf in leaves
            if len(leaf.replicas) > 1 and leaf.boxes
        }

    def packed(self, rank: int, step: int, leaves: list[Leaf]) -> Packed:
        """As ``pack_fragment`` gives it: by itself on the first rank of a kind, which is compared with the shortcut taken for the others."""
        key = self.plans.key(rank, leaves)
        if key not in self._kinds:
            whole = pack_fragment(self.fragment(rank, step, leaves))
            plan, like = self.plans.known[key]
            index = np.array([item.leaf for item in _in_form(plan, like)], dtype=np.int64)
            starts = _starts(like)
            within = (
                np.frombuffer(zstandard.decompress(whole.offsets), "<i8").reshape(len(index), -1)
                - starts[index]
            )
            self._kinds[key] = whole, index, within
            assert self.packed(rank, step, leaves) == whole
        like_that, index, within = self._kinds[key]
        starts = _starts(leaves)
        offsets = starts[index] + within
        marks = self._marks.get(mark := (key, starts.tobytes(), step))
        if marks is None:
            told = self._digests_of(leaves, step)
            marks = zstandard.compress(msgspec.json.encode(told, order="deterministic"), 3) if told else b""
            self._marks[mark] = marks
        file = like_that.file
        return msgspec.structs.replace(
            like_that, rank=rank, step=step, created_at=float(step), offsets=zstandard.compress(offsets.tobytes(), 3), replicas=marks,
            file=File(data_name(rank), rank, file.size, ()) if file else None, checksums=_random(rank, step, len(like_that.checksums)),
        )  # fmt: skip


def _in_form(plan: SavePlan, leaves: Sequence[Leaf]) -> list[Any]:
    """Items in the order of the form's rows: by leaf."""
    del leaves
    return sorted(plan.items, key=lambda item: item.leaf)


def _starts(leaves: Sequence[Leaf]) -> Any:
    rows = [(*leaf.boxes[0].offsets, 0, 0)[:2] if leaf.boxes else (0, 0) for leaf in leaves]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _random(rank: int, step: int, nbytes: int) -> bytes:
    return np.random.default_rng((rank, step)).bytes(nbytes)


def _tree(named: Sequence[Named]) -> msgspec.Raw:
    names = [each.name.removeprefix("model/") for each in named if each.name.startswith("model/")]
    group = {"params": names, "values": {"lr": 0.1, "betas": {"$": "tuple", "v": [0.9, 0.95]}, "eps": 1e-8}}
    node = {
        "model": {"$": "module", "values": {}},
        "optimizer": {"$": "optimizer", "groups": [group], "state": {}},
        "step": 1200,
        "rng": {"$": "per_rank"},
    }
    return msgspec.Raw(msgspec.json.encode(node))


# -- what is measured ----------------------------------------------------------------------------------------------------------


def _write(world: World, by_reference: bool, folder: str, ranks: range) -> dict[str, Any]:
    """Puts the fragments of some ranks, for two saves on the same layout. In a process of its own."""
    job = Job(world, by_reference=by_reference)
    refs: list[list[FragmentRef]] = [[], []]
    packing: list[float] = []
    for rank in ranks:
        leaves = world.leaves(rank)
        for step in (1, 2):
            if not by_reference:
                data = pack(job.fragment(rank, step, leaves))
            else:
                data = pack(job.packed(rank, step, leaves))
            if rank == ranks[len(ranks) // 2]:  # the real thing, for the clock
                fragment = job.fragment(rank, step, leaves)
                start = time.process_time()
                pack(pack_fragment(fragment) if by_reference else fragment)
                packing.append(time.process_time() - start)
            with open(f"{folder}/{step}-{rank}", "wb") as file:
                file.write(data)
            refs[step - 1].append(FragmentRef(fragment_name(rank), rank, len(data), checksum(data)))
    return {"refs": refs, "pack": packing, "plan": job.plans.seconds}


def _read(folder: str, step: int, ref: FragmentRef, known: Known) -> Any:
    """As the committer reads a fragment."""
    with open(f"{folder}/{step}-{ref.rank}", "rb") as file:
        data = file.read()
    assert checksum(data) == ref.checksum
    part = read_part(data, key=ref.name)
    return (
        part
        if isinstance(part, Packed)
        else check_fragment(part, key=ref.name, known=known.parts.get(ref.rank))
    )


def _commit(folder: str, refs: list[list[FragmentRef]]) -> dict[str, float]:
    """The leader's work of two saves. In a process of its own, whose memory is told."""
    found: dict[str, float] = {"base": _peak()}
    known = Known()
    gc.disable()  # as collection is on the save path: fragments have no cycles
    for step, name in ((1, "merge_first"), (2, "merge_known")):
        start, cpu = time.perf_counter(), time.process_time()
        manifest = merge(((_read(folder, step, ref, known), ref) for ref in refs[step - 1]), known)
        data = pack(manifest)
        found[name] = time.perf_counter() - start
        found[f"{name}_cpu"] = time.process_time() - cpu
    with open(f"{folder}/manifest", "wb") as file:
        file.write(data)
    return {**found, "manifest": float(len(data)), "memory": _peak()}


def _restore(folder: str, world: World, rank: int) -> dict[str, float]:
    """A rank of ``world`` restores save 2: from the bytes of the manifest to its plan. In a process of its own."""
    with open(f"{folder}/manifest", "rb") as file:
        data = file.read()
    wanted = world.leaves(rank)
    base = _peak()
    gc.disable()  # as Restorer does
    start, cpu = time.perf_counter(), time.process_time()
    manifest = check_manifest(unpack(data, Manifest, key="manifest"), key="manifest")
    opened = time.perf_counter() - start
    ranks: set[int] = set()
    if manifest.by_reference:
        ranks = ranks_of(manifest, [(leaf.name, leaf.boxes) for leaf in wanted])
        files = {ref.rank: ref for ref in manifest.fragments}
        parts = {}
        for each in sorted(ranks):
            with open(f"{folder}/2-{each}", "rb") as file:
                part = file.read()
            assert checksum(part) == files[each].checksum
            parts[each] = read_fragment(part, key="fragment")
        manifest = fill(manifest, parts, key="manifest")
    plan = plan_restore(manifest, wanted)
    seconds = time.perf_counter() - start
    assert plan.wanted_bytes == sum(leaf.nbytes for leaf in wanted)
    return {
        "seconds": seconds, "cpu": time.process_time() - cpu, "open": opened, "fragments": len(ranks), "reads": len(plan.reads), "files": len({r.rank for r in plan.reads}),
        "over": plan.read_bytes / max(1, plan.wanted_bytes), "memory": _peak() - base,
    }  # fmt: skip


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
