"""``dcp.async_save`` with all that makes it faster on a CPU.

A process of its own writes, so that it does not share the interpreter with the training. One stager
lives for the whole job and keeps its shared memory, so that only the first save pays for it, and it
copies in a thread while training goes on. Plan and metadata are made once.
"""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from typing import Final, cast

from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

from bench.contenders import Handle
from bench.contenders.dcp import DcpSave
from bench.contenders.setting import process_group, shared_memory_for
from bench.state import Subject

warnings.filterwarnings("ignore", module="torch.distributed")

WRITER_THREADS: Final = 2  # of 1, 2 and 4 the fastest on two cores
STAGING: Final = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=True,
    use_async_staging=True,
    use_non_blocking_copy=False,
)


class DcpBest(DcpSave):
    """The state may be changed once staging has completed. The bench fsyncs the folder."""

    staging = STAGING

    def prepare(self, subject: Subject, folder: str) -> None:
        super().prepare(subject, folder)
        self._setting = ExitStack()
        self._setting.enter_context(process_group())
        self._setting.enter_context(shared_memory_for(subject))
        os.environ.setdefault(
            "MASTER_ADDR", "127.0.0.1"
        )  # the writing process would look for the host's name
        self._stager = DefaultStager(self.staging)
        self._last: AsyncSaveResponse | None = None

    def save(self, step: int) -> Handle:
        if self._last is not None:  # it reads the memory that this save is going to fill
            self._last.upload_completion.result()
        path = os.path.join(self._folder, f"step-{step}")
        self._last = cast(
            AsyncSaveResponse,
            async_save(
                self._subject.state_dict(),
                storage_writer=FileSystemWriter(path, thread_count=WRITER_THREADS),
                planner=DefaultSavePlanner(enable_plan_caching=True),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self._stager,
            ),
        )
        return Handle(step, path, self._last)

    def wait_safe(self, handle: Handle) -> None:
        cast(AsyncSaveResponse, handle.payload).staging_completion.result()

    def wait_durable(self, handle: Handle) -> None:
        cast(AsyncSaveResponse, handle.payload).upload_completion.result()
        super().wait_durable(handle)

    def close(self) -> None:
        if self._last is not None:
            self._last.upload_completion.exception()  # the wait for the save has raised it
        self._stager.close()
        _end_process()
        self._setting.close()


def _end_process() -> None:
    """It has no public name, and ends with the last reference to it."""
    process, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    if process is not None:
        child = process._save_process
        del process
        child.join()
