"""Scenario: a commit and a restore of worlds that no machine here could start, as far as they are not bytes of tensors.

Simulated: the ranks. What each holds is reckoned by NumPy (ceil-chunks of a mesh), and its checksums are random numbers. Real: ``plan.save``, fragments and their encoding, the words in a TCPStore, reading, checking and merging
fragments, the manifest's encoding and decoding, and the plan of a restoring rank. Ranks that differ only in where their boxes begin share the work of ``plan.save``, not that of everything after it.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import zstandard

from bench import plots, style
from bench.result import Column, Line, Number, Result
from bench.runner import Bench
from bench.scenarios import told
from ckpt.coordination.commit import Durable, encode
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

CHUNK_BYTES: Final = 16 << 20
HIDDEN: Final = 8192
LAYERS: Final = 27
_TP: Final = 8
_WRITERS: Final = 2  # processes that play the ranks
_NONE: Final = Box((), (0,))
_DIMS: Final = 2  # of the matrices, which nearly all ranks hold some of


@dataclass(frozen=True, kw_only=True)
class Options:
    ranks: tuple[int, ...] = told((64, 256, 1024, 4096, 16384), "sizes of the worlds")
    layouts: tuple[str, ...] = told(("fsdp2", "hsdp", "3d"), "fsdp2, hsdp, 3d")
    tensors: int = told(1000, "of the model and its optimizer")
    plain_to: int = told(
        256, "the largest world of the first layout that is also committed with everything in one manifest"
    )
    budget_seconds: float = told(1800.0, "after which no further world is begun")


QUICK = Options(ranks=(8, 16), layouts=("fsdp2",), tensors=100, plain_to=8)


_COLUMNS: Final = (
    Column("plan_seconds", "plan.save of a rank", "seconds"),
    Column("pack_seconds", "its fragment", "seconds"),
    Column("fragment_kib", "KiB of it", "count"),
    Column("first_seconds", "merge, first save", "seconds"),
    Column("known_seconds", "merge, every later one", "seconds"),
    Column("memory_mib", "MiB of the committer", "count"),
    Column("manifest_kib", "KiB of the manifest", "count"),
    Column("same_seconds", "restore plan, as saved", "seconds"),
    Column("same_fragments", "fragments read", "count"),
    Column("other_seconds", "on 3/4 of the ranks", "seconds"),
    Column("other_fragments", "fragments read for it", "count"),
    Column("hear_seconds", "leader's words, TCPStore", "seconds"),
)
_NOTES: Final = (
    "Seconds are processor time of the one process that does the work (the wall-clock seconds are in the JSON): the machine is shared. The merge reads all fragments from files, checks and merges them, and packs the manifest.",
    "`merge, every later one`: the layout is as in the save before; checksums, digests of replicas and plain values are compared all the same.",
    "A restore plan goes from the bytes of the manifest to what is read where, the fragments that it needs read and checked on the way; one rank's, in a process of its own.",
    "`all in one`: the manifest of small worlds (formats 1 and 2), with everything in it, which is what a world of that size had before.",
    "A rank asks a TCPStore 4 things for each save (its word, wait, verdict, forget), the leader one more for each rank and one for each 256; of storage a rank asks 2 (data, fragment), the leader two more for each rank, and the manifest.",
)
_LABELS: Final = {"fsdp2": "FSDP2", "hsdp": "HSDP", "3d": "3-D"}


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    named = model_of(options.tensors)
    for ranks in options.ranks:
        for layout in options.layouts:
            for by_reference in (True, False):
                if not by_reference and (ranks > options.plain_to or layout != options.layouts[0]):
                    continue
                case, name = _LABELS[layout], f"{'ckpt' if by_reference else 'plain'}.{ranks}"
                if lines and bench.left() < 0:
                    bench.skip(case, name, "no time was left")
                    continue
                label = f"{ranks:,} ranks" + ("" if by_reference else ", all in one")
                line = Line(case, name, label)
                line.numbers.update(_measured(World(layout, ranks, named), by_reference, bench.folder))
                lines.append(line)
                print(f"{case}, {label}: {line.numbers}", flush=True)
    lines.sort(key=lambda line: list(_LABELS.values()).index(line.case))
    return bench.result(
        f"Worlds of up to {max(options.ranks):,} ranks × {options.tensors:,} tensors", _COLUMNS, _NOTES, lines
    )


def _measured(world: World, by_reference: bool, parent: str) -> dict[str, Number]:
    folder = tempfile.mkdtemp(dir=parent)
    begin = time.perf_counter()
    try:
        blocks = [
            range(k * world.ranks // _WRITERS, (k + 1) * world.ranks // _WRITERS) for k in range(_WRITERS)
        ]
        parts = _apart(_WRITERS, _write, [(world, by_reference, folder, block) for block in blocks])
        refs = [[ref for part in parts for ref in part["refs"][step]] for step in range(2)]
        (commit,) = _apart(1, _commit, [(folder, refs)])
        other = World("fsdp2", world.ranks * 3 // 4, world.model)
        (same,) = _apart(1, _restore, [(folder, world, world.ranks // 3)])
        (moved,) = _apart(1, _restore, [(folder, other, other.ranks // 3)])
        (store,) = _apart(1, _words, [(world.ranks,)])
    finally:
        shutil.rmtree(folder)
    sizes = [float(ref.size) for ref in refs[0]]
    return {
        "plan_seconds": max(second for part in parts for second in part["plan"]),
        "pack_seconds": statistics.median(second for part in parts for second in part["pack"]),
        "fragment_kib": round(statistics.mean(sizes) / 1024, 1),
        "first_seconds": commit["merge_first_cpu"], "first_wall_seconds": commit["merge_first"],
        "known_seconds": commit["merge_known_cpu"], "known_wall_seconds": commit["merge_known"],
        "memory_mib": round(commit["memory"] / 2**20), "base_memory_mib": round(commit["base"] / 2**20),
        "manifest_kib": round(commit["manifest"] / 1024),
        "same_seconds": same["cpu"], "same_wall_seconds": same["seconds"], "same_fragments": same["fragments"],
        "other_seconds": moved["cpu"], "other_wall_seconds": moved["seconds"], "other_fragments": moved["fragments"],
        "other_reads": moved["reads"], "other_read_bytes_over_wanted": moved["over"],
        "hear_seconds": store["hear_cpu"], "hear_wall_seconds": store["hear"], "look_wall_seconds": store["look"],
        "store_requests_of_the_leader": store["requests"], "store_requests_of_a_rank": 4.0, "word_bytes": store["word"],
        "simulation_seconds": time.perf_counter() - begin,
    }  # fmt: skip


def _apart(
    count: int, work: Callable[..., dict[str, Any]], told: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """Each in a fresh process: nobody's memory is another's."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        return [future.result() for future in [pool.submit(work, *each) for each in told]]


