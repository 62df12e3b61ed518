"""Measure what a save of a LoRA run writes, beside moonclip where it is installed.

    python -m bench.increments [--saves 100] [--layers 8] [--width 512]

The model is a GPT-2 of transformers with an adapter of PEFT, trained with AdamW. Each way to save
has a process of its own. A save follows each step, and the next step begins when the save is
durable. The program prints a table in Markdown, with a row for each way: what the process has
written for the first save (the ``wchar`` of ``/proc/self/io``), and for the others as the median
and the mean, and as a multiple of the bytes that are trained: the adapter and its optimizer state;
and medians of the call and of the time until the step is durable. With ``base=``, a run with
another adapter has saved a step before, which is not counted.

It needs ``pip install peft transformers``, and for the other way ``pip install moonclip``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from bench.machine import load
from bench.style import seconds
from ckpt import CheckpointManager, Tier
from ckpt.model.readable import size

_KEEP: Final = 3


@dataclass(frozen=True)
class Case:
    """The model, and how often it is saved."""

    saves: int
    layers: int
    width: int
    rank: int = 8


@dataclass(frozen=True)
class Figures:
    """What each save of one way took: bytes, seconds of the call, seconds until durable."""

    trained_bytes: int
    state_bytes: int
    written: list[int]
    calls: list[float]
    durables: list[float]


Save = Callable[[int], float]
"""A function that saves a step, waits until it is durable, and returns the seconds of the call."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dir", default=os.getcwd(), help="a folder on the disk to measure")
    args = parser.parse_args()
    case = Case(args.saves, args.layers, args.width)
    print("| way | first save | written per save | mean | of what is trained | call | durable |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in WAYS:
        if name == "moonclip" and importlib.util.find_spec("moonclip") is None:
            continue
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            figures = _measure(name, folder, case)
        print(f"| {name} | {_cells(figures)} |", flush=True)
    print(
        f"\nstate {size(figures.state_bytes)}, trained {size(figures.trained_bytes)}; "
        f"{case.saves} saves; load average {load():.2f}"
    )


def _measure(name: str, folder: str, case: Case) -> Figures:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, name, folder, case))
    process.start()
    there.close()
    figures: Figures = here.recv()
    process.join()
    return figures


def _cells(figures: Figures) -> str:
    written = figures.written[1:]
    median = statistics.median(written)
    return " | ".join(
        [
            size(figures.written[0]),
            size(int(median)),
            size(int(statistics.mean(written))),
            f"{median / figures.trained_bytes:.2f}×",
            seconds(statistics.median(figures.calls[1:])),
            seconds(statistics.median(figures.durables[1:])),
        ]
    )


def _work(pipe: Connection, name: str, folder: str, case: Case) -> None:
    torch.set_num_threads(1)
    model = _model(case, case.rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    tokens = torch.randint(0, 1000, (2, 32))

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    if name == BASE_WAY:
        with CheckpointManager(f"{folder}/base", journal=False) as manager:
            manager.save({"model": _model(case, 2 * case.rank)}, 1)
    save, close = WAYS[name](folder, model, optimizer)
    written: list[int] = []
    calls: list[float] = []
    durables: list[float] = []
    for step in range(1, case.saves + 1):
        train()
        before, began = _written(), time.perf_counter()
        calls.append(save(step))
        durables.append(time.perf_counter() - began)
        written.append(_written() - before)
    close()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    trained_bytes = sum(tensor.nbytes for tensor in [*trained, *moments])
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    pipe.send(Figures(trained_bytes, trained_bytes + frozen_bytes, written, calls, durables))


def _model(case: Case, adapter_rank: int) -> Any:
    peft = importlib.import_module("peft")
    transformers = importlib.import_module("transformers")

    config = transformers.GPT2Config(
        n_layer=case.layers, n_embd=case.width, n_head=8, vocab_size=8000
    )
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(config)
    lora = peft.LoraConfig(r=adapter_rank, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora)


def _written() -> int:
    text = Path("/proc/self/io").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("wchar")).split()[1])


def _ours(codec: str, incremental: bool, *, has_base: bool = False) -> Any:
    def make(
        folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Save, Callable[[], None]]:
        base = f"{folder}/base" if has_base else None
        tier = Tier(f"{folder}/run", codec=codec, keep_last=_KEEP, base=base)
        manager = CheckpointManager(tier, incremental=incremental, journal=False)
        state = {"model": model, "optimizer": optimizer}

        def save(step: int) -> float:
            began = time.perf_counter()
            pending = manager.save_async(state, step)
            called = time.perf_counter() - began
            pending.result()
            return called

        return save, manager.close

    return make


def _moonclip(
    folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Save, Callable[[], None]]:
    moonclip = importlib.import_module("moonclip")
    manager = moonclip.CheckpointManager(folder, max_total_snapshots=_KEEP)

    def save(step: int) -> float:
        began = time.perf_counter()
        manager.save(step, model=model, optimizer=optimizer)
        called = time.perf_counter() - began
        manager.flush()
        return called

    return save, manager.flush


BASE_WAY: Final = "ckpt, `base=`"
WAYS: Final[Mapping[str, Any]] = {
    "ckpt": _ours("none", incremental=True),
    BASE_WAY: _ours("none", incremental=True, has_base=True),
    'ckpt, `codec="zstd"`': _ours("zstd", incremental=True),
    "ckpt, `incremental=False`": _ours("none", incremental=False),
    "moonclip": _moonclip,
}


if __name__ == "__main__":
    main()
