"""The backend for Azure Blob Storage, over adlfs.

adlfs finds the credentials and runs the event loop. The requests are those of
``azure.storage.blob``, since the files of adlfs send their parts one after another, and its
``info`` and ``find`` make several requests. A small object is put with one request, which can have
the condition that the key has no object. A large object is sent in blocks, several at a time, and
appears when the list of its blocks is committed.

Azure itself removes blocks that are not committed within a week.
"""

from __future__ import annotations

import base64
import io
import math
import secrets as entropy
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from ckpt.errors import (
    ConfigError,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    PutUpload,
    Upload,
    check_key,
    check_limit,
    check_prefix,
    check_written,
)
from ckpt_backends.client_options import missing_extra, secrets_of
from ckpt_backends.foreign_errors import clean
from ckpt_backends.fsspec_bridge import PART_BYTES, StorageBackendOnFsspec

_MIB: Final = 1 << 20
_MOST_BLOCKS: Final = 50_000  # The bound of Azure
_CONCURRENCY: Final = 16
_SINGLE_PUT_BYTES: Final = 1 << 20
"""The most bytes that one request puts. The HTTP client sends more bytes than that in one piece,
during which it does no other work.
"""
_PAGE_KEYS: Final = 5000
"""The most keys that one request for a listing returns. It is the bound of Azure."""
_PUT_ID: Final = "ckptput"
_FOLDER_MARK: Final = "hdi_isfolder"  # The metadata of a folder in an account with real folders
_REQUEST_OPTIONS: Final[Mapping[str, object]] = {
    "connection_timeout": 10,
    "read_timeout": 60,
    "retry_total": 1,  # The pipeline retries too
}
"""The options of each request."""

T = TypeVar("T")