def plot(result: Result, path: str) -> None:
    reading = "Processor seconds and memory of one process; both axes are logarithmic."
    panels = (
        (
            "known_seconds",
            "the committer, each save",
            "reads, checks and merges every rank's fragment",
            "seconds",
        ),
        (
            "first_seconds",
            "the committer, first save",
            "layouts are checked for holes and overlaps",
            "seconds",
        ),
        ("memory_mib", "the committer's memory", "MiB, peak of the process", "count"),
        ("same_seconds", "a rank's restore plan", "on as many ranks as saved", "seconds"),
        ("other_seconds", "a rank's restore plan", "on 3/4 of the ranks", "seconds"),
        ("manifest_kib", "the manifest", "KiB", "count"),
    )
    with style.figure(result, path, (15, 9), reading) as (drawn, plt):
        for axis, (key, title, subtitle, kind) in zip(drawn.subplots(2, 3).flat, panels, strict=True):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            series = _series(result, key)
            for each in series:
                axis.plot(each.x, each.y, alpha=0)  # sets the limits, which the names need
            xs = sorted({x for each in series for x in each.x})
            axis.set_xticks(xs, [f"{x:,.0f}" for x in xs], rotation=0)
            style.log_marks(axis)
            axis.minorticks_off()
            axis.set_xlabel("ranks", color=style.SOFT)
            if kind == "seconds":
                axis.yaxis.set_major_formatter(lambda value, _: style.tick(value, "seconds"))
            else:
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            style.bare(axis, grid="both")
            plots.lines(axis, series)
            style.head(axis, title, subtitle)
        del plt


