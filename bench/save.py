"""What a save costs, against what people use today, on one machine, one disk, in one run.

**The three numbers.** Each alone can be made to look good at the cost of the others, so they are always shown together:

* *stall*: seconds the training thread loses per save. The call itself, plus the wait until the optimizer may change the state, asked for
  where it is needed: after forward and backward, right before ``optimizer.step()``.
* *drag*: seconds training loses while the save streams: the steps beside it minus as many steps without one. The steps without are taken
  right before and right after each save in the same loop, so that a machine that changes its pace does not pass for drag.
* *durable*: seconds from the call until the checkpoint is complete and fsynced. ``ckpt`` fsyncs itself; the files and folders of the
  others are fsynced by the bench before the clock stops, in a thread beside the training loop, so that it never counts as their stall.

These are measured in the training loop. Two more are measured with nothing else running (*idle*): seconds until the state is safe to change
when nothing can overlap, and seconds to durable, to be compared with the floors (a warm copy of as many bytes; as many bytes written with
``O_DIRECT``, 8 MiB at a time from 4 threads into a preallocated file, and fsynced).

**Soundness.** One process per contender, so that peaks of memory do not mix. All of them live for the whole run and work one at a time, in rounds:
within a round every contender saves once in training and once idle, and the order moves on by one with each round. The very first save of each
process is a round of its own and reported apart. Every checkpoint is loaded into another, spoiled training in a helper process and compared bit by
bit with a copy taken at the moment of the save; a contender that fails this has no numbers, the run fails. One torch thread computes.
Peers run as they come; a checkpoint is deleted before the next is made.
An idle save follows right after one in training: pages of the file cache that the other has freed are warm then, which favours those who
write through it. After seconds of training they may not be (a virtual machine may have to get them from its host anew): in training a buffered
writer can take several times as long as idle.

**Memory** is the highest anonymous plus shared memory of the contender's process while it saves, over the highest while it trained before any
contender was prepared. Pages of the kernel's file cache, which buffered writers fill, are not in it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from bench.contenders import ALL
from bench.measure import MemorySampler, Spread, Step, TrainedSave, tree_bytes
from bench.serve import serve

_SPARE_MEMORY = 0.85


class BenchError(Exception):
    """The run cannot go on: what it measured would not be true."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure. ``clean_steps`` are taken before and again after each save in training; ``batch`` sets how long a step lasts."""

    size_bytes: int
    repeats: int
    folder: str
    contenders: Sequence[str]
    layers: int
    clean_steps: int
    batch: int


@dataclass
class Measured:
    """All that was seen of one contender."""

    name: str
    first: TrainedSave | None = None
    trained: list[TrainedSave] = field(default_factory=list)
    idle_safe: list[float] = field(default_factory=list)
    idle_durable: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    disk_bytes: int = 0
    base_memory_bytes: int = 0
    peak_memory_bytes: int = 0
    verified: int = 0


@dataclass
class Outcome:
    """A run: conditions, contenders, floors."""

    conditions: dict[str, Any]
    contenders: list[Measured]
    floor_copy: Spread
    floor_write: Spread

    def as_json(self) -> dict[str, Any]:
        """Everything, raw values included."""
        return {
            "conditions": self.conditions,
            "floors": {"copy_seconds": vars(self.floor_copy), "write_seconds": vars(self.floor_write)},
            "contenders": [summary(one) for one in self.contenders],
        }


def summary(one: Measured) -> dict[str, Any]:
    """The numbers of one contender, each with its median, ends and single values."""
    row = ALL[one.name]
    assert one.first is not None

    def spread(of: str) -> dict[str, Any]:
        return vars(Spread.of(getattr(save, of) for save in one.trained))

    return {
        "name": one.name,
        "label": row.label,
        "asynchronous": row.asynchronous,
        "fsync_by": row.fsync,
        "stall_seconds": spread("stall_seconds"),
        "drag_seconds": spread("drag_seconds"),
        "durable_seconds": spread("durable_seconds"),
        "call_seconds": spread("call_seconds"),
        "clean_step_seconds": spread("clean_step_seconds"),
        "beside_step_seconds": spread("beside_step_seconds"),
        "steps_beside": vars(Spread.of(len(save.beside) for save in one.trained)),
        "first_stall_seconds": one.first.stall_seconds,
        "first_durable_seconds": one.first.durable_seconds,
        "idle_safe_seconds": vars(Spread.of(one.idle_safe)),
        "idle_durable_seconds": vars(Spread.of(one.idle_durable)),
        "load_seconds": vars(Spread.of(one.load)),
        "disk_bytes": one.disk_bytes,
        "training_memory_bytes": one.base_memory_bytes,
        "peak_memory_bytes": one.peak_memory_bytes,
        "added_memory_bytes": one.peak_memory_bytes - one.base_memory_bytes,
        "saves_compared_equal": one.verified,
    }


