"""Compare the stall of a save, and the step of the training, with and without `HfFolders`.

    python -m bench.hf_stall [--layers 12] [--width 512] [--rounds 7] [--folder FOLDER]

One process trains a GPT under AdamW, with one thread, and saves to two roots in turn. The observer
of one root makes a folder of Hugging Face of its first save in each turn. The training goes on
until the folder is there, and saves once more meanwhile. The other root gets as many steps, and the
same two saves. Each figure is the median of the turns, with the lowest and the highest. The export
takes a processor: a machine without an idle one shows its cost as longer steps.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch

from bench.state import GPT, Training
from ckpt import CheckpointManager, HfFolders, PendingSave, Tier

_WITH, _WITHOUT = "with HfFolders", "without"
_STEPS_BETWEEN: Final = 2
"""The steps between the two saves of a turn."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What was measured of one kind, in seconds.

    Attributes:
        first: The stall of the save from which a folder is made.
        second: The stall of the save that falls into the export.
        steps: The mean of the steps of a turn.
    """

    first: list[float] = field(default_factory=list[float])
    second: list[float] = field(default_factory=list[float])
    steps: list[float] = field(default_factory=list[float])


class Job:
    """A training that saves to one root."""

    def __init__(self, training: Training, manager: CheckpointManager) -> None:
        self._training, self._manager, self._number = training, manager, 0

    def turn(self, turns: Turns, is_over: Callable[[int, int], bool]) -> int:
        """Save a step, and train until ``is_over(step, count)``, where ``count`` is the number of
        steps since. Return that number.
        """
        os.sync()  # What the turn before has written is no load of this one
        number, self._number = self._number, self._number + 2
        state = self._training.objects()
        began, count = time.perf_counter(), 0
        saves: list[PendingSave] = [self._manager.save_async(state, number)]
        while count <= _STEPS_BETWEEN or not is_over(number, count):
            self._training.forward_backward()
            self._training.optimizer_step()
            count += 1
            if count == _STEPS_BETWEEN:
                saves.append(self._manager.save_async(state, number + 1))
        turns.steps.append((time.perf_counter() - began) / count)
        for save, stalls in zip(saves, (turns.first, turns.second), strict=True):
            save.result()
            stalls.append(save.stall_seconds)
        return count


def measure(training: Training, folder: Path, rounds: int) -> dict[str, Turns]:
    """Return the turns of each kind. The turns before the first round do not count."""
    config = folder / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    hf = HfFolders(folder / "hf", config, every=2, keep_last=1, dtype="bfloat16")
    tiers = [Tier(str(folder / name), keep_last=2) for name in ("with", "without")]
    kinds = {name: Turns() for name in (_WITH, _WITHOUT)}
    with (
        CheckpointManager(tiers[0], observers=[hf]) as observed,
        hf,
        CheckpointManager(tiers[1]) as plain,
    ):
        jobs = Job(training, observed), Job(training, plain)
        for number in range(rounds + 1):
            turns = kinds if number else {name: Turns() for name in kinds}
            count = jobs[0].turn(turns[_WITH], partial(_is_exported, folder / "hf"))
            jobs[1].turn(turns[_WITHOUT], partial(_is_trained, count))
    return kinds


def _is_exported(place: Path, step: int, _count: int) -> bool:
    return (place / f"step-{step:09d}").exists()


def _is_trained(steps: int, _step: int, count: int) -> bool:
    return count >= steps


def main() -> None:
    """Measure, and print the figures and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="a folder on the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    model = GPT(args.layers, args.width)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=2)
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        kinds = measure(training, Path(folder), args.rounds)
    print(
        f"{training.nbytes >> 20} MiB of state, {args.rounds} turns, {os.cpu_count()} cores, "
        f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after, "
        f"{time.monotonic() - began:.0f} s"
    )
    rows = (
        ("stall of the save that becomes a folder", "first"),
        ("stall of the save meanwhile", "second"),
        ("step", "steps"),
    )
    print(f"| | {_WITH} | {_WITHOUT} | ratio |\n|---|---:|---:|---:|")
    for title, name in rows:
        values = [getattr(kinds[kind], name) for kind in (_WITH, _WITHOUT)]
        ratio = statistics.median(values[0]) / statistics.median(values[1])
        print(f"| {title} | {_text(values[0])} | {_text(values[1])} | {ratio:.3f} |")


def _text(seconds: Sequence[float]) -> str:
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return f"{1e3 * middle:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"


if __name__ == "__main__":
    main()
