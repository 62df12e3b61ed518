"""``torch.distributed.checkpoint``, as it comes: no option is changed."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.contenders import Handle, fsync_tree
from bench.state import Subject

warnings.filterwarnings("ignore", module="torch.distributed")


class DcpSave:
    """``dcp.save``; returns when the files are written and fsynced, the bench fsyncs their
    folder.
    """

    def prepare(self, subject: Subject, folder: str) -> None:
        self._subject, self._folder = subject, folder

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        save(self._subject.state_dict(), checkpoint_id=path)
        return Handle(step, path)

    def wait_safe(self, handle: Handle) -> None:
        """It was safe on return: the state has been written."""

    def wait_durable(self, handle: Handle) -> None:
        fsync_tree(handle.path)

    def load_back(self, path: str, into: Subject) -> None:
        state = into.state_dict()
        load(state, checkpoint_id=path)
        into.load_state_dict(state)

    def close(self) -> None:
        """Nothing is held."""


class DcpAsyncSave(DcpSave):
    """``dcp.async_save``; it copies the state before it returns, then writes in a thread of the
    trainer. The bench fsyncs the folder.
    """

    def prepare(self, subject: Subject, folder: str) -> None:
        super().prepare(subject, folder)
        # The thread's collectives must not mix with those of the training.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._group = cast("dist.ProcessGroup | None", group)
        self._last: Future[Any] | None = None

    def save(self, step: int) -> Handle:
        if self._last is not None:  # one at a time, as its tutorial has it
            self._last.result()
        path = os.path.join(self._folder, f"step-{step}")
        self._last = cast(
            "Future[Any]",
            async_save(self._subject.state_dict(), checkpoint_id=path, process_group=self._group),
        )
        return Handle(step, path, self._last)

    def wait_durable(self, handle: Handle) -> None:
        cast("Future[Any]", handle.payload).result()
        super().wait_durable(handle)

    def close(self) -> None:
        if self._last is not None:
            self._last.exception()  # the wait for the save has raised it
        if self._group is not None:
            dist.destroy_process_group(self._group)