class Process:
    """A worker: see ``bench.worker``. Forked from a server that has done nothing but import torch, which saves each of them seconds."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.checkpoint"])
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def tell(self, verb: str, **command: Any) -> None:
        self._line.send((verb, command))

    def hear(self) -> Any:
        try:
            answer, error = self._line.recv()
        except EOFError:
            self._process.join()
            raise BenchError(f"a worker ended with code {self._process.exitcode}") from None
        if error:
            raise BenchError(error)
        return answer

    def ask(self, verb: str, **command: Any) -> Any:
        self.tell(verb, **command)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._line.close()
        self._process.join()


class Run:
    """The parent's side: who works when, and what is kept of it."""

    def __init__(self, options: Options, folder: str, reference: str, stack: contextlib.ExitStack) -> None:
        self._options, self._folder = options, folder
        names = options.contenders
        self._workers = {name: stack.enter_context(Process()) for name in names}
        self._helper = stack.enter_context(Process())
        self.measured = {name: Measured(name) for name in names}
        self.floor: dict[str, list[float]] = {"copy": [], "write": []}
        self._step = 0
        shape = {"size": options.size_bytes, "layers": options.layers, "batch": options.batch}
        everyone = [*self._workers.values(), self._helper]
        for process in everyone:
            process.tell("setup", **shape, seed=1, reference=reference)
        told = [process.hear() for process in everyone]
        self.setup: dict[str, Any] = told[0]
        for name, process in self._workers.items():
            with MemorySampler(process.pid) as memory:
                process.ask("warm")
            self.measured[name].base_memory_bytes = memory.peak_bytes
            process.ask("prepare", name=name, folder=self._place(name))

    def round(self, number: int) -> None:
        """Everybody saves once in training and, after the first round, once idle."""
        names = list(self._workers)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            self._train(name)
            if number:
                self._idle(name)
            self._tell(name, number)
        if number:
            for what, seconds in self._helper.ask("floor", folder=self._folder).items():
                self.floor[what].append(seconds)

    def close(self) -> None:
        for process in (*self._workers.values(), self._helper):
            process.ask("close")

    def _train(self, name: str) -> None:
        answer = self._save(name, "train", clean=self._options.clean_steps)
        save = TrainedSave(
            answer["call"], answer["durable"], answer["clean"], [Step(**s) for s in answer["beside"]]
        )
        kept = self.measured[name]
        if kept.first is None:
            kept.first = save
        else:
            kept.trained.append(save)

    def _idle(self, name: str) -> None:
        answer = self._save(name, "idle")
        self.measured[name].idle_safe.append(answer["safe"])
        self.measured[name].idle_durable.append(answer["durable"])

    def _save(self, name: str, verb: str, **command: Any) -> Any:
        """Let one contender save, then compare what it wrote; nothing is kept of a save that is not equal."""
        self._step += 1
        kept, process, folder = self.measured[name], self._workers[name], self._place(name)
        with MemorySampler(process.pid) as memory:
            answer = process.ask(verb, step=self._step, **command)
        kept.peak_memory_bytes = max(kept.peak_memory_bytes, memory.peak_bytes)
        checked = self._helper.ask("verify", name=name, path=answer["path"], values=answer["values"])
        if checked["wrong"]:
            raise BenchError(f"{name}: what was loaded is not what was saved: {checked['wrong'][:3]}")
        kept.verified += 1
        kept.load.append(checked["load_seconds"])
        kept.disk_bytes = tree_bytes(folder)
        for entry in os.listdir(folder):
            if entry.startswith("step-"):
                path = os.path.join(folder, entry)
                (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
        return answer

    def _place(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _tell(self, name: str, number: int) -> None:
        kept = self.measured[name]
        save = kept.trained[-1] if number else kept.first
        assert save is not None
        what = f"round {number}/{self._options.repeats}" if number else "first save"
        idle = f"   idle {kept.idle_durable[-1]:6.2f} s" if number else ""
        print(
            f"{what:>12}  {ALL[name].label:<16} stall {save.stall_seconds * 1e3:8.1f} ms   "
            f"drag {save.drag_seconds * 1e3:+8.0f} ms   durable {save.durable_seconds:6.2f} s{idle}",
            flush=True,
        )


def run(options: Options) -> Outcome:
    """Measure. Raises ``BenchError`` if a contender does not give back what it was given."""
    _check_memory(options)
    began = time.perf_counter()
    with _places(options.folder) as (folder, reference), contextlib.ExitStack() as stack:
        print(f"starting {len(options.contenders) + 1} processes, writing below {folder}", flush=True)
        this = Run(options, folder, reference, stack)
        conditions = _conditions(options, folder, this.setup)
        for number in range(options.repeats + 1):
            this.round(number)
        this.close()
    conditions["run_seconds"] = round(time.perf_counter() - began, 1)
    return Outcome(
        conditions,
        list(this.measured.values()),
        Spread.of(this.floor["copy"]),
        Spread.of(this.floor["write"]),
    )


@contextlib.contextmanager
def _places(folder: str) -> Iterator[tuple[str, str]]:
    """A folder of this run on the disk in question, and the file in shared memory that references are kept in."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=folder) as own:
        reference = f"/dev/shm/ckpt-bench-{os.getpid()}-{random.getrandbits(32):08x}"
        try:
            yield own, reference
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(reference)


def _check_memory(options: Options) -> None:
    # per contender: the state, its gradients, and up to two images or copies; the helper: a state, two buffers; the reference
    need = options.size_bytes * (len(options.contenders) * 10 // 3 + 5)
    free = psutil.virtual_memory().available
    if need > free * _SPARE_MEMORY:
        raise BenchError(
            f"this takes about {need >> 20} MiB of memory and {free >> 20} MiB are free: "
            "give a smaller --size-mib, or fewer --contenders"
        )


def _conditions(options: Options, folder: str, setup: dict[str, Any]) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as info:
        cpu = next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    parts = [p for p in psutil.disk_partitions(all=True) if folder.startswith(p.mountpoint)]
    disk = max(parts, key=lambda p: len(p.mountpoint), default=None)
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": round(os.getloadavg()[0], 2),
        "disk": f"{disk.fstype} on {disk.device}" if disk else "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": setup["torch"],
        "state_bytes": setup["nbytes"],
        "tensors": setup["tensors"],
        "parameters": setup["parameters"],
        "layers": options.layers,
        "batch": options.batch,
        "repeats": options.repeats,
        "clean_steps": 2 * options.clean_steps,
    }
