"""The upload of large objects to S3 with obstore, the Python package of Rust's object_store.

obstore needs less CPU time than s3fs and botocore, and disturbs other threads less, also over TLS.
It takes the parts in file order and copies each part once. It sends several parts at a time, and
retries failed requests with backoff and jitter. s3fs and botocore make all other requests, with the
same settings. botocore finds the credentials.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any, Final, Protocol

from ckpt.errors import StorageError, TransientStorageError
from ckpt.storage.api import ObjectInfo, check_written
from ckpt_backends.s3.options import PUT_ID

_PARTS_AT_ONCE: Final = 8
_REQUEST_SECONDS: Final = 120
_RETRY_SECONDS: Final = 120
_TRIES: Final = 8
_CREDENTIALS_SECONDS: Final = 300
_DENIAL_TEXT: Final = re.compile(
    r"\b40[13] |AccessDenied|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch"
)


class Bucket(Protocol):
    """The methods of the backend that an upload uses."""

    def translate_errors(self, key: str) -> AbstractContextManager[None]:
        """Return a context manager that turns errors of client libraries into storage errors."""
        ...

    def put_id_of(self, key: str) -> str:
        """Return the random id that the writer of the object has stored in its metadata.

        Return '' if the object has no id, or if its metadata cannot be read.
        """
        ...

    def abort_uploads(self, key: str) -> None:
        """Abort all unfinished uploads of exactly this key. Never raise."""
        ...


class ObstoreWriter:
    """Opens files of obstore for writes to one bucket.

    Thread safety: several threads may call ``open`` at the same time. A forked process must not use
    this object.

    Args:
        bucket: The name of the bucket.
        settings: Returns the settings of the store (see ``S3BulkClient.settings``). It is called at
            the first ``open``.

    Raises:
        ImportError: obstore is not installed.
    """

    def __init__(self, bucket: str, settings: Callable[[], Mapping[str, Any]]) -> None:
        import obstore

        self._obstore, self._bucket, self._settings = obstore, bucket, settings
        self._store: Any = None

    def open(self, path: str, part_bytes: int, metadata: Mapping[str, str]) -> Any:
        """Return a writable file of obstore for the object at ``path``, which gets ``metadata``.

        The object appears when the file is closed.
        """
        if self._store is None:
            self._store = self._make_store()
        return self._obstore.open_writer(
            self._store,
            path,
            attributes=dict(metadata),
            buffer_size=part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
        )

    def _make_store(self) -> Any:
        """Return a new ``S3Store`` of obstore, which gets the credentials that botocore finds."""
        from obstore.store import S3Store

        settings = dict(self._settings())
        credentials = settings.pop("credentials")

        def provide() -> dict[str, Any]:
            keys = credentials.get_frozen_credentials()
            expiry = datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_SECONDS)
            values = {
                "access_key_id": keys.access_key,
                "secret_access_key": keys.secret_key,
                "token": keys.token,
            }
            return {**values, "expires_at": expiry}

        store: Any = S3Store  # The type annotations of obstore demand literals in these dicts
        return store(
            self._bucket,
            config={**settings, "skip_signature": credentials is None},
            credential_provider=provide if credentials is not None else None,
            client_options={
                "allow_http": str(settings.get("endpoint", "")).startswith("http://"),
                "connect_timeout": timedelta(seconds=10),
                "timeout": timedelta(seconds=_REQUEST_SECONDS),
            },
            retry_config={
                "max_retries": _TRIES,
                "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
            },
        )


class ObstoreUpload:
    """The upload of one large object through a file of obstore.

    After an error, the parts that obstore has taken are lost, and the owner must begin another
    upload. The next call that would use the file raises ``TransientStorageError``.

    Thread safety:
        Only one method may run at a time.

    Args:
        bucket: The backend.
        writer: Opens the file.
        key: The key of the object, relative to the root.
        path: The key of the object in the bucket.
        size: The most bytes of the object.
        part_bytes: The length of every part but the last.
    """

    def __init__(
        self,
        bucket: Bucket,
        writer: ObstoreWriter,
        key: str,
        path: str,
        size: int,
        *,
        part_bytes: int,
    ) -> None:
        self._bucket, self._key, self._size, self.part_bytes = bucket, key, size, part_bytes
        self._put_id = token_hex(16)
        with bucket.translate_errors(key):
            self._file: Any = writer.open(path, part_bytes, {PUT_ID: self._put_id})
        self._early_parts: dict[int, bytes] = {}
        self._offset = 0

    def write(self, offset: int, data: memoryview) -> None:
        self._usable_file()
        if offset < self._offset:
            return  # obstore has already taken this part
        if offset > self._offset:
            self._early_parts[offset] = bytes(data)
            return
        self._send(data.cast("B"))
        while (part := self._early_parts.pop(self._offset, None)) is not None:
            self._send(memoryview(part))

    def finish(self, size: int | None = None) -> ObjectInfo:
        self._usable_file()
        self._size = check_written(self._key, self._offset, self._size, size)
        try:
            with self._bucket.translate_errors(self._key), _as_known_error():
                self._usable_file().close()
            self._file = None
        except StorageError:
            if not self._is_complete():
                self.abort()
                raise
        return ObjectInfo(key=self._key, size=self._size)

    def abort(self) -> None:
        self._early_parts.clear()
        if self._file is not None:
            self._file = None  # Do not close the file, which would make a cut object visible
            self._bucket.abort_uploads(self._key)

    def _send(self, part: memoryview) -> None:
        """Append ``part`` to the file. Abort the upload if that fails."""
        try:
            with self._bucket.translate_errors(self._key), _as_known_error():
                self._usable_file().write(part)
        except StorageError:
            self.abort()
            raise
        self._offset += part.nbytes

    def _usable_file(self) -> Any:
        """Return the file. Raise ``TransientStorageError`` if an error has ended the upload."""
        if self._file is None:
            raise TransientStorageError(self._key, "the upload broke off and must start again")
        return self._file

    def _is_complete(self) -> bool:
        """Return True if the object is complete although the last request failed, because only its
        reply was lost.

        This is so if the object has the id of the upload. A server that keeps no metadata gives
        the error, and the caller sends all again.
        """
        return self._bucket.put_id_of(self._key) == self._put_id


@contextmanager
def _as_known_error() -> Generator[None]:
    """Return a context manager that turns an ``OSError`` into a ``PermissionError`` or a
    ``ConnectionError``.

    An error of obstore's file has no code, so its text decides.
    """
    try:
        yield
    except OSError as error:
        text = str(error)
        raise (
            PermissionError(text) if _DENIAL_TEXT.search(text) else ConnectionError(text)
        ) from None
