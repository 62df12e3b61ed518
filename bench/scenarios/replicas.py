"""Scenario 11: ranks under DDP restore what they all hold.

Each reads all of it, or each part is read by one of them and broadcast to the others.

From the local disk, cold, and from a real S3 server behind a wire that all ranks share. All ranks,
the server and the wire take their share of the same cores: on real nodes each rank has cores and a
network of its own.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from bench import clients, plots
from bench.measure import Spread
from bench.process import BenchError
from bench.proxy import Proxy
from bench.result import Column, Line, Result
from bench.runner import Bench, size_label
from bench.scenarios import option
from bench.scenarios.objects import served
from bench.scenarios.ranks import torchrun

_LABELS: Final = {"read": "each rank reads", "broadcast": "one reads, broadcast"}
_COLUMNS: Final = (
    Column("restore_seconds", "restore", "seconds"),
    Column("bytes_per_second", "landed, all ranks", "per_second"),
    Column("read_bytes", "read from the store", "bytes"),
    Column("cpu_seconds", "CPU, all ranks", "seconds"),
    Column("rounds", "rounds", "count"),
)
_NOTES: Final = (
    "**restore**: the whole call, the longest of any rank; medians of the *rounds*, the two in "
    "turn, after one that does not count. What was restored was compared on every rank, every "
    "time. "
    "**read from the store**, **CPU**: all ranks together; the server's and the wire's CPU is not "
    "in it.",
    "The disk is cold (page cache dropped). The S3 server (rclone, from memory) is behind a wire "
    "of {wire} MB/s for all ranks together.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    ranks: tuple[int, ...] = option((2, 4), "in one job, one or several numbers")
    stores: tuple[str, ...] = option(("disk", "s3"), "disk, s3")
    size_mib: int = option(384, "of the state that every rank holds")
    wire_mb: int = option(100, "MB/s of the wire to the S3 server, for all ranks together")
    repeats: int = option(5, "restores of each kind")
    budget_seconds: float = option(180.0, "after which no other job is begun")


QUICK = Options(ranks=(2,), stores=("disk",), size_mib=12, repeats=2, budget_seconds=30)


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    for store in options.stores:
        for ranks in options.ranks:
            case = (
                f"{ranks} ranks, "
                f"{'local disk' if store == 'disk' else f'S3 at {options.wire_mb} MB/s'}"
            )
            if lines and bench.over():
                for name in _LABELS:
                    bench.skip(
                        case, name, f"the {bench.budget_seconds:.0f} s of this scenario were over"
                    )
                continue
            folder = bench.place()
            os.makedirs(folder)
            with _store(bench, store, folder, options) as (url, given):
                plan = {
                    "folder": folder,
                    "url": url,
                    "options": given,
                    "size": options.size_mib << 20,
                    "repeats": options.repeats,
                }
                try:
                    seen = [
                        said
                        for said in torchrun(ranks, "bench.replicas_rank", plan)
                        if said["number"]
                    ]
                    lines += _lines(bench, case, seen)
                except BenchError as error:
                    for name in _LABELS:
                        bench.fail(case, name, error)
    state = (
        f"{size_label(options.size_mib << 20)} of AdamW state on every rank, DDP over gloo, one "
        "torch thread per rank"
    )
    notes = [note.format(wire=options.wire_mb) for note in _NOTES]
    return bench.result("Ranks that restore the same", _COLUMNS, notes, lines, training=state)


@contextmanager
def _store(
    bench: Bench, store: str, folder: str, options: Options
) -> Generator[tuple[str, dict[str, Any]]]:
    if store == "disk":
        yield os.path.join(folder, "root"), {}
        return
    with served("rclone", bench) as (port, _), Proxy(port) as wire:
        wire.bytes_per_second = options.wire_mb * 1e6
        yield (
            f"s3://{clients.BUCKET}/replicas",
            {
                "endpoint_url": wire.url,
                "key": clients.KEY,
                "secret": clients.SECRET,
                "region": "us-east-1",
                "put_if_absent": False,
            },
        )


def _lines(bench: Bench, case: str, seen: list[dict[str, Any]]) -> list[Line]:
    lines = []
    for name, label in _LABELS.items():
        rounds = [answer["ranks"] for answer in seen if answer["name"] == name]
        slowest = [max(one["seconds"] for one in ranks) for ranks in rounds]
        landed = sum(one["nbytes"] for one in rounds[0])
        numbers: dict[str, Any] = {
            "restore_seconds": Spread.of(slowest),
            "bytes_per_second": Spread.of(landed / seconds for seconds in slowest),
            "read_bytes": sum(one["read_bytes"] for one in rounds[0]),
            "cpu_seconds": Spread.of(sum(one["cpu_seconds"] for one in ranks) for ranks in rounds),
            "rounds": len(rounds),
        }
        lines.append(Line(case, name, label, numbers))
        bench.say(f"{case}, {label}: {lines[-1].median('restore_seconds') or 0:.2f} s")
    return lines


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel("restore_seconds", "restore", "longest of any rank"),
        plots.Panel("read_bytes", "read from the store", "all ranks", kind="bytes"),
    )
    plots.bars(result, panels, path)
