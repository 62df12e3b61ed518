"""Scenario: a commit and a restore of worlds that no machine here could start, as far as they are
not bytes of tensors.

Simulated: the ranks, and their checksums (``bench/worlds.py``). Real (``bench/commits.py``):
``plan.save``, fragments and their encoding, the words in a TCPStore, reading, checking and merging
fragments, the manifest's encoding and decoding, and the plan of a restoring rank.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from bench import commits, plots, style
from bench.result import Column, Line, Number, Result
from bench.runner import Bench
from bench.scenarios import option
from bench.worlds import World, model_of

_WRITERS: Final = 2  # processes that play the ranks


@dataclass(frozen=True, kw_only=True)
class Options:
    ranks: tuple[int, ...] = option((64, 256, 1024, 4096, 16384), "sizes of the worlds")
    layouts: tuple[str, ...] = option(
        ("fsdp2", "hsdp", "hsdp2", "3d"), "fsdp2, hsdp, hsdp2 (sharded over half of the ranks), 3d"
    )
    tensors: int = option(1000, "of the model and its optimizer")
    budget_seconds: float = option(1800.0, "after which no further world is begun")


QUICK = Options(ranks=(8, 16), layouts=("fsdp2",), tensors=100)


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
    "Seconds are processor time of the one process that does the work (the wall-clock seconds are "
    "in the JSON): the machine is shared. The merge reads all fragments from files, checks and "
    "merges them, and packs the manifest.",
    "`merge, every later one`: the layout is as in the previous save; checksums, digests of "
    "replicas and plain values are compared all the same.",
    "A restore plan goes from the bytes of the manifest to what is read where, the fragments that "
    "it needs read and checked on the way; one rank's, in a process of its own.",
    "A rank asks a TCPStore 4 things for each save (its word, wait, verdict, forget), the leader "
    "one more for each rank and one for each 256; of storage a rank asks 2 (data, fragment), the "
    "leader two more for each rank, and the manifest.",
)
_LABELS: Final = {"fsdp2": "FSDP2", "hsdp": "HSDP", "hsdp2": "HSDP, 2 copies", "3d": "3-D"}


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    named = model_of(options.tensors)
    for ranks in options.ranks:
        for layout in options.layouts:
            if (
                layout == "hsdp2"
                and World("hsdp", ranks, named).mesh == World(layout, ranks, named).mesh
            ):
                continue
            case, name = _LABELS[layout], f"ckpt.{ranks}"
            if lines and bench.left() < 0:
                bench.skip(case, name, "no time was left")
                continue
            line = Line(case, name, f"{ranks:,} ranks")
            line.numbers.update(_measured(World(layout, ranks, named), bench.folder))
            lines.append(line)
            print(f"{case}, {line.label}: {line.numbers}", flush=True)
    lines.sort(key=lambda line: list(_LABELS.values()).index(line.case))
    return bench.result(
        f"Worlds of up to {max(options.ranks):,} ranks × {options.tensors:,} tensors",
        _COLUMNS,
        _NOTES,
        lines,
    )


def _measured(world: World, parent: str) -> dict[str, Number]:
    folder = tempfile.mkdtemp(dir=parent)
    begin = time.perf_counter()
    try:
        blocks = [
            range(k * world.ranks // _WRITERS, (k + 1) * world.ranks // _WRITERS)
            for k in range(_WRITERS)
        ]
        parts = _apart(_WRITERS, commits.write, [(world, folder, block) for block in blocks])
        refs = [[ref for part in parts for ref in part["refs"][step]] for step in range(2)]
        (commit,) = _apart(1, commits.commit, [(folder, refs)])
        other = World("fsdp2", world.ranks * 3 // 4, world.model)
        (same,) = _apart(1, commits.restore, [(folder, world, world.ranks // 3)])
        (moved,) = _apart(1, commits.restore, [(folder, other, other.ranks // 3)])
        (store,) = _apart(1, commits.words, [(world.ranks,)])
    finally:
        shutil.rmtree(folder)
    sizes = [float(ref.size) for ref in refs[0]]
    return {
        "plan_seconds": max(second for part in parts for second in part["plan"]),
        "pack_seconds": statistics.median(second for part in parts for second in part["pack"]),
        "fragment_kib": round(statistics.mean(sizes) / 1024, 1),
        "first_seconds": commit["merge_first_cpu"],
        "first_wall_seconds": commit["merge_first"],
        "known_seconds": commit["merge_known_cpu"],
        "known_wall_seconds": commit["merge_known"],
        "memory_mib": round(commit["memory"] / 2**20),
        "base_memory_mib": round(commit["base"] / 2**20),
        "manifest_kib": round(commit["manifest"] / 1024),
        "same_seconds": same["cpu"],
        "same_wall_seconds": same["seconds"],
        "same_fragments": same["fragments"],
        "other_seconds": moved["cpu"],
        "other_wall_seconds": moved["seconds"],
        "other_fragments": moved["fragments"],
        "other_reads": moved["reads"],
        "other_read_bytes_over_wanted": moved["over"],
        "hear_seconds": store["hear_cpu"],
        "hear_wall_seconds": store["hear"],
        "look_wall_seconds": store["look"],
        "store_requests_of_the_leader": store["requests"],
        "store_requests_of_a_rank": 4.0,
        "word_bytes": store["word"],
        "simulation_seconds": time.perf_counter() - begin,
    }


def _apart(
    count: int, work: Callable[..., dict[str, Any]], given: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """Run each call in a fresh process, so that no call uses the memory of another."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        return [future.result() for future in [pool.submit(work, *each) for each in given]]


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
        for axis, (key, title, subtitle, kind) in zip(
            drawn.subplots(2, 3).flat, panels, strict=True
        ):
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
        points = [
            (float(line.name.split(".")[1]), value)
            for line in result.of(case)
            if line.name.startswith("ckpt.") and (value := line.median(key))
        ]
        if points:
            own = next(f"ckpt.{layout}" for layout, label in _LABELS.items() if label == case)
            found.append(plots.Series(own, case, *map(list, zip(*points, strict=True))))
    return found
