"""Scenario 5: several ranks under torchrun, FSDP2 shards of one GPT over gloo, and a save that all
of them make together.

One job per number of ranks and lot of contenders trains, and saves with one contender after the
other (each is closed before the next). A rank that fails ends its job: that contender has no
numbers, and a new job goes on with the next. All ranks share the machine: this is about what saving
together costs, not about how it scales.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from bench import plots
from bench.contenders import ALL
from bench.measure import Spread, Step, TrainedSave
from bench.process import BenchError
from bench.result import Column, Line, Result
from bench.runner import Bench, label, lots
from bench.scenarios import option

_QUIET_SECONDS: Final = 60.0  # without a word from any rank
_COLUMNS = (
    Column("stall_seconds", "stall", "seconds"),
    Column("drag_seconds", "drag", "seconds"),
    Column("durable_seconds", "durable", "seconds"),
    Column("first_stall_seconds", "first: stall", "seconds"),
    Column("first_durable_seconds", "first: durable", "seconds"),
    Column("clean_step_seconds", "step alone", "seconds"),
    Column("disk_bytes", "on disk", "bytes"),
    Column("saves", "saves", "count"),
)
_NOTES = (
    "**stall**, **durable**: the longest of any rank. **drag**: training time lost beside the "
    "save, the longest of any rank; steps are collective. **first**: the first save of the job's "
    "contender, in no median.",
    "Medians of the later saves (how many: *saves*). Each was loaded back by all ranks into their "
    "spoiled shards and compared before it counted.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    ranks: tuple[int, ...] = option((2, 4), "in one job, one or several numbers")
    size_mib: int = option(64, "of the AdamW state of all ranks together")
    layers: int = option(4, "of the model")
    batch: int = option(2, "sequences per rank and step")
    repeats: int = option(5, "saves after the first")
    clean_steps: int = option(2, "before and after each save")
    budget_seconds: float = option(120.0, "after which no other job is begun")


QUICK = Options(ranks=(2,), size_mib=4, layers=2, repeats=2, clean_steps=1, budget_seconds=20)


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    for ranks in options.ranks:
        case = f"{ranks} ranks"
        seen: dict[str, list[dict[str, Any]]] = {}
        names = [name for name in bench.names if ALL[name].distributed]
        for number, lot in enumerate(lots(dict.fromkeys(names, 0), 0)):
            if number and bench.over():
                for name in lot:
                    bench.skip(
                        case, name, f"the {bench.budget_seconds:.0f} s of this scenario were over"
                    )
                continue
            waiting = lot
            while waiting:
                waiting = _job(bench, case, ranks, waiting, options, seen)
        for name, saves in seen.items():
            if len(saves) == options.repeats + 1 and not bench.failed(case, name):
                lines.append(_line(case, name, saves))
    state = (
        f"{options.size_mib} MiB of state over all ranks, GPT of {options.layers} layers, FSDP2 "
        "over gloo, one torch thread per rank"
    )
    return bench.result(
        "Ranks that save one checkpoint together", _COLUMNS, _NOTES, lines, training=state
    )


def _summary(line: Line) -> str:
    return (
        f"stall {(line.median('stall_seconds') or 0) * 1e3:.1f} ms, durable "
        f"{line.median('durable_seconds') or 0:.2f} s"
    )


def _job(
    bench: Bench,
    case: str,
    ranks: int,
    names: Sequence[str],
    options: Options,
    seen: dict[str, list[dict[str, Any]]],
) -> list[str]:
    """Run one job until it ends or fails. Returns the contenders that have not had a turn."""
    folder = bench.place()
    os.makedirs(folder)
    plan: dict[str, Any] = {
        "folder": folder,
        "names": list(names),
        "size": options.size_mib << 20,
        **{key: getattr(options, key) for key in ("layers", "batch", "repeats", "clean_steps")},
    }
    left = list(names)
    current = left[0]
    try:
        with contextlib.closing(torchrun(ranks, "bench.rank", plan)) as said:
            for answer in said:
                if begun := answer.get("begin"):
                    current = begun
                    left.remove(begun)
                elif error := answer.get("error"):
                    raise BenchError(error)
                elif name := answer.get("name"):
                    seen.setdefault(name, []).append(answer)
                elif ended := answer.get("end"):
                    bench.say(
                        f"{case}, {label(ended)}: {_summary(_line(case, ended, seen[ended]))}"
                    )
    except BenchError as error:
        bench.fail(case, current, error)
        left = [name for name in left if name != current]  # it may have failed before it began
    return left


def torchrun(ranks: int, module: str, plan: dict[str, Any]) -> Generator[dict[str, Any]]:
    """What the ranks of a job say.

    ``module`` is given the path of ``plan`` as JSON, and writes to its "answers". All
    files are in its "folder".

    The job ends when the generator is closed. Raises ``BenchError`` if it fails, or its ranks fall
    silent.
    """
    folder = plan["folder"]
    plan = plan | {"answers": os.path.join(folder, "answers")}
    path = os.path.join(folder, "plan.json")
    with open(path, "w") as file:
        json.dump(plan, file)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command += ["-m", module, path]
    with open(os.path.join(folder, "log"), "wb") as log:
        job = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield from _answers(job, plan["answers"])
        if job.returncode:
            with open(log.name, errors="replace") as text:
                tail = text.read()[-4000:]
            raise BenchError(f"{tail}\nthe job ended with code {job.returncode}")
    finally:
        _end(job)


def _answers(job: subprocess.Popen[bytes], path: str) -> Generator[dict[str, Any]]:
    """What the ranks say, until the job ends. Raises ``BenchError`` if they fall silent."""
    offset, heard = 0, time.monotonic()
    while True:
        ended = job.poll() is not None  # before the read: what is said last is not missed
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            file.seek(offset)
            while (line := file.readline()).endswith("\n"):
                offset, heard = file.tell(), time.monotonic()
                yield json.loads(line)
        if ended:
            return
        if time.monotonic() - heard > _QUIET_SECONDS:
            raise BenchError(f"no word from any rank for {_QUIET_SECONDS:.0f} s")
        time.sleep(0.1)


def _end(job: subprocess.Popen[bytes]) -> None:
    """torchrun's workers have sessions of their own: they end with it, or are killed."""
    below = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
    if job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(10)
    job.kill()
    job.wait()
    for each in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(below, timeout=10)


def _line(case: str, name: str, saves: Sequence[dict[str, Any]]) -> Line:
    def worst(answer: dict[str, Any], key: str) -> float:
        ranks = [
            TrainedSave(
                one["call_seconds"],
                one["durable_seconds"],
                one["clean"],
                [Step(**s) for s in one["beside"]],
            )
            for one in answer["saves"]
        ]
        return max(float(getattr(rank, key)) for rank in ranks)

    first, *later = saves
    numbers: dict[str, Any] = {
        key: Spread.of(worst(answer, key) for answer in later)
        for key in ("stall_seconds", "drag_seconds", "durable_seconds", "clean_step_seconds")
    }
    numbers |= {f"first_{key}": worst(first, key) for key in ("stall_seconds", "durable_seconds")}
    numbers |= {"disk_bytes": later[-1]["disk_bytes"], "saves": len(later)}
    if not any(one["beside"] for answer in later for one in answer["saves"]):
        numbers["drag_seconds"] = "none"
    return Line(case, name, label(name), numbers)


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel("stall_seconds", "stall", "longest of any rank", first="first_stall_seconds"),
        plots.Panel(
            "durable_seconds", "durable", "longest of any rank", first="first_durable_seconds"
        ),
    )
    plots.bars(result, panels, path)
