"""Folders of Hugging Face beside the checkpoints of a running job.

A *ref* names a step and the attempt at it. A *pin* (or lease) on a step keeps it from being removed
while it waits for its export. Only the newest pinned step waits. `HfFolders` pins steps on one
thread, and exports them on another.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from ckpt.catalog.step_listing import find
from ckpt.checks import check_int
from ckpt.config import rank_of_this_process
from ckpt.errors import CkptError
from ckpt.errors.sanitize import clean
from ckpt.events import SaveCommitted
from ckpt.exchange.exports.hf_folder import HfOptions, read_config
from ckpt.exchange.exports.hf_output_folders import output_folders
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.root.leases import lease_if_allowed
from ckpt.storage.registry import open_backend

_NICE_VALUE: Final = 10
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _PinnedStep:
    """A step that waits for its export, and what ends its pin."""

    ref: StepRef
    tier: str
    pin: ExitStack


class HfFolders:
    """An observer that makes a folder of Hugging Face of committed steps.

    ::

        folders = HfFolders("hf/gpt", "gpt2/", every=1000, keep_last=2, dtype="bfloat16")
        with CheckpointManager("runs/gpt", observers=[folders]) as manager, folders:
            ...

    A process of its own runs ``ckpt export`` for each step, with a low priority, so
    that the training goes on beside it. If steps come faster than they are exported, only the
    newest one waits. A folder, such as ``hf/gpt/step-000001000``, appears when it is complete. The
    process reads the tier that has committed the step first, by its URL alone, without options. It
    goes on if the trainer ends or dies. In a store, the name of a folder ends in the attempt of the
    step, and ``config.json`` is its last file.

    Args:
        out: The folder or the URL that gets a folder for each step.
        files: The folder with the model's ``config.json`` and the files of the tokenizer.
        every: Only steps that are multiples of this number are exported.
        keep_last: How many of the folders that were made last stay; None for all.
        part: The name of the part of the state that holds the weights.
        dtype: As in `ckpt.exchange.exports.hf_folder.HfOptions`.
        names: As in `ckpt.exchange.exports.hf_folder.HfOptions`.

    Raises:
        ConfigError: An argument is invalid.

    Thread safety: any thread may report events. The owner calls ``close``.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        files: str | os.PathLike[str],
        *,
        every: int = 1,
        keep_last: int | None = None,
        part: str = "model",
        dtype: str | None = None,
        names: Mapping[str, str | None] | str | None = None,
    ) -> None:
        check_int("every", every, 1, 10**18)
        if keep_last is not None:
            check_int("keep_last", keep_last, 1, 10**9)
        self._options = HfOptions(files=os.fspath(files), dtype=dtype, names=names)
        read_config(self._options.files)
        self._out, self._output_folders = os.fspath(out), output_folders(os.fspath(out))
        self._part, self._every, self._keep_last = part, every, keep_last
        self._lock = threading.Lock()
        self._next_step: _PinnedStep | None = None
        self._last_commit: tuple[int, str] | None = None
        self._pinner, self._workers = Workers("hf-pins", 1), Workers("hf-folders", 1)

    def __call__(self, event: object) -> None:
        """Note a committed step, and export it in the background."""
        if (
            not isinstance(event, SaveCommitted)
            or event.step % self._every
            or event.tier.startswith("shm:")
            or rank_of_this_process()
        ):
            return
        with self._lock:
            last_step, last_tier = self._last_commit or (None, "")
            if last_step == event.step and last_tier != event.tier:
                return  # A farther tier has it too. The same tier has it again after a rollback.
            self._last_commit = event.step, event.tier
        self._pinner.submit(self._pin, event)

    def __repr__(self) -> str:
        return f"HfFolders({clean(self._out)!r}, every={self._every})"

    def close(self) -> None:
        """Wait until the steps so far are exported, and end the threads."""
        self._pinner.close()
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pin(self, event: SaveCommitted) -> None:
        """Pin a step, since the export begins seconds later. A step that waits is given up."""
        with ExitStack() as stack:
            try:
                backend = stack.enter_context(closing(open_backend(event.tier)))
                ref = find(backend, event.step)[0]
                stack.enter_context(lease_if_allowed(backend, ref, "a folder of Hugging Face"))
            except CkptError as error:
                _log.warning("ckpt: step %d has no folder of Hugging Face: %s", event.step, error)
                return
            with self._lock:
                replaced_step, self._next_step = (
                    self._next_step,
                    _PinnedStep(ref, event.tier, stack.pop_all()),
                )
        if replaced_step is None:
            self._workers.submit(self._export_next)
        else:
            _log.info(
                "ckpt: step %d has no folder of Hugging Face: step %d came before its export",
                replaced_step.ref.step,
                event.step,
            )
            replaced_step.pin.close()

    def _export_next(self) -> None:
        """Export the step that waits, if there is one, and end its pin."""
        with self._lock:
            step, self._next_step = self._next_step, None
        if step is None:
            return
        with step.pin:
            try:
                self._export(step)
                if self._keep_last is not None:
                    self._output_folders.prune(self._keep_last)
            except (OSError, CkptError) as error:
                _log.warning(
                    "ckpt: step %d has no folder of Hugging Face: %s", step.ref.step, error
                )

    def _export(self, step: _PinnedStep) -> None:
        """Run ``ckpt export`` for a step in a process of its own, and wait for its end."""
        folder, step_number = self._output_folders.prepare_folder(step.ref), step.ref.step
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            command = self._command(step, folder, file.name)
            if isinstance(self._options.names, Mapping):
                json.dump(dict(self._options.names), file)
                file.flush()
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
                errors="replace",
            )
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE_VALUE)
            _, errors = process.communicate()
        if process.returncode:
            _log.warning(
                "ckpt: step %d has no folder of Hugging Face: %s",
                step_number,
                errors.strip()[-500:],
            )
        else:
            _log.info(
                "ckpt: step %d is a folder of Hugging Face now: %s", step_number, clean(folder)
            )

    def _command(self, step: _PinnedStep, folder: str, mapping: str) -> list[str]:
        """Return the command. ``mapping`` is the path of the file with the mapping of names."""
        options = self._options
        command = [sys.executable, "-m", "ckpt.cli.main", "export", step.tier, folder]
        command += ["--format", "hf", "--step", str(step.ref.step), "--attempt", step.ref.attempt]
        command += ["--config", options.files]
        command += ["--name", f"{self._part}/*", "--strip", f"{self._part}/"]
        if options.dtype is not None:
            command += ["--dtype", options.dtype]
        if options.names is not None:
            names = options.names if isinstance(options.names, str) else mapping
            command += ["--names", names]
        return command
