"""A trial in one minute: ``python -m ckpt.demo``.

A small training is killed by SIGKILL in the middle of a save, is started again, and is compared
with the same training without an interruption. It needs torch alone, and runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ckpt import CheckpointManager, Tier
from ckpt.model.readable import duration, size

_STEPS: Final = 24
_INTERVAL: Final = 4
_KILL_AFTER: Final = 12
"""The kill hits the first save after this step that is under way."""
_POLL_SECONDS: Final = 0.0005
_WIDTH: Final = 1024


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo has shown.

    Attributes:
        killed_at: The step whose save the kill has cut short; None if the training was too quick.
        resumed_from: The step from which the second start went on.
        losses: How many losses there are.
        equal: How many of them are equal, to the bit, to those of the uninterrupted training.
        stall_seconds: The median time that a save took from the training.
        nbytes: The size of a step.
    """

    killed_at: int | None
    resumed_from: int
    losses: int
    equal: int
    stall_seconds: float
    nbytes: int


def train(root: str, log: str, width: int) -> None:
    """Train on the CPU, save each fourth step, and write each loss as a line of ``log``.

    The line of a saved step also has its ``stall``: how many seconds the save has held up training.
    ``width`` is the number of features of the two layers.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    with (
        CheckpointManager(Tier(root, keep_last=3, keep_best=("loss", "min"))) as manager,
        open(log, "a", encoding="utf-8") as file,
    ):
        report = manager.restore(state)
        for step in range(state["step"] + 1, _STEPS + 1):
            torch.manual_seed(step)
            batch = torch.randn(8, width)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record: dict[str, Any] = {"step": step, "loss": loss.item().hex()}
            if step % _INTERVAL == 0:
                state["step"] = step
                save = manager.save_async(state, step, metrics={"loss": loss.item()})
                record |= {"stall": save.stall_seconds, "nbytes": save.nbytes}
            record["from"] = report.step if report else 0
            file.write(json.dumps(record) + "\n")
            file.flush()


def run(folder: Path, width: int = _WIDTH) -> DemoResult:
    """Run the three trainings in ``folder``, and return what they have shown."""
    _join(_start(folder / "uninterrupted", folder / "uninterrupted.log", width))
    root, log = folder / "killed", folder / "killed.log"
    killed_at = _kill_in_a_save(_start(root, log, width), root)
    _join(_start(root, log, width))
    reference, records = _read_records(folder / "uninterrupted.log"), _read_records(log)
    losses = {record["step"]: record["loss"] for record in records}  # A repeated step counts once
    stalls = [record["stall"] for record in records if "stall" in record]
    return DemoResult(
        killed_at=killed_at,
        resumed_from=records[-1]["from"] or _STEPS,  # A training that was not killed has ended
        losses=len(losses),
        equal=sum(losses.get(record["step"]) == record["loss"] for record in reference),
        stall_seconds=statistics.median(stalls),
        nbytes=max(record.get("nbytes", 0) for record in records),
    )


def _start(root: Path, log: Path, width: int) -> BaseProcess:
    # A fork has imported torch. The parent has run no operation of torch that starts threads.
    process = multiprocessing.get_context("fork").Process(
        target=train, args=(str(root), str(log), width)
    )
    process.start()
    return process


def _join(process: BaseProcess) -> None:
    """Wait for the end of a training. Exit if it has failed."""
    process.join()
    if process.exitcode:
        raise SystemExit(f"the training has failed, exit code {process.exitcode}")


def _kill_in_a_save(process: BaseProcess, root: Path) -> int | None:
    """Kill the training when a step has a folder and no manifest, and return the step."""
    while process.is_alive():
        for folder in root.glob("step-*"):
            step = int(folder.name.split(".")[0].removeprefix("step-"))
            if step > _KILL_AFTER and not (folder / "manifest.json").exists():
                process.kill()
                process.join()
                # The manifest, which ends a save, may have appeared since the first look.
                return None if (folder / "manifest.json").exists() else step
        time.sleep(_POLL_SECONDS)
    return None


def _read_records(log: Path) -> list[dict[str, Any]]:
    """Return the lines of a log. The last line of a training that was killed may be cut."""
    records: list[dict[str, Any]] = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo, and print what it has shown."""
    parser = argparse.ArgumentParser(prog="python -m ckpt.demo", description=__doc__)
    parser.add_argument("--folder", help="an empty folder for the runs; default: a temporary one")
    parser.add_argument("--width", type=int, default=_WIDTH, help="the width of the two layers")
    options = parser.parse_args(arguments)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="ckpt-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    _print(f"training three times on the CPU, {_STEPS} steps, in {folder} ...")
    result = run(folder, options.width)
    kill = "a save" if result.killed_at is None else f"the save of step {result.killed_at}"
    _print(
        f"a save of {size(result.nbytes)} took {duration(result.stall_seconds)} from the training\n"
        f"killed by SIGKILL during {kill}, and went on from step {result.resumed_from}\n"
        f"{result.equal} of {result.losses} losses are equal to those without the kill, bit for "
        f"bit\n\nLook at it:\n  ckpt ls {folder}/killed\n  ckpt serve {folder}/killed\n"
        f"  rm -r {folder}"
    )
    sys.exit(result.equal != result.losses)


if __name__ == "__main__":
    main()
