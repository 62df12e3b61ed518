"""The space of the file system that a folder is on."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future, wait
from typing import Final

from ckpt.pipeline.workers import Workers

_PATIENCE_SECONDS: Final = 1.0
"""How long a file system may take to answer. One that was disconnected may never do."""


class FolderSpace:
    """The space of a folder's file system, asked for by a thread of its own.

    A file system that does not answer costs that thread, however often it is asked.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_asked``.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._worker = Workers("space", 1)
        self._lock = threading.Lock()
        self._asked: Future[os.statvfs_result] | None = None

    def free(self) -> float:
        """Return how many bytes are free; nan if the file system does not answer."""
        found = self._ask()
        return math.nan if found is None else found.f_bavail * found.f_frsize

    def size(self) -> float:
        """Return how many bytes there are; nan if the file system does not answer."""
        found = self._ask()
        return math.nan if found is None else found.f_blocks * found.f_frsize

    def _ask(self) -> os.statvfs_result | None:
        with self._lock:
            if self._asked is None:
                self._asked = self._worker.submit(os.statvfs, self._folder)
            asked = self._asked
        if not wait([asked], _PATIENCE_SECONDS).done:
            return None
        with self._lock:
            self._asked = None if self._asked is asked else self._asked
        return None if asked.exception() else asked.result()
