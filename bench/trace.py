"""Count the functions and files of ckpt that a save or a restore enters.

    python -m bench.trace [--list]

One process saves and restores a model of 16 parameters under AdamW, and a profile hook on every
thread notes each function that it enters. The first save and the first restore are not counted,
since imports and the reservation of memory belong to them. The thread that reserves memory for the
next save is never counted: a quiet machine runs it before a restore returns, and a busy one later.
Each act runs five times and the run that enters the fewest functions counts, since the threads of a
busy machine wait for each other in more ways. ``--list`` prints the functions by file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NamedTuple

import torch
from torch import nn

from ckpt import CheckpointManager, Tier

_ROOT: Final = Path(__file__).resolve().parents[1]
_PRODUCT: Final = tuple(f"{_ROOT / folder}/" for folder in ("ckpt", "backends"))
_ROUNDS: Final = 5
_RESERVER: Final = "ckpt-slots"
_COMPREHENSIONS: Final = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}


class Trace(NamedTuple):
    """The functions that one act entered, as ``(file, qualified name)``."""

    functions: frozenset[tuple[str, str]]

    @property
    def files(self) -> frozenset[str]:
        return frozenset(file for file, _ in self.functions)


def trace(act: Callable[[], object]) -> Trace:
    """Run ``act`` and return the functions of the product that any thread entered meanwhile.

    Only threads that began after a call of :func:`watch` are seen, and the thread that called it.
    """
    codes: set[CodeType] = set()
    _sink.append(codes)
    try:
        act()
    finally:
        _sink.remove(codes)
    return Trace(
        frozenset(
            (str(Path(code.co_filename).relative_to(_ROOT)), code.co_qualname)
            for code in codes
            if code.co_filename.startswith(_PRODUCT) and code.co_name not in _COMPREHENSIONS
        )
    )


_sink: Final[list[set[CodeType]]] = []


def watch() -> None:
    """Install the hook on this thread and on each thread that begins later."""
    threading.setprofile(_note)
    sys.setprofile(_note)


def _note(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and not threading.current_thread().name.startswith(_RESERVER):
        for codes in _sink:
            codes.add(frame.f_code)


def measure(folder: Path) -> dict[str, Trace]:
    """Return the traces of a save to one tier, of a save to two tiers, and of a restore."""
    watch()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    traces = {}
    for name, tiers in {
        "a save to one tier": [Tier(str(folder / "one"))],
        "a save to near and far": [Tier(str(folder / "near")), Tier(str(folder / "far"))],
    }.items():
        with CheckpointManager(tiers) as manager:
            rounds = []
            for step in range(1 + _ROUNDS):
                _train(model, optimizer)
                rounds.append(trace(lambda m=manager, s=step: m.save_async(state, step=s).result()))  # type: ignore[misc]
            traces[name] = _least(rounds[1:])
    with CheckpointManager(folder / "one") as manager:
        manager.restore(state)
        traces["a restore"] = _least(
            [trace(lambda: manager.restore(state)) for _ in range(_ROUNDS)]
        )
    sys.setprofile(None)
    threading.setprofile(None)
    return traces


def _least(rounds: Sequence[Trace]) -> Trace:
    return min(rounds, key=lambda entered: len(entered.functions))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and the functions if they were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions by file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        traces = measure(Path(folder))
    print("| act | functions | files |\n|---|---:|---:|")
    for name, entered in traces.items():
        print(f"| {name} | {len(entered.functions)} | {len(entered.files)} |")
    if options.list:
        for name, entered in traces.items():
            print(f"\n{name}")
            by_file = defaultdict(list)
            for file, function in sorted(entered.functions):
                by_file[file].append(function)
            for file, functions in by_file.items():
                print(f"  {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
