"""Measure what each setting of the host memory costs and brings, at steps of several lengths.

    python -m bench.host_memory [--size-mib 1024] [--steps 0.5 2 8] [--saves 5] [--turns 3]

The state is a GPT under AdamW. Each setting has a process of its own, and the processes take turns.
A turn is a number of training steps. Each step begins with a save, which does not wait for the
previous save. The optimizer's step comes after 60 % of the training step. The first turn, in which
the memory settles, is not reported. ``whole slots`` is what a job with a tier in memory has: two
slots that take the whole image each.

The program prints a table in Markdown, with a row for each setting and length of a step:

* the most memory that the saves have added to that of training alone, as a multiple of the state,
  and what is left of it after the last save;
* medians of the stall, the drag and the time until the step is durable. The drag is the time by
  which the forward and backward passes of a step with a save take longer than without one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final

import torch

from bench.machine import load
from bench.measure import MemorySampler, host_memory_bytes
from bench.state import Training
from bench.style import seconds
from bench.whole_slots import whole_slots
from ckpt import CheckpointManager, PendingSave, Tier

_WHOLE: Final = "whole slots"
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "defaults": {},
    "`slots=1`": {"slots": 1},
    '`host_memory="0.5x"`': {"host_memory": "0.5x"},
    '`host_memory="0.25x"`': {"host_memory": "0.25x"},
    '`overlap="off"`': {"overlap": "off"},
    _WHOLE: {},
}
_UNTIL_OPTIMIZER: Final = 0.6  # of a step: the forward and the backward pass
_WARM_UP_STEPS: Final = 3


@dataclass(frozen=True)
class Turn:
    """What the saves of one turn took.

    Attributes:
        stalls: Seconds that the call and the optimizer's step have waited, for each save.
        drag: Seconds by which the computing of each step took longer than without a save.
        durables: Seconds until each step was durable.
    """

    stalls: Sequence[float]
    drag: float
    durables: Sequence[float]


@dataclass(frozen=True)
class Case:
    """The length of a step, the saves of a turn, the turns, and the bytes of the state."""

    step: float
    saves: int
    turns: int
    size_bytes: int


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--steps", type=float, nargs="+", default=[0.5, 2.0, 8.0])
    parser.add_argument("--saves", type=int, default=5, help="in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dir", default=".", help="on the disk to be measured")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    began = load()
    print(
        "| setting | step | most memory added | at the end | stall | drag | durable |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    for step in args.steps:
        case = Case(step, args.saves, args.turns, args.size_mib << 20)
        for row in measure(args.settings, case, args.dir):
            print(row, flush=True)
    print(f"\nLoad {began:.1f} at the begin and {load():.1f} at the end.")


def measure(settings: Sequence[str], case: Case, folder: str) -> list[str]:
    """Let each setting save in turn, and return a row of the table for each."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        workers: list[tuple[str, Connection, SpawnProcess]] = []
        for number, name in enumerate(settings):
            here, away = context.Pipe()
            arguments = (away, name, os.path.join(place, str(number)), case)
            process = context.Process(target=_work, args=arguments)
            process.start()
            away.close()  # A worker that ends with an error ends this program too
            workers.append((name, here, process))
        turns: dict[str, list[Turn]] = {name: [] for name in settings}
        for _, pipe, _ in workers:
            pipe.recv()  # it is ready
        for _ in range(case.turns):
            for name, pipe, _ in workers:
                pipe.send("save")
                turns[name].append(pipe.recv())
        rows: list[str] = []
        for name, pipe, process in workers:
            pipe.send("end")
            rows.append(f"| {name} | {case.step:g} s | {_cells(turns[name][1:], *pipe.recv())} |")
            process.join()
        return rows


def _cells(turns: Sequence[Turn], state_bytes: int, most: int, last: int) -> str:
    stalls = [stall for turn in turns for stall in turn.stalls]
    durables = [durable for turn in turns for durable in turn.durables]
    drags = [turn.drag for turn in turns]
    memory = [f"{nbytes / state_bytes:.2f}×" for nbytes in (most, last)]
    times = [seconds(statistics.median(values)) for values in (stalls, drags, durables)]
    return " | ".join([*memory, *times])


def _work(pipe: Connection, setting: str, root: str, case: Case) -> None:
    torch.set_num_threads(1)
    with whole_slots() if setting == _WHOLE else nullcontext():
        _answer(pipe, SETTINGS[setting], root, case)


def _answer(pipe: Connection, settings: Mapping[str, Any], root: str, case: Case) -> None:
    training = Training.make(case.size_bytes, layers=6, batch=1, seed=0)
    with MemorySampler(os.getpid()) as alone:
        for _ in range(_WARM_UP_STEPS):  # Until the allocator needs no further memory
            for _ in range(9):
                training.forward_backward()
            training.optimizer_step()
    training.forward_backward()
    before = host_memory_bytes(os.getpid())
    tier = Tier(root, keep_last=2)  # With all steps, the disk would be full soon
    with MemorySampler(os.getpid()) as sampler, CheckpointManager(tier, **settings) as manager:
        manager.prepare(training.objects())
        time.sleep(1.0)
        pipe.send("ready")
        while pipe.recv() == "save":
            pipe.send(_turn(manager, training, case))
        training.forward_backward()  # The memory has gradients again, as it had before
        last = host_memory_bytes(os.getpid()) - before
    pipe.send((training.nbytes, sampler.peak_bytes - alone.peak_bytes, last))


def _turn(manager: CheckpointManager, training: Training, case: Case) -> Turn:
    """Save and compute in each of some steps, and then wait for the saves."""
    clean = statistics.median(_compute(training) for _ in range(5))
    pending: list[PendingSave] = []
    computed: list[float] = []
    for _ in range(case.saves):
        began = time.perf_counter()
        pending.append(manager.save_async(training.objects(), training.step))
        computed.append(_compute(training))  # An optimizer without a gradient changes nothing
        while time.perf_counter() - began < _UNTIL_OPTIMIZER * case.step:
            computed.append(_compute(training))
        training.optimizer_step()
        while time.perf_counter() - began < case.step:
            computed.append(_compute(training))
    for save in pending:
        save.result()
    durables = [save.durable_seconds for save in pending if save.durable_seconds is not None]
    drag = sum(taken - clean for taken in computed) / case.saves
    return Turn([save.stall_seconds for save in pending], drag, durables)


def _compute(training: Training) -> float:
    began = time.perf_counter()
    training.forward_backward()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
