"""``python -m bench save``: measure, print a table, write Markdown, CSV, JSON and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import report, save
from bench.contenders import ALL

_QUICK = {"size_mib": 8, "repeats": 2, "layers": 2, "clean_steps": 1}
_FULL = {"size_mib": 512, "repeats": 5, "layers": 6, "clean_steps": 3}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="verb")
    verb = verbs.add_parser("save", help="stall, drag and durable of a save, against torch.save and DCP")
    verb.add_argument("--size-mib", type=int, help=f"of the AdamW state [{_FULL['size_mib']}]")
    verb.add_argument("--repeats", type=int, help=f"saves of each kind [{_FULL['repeats']}]")
    verb.add_argument(
        "--layers", type=int, help=f"of the model; sets the number of tensors [{_FULL['layers']}]"
    )
    verb.add_argument("--clean-steps", type=int, help=f"before and after each save [{_FULL['clean_steps']}]")
    verb.add_argument("--batch", type=int, default=2, help="sequences per step; sets its length [2]")
    verb.add_argument("--contenders", nargs="+", choices=list(ALL), default=list(ALL), metavar="NAME")
    verb.add_argument("--dir", default=".build/bench", help="on the disk to be measured [.build/bench]")
    verb.add_argument("--out", default="bench/results", help="folder of the reports [bench/results]")
    verb.add_argument("--quick", action="store_true", help="a small smoke run: the numbers mean nothing")
    told = parser.parse_args(arguments)
    chosen = _QUICK if told.quick else _FULL
    chosen = {key: getattr(told, key) or value for key, value in chosen.items()}
    options = save.Options(
        size_bytes=chosen["size_mib"] << 20,
        repeats=chosen["repeats"],
        folder=told.dir,
        contenders=told.contenders,
        layers=chosen["layers"],
        clean_steps=chosen["clean_steps"],
        batch=told.batch,
    )
    try:
        outcome = save.run(options)
    except save.BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    report.show(outcome)
    for path in report.write(outcome, told.out):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
