"""``torch_checkpointing``: stages in a thread of the trainer, writes in a process of its own.

Told to leave out what needs CUDA (pinned memory and non-blocking copies), and direct I/O: with it
0.1.1 fails on ext4, as the last write of a file has no aligned length.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Final, cast

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from bench.contenders import Handle, fsync_tree
from bench.contenders.setting import shared_memory_for
from bench.contenders.trees import land_values, leaves, own_state
from bench.state import Subject

WRITER_THREADS: Final = 2  # of 1, 2 and 4 the fastest on two cores
_NAMED_SECONDS: Final = 30.0
STORAGE: Final = LocalFileSystemStorageConfig(use_direct_io=False)


class TorchCheckpointing:
    """A file per object and rank.

    The state may be changed once its lock is to be had. The bench fsyncs.
    """

    pinned = False

    def prepare(self, subject: Subject, folder: str) -> None:
        self._subject, self._folder = subject, folder
        self._setting = ExitStack()
        self._setting.enter_context(shared_memory_for(subject))
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    writer_config=CheckpointWriterConfig(file_write_max_threads=WRITER_THREADS),
                    staging_config=CheckpointStagerConfig(
                        use_pinned_memory=self.pinned, use_non_blocking_copy=self.pinned
                    ),
                ),
                storage_config=STORAGE,
            )
        )
        self._manager.prewarm_staging(own_state(subject))
        _wait_until_ready(self._manager)

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        return Handle(step, path, self._manager.save(path, own_state(self._subject)))

    def wait_safe(self, handle: Handle) -> None:  # noqa: ARG002
        with self._manager.lock():
            pass

    def wait_durable(self, handle: Handle) -> None:
        cast("Future[Any]", handle.payload).result()
        _wait_until_named(handle.path)
        fsync_tree(handle.path)

    def load_back(self, path: str, into: Subject) -> None:
        config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=STORAGE)
        manager = CheckpointManager(config)
        # its tensors are the live ones
        loaded = manager.load(path, into=own_state(into), strict=True)
        manager.close()
        land_values(into, leaves(loaded).__getitem__)

    def close(self) -> None:
        self._manager.close()
        self._setting.close()


class TorchCheckpointingPinned(TorchCheckpointing):
    """``TorchCheckpointing`` as its defaults are where there is CUDA."""

    pinned = torch.cuda.is_available()


def _wait_until_named(path: str) -> None:
    """Rank 0 renames the folder when all have written; on other ranks the future does not wait
    for that.
    """
    deadline = time.monotonic() + _NAMED_SECONDS
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.001)


def _wait_until_ready(manager: CheckpointManager) -> None:
    """Process and staging memory, both made in the background: a job is past that at its first
    save. No public name waits for them.
    """
    unnamed = cast(Any, manager)
    unnamed._saver._checkpoint_process.wait_for_init()
    unnamed._prewarm_staging_future.result()
