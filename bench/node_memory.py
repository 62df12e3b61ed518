"""Measure the host memory that the ranks of a node add together, with rings and with whole slots.

    python -m bench.node_memory [--ranks 4] [--size-mib 2048] [--ahead 2] [--saves 4] [--turns 3]

The ranks train one GPT in FSDP2 shards under torchrun. In each turn, they save some times with the
defaults, and as many times with two whole slots, which is what a job with a tier in memory has. The
optimizer's step comes some seconds after the call, when the next forward and backward pass has
ended. The program prints a table in Markdown, with a row for each setting:

* the memory that all ranks have added together to what as many steps of the same length need
  without a save at their peak, before or after the saves, as a multiple of the state of all ranks:
  the most of each rank, and the median of the turns;
* medians of the stall and of the durable time of all saves but the first of each turn, each the
  longest of any rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.machine import load
from bench.scenarios.ranks import torchrun
from bench.style import seconds

SETTINGS: Final = ("rings", "whole slots")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size-mib", type=int, default=2048, help="of the state of all ranks")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ahead", type=float, default=2.0, help="seconds until the optimizer")
    parser.add_argument("--saves", type=int, default=4, help="in each turn, after the first")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dir", default=".", help="on the disk to be measured")
    args = parser.parse_args()
    began = load()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        rows = measure(
            args.ranks,
            {
                "folder": os.path.abspath(folder),
                "names": SETTINGS,
                "size": args.size_mib << 20,
                "batch": 1,
                **{key: getattr(args, key) for key in ("layers", "ahead", "saves", "turns")},
            },
        )
    print("| setting | memory added | stall | durable |\n|---|---:|---:|---:|")
    print(*rows, sep="\n")
    print(f"\nLoad {began:.1f} at the begin and {load():.1f} at the end.")


def measure(ranks: int, plan: dict[str, Any]) -> list[str]:
    """Return a row of the table for each setting of ``plan``."""
    turns: dict[str, list[Sequence[Mapping[str, Any]]]] = {name: [] for name in plan["names"]}
    with contextlib.closing(torchrun(ranks, "bench.node_memory_rank", plan)) as answers:
        for answer in answers:
            if "name" in answer:
                turns[answer["name"]].append(answer["ranks"])
    return [f"| {name} | {_cells(figures)} |" for name, figures in turns.items()]


def _cells(turns: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    memory = statistics.median(
        sum(rank["memory"] for rank in ranks) / sum(rank["saves"][0][2] for rank in ranks)
        for ranks in turns
    )
    saves = [save for ranks in turns for save in zip(*(r["saves"] for r in ranks), strict=True)]
    stall, durable = (
        statistics.median(max(rank[column] for rank in save) for save in saves) for column in (0, 1)
    )
    return f"{memory:.2f}× | {seconds(stall)} | {seconds(durable)}"


if __name__ == "__main__":
    main()
