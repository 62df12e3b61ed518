"""The upload of a large object to Google Cloud Storage, as one resumable upload.

The server takes the parts only in file order. A part that is written early is copied, and kept
until all parts before it are sent. If few threads write, only a few parts are kept at a time. After
an error, the bytes are sent again from the position that the server last reported. The server
ignores bytes that it already has. An emulator may not ignore them, so the size of the object is
checked at the end.

If the server no longer knows the upload, every method but ``abort`` raises
``TransientStorageError``. The caller may then begin another upload and send the whole object again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from ckpt.errors import ObjectNotFound, StorageError, TransientStorageError
from ckpt.storage.api import Capabilities, ObjectInfo, check_written

PART_UNIT_BYTES: Final = 256 << 10
"""The lengths of all parts of an upload but the last must be multiples of this number of bytes."""
_GONE_STATUS: Final = 410  # The status for an upload that the server has forgotten


class Server(Protocol):
    """The methods of the backend that an upload uses."""

    @property
    def capabilities(self) -> Capabilities: ...

    def head(self, key: str) -> ObjectInfo: ...

    def put_id_of(self, key: str) -> str:
        """Return the id in the metadata of the object, or '' if it cannot be read."""
        ...

    def request(
        self,
        key: str,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: memoryview | None = None,
    ) -> tuple[int, Mapping[str, Any]]:
        """Send one request. Return the status and the headers of the answer."""
        ...


class ResumableUpload:
    """The upload of one object.

    Thread safety: only one method may run at a time.

    Args:
        backend: The backend that began the upload.
        key: The key of the object.
        size: The most bytes of the object.
        location: The URL of the upload session.
        put_id: The id that the session stores in the metadata of the object.
    """

    def __init__(self, backend: Server, key: str, size: int, location: str, put_id: str) -> None:
        self._backend, self._key, self._size, self._location = backend, key, size, location
        self._put_id = put_id
        self._early_parts: dict[int, memoryview] = {}
        self._offset = 0
        self._is_lost = False

    @property
    def part_bytes(self) -> int:
        return self._backend.capabilities.part_bytes

    def write(self, offset: int, data: memoryview) -> None:
        data = data.cast("B")
        if offset % PART_UNIT_BYTES or offset + data.nbytes > self._size:
            raise StorageError(
                self._key, f"bytes {offset} to {offset + data.nbytes} are not part of this upload"
            )
        self._check_known()
        if offset + data.nbytes > self._offset:  # Otherwise the server already has this part
            # Keep a part that is early, and a part of odd length. The latter is the last one, and
            # must be sent with the size of the whole object, which only ``finish`` knows.
            if offset > self._offset or data.nbytes % PART_UNIT_BYTES:
                self._early_parts[offset] = memoryview(bytes(data))
            else:
                self._send(offset, data)
        while (part := self._next_bytes()).nbytes and not part.nbytes % PART_UNIT_BYTES:
            self._send(self._offset, part)

    def finish(self, size: int | None = None) -> ObjectInfo:
        self._check_known()
        rest = self._next_bytes()
        unsent_bytes = sum(
            min(part.nbytes, offset + part.nbytes - self._offset)
            for offset, part in self._early_parts.items()
        )
        size = check_written(self._key, self._offset + unsent_bytes, self._size, size)
        content_range = (
            f"bytes {self._offset}-{size - 1}/{size}" if rest.nbytes else f"bytes */{size}"
        )
        try:
            self._send_range(content_range, rest)
        except TransientStorageError:
            # If only the reply was lost, the server has ended the session, and the object has the
            # id of this upload. Otherwise the caller may call ``finish`` again.
            if not self._is_lost or self._backend.put_id_of(self._key) != self._put_id:
                raise
        with suppress(ObjectNotFound):
            if self._backend.head(self._key).size == size:
                return ObjectInfo(key=self._key, size=size)
        raise TransientStorageError(self._key, "is not what was sent: it must be sent again")

    def abort(self) -> None:
        self._early_parts.clear()
        with suppress(StorageError):
            self._backend.request(self._key, "DELETE", self._location)

    def _next_bytes(self) -> memoryview:
        """Return the bytes from ``_offset`` to the end of the kept part that contains them; empty
        if no kept part does. Let the parts go that the server has.
        """
        for offset, part in sorted(self._early_parts.items()):
            if offset + part.nbytes <= self._offset:
                del self._early_parts[offset]
            elif offset <= self._offset:
                return part[self._offset - offset :]
        return memoryview(b"")

    def _send(self, offset: int, data: memoryview) -> None:
        """Send ``data``, whose first byte is the byte ``offset`` of the object, in as many
        requests as the server needs.
        """
        while self._offset < offset + data.nbytes:
            previous, rest = self._offset, data[self._offset - offset :]
            self._send_range(f"bytes {self._offset}-{self._offset + rest.nbytes - 1}/*", rest)
            if self._offset <= previous:
                raise TransientStorageError(
                    self._key, f"the server takes no more than {previous} bytes"
                )

    def _check_known(self) -> None:
        """Raise ``TransientStorageError`` if the server no longer knows the upload."""
        if self._is_lost:
            raise TransientStorageError(
                self._key, "the server has forgotten this upload: it must be sent again"
            )

    def _send_range(self, content_range: str, data: memoryview) -> None:
        """Send one request with ``content_range`` as its Content-Range. If the upload is not
        complete after it, store in ``_offset`` the number of bytes that the server reports to have.

        Raises:
            TransientStorageError: The server no longer knows the upload.
            StorageError: The request failed for another reason.
        """
        headers = {"Content-Range": content_range, "Content-Length": str(data.nbytes)}
        try:
            status, answer = self._backend.request(
                self._key,
                "PUT",
                self._location,
                headers=headers,
                data=data if data.nbytes else None,
            )
        except StorageError as error:
            self._is_lost = isinstance(error, ObjectNotFound) or bool(
                re.search(rf"\b{_GONE_STATUS}\b", error.detail)
            )
            self._check_known()
            raise
        if status not in (200, 201):
            self._offset = _stored_bytes(answer)


def _stored_bytes(headers: Mapping[str, Any]) -> int:
    """Return the number of bytes that the server has, from the headers of its answer. The header
    'Range: bytes=0-42' means 43 bytes. Without this header, the server has no bytes.
    """
    text = str(headers.get("Range", ""))
    return int(text.rpartition("-")[2]) + 1 if "-" in text else 0
