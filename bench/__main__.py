"""``python -m bench <scenario>`` or ``python -m bench all``: measure, print tables, write
Markdown, CSV, JSON and plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import typing
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from bench import contenders, report, scenarios
from bench.result import Result
from bench.runner import Bench

_LEAST_SECONDS: Final = 30.0  # whatever went before: the first contenders are measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for.

    Returns 1 if a contender failed anywhere, after all the others have been measured.
    """
    words = sys.argv[1:] if arguments is None else arguments
    asked = _parser(words).parse_args(words)
    console = Console()
    if asked.scenario == "render":
        for result in report.read(asked.out).values():
            report.write(result, asked.out)
        return 0
    failed = False
    for name, reason in contenders.missing().items():
        console.print(f"[dim]without {contenders.ALL[name].label}: {reason}[/]", highlight=False)
    together = [name for name in scenarios.ALL if name not in scenarios.ALONE]
    chosen = together if asked.scenario == "all" else [asked.scenario]
    budgets = {name: _options(name, asked).budget_seconds for name in chosen}
    until = time.monotonic() + (
        asked.minutes * 60 if asked.scenario == "all" else sum(budgets.values())
    )
    for scenario in chosen:
        console.rule(f"{scenario}: {scenarios.ALL[scenario]}", align="left")
        # less if those before took longer
        share = (until - time.monotonic()) / sum(budgets.values())
        budget = max(_LEAST_SECONDS, budgets.pop(scenario) * share)
        result = _run(scenario, asked, budget, console)
        report.show(result, console)
        for path in report.write(result, asked.out):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        failed = failed or bool(result.failures)
    return 1 if failed else 0


def _run(name: str, asked: argparse.Namespace, budget_seconds: float, console: Console) -> Result:
    memory = asked.memory_mib << 20
    with Bench(
        name,
        asked.dir,
        asked.contenders,
        budget_seconds,
        console,
        memory_bytes=memory,
        quick=asked.quick,
    ) as bench:
        return scenarios.load(name).run(bench, _options(name, asked))


def _options(name: str, asked: argparse.Namespace) -> Any:
    scenario = scenarios.load(name)
    options = scenario.QUICK if asked.quick else scenario.Options()
    given = {
        key: value for key in _fields(options) if (value := getattr(asked, key, None)) is not None
    }
    return dataclasses.replace(
        options,
        **{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()},
    )


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser. It imports only the scenario in ``arguments``, since `bench.against` runs
    that with the packages of another commit, which the other scenarios may not fit.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="scenario", dest="scenario")
    for name, words in {
        **scenarios.ALL,
        "all": f"all of these but {' and '.join(sorted(scenarios.ALONE))}, one after the other",
    }.items():
        verb = verbs.add_parser(name, help=words)
        verb.add_argument(
            "--out", default="bench/results", help="folder of the reports [bench/results]"
        )
        verb.add_argument(
            "--dir", default=".build/bench", help="on the disk to be measured [.build/bench]"
        )
        verb.add_argument(
            "--memory-mib", type=int, default=0, help="most to take [85 %% of what is free]"
        )
        verb.add_argument(
            "--quick", action="store_true", help="a small smoke run: the numbers mean nothing"
        )
        verb.add_argument(
            "--contenders",
            nargs="+",
            choices=contenders.ASKED,
            default=contenders.ASKED,
            metavar="NAME",
            help=", ".join(contenders.ASKED),
        )
        if name == "all":
            verb.add_argument("--minutes", type=float, default=25, help="for all together [25]")
        elif name in arguments:
            _add_options(verb, scenarios.load(name).Options())
    render = verbs.add_parser(
        "render", help="make the tables and plots again from the JSON of earlier runs"
    )
    render.add_argument(
        "--out", default="bench/results", help="folder of the reports [bench/results]"
    )
    return parser


def _fields(options: Any) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(options)}


def _add_options(verb: argparse.ArgumentParser, options: Any) -> None:
    """A word of the command line for each field of a scenario's options."""
    kinds = typing.get_type_hints(type(options))
    for key, field in _fields(options).items():
        many = typing.get_origin(kinds[key]) is tuple
        kind = typing.get_args(kinds[key])[0] if many else kinds[key]
        default = getattr(options, key)
        shown = " ".join(map(str, default)) if many else str(default)
        more: dict[str, Any] = {"nargs": "+"} if many else {}
        verb.add_argument(
            f"--{key.replace('_', '-')}",
            type=kind,
            help=f"{field.metadata['help']} [{shown}]",
            **more,
        )


if __name__ == "__main__":
    sys.exit(main())
