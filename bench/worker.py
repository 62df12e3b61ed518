"""The processes that do the work.

One process per contender, so that their memory does not mix, and one *helper*, which loads checkpoints back, compares them, and measures the floors.
They live for the whole run, so that a round measures saves and not imports; the parent lets one of them work at a time.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

import torch

from bench import contenders
from bench.contenders import Contender, Handle
from bench.state import Reference, Training

_FLOOR_WRITE_BYTES: Final = 8 << 20
_FLOOR_THREADS: Final = 4
_WARM_STEPS: Final = 2


class Worker:
    """The commands. Each is a method that takes and returns plain values."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.training: Training
        self.reference: Reference
        self.contender: Contender
        self._warm: tuple[torch.Tensor, torch.Tensor] | None = None

    def setup(self, size: int, layers: int, batch: int, seed: int, reference: str) -> Any:
        self.training = Training.make(size, layers, batch, seed)
        self.reference = Reference(reference, self.training.nbytes)
        return {
            "nbytes": self.training.nbytes,
            "tensors": len(self.training.tensors()),
            "parameters": sum(p.numel() for p in self.training.model.parameters()),
            "torch": torch.__version__,
        }

    def warm(self) -> Any:
        """Train without any contender, with the reference in memory: what the memory of a save is compared with."""
        self.reference.take(self.training)
        for _ in range(_WARM_STEPS):
            self._step()
        return {}

    def prepare(self, name: str, folder: str) -> Any:
        os.makedirs(folder)
        self.contender = contenders.make(name)
        self.contender.prepare(self.training, folder)
        return {}

    def idle(self, step: int) -> Any:
        """A save while nothing else runs, waited for at once: what it costs where nothing can overlap."""
        self.reference.take(self.training)
        began = time.perf_counter()
        handle = self.contender.save(step)
        self.contender.wait_safe(handle)
        safe = time.perf_counter()
        self.contender.wait_durable(handle)
        durable = time.perf_counter()
        return {"safe": safe - began, "durable": durable - began, **self._told(handle)}

    def train(self, step: int, clean: int) -> Any:
        """A save in the training loop, between ``clean`` steps without one on either side."""
        self._step()
        before = [self._step() for _ in range(clean)]
        self.reference.take(self.training)
        values = self.training.values()
        began = time.perf_counter()
        handle = self.contender.save(step)
        call = time.perf_counter() - began
        finisher = _Finisher(self.contender, handle, began + call)
        beside: list[dict[str, float]] = []
        safe = handle.durable
        while not safe or not finisher.done.is_set():
            started = time.perf_counter()
            self.training.forward_backward()
            waiting = time.perf_counter()
            if not safe:
                self.contender.wait_safe(handle)
                safe = True
            wait = time.perf_counter() - waiting
            self.training.optimizer_step()
            beside.append({"seconds": time.perf_counter() - started - wait, "wait": wait})
        after = [self._step() for _ in range(clean)]
        return {
            "call": call,
            "durable": finisher.result() - began,
            "clean": before + after,
            "beside": beside,
            **self._told(handle),
            "values": values,
        }

    def verify(self, name: str, path: str, values: Any) -> Any:
        """Load a checkpoint into a spoiled training and compare every element with the reference."""
        self.training.spoil()
        began = time.perf_counter()
        contenders.make(name).load_back(path, self.training)
        seconds = time.perf_counter() - began
        wrong = self.reference.differences(self.training)
        if self.training.values() != values:
            wrong.append(f"values {self.training.values()} instead of {values}")
        gc.collect()
        return {"load_seconds": seconds, "wrong": wrong}

    def floor(self, folder: str) -> Any:
        """The machine's own speed for as many bytes: a warm copy, and a plain direct write that is fsynced."""
        if self._warm is None:
            source, target = (_mapped(self.training.nbytes) for _ in range(2))
            self._warm = source.random_(), target.fill_(0)
        source, target = self._warm
        began = time.perf_counter()
        target.copy_(source)
        copy = time.perf_counter() - began
        began = time.perf_counter()
        _write_direct(os.path.join(folder, "floor"), memoryview(cast(Any, source.numpy())))
        write = time.perf_counter() - began
        os.unlink(os.path.join(folder, "floor"))
        return {"copy": copy, "write": write}

    def close(self) -> Any:
        if hasattr(self, "contender"):
            self.contender.close()
        return {}

    def _step(self) -> float:
        began = time.perf_counter()
        self.training.forward_backward()
        self.training.optimizer_step()
        return time.perf_counter() - began

    def _told(self, handle: Handle) -> dict[str, Any]:
        return {"path": handle.path, "values": self.training.values()}


class _Finisher:
    """Waits for durability beside the training loop, and fsyncs there for those that do not do it themselves."""

    def __init__(self, contender: Contender, handle: Handle, returned: float) -> None:
        self.done = threading.Event()
        self._at = returned
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(contender, handle))
        if handle.durable:
            self.done.set()
        else:
            self._thread.start()

    def result(self) -> float:
        self.done.wait()
        if self._error is not None:
            raise self._error
        return self._at

    def _run(self, contender: Contender, handle: Handle) -> None:
        try:
            contender.wait_durable(handle)
        except BaseException as error:
            self._error = error
        self._at = time.perf_counter()
        self.done.set()


def _mapped(nbytes: int) -> torch.Tensor:
    rounded = -(-nbytes // 4096) * 4096
    return torch.frombuffer(mmap.mmap(-1, rounded), dtype=torch.uint8)


def _write_direct(path: str, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, data.nbytes)
        offsets = range(0, data.nbytes, _FLOOR_WRITE_BYTES)

        def write(offset: int) -> None:
            left = data[offset : offset + _FLOOR_WRITE_BYTES]
            while left.nbytes:
                count = os.pwrite(descriptor, left, offset)
                left, offset = left[count:], offset + count

        with ThreadPoolExecutor(_FLOOR_THREADS) as pool:
            list(pool.map(write, offsets))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
