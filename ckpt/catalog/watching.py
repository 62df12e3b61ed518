"""Watch a tier for committed steps, for a program that evaluates or publishes each of them.

A watcher has a name. It puts a small object below ``watchers/NAME/`` on the tier for each step that
it has handled. So a watcher that is started again continues where the last one ended, also on
another machine. While a step is being handled, a pin keeps it from being removed. A rollback is the
record that the run goes on from an older step. It abandons the later steps, which then are not on
the current branch.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ckpt.catalog.step_listing import is_committed, list_root
from ckpt.errors import (
    ConfigError,
    NoCheckpoint,
    TransientStorageError,
)
from ckpt.model.keys import WATCHERS, StepRef, parse_folder
from ckpt.pipeline.retry import ask
from ckpt.root.leases import lease
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend

POLL_SECONDS: Final = 10.0

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A committed step that a watcher has not handled yet.

    Attributes:
        root: The URL of the tier, without credentials.
        path: The folder of the step. It is a path if the tier is a folder of this machine, and a
            URL otherwise.
    """

    ref: StepRef
    root: str
    path: str

    @property
    def step(self) -> int:
        return self.ref.step


class Watcher:
    """A named watcher of a tier, which finds the committed steps that it has not handled yet.

    Args:
        backend: The tier.
        name: The name of the watcher. Watchers of different names each handle every step. Only one
            process at a time may use a name.
        newest: At each ``look``, pass over all steps but the newest one.

    Raises:
        ConfigError: The name is empty, is longer than 64 characters, has other characters than
            ASCII letters, digits, '-' and '_', or begins with '-' or '_'.

    Thread safety:
        One thread at a time.
    """

    def __init__(self, backend: StorageBackend, name: str, *, newest: bool = False) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"a watcher named {name[:80]!r}: use 1 to 64 letters, digits, '-' and '_'"
            )
        self._backend, self._newest = backend, newest
        self._folder = f"{WATCHERS}/{name}/"
        self._reason = f"watch {name}"
        self._skipped_refs: set[StepRef] = set()

    def look(self) -> list[CommittedStep]:
        """Return the committed steps that were not handled yet, oldest first. Steps that were
        passed to ``skip`` are left out.

        The records of handled steps that the tier does not have any more are removed.
        """
        listing = list_root(self._backend)
        refs = listing.refs
        keys = ask(self._backend, lambda: [info.key for info in self._backend.list(self._folder)])
        handled_refs = {
            ref for key in keys if (ref := parse_folder(key.removeprefix(self._folder)))
        }
        for ref in handled_refs.difference(refs):
            ask(self._backend, partial(self._backend.delete, self._key(ref)))
        new_refs: list[StepRef] = []
        # Newest first. An abandoned step is not the newest.
        for ref in listing.on_branch if self._newest else refs:
            if self._newest and (new_refs or ref in handled_refs | self._skipped_refs):
                break
            if ref not in handled_refs | self._skipped_refs and is_committed(self._backend, ref):
                new_refs.append(ref)
        return [self.committed_step(ref) for ref in reversed(new_refs)]

    @contextmanager
    def lease(self, step: CommittedStep) -> Generator[None]:
        """Pin ``step`` while the block runs.

        Raises:
            NoCheckpoint: The step was removed before, or is being removed.
            StorageError: The pin cannot be put.
            ThreadLimit: The system does not start the thread that renews the pin.
        """
        with lease(self._backend, step.ref, self._reason):
            yield

    def skip(self, step: CommittedStep) -> None:
        """Pass over ``step``. This `Watcher` does not return the step again, but a new `Watcher` of
        the same name does.
        """
        self._skipped_refs.add(step.ref)

    def mark_handled(self, step: CommittedStep) -> None:
        """Record that ``step`` was handled, so that no watcher of this name returns it again.

        This has no effect for a step that was passed to ``skip``.
        """
        if step.ref not in self._skipped_refs:
            ask(self._backend, lambda: self._backend.put(self._key(step.ref), [b"handled\n"]))

    def _key(self, ref: StepRef) -> str:
        return f"{self._folder}{ref.folder}"

    def committed_step(self, ref: StepRef) -> CommittedStep:
        """Return ``ref`` with the root and the path by which other programs find it."""
        root = self._backend.url
        return CommittedStep(ref=ref, root=root, path=f"{root.rstrip('/')}/{ref.folder}")


