"""The processes that do the work: one per contender, so that their memory does not mix, and others
that load checkpoints back.

They live for a whole heat, so that a round measures saves and not imports; the parent lets one of
them work at a time.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, Literal

import torch

from bench import contenders
from bench.compare import contents
from bench.contenders import Contender, Handle
from bench.machine import evict
from bench.measure import Step
from bench.state import Raw, Subject, Training
from bench.worker_objects import ObjectWork

_WARM_STEPS: Final = 2
_IN_FLIGHT: Final = 2  # saves that may stream while the next one is asked for


class Worker(ObjectWork):
    """The commands. Each is a method that takes and returns plain values."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.subject: Subject
        self.contender: Contender

    def setup(self, kind: Literal["training", "raw"], size: int, count: int, batch: int = 1) -> Any:
        """Make the state: ``count`` tensors, or a GPT of ``count`` layers."""
        self.subject = (
            Training.make(size, count, batch, seed=1)
            if kind == "training"
            else Raw.make(size, count, seed=1)
        )
        tensors = self.subject.tensors()
        return {"nbytes": self.subject.nbytes, "tensors": len(tensors), "names": list(tensors)}

    def warm(self) -> Any:
        """Work without any contender, and hash once: what the memory of a save is compared with."""
        contents(self.subject)
        if not isinstance(self.subject, Training):
            return {}
        computed = 0.0
        for _ in range(_WARM_STEPS):
            began = time.perf_counter()
            self.subject.forward_backward()
            computed = time.perf_counter() - began
            self.subject.optimizer_step()
        return {"forward_backward": computed}

    def prepare(self, name: str, folder: str) -> Any:
        self.contender = contenders.make(name)
        self.contender.prepare(self.subject, folder)
        return {}

    def pace(self, batch: int = 0, seconds: float = 0.0) -> Any:
        """Set the batch, or find the smallest at which a step lasts ``seconds`` or longer;
        returns it.
        """
        training = self._training()
        training.batch = batch or training.batch
        while not batch and (taken := min(self._step() for _ in range(3))) < seconds:
            training.batch = max(training.batch + 1, int(training.batch * seconds / taken))
        return training.batch

    def idle(self, step: int, *, compare: bool, train: bool = False) -> Any:
        """A save while nothing else runs, waited for at once: what it costs where nothing can
        overlap.
        """
        if train:
            self._step()
        else:
            self._touch()
        saved = contents(self.subject) if compare else None
        began = time.perf_counter()
        handle = self.contender.save(step)
        call = time.perf_counter()
        self.contender.wait_safe(handle)
        safe = time.perf_counter()
        self.contender.wait_durable(handle)
        durable = time.perf_counter()
        return {
            "call": call - began,
            "safe": safe - began,
            "durable": durable - began,
            "path": handle.path,
            "saved": saved,
        }

    def train(self, step: int, *, compare: bool, clean: int) -> Any:
        """A save in the training loop, between ``clean`` steps without one on either side."""
        self._step()
        before = [self._step() for _ in range(clean)]
        saved = contents(self.subject) if compare else None
        began = time.perf_counter()
        handle = self.contender.save(step)
        call = time.perf_counter() - began
        finisher = Finisher(self.contender)
        finisher.take(handle, began + call)
        beside: list[Step] = []
        safe = handle.durable
        while not safe or finisher.waiting():
            beside.append(self._step_beside(None if safe else handle))
            safe = True
        durable = finisher.finish()[0]
        after = [self._step() for _ in range(clean)]
        return {
            "call": call,
            "durable": durable - began,
            "clean": before + after,
            "beside": [asdict(each) for each in beside],
            "path": handle.path,
            "saved": saved,
        }

    def block(self, step: int, *, compare: bool, count: int) -> Any:
        """``count`` training steps with a save each, then as many without.

        A save waits until the last but one before it is durable.
        """
        finisher = Finisher(self.contender)
        saving: list[float] = []
        stalls: list[float] = []
        saved, handle = None, None
        for number in range(count):
            if compare and number == count - 1:  # off the clock
                saved = contents(self.subject)
            began = time.perf_counter()
            finisher.wait_for(number - _IN_FLIGHT)
            handle = self.contender.save(step + number)
            finisher.take(handle, time.perf_counter())
            stall = time.perf_counter() - began
            beside = self._step_beside(None if handle.durable else handle)
            saving.append(time.perf_counter() - began)
            stalls.append(stall + beside.wait)
        drain = time.perf_counter()
        drain = max(0.0, finisher.finish()[-1] - drain)
        self._step()
        clean = [self._step() for _ in range(count)]
        assert handle is not None
        answer = {"saving": saving, "stalls": stalls, "clean": clean, "drain": drain}
        return {**answer, "path": handle.path, "saved": saved}

    def load(self, name: str, path: str, *, cold: bool = False) -> Any:
        """Load a checkpoint into a spoiled state, with what it then holds.

        ``cold``: its files are evicted from the page cache first.
        """
        contender = contenders.make(name)
        self.subject.spoil()
        if cold:
            evict(path)
        began = time.perf_counter()
        contender.load_back(path, self.subject)
        seconds = time.perf_counter() - began
        loaded = contents(self.subject)
        gc.collect()
        return {"seconds": seconds, "loaded": loaded}

    def close(self) -> Any:
        if hasattr(self, "contender"):
            self.contender.close()
        return {}

    def _training(self) -> Training:
        assert isinstance(self.subject, Training)
        return self.subject

    def _step(self) -> float:
        training = self._training()
        began = time.perf_counter()
        training.forward_backward()
        training.optimizer_step()
        return time.perf_counter() - began

    def _step_beside(self, unsafe: Handle | None) -> Step:
        """A step that waits, where a training has to, until the optimizer may change the state."""
        training = self._training()
        began = time.perf_counter()
        training.forward_backward()
        waiting = time.perf_counter()
        if unsafe is not None:
            self.contender.wait_safe(unsafe)
        wait = time.perf_counter() - waiting
        training.optimizer_step()
        return Step(time.perf_counter() - began - wait, wait)

    def _touch(self) -> None:
        """Change one element of every tensor, so that an older checkpoint does not pass for this
        one.
        """
        with torch.no_grad():
            for tensor in self.subject.tensors().values():
                tensor.view(-1)[:1].add_(1)
        self.subject.step += 1


class Finisher:
    """Waits for durability beside the training loop, in order, and fsyncs there for those that
    do not do it themselves.
    """

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._ends: list[float] = []
        self._taken = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._handles: queue.SimpleQueue[tuple[Handle, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, handle: Handle, returned: float) -> None:
        self._taken += 1
        if handle.durable:
            with self._changed:
                self._ends.append(returned)
        else:
            self._handles.put((handle, returned))

    def waiting(self) -> bool:
        with self._changed:
            return len(self._ends) < self._taken and self._error is None

    def wait_for(self, number: int) -> None:
        """Return when the save ``number`` of those taken is durable."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ends) > number or self._error is not None)

    def finish(self) -> Sequence[float]:
        """When each became durable."""
        self._handles.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._ends

    def _run(self) -> None:
        while (taken := self._handles.get()) is not None:
            try:
                self._contender.wait_durable(taken[0])
            except BaseException as error:
                self._error = error
            with self._changed:
                self._ends.append(time.perf_counter())
                self._changed.notify_all()
