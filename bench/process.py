"""The parent's side of a worker process."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from typing import Any, Final, Self

import psutil

from bench.measure import host_memory_bytes
from bench.serve import serve

ANSWER_SECONDS: Final = 300.0
_PRELOADED: Final = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
]
_QUIET_SECONDS: Final = 0.3
_SETTLE_SECONDS: Final = 30.0
_LINGER_SECONDS: Final = 2.0


class BenchError(Exception):
    """Something cannot be measured: what was measured would not be true.

    ``reason`` is one line, for a table.
    """

    @property
    def reason(self) -> str:
        lines = [line for line in str(self).strip().splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else type(self).__name__


class Process:
    """A worker: see ``bench.worker``.

    Forked from a server that has done nothing but import torch, which saves each of them seconds.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._line, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, log)
        )  # no daemon: peers start processes too
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def tell(self, verb: str, **command: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `hear` says so
            self._line.send((verb, command))

    def hear(self, seconds: float = ANSWER_SECONDS) -> Any:
        try:
            if not self._line.poll(seconds):
                raise BenchError(f"no answer within {seconds:.0f} s")
            answer, error = self._line.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise BenchError(
                f"{self._said()}the worker ended with code {self._process.exitcode}"
            ) from None
        if error:
            raise BenchError(error)
        return answer

    def ask(self, verb: str, **command: Any) -> Any:
        self.tell(verb, **command)
        return self.hear()

    def settle(self) -> None:
        """Return when the worker does nothing any more: what it has begun in the background
        belongs to getting ready.
        """
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            before = self._busy()
            time.sleep(_QUIET_SECONDS)
            if self._busy() == before:
                return

    def end(self, seconds: float = 20.0) -> None:
        """End it, by force if it does not go by itself, with all it has started.

        Once is enough; more do no harm.
        """
        if self._line.closed:
            return
        below = self._below()
        self._line.close()
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        workers = [each for each in below if not _tidies_up(each)]
        for each in psutil.wait_procs(workers, timeout=_LINGER_SECONDS)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        # what it shared is gone from /dev/shm then
        psutil.wait_procs(below, timeout=_SETTLE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(0 if kind is not None else 20)

    def _said(self) -> str:
        with contextlib.suppress(OSError), open(self._log, errors="replace") as log:
            return log.read()[-4000:] + "\n"
        return ""

    def _below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self.pid).children(recursive=True))
        return []

    def _busy(self) -> tuple[int, int]:
        """Grows while anything happens: hundredths of CPU seconds of the tree, and its memory in
        MiB.
        """
        ticks = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.pid)
            for each in (tree, *tree.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    ticks += sum(each.cpu_times()[:2])
        return round(ticks * 20), host_memory_bytes(self.pid) >> 20


def _tidies_up(process: psutil.Process) -> bool:
    """Whether it is torch's own, which ends by itself once it has removed what killed processes
    have left in ``/dev/shm``.
    """
    with contextlib.suppress(psutil.Error):
        return bool(process.name() == "torch_shm_manager")
    return False
