"""PACKAGE FOLDER FIRST STEP SECONDS [NAME ...]: measure each STEP-th optimizer, from number FIRST
on.

The optimizers are those of the package, or those of them that the names name. A part of a
measurement may take SECONDS. This prints a line of JSON for each. Each part of a measurement is a
process of its own, forked from this one, since the import of torch takes longer than all parts
together.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from ckpt import CheckpointManager
from ckpt.errors import CkptError
from tests.census.cells import DIFFERS, EQUAL, NONE, Failure, Row
from tests.census.optimizers import Entry, entries
from tests.census.training import END, SAVED, SHARDED_STEPS, STYLES, Style, Training

RANKS: Final = 2
TIMED_OUT: Final = "timed out"
IMPORT_SECONDS: Final = 300.0
TRIED: Final = 12  # Some optimizers collect ten gradients before their first step
Outcome = tuple[list[str], dict[str, str]]
"""The losses after the save, and the digests at the end."""


def style_of(entry: Entry, seconds: float) -> Style | Failure:
    """Return how the optimizer trains on a CPU, or the error of the most usual way."""
    failures: list[Failure] = []
    for style in STYLES:
        (tried,) = _in_processes([partial(_tried, entry, style)], seconds)
        if not isinstance(tried, Failure):
            return style
        failures.append(tried)
        if tried.name == TIMED_OUT:
            break  # The other ways are no faster
    return failures[0]


def measure(entry: Entry, style: Style | Failure, folder: Path, ranks: int, seconds: float) -> Row:
    """Measure one optimizer on this many ranks, in processes of its own."""
    if isinstance(style, Failure):
        return Row(entry.package, entry.name, "", ranks, {NONE: style.words()})
    cells = dict(_cells(entry, style, folder, ranks, seconds))
    return Row(entry.package, entry.name, " ".join(style), ranks, cells)


def _tried(entry: Entry, style: Style) -> bool:
    """Train, and raise ``RuntimeError`` if nothing has moved."""
    training = Training(entry, style, 1)
    before = training.bits()
    training.train(0, TRIED)
    after = training.bits()
    if all(after[path] == digest for path, digest in before.items()):
        raise RuntimeError("the weights do not move")
    return True


def _cells(
    entry: Entry, style: Style, folder: Path, ranks: int, seconds: float
) -> Iterator[tuple[str, str]]:
    root = folder / f"{entry.name}-{ranks}"
    root.mkdir(parents=True)
    how: dict[str, Any] = {"entry": entry, "style": style, "root": root, "ranks": ranks}

    def run(part: Callable[..., Any], **more: Any) -> list[Any]:
        store = root / f"store-{time.monotonic_ns()}"
        return _in_processes(
            [partial(_as_rank, rank, store, part, **how, **more) for rank in range(ranks)], seconds
        )

    saved = run(_save_own)
    if first := _failure(saved):
        yield NONE, first.words()
        return
    reference = [before for before, _ in saved]
    yield "torch rollback", _cell(reference, [after for _, after in saved])
    yield "torch", _cell(reference, run(_resume_own))
    for wrapped in (False, True):
        saved = run(_save, wrapped=wrapped)
        failed = _failure(saved)
        name = "wrapped" if wrapped else "ckpt"
        if failed:
            yield name, failed.cell()
            if failed.is_ours and not wrapped:
                continue
            break
        yield f"{name} rollback", _cell(reference, saved)
        yield name, _cell(reference, run(_resume, wrapped=wrapped))
        break
    shutil.rmtree(root)


def _failure(results: list[Any]) -> Failure | None:
    return next((result for result in results if isinstance(result, Failure)), None)


def _cell(reference: list[Outcome], found: list[Any]) -> str:
    if failed := _failure(found):
        return failed.cell()
    return EQUAL if found == reference else DIFFERS


# -- the parts -------------------------------------------------------------------------------------


def _outcome(training: Training) -> Outcome:
    return training.train(*_steps()), training.bits()


def _save_own(entry: Entry, style: Style, root: Path, ranks: int) -> tuple[Outcome, Any]:
    """Save, train on, go back to the save in the same objects, and train on again."""
    training = Training(entry, style, 1, sharded=ranks > 1)
    training.train(0, _steps()[0])
    path = _path(root)
    try:
        torch.save(training.own(), path)
    except Exception as error:  # Some state dicts cannot be pickled
        return _outcome(training), _described(error)
    reference = _outcome(training)
    try:
        training.load(torch.load(path, weights_only=False))
        return reference, _outcome(training)
    except Exception as error:
        return reference, _described(error)


def _resume_own(entry: Entry, style: Style, root: Path, ranks: int) -> Outcome:
    training = Training(entry, style, 77, sharded=ranks > 1)
    training.load(torch.load(_path(root), weights_only=False))
    return _outcome(training)


def _save(entry: Entry, style: Style, root: Path, ranks: int, *, wrapped: bool) -> Any:
    training = Training(entry, style, 1, sharded=ranks > 1)
    training.train(0, _steps()[0])
    state = training.state(wrapped=wrapped)
    with CheckpointManager(root / f"ckpt-{wrapped}") as manager:
        pending = manager.save_async(state, 1)
        training.train(*_steps())
        pending.result()
        manager.restore(state, 1)
        return _outcome(training)


def _resume(entry: Entry, style: Style, root: Path, ranks: int, *, wrapped: bool) -> Outcome:
    training = Training(entry, style, 77, sharded=ranks > 1)
    with CheckpointManager(root / f"ckpt-{wrapped}") as manager:
        manager.restore(training.state(wrapped=wrapped))
    return _outcome(training)


def _steps() -> tuple[int, int]:
    """Return the steps after which the training is saved, and after which it ends."""
    return (SAVED, END) if not dist.is_initialized() else SHARDED_STEPS


def _path(root: Path) -> Path:
    return root / f"own-{dist.get_rank() if dist.is_initialized() else 0}.pt"


# -- processes -------------------------------------------------------------------------------------


def _as_rank(rank: int, store: Path, part: Callable[..., Any], *, ranks: int, **how: Any) -> Any:
    if ranks == 1:
        return part(ranks=ranks, **how)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    return part(ranks=ranks, **how)


def _described(error: BaseException) -> Failure:
    return Failure.of(error, is_ours=isinstance(error, CkptError))


def _in_processes(parts: list[Callable[[], Any]], seconds: float) -> list[Any]:
    """Return what each part returns in a process of its own, or how it failed."""
    begun = [_fork(part) for part in parts]
    end = time.monotonic() + seconds
    found = []
    for pid, reader in begun:
        found.append(_result(pid, reader, end - time.monotonic()))
        if isinstance(found[-1], Failure):
            end = min(end, time.monotonic() + 5.0)  # The other rank waits for this one
    return found


def _fork(part: Callable[[], Any]) -> tuple[int, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, os.fdopen(read, "rb")
    try:
        os.close(read)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            result = part()
        except BaseException as error:
            result = _described(error)
        with os.fdopen(write, "wb") as file:
            pickle.dump(result, file)
    finally:
        os._exit(0)


def _result(pid: int, reader: Any, seconds: float) -> Any:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        content = reader.read()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        reader.close()
    _, status = os.waitpid(pid, 0)
    if content:
        return pickle.loads(content)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return Failure("died", signal.Signals(os.WTERMSIG(status)).name, is_ours=False)
    return Failure(TIMED_OUT, f"{seconds:.0f} s", is_ours=False)


def _modules(entry: Entry, folder: Path) -> list[str]:
    """Return the names of the modules that all parts import."""
    how: dict[str, Any] = {"entry": entry, "style": STYLES[0], "root": folder, "ranks": 1}
    _save(**how, wrapped=False)
    _resume(**how, wrapped=False)
    _save_own(**how)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    _save(entry, STYLES[0], folder / "sharded", 2, wrapped=False)
    _save_own(entry, STYLES[0], folder, 2)
    _resume_own(entry, STYLES[0], folder, 2)
    return list(sys.modules)


def _warm(folder: Path) -> None:
    """Import here what each part would import, which takes longer than the part itself."""
    folder.mkdir(parents=True)
    (names,) = _in_processes(
        [partial(_modules, Entry("", "", torch.optim.AdamW), folder)], IMPORT_SECONDS
    )
    assert not isinstance(names, Failure), names.words()
    for name in names:
        with suppress(Exception):  # Some are not imported by their names
            import_module(name)


def main(
    package: str, folder: Path, first: int, step: int, seconds: float, names: Collection[str]
) -> None:
    """Print a row for each of these optimizers."""
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    _warm(folder / f"warm-{first}")
    styles: dict[str, Style | Failure] = {}
    chosen = [entry for entry in entries(package) if not names or entry.name in names]
    for ranks in (1, RANKS):
        for entry in chosen[first::step]:
            if entry.name not in styles:
                styles[entry.name] = style_of(entry, seconds)
            style = styles[entry.name]
            row = measure(entry, style, folder / package, ranks, seconds)
            print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    _, package, folder, first, step, seconds, *names = sys.argv
    main(package, Path(folder), int(first), int(step), float(seconds), names)
