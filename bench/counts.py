"""Count what a save, a restore and ``ckpt prune`` ask of the system and of the stores.

    python -m bench.counts [--toml]

One process saves and restores a model of 16 parameters under AdamW, to a folder (near) and to a
store in its memory (far). There is no journal, since its thread writes when it has time. A profile
hook on every thread notes the calls of the system, and the bytes that are copied in memory and
hashed. The stores are wrapped, and note their requests. No number depends on the load of the
machine. ``bench/gates.toml`` holds the most of each, which ``--toml`` prints, and
``tests/bench/test_counts.py`` compares them.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn

import ckpt.cli.watched_store
import ckpt.storage.tiers
from ckpt import CheckpointManager, Tier
from ckpt.cli.prune import prune
from ckpt.model.checksum import checksum
from ckpt.staging import copies
from ckpt.storage.api import StorageBackend, Upload
from ckpt.storage.registry import open_backend
from ckpt_backends.folder import direct_io

_CALLS: Final = {
    "open": ("open",),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace", "link"),
    "write": ("write", "pwrite", "pwritev", "writev", "copy_file_range", "sendfile"),
    "read": ("read", "pread", "preadv", "readv"),
    "unlink": ("unlink", "remove", "rmdir"),
    "mkdir": ("mkdir",),
    "list": ("scandir", "listdir"),
}
_KIND_OF: Final = {name: kind for kind, names in _CALLS.items() for name in names}
_RENAME: Final = direct_io._rename_noreplace.__code__
"""A call of the C library by ctypes, which no hook sees."""
_VERBS: Final = {
    "put": "put",
    "fetch": "read",
    "open_file": "read",
    "head": "head",
    "list": "list",
    "folders": "list",
    "unfinished_writes": "list",
    "delete": "delete",
    "discard": "delete",
    "adopt": "put",
}
_STEPS: Final = 3

Counts = Mapping[str, int]


def _hashed(values: Mapping[str, Any]) -> int:
    return sum(memoryview(part).nbytes for part in (values["data"], *values["more"]))


def _staged(values: Mapping[str, Any]) -> int:
    return sum(copy.target.nbytes for copy in values["copies"])


_BYTES: Final[Mapping[CodeType, tuple[str, Callable[[Mapping[str, Any]], int]]]] = {
    checksum.__code__: ("KiB hashed", _hashed),
    copies._copy.__code__: ("KiB copied", _staged),
}
"""The functions through which bytes pass, and how many they are by the arguments."""


class Meter:
    """Notes what is counted, on all threads that begin after ``watch``.

    A list takes the notes, since two threads may not add to a number at the same time.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[str, int]] = []

    def note(self, name: str, count: int = 1) -> None:
        """Add ``count`` to ``name``."""
        self._notes.append((name, count))

    def take(self) -> Counts:
        """Return the counts since the last call. Bytes are given in KiB, since the length of a
        manifest varies with the times in it.
        """
        notes, self._notes = self._notes, []
        counts: Counter[str] = Counter()
        for name, count in notes:
            counts[name] += count
        return {
            name: -(-count // 1024) if name.startswith("KiB") else count
            for name, count in sorted(counts.items())
        }

    @contextmanager
    def watch(self) -> Generator[None]:
        """Count while the block runs."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

        def open_counted(url: str, options: Mapping[str, object] | None = None) -> Any:
            return _CountedStore(open_backend(url, options), Path(url).name, self)

        with ExitStack() as patches:
            for module in (ckpt.storage.tiers, ckpt.cli.watched_store):
                patches.enter_context(patch.object(module, "open_backend", open_counted))
            try:
                yield
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            name = argument.__name__
            if name in _KIND_OF and argument.__module__ in ("posix", "io", "_io"):
                self.note(f"call {_KIND_OF[name]}")
        elif event == "call":
            code = frame.f_code
            if code is _RENAME:
                self.note("call rename")
            elif (measure := _BYTES.get(code)) is not None:
                self.note(measure[0], measure[1](frame.f_locals))


class _CountedStore:
    """A store that notes its requests by their verbs, and the bytes that it gets."""

    def __init__(self, store: StorageBackend, name: str, meter: Meter) -> None:
        self._store, self._name, self._meter = store, name, meter

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)  # Raises if the store has no such method
        if name == "read_parts":
            return self._read_parts
        if name not in _VERBS:
            return attribute

        def request(*arguments: Any, **settings: Any) -> Any:
            self._meter.note(f"{self._name} {_VERBS[name]}")
            return attribute(*arguments, **settings)

        return request

    def _read_parts(self, key: str, offset: int, outs: Sequence[memoryview]) -> None:
        self._meter.note(f"{self._name} read")
        self._meter.note("KiB read", sum(out.nbytes for out in outs))
        self._store.read_parts(key, offset, outs)  # type: ignore[attr-defined]

    def put(self, key: str, parts: Sequence[Any], **settings: Any) -> Any:
        self._meter.note(f"{self._name} put")
        self._meter.note("KiB written", sum(memoryview(part).nbytes for part in parts))
        return self._store.put(key, parts, **settings)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._meter.note(f"{self._name} read")
        self._meter.note("KiB read", out.nbytes)
        self._store.read_into(key, offset, out)

    def upload(self, key: str, size: int) -> Any:
        self._meter.note(f"{self._name} upload")
        return _CountedUpload(self._store.upload(key, size), self._name, self._meter)


class _CountedUpload:
    def __init__(self, upload: Upload, name: str, meter: Meter) -> None:
        self._upload, self._name, self._meter = upload, name, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upload, name)

    def write(self, offset: int, data: memoryview) -> None:
        self._meter.note(f"{self._name} part")
        self._meter.note("KiB written", data.nbytes)
        self._upload.write(offset, data)


class Job:
    """Saves and restores one state, and waits after each save until no thread works for it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self.state = {"model": self._model, "optimizer": self._optimizer}

    def save(self, manager: CheckpointManager, step: int) -> None:
        """Train a step, and save it to all tiers."""
        self._model(torch.ones(1, 32)).sum().backward()
        self._optimizer.step()
        manager.save(self.state, step)
        for writer in manager._saver._writers:
            if writer._pruner is not None:
                writer._pruner._workers.submit(int).result()
        if manager._saver._backfill is not None:
            manager._saver._backfill._watcher.submit(int).result()


def measure(folder: Path) -> dict[str, Counts]:
    """Return the counts of each act. ``folder`` must be empty, and not in memory."""
    meter, job, stores = Meter(), Job(), f"memory://{folder.name}"
    acts: dict[str, Counts] = {}

    @contextmanager
    def act(name: str) -> Generator[None]:
        meter.take()
        yield
        acts[name] = meter.take()

    def save_often(name: str, tiers: Sequence[Tier]) -> None:
        with CheckpointManager(tiers, journal=False) as manager:
            for step in range(1, _STEPS + 1):
                job.save(manager, step)
            with act(name):
                job.save(manager, _STEPS + 1)

    near, far = Tier(str(folder / "near")), Tier(f"{stores}/far")
    with meter.watch():
        save_often("a save to a folder", [Tier(str(folder / "alone" / "near"))])
        save_often("a save to a folder and a store", [near, far])
        for name, tier in {"a restore from a folder": near, "a restore from a store": far}.items():
            with CheckpointManager(tier, journal=False) as manager:
                manager.restore(job.state)
                with act(name):
                    manager.restore(job.state)
        with CheckpointManager([near, far], journal=False) as manager:
            manager.restore(job.state)
            with act("the first save of a later job"):
                job.save(manager, _STEPS + 2)
        lasting = [
            Tier(str(folder / "lasting" / "near"), keep_last=2),
            Tier(f"{stores}/lasting/far", keep_last=2),
        ]
        save_often("a save that removes a step", lasting)
        config = folder / "ckpt.toml"
        config.write_text("".join(f'[[tiers]]\nurl = "{tier.url}"\n' for tier in (near, far)))
        for name, count in {"a prune of nothing": _STEPS + 2, "a prune of three steps": 2}.items():
            with act(name), redirect_stdout(io.StringIO()):
                prune(near.url, keep_last=count, config=str(config))
    return acts


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or the gates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toml", action="store_true", help="print bench/gates.toml")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        acts = measure(Path(folder))
    if options.toml:
        for name, counts in acts.items():
            print(f'["{name}"]')
            print("".join(f'"{key}" = {count}\n' for key, count in counts.items()))
        return
    print(f"| | {' | '.join(acts)} |\n|---|{'---:|' * len(acts)}")
    for key in sorted({key for counts in acts.values() for key in counts}):
        print(f"| {key} | {' | '.join(str(counts.get(key, 0)) for counts in acts.values())} |")


if __name__ == "__main__":
    main()