def _series(result: Result, key: str) -> list[plots.Series]:
    found: list[plots.Series] = []
    for case in result.cases():
        for kind, name, more in (("ckpt", "ckpt", ""), ("plain", "plain", ", all in one")):
            points = [
                (float(line.name.split(".")[1]), value)
                for line in result.of(case)
                if line.name.startswith(f"{kind}.") and (value := line.median(key))
            ]
            if points and (kind == "ckpt" or case == _LABELS["fsdp2"]):
                own = next(f"{name}.{layout}" for layout, label in _LABELS.items() if label == case)
                found.append(plots.Series(own, case + more, *map(list, zip(*points, strict=True))))
    return found


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
        if max(len(leaf.shape) for leaf in leaves) != _DIMS:
            return pack_fragment(self.fragment(rank, step, leaves))
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
        file, offsets = like_that.file, _starts(leaves)[index] + within
        return self.again(
            msgspec.structs.replace(
                like_that, rank=rank, offsets=zstandard.compress(offsets.tobytes(), 3),
                file=File(data_name(rank), rank, file.size, ()) if file else None,
            ), rank, step, leaves,
        )  # fmt: skip

    def again(self, packed: Packed, rank: int, step: int, leaves: list[Leaf]) -> Packed:
        """The next save of a rank: other bytes in the same places."""
        mark = step, leaves[0].name, *(leaf.boxes for leaf in leaves if len(leaf.replicas) > 1)
        if mark not in self._marks:
            told = self._digests_of(leaves, step)
            self._marks[mark] = (
                zstandard.compress(msgspec.json.encode(told, order="deterministic"), 3) if told else b""
            )
        return msgspec.structs.replace(
            packed, step=step, created_at=float(step), replicas=self._marks[mark], checksums=_random(rank, step, len(packed.checksums)),
        )  # fmt: skip


def _in_form(plan: SavePlan, leaves: Sequence[Leaf]) -> list[Any]:
    """Items in the order of the form's rows: by leaf."""
    del leaves
    return sorted(plan.items, key=lambda item: item.leaf)


def _starts(leaves: Sequence[Leaf]) -> Any:
    rows = [(*leaf.boxes[0].offsets, 0, 0)[:_DIMS] if leaf.boxes else (0,) * _DIMS for leaf in leaves]
    return np.array(rows, dtype=np.int64).reshape(-1, _DIMS)


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
        packed: Packed | None = None
        for step in (1, 2):
            if by_reference:
                packed = job.again(packed, rank, step, leaves) if packed else job.packed(rank, step, leaves)
                data = pack(packed)
            else:
                data = pack(job.fragment(rank, step, leaves))
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
    """Of this process. What ``getrusage`` tells begins with its parent's."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024.0


def _words(ranks: int) -> dict[str, float]:
    """The leader hears the words of all ranks, through a TCPStore of this process; and looks once when only half of them have come."""
    import torch.distributed as dist

    from ckpt.adapters.torch_store import TorchStoreCoordinator

    make: Any = dist  # torch's stub does not export it
    store = make.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    count = [0]

    class Counting(TorchStoreCoordinator):
        def __init__(self) -> None:
            self.rank, self.world_size, self.attempt = 0, ranks, "abc123def456"
            self._store = store

        def _look(self, key: str) -> bytes | None:
            count[0] += 1
            return super()._look(key)

        def _are_there(self, keys: list[str]) -> bool:
            count[0] += 1
            return super()._are_there(keys)

        def _wait(self, keys: list[str], seconds: float) -> bool:
            count[0] += 1
            return super()._wait(keys, seconds)

    leader, word = Counting(), encode(Durable(FragmentRef(fragment_name(ranks), ranks, 40000, "0" * 32)))
    subject = "save/0/0/step-000001200.abc123def456"
    for rank in range(ranks // 2):
        store.set(f"{subject}/{rank}", word.decode())
    begin = time.perf_counter()
    leader.hear(subject, set(range(ranks // 2, ranks)), timeout=0.001)
    look = time.perf_counter() - begin
    for rank in range(ranks // 2, ranks):
        store.set(f"{subject}/{rank}", word.decode())
    count[0] = 0
    begin, cpu = time.perf_counter(), time.process_time()
    assert len(leader.hear(subject, set(range(ranks)), timeout=60)) == ranks
    return {
        "hear": time.perf_counter() - begin, "hear_cpu": time.process_time() - cpu, "look": look, "requests": float(count[0]), "word": float(len(word)),
    }  # fmt: skip
