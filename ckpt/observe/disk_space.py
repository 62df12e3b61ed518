"""The free space and the size of the file system that holds a folder."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future, wait
from typing import Final

from ckpt.pipeline.workers import Workers

_PATIENCE_SECONDS: Final = 1.0
"""How long to wait for a file system. A network file system that is disconnected may never
answer.
"""


class FolderSpace:
    """The space of the file system that holds a folder. A thread of this object calls ``statvfs``.

    If the file system does not answer, only that thread is blocked. Later calls of ``free`` and
    ``size`` wait for the same ``statvfs`` instead of making another one.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_asked``.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._worker = Workers("space", 1)
        self._lock = threading.Lock()
        self._asked: Future[os.statvfs_result] | None = None

    def free(self) -> float:
        """Return how many bytes a user may still write.

        The result is nan if the file system does not answer within a second, or fails.
        """
        found = self._ask()
        return math.nan if found is None else found.f_bavail * found.f_frsize

    def size(self) -> float:
        """Return the size of the file system in bytes.

        The result is nan if the file system does not answer within a second, or fails.
        """
        found = self._ask()
        return math.nan if found is None else found.f_blocks * found.f_frsize

    def _ask(self) -> os.statvfs_result | None:
        """Return the result of ``statvfs``; None if it fails or does not return in time."""
        with self._lock:
            if self._asked is None:
                self._asked = self._worker.submit(os.statvfs, self._folder)
            asked = self._asked
        if not wait([asked], _PATIENCE_SECONDS).done:
            return None
        with self._lock:
            self._asked = None if self._asked is asked else self._asked
        return None if asked.exception() else asked.result()
