"""The removal of multipart uploads that killed jobs have left in a bucket.

Such uploads appear in no listing of objects, but their parts cost money until the uploads are
aborted. An upload is aborted only if it is for a rank's file in the folder of a step below the
root, and if it is so old that no running job can still be working on it. Only a process that writes
a file of rank 0 looks for such uploads, and only once. If the store cannot list uploads, or forbids
the listing, nothing is aborted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ckpt.errors import ObjectNotFound, StorageError
from ckpt.storage.api import UnfinishedWrite

_RANK_KEY: Final = re.compile(r"step-\d{9,}\.[^/]+/rank-\d{5,}\.[a-z]+(\.[a-z]+)?")
_RANK_0_KEY: Final = re.compile(r"(.*/)?rank-0+\.[a-z.]+")


class UnfinishedUploads:
    """The unfinished multipart uploads below one root.

    Thread safety: any thread may call all methods.

    Args:
        call: Makes a request about the bucket. It takes the name of the method of botocore's S3
            client and the arguments of the method, and raises ``StorageError``.
        prefix: The prefix of the root with a slash at its end; '' for the whole bucket.
        max_age: The age from which an upload counts as abandoned. If it is zero,
            ``abort_abandoned_once`` aborts nothing.
    """

    def __init__(self, call: Callable[..., Any], prefix: str, max_age: timedelta) -> None:
        self._call, self._prefix, self.max_age = call, prefix, max_age
        self._is_done = not max_age
        self._lock = threading.Lock()

    def abort_abandoned_once(self, key: str) -> None:
        """Abort the abandoned uploads of ranks' files if ``key`` is a file of rank 0. Do this at
        most once in the life of this object. Never raise.
        """
        with self._lock:
            if self._is_done or not _RANK_0_KEY.fullmatch(key):
                return
            self._is_done = True
        with suppress(StorageError):
            for upload in self.list(""):
                if upload.abandoned and _RANK_KEY.fullmatch(upload.key):
                    with suppress(StorageError):
                        self.abort(upload)

    def abort(self, upload: UnfinishedWrite) -> None:
        """Abort one upload. Do nothing if the store no longer knows it."""
        with suppress(ObjectNotFound):
            self._call(
                "abort_multipart_upload", Key=self._prefix + upload.key, UploadId=upload.name
            )

    def list(self, prefix: str) -> Iterator[UnfinishedWrite]:
        """Yield the unfinished uploads of all processes to keys that start with ``prefix``."""
        current_time, marker = datetime.now(UTC), dict[str, str]()
        while True:
            try:
                page = self._call("list_multipart_uploads", Prefix=self._prefix + prefix, **marker)
            except ObjectNotFound:  # rclone answers NoSuchUpload if there is none
                return
            for upload in page.get("Uploads", ()):
                yield UnfinishedWrite(
                    key=str(upload["Key"]).removeprefix(self._prefix),
                    name=str(upload["UploadId"]),
                    size=0,
                    modified=upload["Initiated"].timestamp(),
                    abandoned=current_time - upload["Initiated"] > self.max_age,
                )
            if not page.get("IsTruncated") or "NextKeyMarker" not in page:
                return
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }
