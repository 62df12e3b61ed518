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

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_query``.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._worker = Workers("space", 1)
        self._lock = threading.Lock()
        self._query: Future[os.statvfs_result] | None = None

    def free(self) -> float:
        """Return how many bytes a user may still write.

        The result is nan if the file system does not answer within a second, or fails.
        """
        status = self._ask()
        return math.nan if status is None else status.f_bavail * status.f_frsize

    def size(self) -> float:
        """Return the size of the file system in bytes.

        The result is nan if the file system does not answer within a second, or fails.
        """
        status = self._ask()
        return math.nan if status is None else status.f_blocks * status.f_frsize

    def _ask(self) -> os.statvfs_result | None:
        """Return the result of ``statvfs``; None if it fails or does not return in time."""
        with self._lock:
            if self._query is None:
                self._query = self._worker.submit(os.statvfs, self._folder)
            query = self._query
        if not wait([query], _PATIENCE_SECONDS).done:
            return None
        with self._lock:
            # Another thread may have taken this result, and begun the next call.
            self._query = None if self._query is query else self._query
        return None if query.exception() else query.result()