def open_azure(url: str, options: Mapping[str, object]) -> AzureBackend:
    """Return the backend whose root is ``abfs://container/prefix``. No request is made yet.

    Args:
        url: The root, also in the form ``abfss://container@account.dfs.core.windows.net/prefix``.
        options: The options of ``adlfs.AzureBlobFileSystem``, such as ``account_name``,
            ``account_key``, ``sas_token``, ``connection_string``, ``anon``, ``tenant_id``,
            ``client_id`` and ``client_secret``. Without these, adlfs reads the variables
            ``AZURE_STORAGE_...``, and the identity of the machine.

    Raises:
        MissingExtra: adlfs is not installed.
        ConfigError: The URL names no container, or adlfs refuses the options.
    """
    clean_url, secrets = _clean_url(url), secrets_of(options)
    try:
        from adlfs import AzureBlobFileSystem

        fs_class: Any = AzureBlobFileSystem
        settings = {**fs_class._get_kwargs_from_urls(url), **options}
        container, _, prefix = str(fs_class._strip_protocol(url)).strip("/").partition("/")
        if not container:
            raise ConfigError(f"{clean_url!r} names no container: write abfs://container/prefix")
        fs = fs_class(**settings, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise missing_extra(clean_url, error) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{clean_url!r} cannot be opened: {clean(str(error), secrets)}") from None
    return AzureBackend(fs, container, prefix, clean_url, secrets=secrets)


def _clean_url(url: str) -> str:
    """Return ``url`` for display. A name before the ``@`` is a container, and no user with a
    password.
    """
    place = url.partition("?")[0].rstrip("/")
    has_password = ":" in place.partition("://")[2]
    return clean(place) if has_password else place


class AzureBackend(StorageBackendOnFsspec):
    """A prefix of a container of Azure Blob Storage as a store.

    Each put stores a random id with the object. If the reply of a put is lost, this id tells
    whether the put has succeeded (see ``put_id_of``).

    Thread safety: several threads may call all methods at the same time. A forked process must not
    use this object.
    """

    def __init__(
        self, fs: Any, container: str, prefix: str, url: str, *, secrets: Sequence[str]
    ) -> None:
        capabilities = Capabilities(
            put_if_absent=True,
            shared=True,
            part_bytes=PART_BYTES,
            max_concurrency=_CONCURRENCY,
            takes_parts=True,
        )
        super().__init__(
            fs, f"{container}/{prefix}", url, secrets=secrets, capabilities=capabilities
        )
        self._container, self._prefix = container, f"{prefix}/" if prefix else ""

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Put an object.

        After a lost reply, the client may repeat a put that succeeded, and its condition then
        fails. So each put stores a random id in the metadata of the object. If the object has
        the id of this call, the put has succeeded.
        """
        value, put_id = b"".join(parts), entropy.token_hex(16)
        send = self._put_whole if len(value) <= _SINGLE_PUT_BYTES else self._put_blocks
        try:
            send(key, value, metadata={_PUT_ID: put_id}, if_absent=if_absent)
        except (ObjectExists, TransientStorageError):
            if not if_absent or self.put_id_of(key) != put_id:
                raise
        return ObjectInfo(key=key, size=len(value))

    def _put_whole(
        self, key: str, value: bytes, *, metadata: Mapping[str, str], if_absent: bool
    ) -> None:
        self.call(key, "upload_blob", value, overwrite=not if_absent, metadata=metadata)

    def _put_blocks(
        self, key: str, value: bytes, *, metadata: Mapping[str, str], if_absent: bool
    ) -> None:
        upload = _BlockUpload(self, key, len(value), PART_BYTES)
        for start in range(0, len(value), PART_BYTES):
            upload.write(start, memoryview(value)[start : start + PART_BYTES])
        upload.commit(metadata=metadata, if_absent=if_absent)

    def upload(self, key: str, size: int) -> Upload:
        check_key(key)
        part_bytes = max(PART_BYTES, math.ceil(size / _MOST_BLOCKS / _MIB) * _MIB)
        if size < 2 * part_bytes:
            return PutUpload(self, key, size)
        return _BlockUpload(self, key, size, part_bytes)

    def _receive(self, key: str, offset: int, out: memoryview) -> int:
        """Fill ``out`` from the byte ``offset`` of an object on, and return the number of bytes."""

        async def receive(blob: Any) -> bytes:
            stream = await blob.download_blob(offset=offset, length=out.nbytes, **_REQUEST_OPTIONS)
            return bytes(await stream.readall())

        try:
            data = self._with_blob(key, receive)
        except StorageError:
            size = self.head(key).size
            if offset < size:
                raise
            return 0  # Azure refuses a range that begins behind the end
        out[: len(data)] = data
        return len(data)

    def fetch(self, key: str, *, limit: int) -> bytes:
        async def receive(blob: Any) -> bytes:
            stream = await blob.download_blob(**_REQUEST_OPTIONS)
            check_limit(key, int(stream.size), limit)
            return bytes(await stream.readall())

        return self._with_blob(key, receive)

    def head(self, key: str) -> ObjectInfo:
        properties = self.call(key, "get_blob_properties")
        if _FOLDER_MARK in (properties.metadata or {}):
            raise ObjectNotFound(key, "not a file")
        date = properties.last_modified.timestamp()
        return ObjectInfo(key=key, size=int(properties.size), modified=date)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for blob in self._blobs(check_prefix(prefix), "list_blobs", include=["metadata"]):
            if _FOLDER_MARK not in (blob.metadata or {}):
                yield ObjectInfo(
                    key=str(blob.name).removeprefix(self._prefix),
                    size=int(blob.size),
                    modified=blob.last_modified.timestamp(),
                )

    def folders(self, prefix: str) -> Iterator[str]:
        start = check_prefix(prefix).removesuffix("/")
        start = f"{start}/" if start else ""
        for blob in self._blobs(start, "walk_blobs", delimiter="/"):
            if str(blob.name).endswith("/"):
                yield str(blob.name).removeprefix(self._prefix + start).rstrip("/")

    def delete(self, key: str) -> None:
        with suppress(ObjectNotFound):
            self.call(key, "delete_blob")

    def call(self, key: str, method: str, *arguments: object, **options: object) -> Any:
        """Make one request about the object ``key`` and return the answer. Errors are raised as
        storage errors.

        Args:
            key: The key of the object.
            method: The name of the method of ``azure.storage.blob.aio.BlobClient``.
            *arguments: The arguments of the method.
            **options: More arguments of the method.
        """
        return self._with_blob(
            key, lambda blob: getattr(blob, method)(*arguments, **options, **_REQUEST_OPTIONS)
        )

    def _with_blob(self, key: str, work: Callable[[Any], Awaitable[T]]) -> T:
        """Return the result of ``work``, which gets the client of the object ``key``."""
        name = self._prefix + check_key(key)

        async def request() -> T:
            async with self._fs.service_client.get_blob_client(self._container, name) as blob:
                return await work(blob)

        return self._run(key, request)

    def _blobs(self, prefix: str, method: str, **options: object) -> Iterator[Any]:
        """Yield the entries of a listing of the keys below the root that start with ``prefix``. A
        page is asked for when the entries of the page before it have been taken.
        """
        start = self._prefix + prefix
        token: str | None = None

        async def request_page() -> tuple[Sequence[Any], str | None]:
            async with self._fs.service_client.get_container_client(self._container) as container:
                listing = getattr(container, method)(
                    name_starts_with=start,
                    results_per_page=_PAGE_KEYS,
                    **options,
                    **_REQUEST_OPTIONS,
                )
                pages = listing.by_page(continuation_token=token)
                entries = [entry async for entry in await anext(pages)]
                return entries, pages.continuation_token

        while True:
            entries, token = self._run(prefix, request_page)
            yield from entries
            if not token:
                return

    def _run(self, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``request``, which runs on the event loop of fsspec. Errors are
        raised as storage errors about ``key``.
        """
        from fsspec.asyn import sync

        try:
            with self.translate_errors(key):
                return cast(T, sync(self._fs.loop, request))
        except ObjectNotFound as error:
            if "ContainerNotFound" in error.detail:
                raise StorageError(
                    key, f"there is no container {self._container!r}: create it, or correct the URL"
                ) from None
            raise

    def put_id_of(self, key: str) -> str:
        """Return the id that a put or an upload stored in the metadata of the object, or '' if
        it cannot be read.
        """
        with suppress(StorageError):
            metadata = self.call(key, "get_blob_properties").metadata
            return str((metadata or {}).get(_PUT_ID, ""))
        return ""


class _BlockUpload:
    """The upload of a large object in blocks.

    ``_block_sizes`` maps the offset of each block that was sent to its size. ``_put_id`` is part of
    the names of the blocks. It is also stored with the object, and so tells which upload has made
    the object.

    Thread safety: several threads may call ``write`` at the same time. See ``Upload`` for the other
    methods.
    """

    def __init__(self, backend: AzureBackend, key: str, size: int, part_bytes: int) -> None:
        self._backend, self._key, self._size = backend, key, size
        self.part_bytes = part_bytes
        self._put_id = entropy.token_hex(8)  # Blocks of another upload have other names
        self._block_sizes: dict[int, int] = {}

    def write(self, offset: int, data: memoryview) -> None:
        if offset + data.nbytes > self._size:
            raise StorageError(
                self._key, f"bytes {offset} to {offset + data.nbytes} are not part of this upload"
            )
        self._backend.call(
            self._key,
            "stage_block",
            self._block_name(offset),
            io.BytesIO(data.cast("B")),
            length=data.nbytes,
        )
        self._block_sizes[offset] = data.nbytes

    def finish(self, size: int | None = None) -> ObjectInfo:
        size = check_written(self._key, sum(self._block_sizes.values()), self._size, size)
        try:
            self.commit(metadata={_PUT_ID: self._put_id})
        except StorageError:
            # If only the reply was lost, the object has the id of this upload.
            if self._backend.put_id_of(self._key) != self._put_id:
                raise
        return ObjectInfo(key=self._key, size=size)

    def commit(self, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False) -> None:
        """Make the blocks written so far the object, with ``metadata``."""
        from azure.core import MatchConditions

        condition = {"match_condition": MatchConditions.IfMissing} if if_absent else {}
        blocks = [self._block_name(offset) for offset in sorted(self._block_sizes)]
        self._backend.call(self._key, "commit_block_list", blocks, metadata=metadata, **condition)

    def abort(self) -> None:
        """Do nothing. Azure has no request that removes the blocks, and removes them by itself."""

    def _block_name(self, offset: int) -> str:
        """Return the name of a block. All names of an object must have the same length."""
        return base64.b64encode(f"{self._put_id}{offset:016x}".encode()).decode()
