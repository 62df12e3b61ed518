"""Multipart uploads that a killed job has left: they are invisible, and cost money until aborted.

Only uploads that are certainly ours are aborted: below the root, with the name of a rank's file in
a step's folder, and begun so long ago that no live job can still write them. A process that writes
the file of a rank 0 does it once. A store that cannot list uploads, or forbids it, is left as it
is.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ckpt.errors import ObjectNotFound, StorageError
from ckpt.storage.api import Unfinished

_OURS: Final = re.compile(r"step-\d{9,}\.[^/]+/rank-\d{5,}\.[a-z]+(\.[a-z]+)?")
_LEADS: Final = re.compile(r"(.*/)?rank-0+\.[a-z.]+")


class Orphans:
    """Thread safety: any thread may use it.

    Args:
        call: A request about the bucket; raises ``StorageError``.
        prefix: Of the root, with its slash.
        after: How old an upload must be; with zero, uploads of earlier jobs stay.
    """

    def __init__(self, call: Callable[..., Any], prefix: str, after: timedelta) -> None:
        self._call, self._prefix, self.after = call, prefix, after
        self._done = not after
        self._lock = threading.Lock()

    def abort_once(self, key: str) -> None:
        """Abort what earlier jobs have left, at the first upload of a rank 0. Never raises."""
        with self._lock:
            if self._done or not _LEADS.fullmatch(key):
                return
            self._done = True
        with suppress(StorageError):
            for found in self.uploads(""):
                if found.abandoned and _OURS.fullmatch(found.key):
                    with suppress(StorageError):
                        self.abort(found)

    def abort(self, found: Unfinished) -> None:
        """Abort one upload. It is no error if the store does not know it any more."""
        with suppress(ObjectNotFound):
            self._call("abort_multipart_upload", Key=self._prefix + found.key, UploadId=found.name)

    def uploads(self, prefix: str) -> Iterator[Unfinished]:
        """Return the unfinished uploads to keys that start with ``prefix``."""
        now, marker = datetime.now(UTC), dict[str, str]()
        while True:
            page = self._call("list_multipart_uploads", Prefix=self._prefix + prefix, **marker)
            for found in page.get("Uploads", ()):
                yield Unfinished(
                    key=str(found["Key"]).removeprefix(self._prefix),
                    name=str(found["UploadId"]),
                    size=0,
                    modified=found["Initiated"].timestamp(),
                    abandoned=now - found["Initiated"] > self.after,
                )
            if not page.get("IsTruncated") or "NextKeyMarker" not in page:
                return
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }
