"""A bf16 training on an accelerator: what a save costs the CPU, the training thread and the device,
beside peers that stage as fast as they can.

Contenders come one after the other, each in a process of its own: two states of 8 GiB on one device
would disturb each other. Time is shared out by the size of the state, and each repeats its saves as
often as its share allows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final

from bench import plots
from bench.contenders import ALL, missing
from bench.measure import Spread
from bench.process import BenchError
from bench.result import Column, Line, Result
from bench.runner import Bench, label, size_label
from bench.scenarios import option

NAMES: Final = (
    "ckpt.device",
    "dcp.pinned",
    "torch_checkpointing.pinned",
    "dcp.process",
    "dcp.thread",
)
_GRACE_SECONDS: Final = 45.0  # to begin, to compare and to end, beyond the share for saving

_COLUMNS = (
    Column("stall_seconds", "stall", "seconds"),
    Column("drag_seconds", "drag", "seconds"),
    Column("lost_seconds", "lost", "seconds"),
    Column("call_cpu_seconds", "call: CPU", "seconds"),
    Column("hook_cpu_seconds", "hook: CPU", "seconds"),
    Column("durable_seconds", "durable", "seconds"),
    Column("copied_bytes_per_second", "device to host", "per_second"),
    Column("copied_over_plain", "over plain", "ratio"),
    Column("clean_step_seconds", "step alone", "seconds"),
    Column("saves", "saves", "count"),
    Column("equal", "equal", "count"),
)
_NOTES = (
    "**stall**: seconds the training thread loses per save, in the call and until it may go on to "
    "the optimizer. **drag**: how much longer the steps took that began until the save was "
    "durable, "
    "the wait of the device at the optimizer's step included; noise can make it negative. "
    "**lost**: both together. Every step is waited for on the device.",
    "**call: CPU**: CPU time of the training thread in the call. **hook: CPU**: what the step of "
    "the optimizer that follows takes more of it than one without a save.",
    "**device to host**: bytes of the state per second until it may change, when nothing else "
    "runs; *over plain*: over a plain copy of the same process into page-locked memory. "
    "**durable**: as the contender says; nothing is fsynced for it beside what its own code and "
    "the contender's note do.",
    "Medians of the saves after the first. The last checkpoint of each was loaded back into a "
    "spoiled state and compared bit for bit.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: tuple[int, ...] = option((1024, 8192), "of the AdamW state in bf16, one or several")
    repeats: int = option(5, "saves after the first, as far as the time allows")
    layers: int = option(12, "of the model")
    batch: int = option(256, "sequences per step")
    clean_steps: int = option(5, "before each save")
    budget_seconds: float = option(330.0, "for all together")


QUICK = Options(size_mib=(8,), repeats=2, layers=2, batch=2, clean_steps=2, budget_seconds=120)


def run(bench: Bench, options: Options) -> Result:
    names = [name for name in NAMES if name not in missing()]
    todo = [(mib, name) for mib in options.size_mib for name in names]
    for name in NAMES:
        if name in missing():
            bench.skip("", name, missing()[name])
    lines: list[Line] = []
    devices: set[str] = set()
    plain: dict[int, list[float]] = {}
    while todo:
        mib, name = todo[0]
        share = bench.left() * _weight(mib) / sum(_weight(each) for each, _ in todo)
        todo.pop(0)
        if bench.over():
            bench.skip(size_label(mib << 20), name, "the time was up")
            continue
        try:
            answer = _measured(bench, name, mib, max(1.0, share - 15), options)
        except BenchError as error:
            bench.fail(size_label(mib << 20), name, error)
            continue
        devices.add(answer["device"])
        plain.setdefault(mib, []).extend(answer["plain_bytes_per_second"])
        lines.append(line := _line(size_label(mib << 20), name, answer))
        bench.say(
            f"{line.case}, {line.label}: stall {(line.median('stall_seconds') or 0) * 1e3:.1f} "
            f"ms, lost {(line.median('lost_seconds') or 0) * 1e3:.0f} ms"
        )
    for mib, rates in plain.items():
        numbers: dict[str, Any] = {"copied_bytes_per_second": Spread.of(rates)}
        lines.append(
            Line(size_label(mib << 20), "floor.plain", "floor: plain page-locked copy", numbers)
        )
    on = ", ".join(sorted(devices)) or "nothing"
    layers = (
        f"GPT of {options.layers} layers with AdamW in bf16, {options.batch} sequences per step, "
        f"on {on}"
    )
    return bench.result(
        "What a save costs a training on an accelerator", _COLUMNS, _NOTES, lines, training=layers
    )


def _weight(mib: int) -> float:
    return 1 + mib / 2048


def _measured(
    bench: Bench, name: str, mib: int, seconds: float, options: Options
) -> dict[str, Any]:
    folder = os.path.join(bench.folder, f"{name}-{mib}")
    os.makedirs(folder)
    command = {
        "name": name,
        "size": mib << 20,
        "layers": options.layers,
        "batch": options.batch,
        "seconds": seconds,
        "repeats": options.repeats,
        "clean": options.clean_steps,
        "folder": folder,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.device_worker", json.dumps(command)],
            capture_output=True,
            text=True,
            timeout=seconds + _GRACE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"no answer within {seconds + _GRACE_SECONDS:.0f} s") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        raise BenchError(done.stderr[-4000:] or f"it ended with code {done.returncode}")
    answer: dict[str, Any] = json.loads(answers[-1])
    if not answer["equal"]:
        raise BenchError("what was loaded back is not what was saved")
    return answer


def _line(case: str, name: str, answer: dict[str, Any]) -> Line:
    saves, idle = answer["saves"][1:] or answer["saves"], answer["idle"]
    keys = [key for key, value in saves[0].items() if isinstance(value, float)]
    numbers: dict[str, Any] = {key: Spread.of(save[key] for save in saves) for key in keys}
    copied = [answer["nbytes"] / save["idle_safe_seconds"] for save in idle]
    plain = Spread.of(answer["plain_bytes_per_second"]).median
    numbers |= {
        "lost_seconds": Spread.of(save["stall_seconds"] + save["drag_seconds"] for save in saves),
        "copied_bytes_per_second": Spread.of(copied),
        "copied_over_plain": Spread.of(each / plain for each in copied),
        "first_stall_seconds": answer["saves"][0]["stall_seconds"],
        "saves": len(saves),
        "equal": 1,
        "fsync_by": ALL[name].fsync,
        "state_bytes": answer["nbytes"],
        "tensors": answer["tensors"],
    }
    return Line(case, name, label(name), numbers)


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel("stall_seconds", "stall", "the training thread stands still"),
        plots.Panel("lost_seconds", "lost", "stall, and what the steps beside it took longer"),
        plots.Panel("durable_seconds", "durable", "complete, as the contender says"),
    )
    plots.bars(result, panels, path)