def watch(
    root: str,
    *,
    name: str = "default",
    newest: bool = False,
    poll_seconds: float = POLL_SECONDS,
    stop: threading.Event | None = None,
    options: Mapping[str, Any] | None = None,
) -> Generator[CommittedStep]:
    """Yield each committed step of ``root``, oldest first, and wait for further steps.

    A step is not removed while the body of the loop runs. It counts as handled when the loop goes
    on to the next step. If the loop is left by ``break`` or an exception, the step is yielded again
    by the next call with the same name, also in another process. The pin on the step ends when the
    iterator is closed or collected.

    Args:
        root: A folder or URL.
        name: The name of the watcher. Each name handles every step once, so give each process that
            needs all steps a name of its own.
        newest: At each listing of the steps, pass over all steps but the newest one.
        poll_seconds: The time between two listings.
        stop: Ends the iteration when it is set.
        options: Options of the store.

    Raises:
        ConfigError: ``name`` or ``poll_seconds`` is not allowed.
        StorageError: The store denies a request. A store that does not answer for a while is asked
            again.
    """
    if not 0 < poll_seconds < float("inf"):
        raise ConfigError(f"poll_seconds={poll_seconds!r}: give a positive number of seconds")
    backend = open_backend(root, options)
    return _steps_and_close(backend, Watcher(backend, name, newest=newest), poll_seconds, stop)


def each_step(
    watcher: Watcher, poll_seconds: float | None, stop: threading.Event | None = None
) -> Generator[CommittedStep]:
    """Yield the steps of a watcher as ``watch`` does.

    Args:
        watcher: The watcher.
        poll_seconds: The time between two listings; None to list the steps once and not wait.
        stop: Ends the iteration when it is set.

    Raises:
        StorageError: The store denies a request, or, if ``poll_seconds`` is None, does not answer.
    """
    end = stop or threading.Event()
    while not end.is_set():
        try:
            steps = watcher.look()
        except TransientStorageError as error:
            if poll_seconds is None:
                raise
            _log.warning("ckpt: new steps could not be listed: %s", error)
            steps = []
        for step in steps:
            if end.is_set():
                return
            try:
                with suppress(NoCheckpoint), watcher.lease(step):  # The step may be removed
                    yield step
                    watcher.mark_handled(step)
            except TransientStorageError as error:
                if poll_seconds is None:
                    raise
                _log.warning(
                    "ckpt: step %d is handled again at the next look: %s", step.step, error
                )
                break
        if poll_seconds is None:
            return
        end.wait(poll_seconds)


def _steps_and_close(
    backend: StorageBackend, watcher: Watcher, poll_seconds: float, stop: threading.Event | None
) -> Generator[CommittedStep]:
    try:
        yield from each_step(watcher, poll_seconds, stop)
    finally:
        backend.close()


def watch_records(backend: StorageBackend) -> list[str]:
    """Return the keys of the records of all watchers of a tier."""
    keys = ask(backend, lambda: [info.key for info in backend.list(f"{WATCHERS}/")])
    return [key for key in keys if _is_record(key)]


def remove_watch_records(backend: StorageBackend) -> None:
    """Remove the records of all watchers of a tier whose run is removed. Other files stay."""
    for key in watch_records(backend):
        ask(backend, partial(backend.delete, key))


def _is_record(key: str) -> bool:
    _, name, folder = (*key.split("/", 2), "", "")[:3]
    return _NAME.fullmatch(name) is not None and parse_folder(folder) is not None
