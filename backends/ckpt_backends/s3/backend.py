"""The backend for Amazon S3 and compatible stores.

A large object is written with a multipart upload. Each thread of the pipeline sends one part at a
time straight from the caller's memory (see ``s3.bulk_client``). ``pipe_file`` and ``open`` of s3fs
are not used for large objects, since they hold hundreds of MiB and send parts in batches. s3fs
makes the small requests, on the one thread of fsspec's event loop. If the reply of a request that
creates an object is lost, the backend asks the store whether the object exists. For this, each
object gets the random id of its put or upload as metadata.

The class ``UnfinishedUploads`` lists and aborts the uploads that killed jobs have left.
"""

from __future__ import annotations

import math
import os
import secrets as entropy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from ckpt.errors import (
    AccessDenied,
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
    UnfinishedWrite,
    Upload,
    check_key,
    check_prefix,
    check_written,
    is_there,
)
from ckpt_backends.client_options import (
    BucketPrefix,
    missing_extra,
    parse_bucket_url,
    secrets_of,
)
from ckpt_backends.foreign_errors import clean
from ckpt_backends.fsspec_bridge import PART_BYTES, StorageBackendOnFsspec
from ckpt_backends.jitter import separate_jitter_of_botocore
from ckpt_backends.s3.bulk_client import (
    S3BulkClient,
    bulk_client_of,
    remove_expect_header,
    session_of,
)
from ckpt_backends.s3.obstore import ObstoreUpload, ObstoreWriter
from ckpt_backends.s3.options import PUT_ID, check_options
from ckpt_backends.s3.unfinished_uploads import UnfinishedUploads

_MIB: Final = 1 << 20
_MOST_PARTS: Final = 10_000
_CONCURRENCY: Final = 16
_ABANDONED_AFTER_HOURS: Final = 24.0
_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CLIENT_CONFIG: Final[Mapping[str, object]] = {
    "connect_timeout": 10,
    # On a slow network, the buffers of the system still hold megabytes of a part when botocore has
    # written its last byte. The answer arrives only after these megabytes are sent.
    "read_timeout": 60,
    "retries": {"max_attempts": 3, "mode": "standard"},
    "max_pool_connections": 2 * _CONCURRENCY,
    # Many servers other than AWS refuse or damage uploads with the newer default checksums. The
    # manifest holds checksums anyway.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


def open_s3(url: str, options: Mapping[str, object]) -> S3Backend:
    """Return the backend whose root is ``s3://bucket/prefix``. No request is made yet.

    If credentials and settings are not given, botocore takes them from the environment, from the
    configuration files of AWS, or from the role of the instance.

    Args:
        url: The root. Its query may set options, as in ``?endpoint_url=...&region=...``.
        options: The following options, and those of ``s3fs.S3FileSystem``:

            * ``endpoint_url``, ``region``: the server.
            * ``key``, ``secret``, ``token``, ``profile``, ``anon``: the credentials.
            * ``put_if_absent`` (bool, default true). False is for servers that ignore
              ``If-None-Match``, such as ``rclone serve s3``.
            * ``client`` ("botocore", the default, or "obstore"): the client that uploads large
              objects.
            * ``checksums`` (bool): whether a CRC-32 is sent with each part, for the server to
              compare. The default is true unless the options, ``AWS_ENDPOINT_URL_S3`` or
              ``AWS_ENDPOINT_URL`` name a server that is not one of Amazon.
            * ``abort_uploads_after_hours`` (default 24): unfinished uploads of ranks' files below
              this root that are older than this are aborted at the first large upload of rank 0.
              The value 0 disables this.
            * ``config_kwargs``: arguments of botocore's ``Config``.

    Raises:
        MissingExtra: s3fs is not installed, or obstore if ``client`` names it.
        ConfigError: The URL names no bucket, or an option is unknown or has a wrong value.
    """
    bucket_prefix, settings = parse_bucket_url(url, options, scheme="s3")
    clean_url, secrets = clean(url.partition("?")[0]), secrets_of(settings)
    put_if_absent = _is_true(settings.pop("put_if_absent", True))
    client = str(settings.pop("client", "botocore"))
    if client not in ("botocore", "obstore"):
        raise ConfigError(f"{clean_url!r}: the option client takes 'botocore' or 'obstore'")
    abandoned_after_hours = _hours(
        settings.pop("abort_uploads_after_hours", _ABANDONED_AFTER_HOURS), clean_url
    )
    try:
        fs, bulk_client = _clients(settings)
        writer = (
            ObstoreWriter(bucket_prefix.bucket, bulk_client.settings)
            if client == "obstore"
            else None
        )
    except ImportError as error:
        raise missing_extra(clean_url, error) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{clean_url!r} cannot be opened: {clean(str(error), secrets)}") from None
    return S3Backend(
        S3Clients(fs, bulk_client, writer),
        bucket_prefix,
        secrets=secrets,
        put_if_absent=put_if_absent,
        abandoned_after_hours=abandoned_after_hours,
    )


def _hours(value: object, clean_url: str) -> float:
    """Return the value of the option ``abort_uploads_after_hours``.

    Raises:
        ConfigError: The value is not a number of hours.
    """
    try:
        hours = float(str(value))
    except ValueError:
        hours = -1.0  # Is refused below
    if not 0 <= hours < math.inf:
        raise ConfigError(
            f"{clean_url!r}: abort_uploads_after_hours={value!r}: give a number of hours, such as "
            "24"
        )
    return hours


def _clients(settings: dict[str, Any]) -> tuple[Any, S3BulkClient]:
    """Return the file system of s3fs for small requests, and the client for the bytes of large
    objects. Both have the same settings.
    """
    import s3fs

    separate_jitter_of_botocore()
    if "session" in settings:
        raise ValueError("a session cannot be shared: give profile, or key, secret and token")
    check_options(settings)
    endpoint = _endpoint(settings)
    config: dict[str, Any] = {**_CLIENT_CONFIG, **settings.pop("config_kwargs", {})}
    if not endpoint.startswith("http://"):
        # With TLS, the connection itself detects damaged bytes. Over http, only a signed SHA-256 of
        # the body does.
        config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    checksums = _is_true(settings.pop("checksums", _is_amazon(endpoint)))
    client_arguments: dict[str, Any] = dict(settings.pop("client_kwargs", {}))
    if region := settings.pop("region", None):
        client_arguments["region_name"] = region
    settings["client_kwargs"] = client_arguments
    fs = s3fs.S3FileSystem(
        **settings, config_kwargs=config, use_listings_cache=False, skip_instance_cache=True
    )
    fs.session = session_of(fs.kwargs)
    fs.retries = 1  # botocore and the pipeline already retry requests
    return fs, bulk_client_of(settings, config, checksums=checksums)


def _endpoint(settings: Mapping[str, Any]) -> str:
    """Return the URL of the server that the options or the environment name; '' if they name none.

    Configuration files of AWS are not read.
    """
    client = settings.get("client_kwargs")
    endpoint = settings.get("endpoint_url") or (
        client.get("endpoint_url") if isinstance(client, Mapping) else None
    )
    variables = (os.environ.get(name) for name in _ENDPOINT_VARIABLES)  # noqa: TID251
    return str(endpoint or next(filter(None, variables), ""))


def _is_amazon(endpoint: str) -> bool:
    host = (urlsplit(endpoint).hostname or "").removesuffix(".cn")
    return not endpoint or host.endswith(".amazonaws.com")


def _is_true(value: object) -> bool:
    return str(value).lower() not in ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class S3Clients:
    """The clients of the server.

    Attributes:
        fs: The file system of s3fs, for small requests.
        bulk_client: Sends and receives the bytes of large objects.
        writer: Uploads large objects instead of ``bulk_client`` if the option ``client`` is
            "obstore"; else None.
    """

    fs: Any
    bulk_client: S3BulkClient
    writer: ObstoreWriter | None


@contextmanager
def _listing_errors() -> Generator[None]:
    """Add to the error of a listing that the credentials do not permit which permission it needs.

    Servers of S3 do not say so.
    """
    try:
        yield
    except AccessDenied as error:
        if "AccessDenied" not in error.detail:  # The credentials themselves are refused
            raise
        raise AccessDenied(
            error.key,
            f"{error.detail}; a job lists its steps, so allow s3:ListBucket on the bucket",
        ) from None


class S3Backend(StorageBackendOnFsspec):
    """A prefix of a bucket of S3 as a store.

    Thread safety: several threads may call all methods at the same time. A forked process must not
    use this object.
    """

    def __init__(
        self,
        clients: S3Clients,
        bucket_prefix: BucketPrefix,
        *,
        secrets: Sequence[str],
        put_if_absent: bool,
        abandoned_after_hours: float = _ABANDONED_AFTER_HOURS,
    ) -> None:
        capabilities = Capabilities(
            put_if_absent=put_if_absent,
            shared=True,
            part_bytes=PART_BYTES,
            max_concurrency=_CONCURRENCY,
            parallel_parts=clients.writer is None,
            takes_parts=True,
        )
        super().__init__(
            clients.fs,
            bucket_prefix.root,
            bucket_prefix.url,
            secrets=secrets,
            capabilities=capabilities,
        )
        self._bucket, self._prefix = (
            bucket_prefix.bucket,
            f"{bucket_prefix.prefix}/" if bucket_prefix.prefix else "",
        )
        self._bulk_client, self._obstore_writer = clients.bulk_client, clients.writer
        self._client_without_header: object = None
        age = timedelta(hours=abandoned_after_hours)
        self._unfinished_uploads = UnfinishedUploads(self._call_bucket, self._prefix, age)

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        value = b"".join(parts)
        if not if_absent:
            self.call(key, "put_object", Body=value)
        else:
            # This check also protects an existing object on servers that ignore the condition.
            if is_there(self, key):
                raise ObjectExists(key)
            if self.capabilities.put_if_absent:
                self._put_if_none(key, value)
            else:
                self._put_and_compare(key, value)
        return ObjectInfo(key=key, size=len(value))

    def upload(self, key: str, size: int) -> Upload:
        part_bytes = max(PART_BYTES, math.ceil(size / _MOST_PARTS / _MIB) * _MIB)
        if size < 2 * part_bytes:
            check_key(key)
            return PutUpload(self, key, size)
        self._unfinished_uploads.abort_abandoned_once(key)
        if self._obstore_writer is not None:
            path = self._prefix + check_key(key)
            return ObstoreUpload(self, self._obstore_writer, key, path, size, part_bytes=part_bytes)
        put_id = entropy.token_hex(16)
        metadata = {PUT_ID: put_id}
        reply = self.call(
            key,
            "create_multipart_upload",
            Metadata=metadata,
            **self._bulk_client.checksum_arguments,
        )
        upload_id = UploadId(reply["UploadId"], put_id)
        return _S3Upload(self, key, size, upload_id=upload_id, part_bytes=part_bytes)

    def _receive(self, key: str, offset: int, out: memoryview) -> int:
        bucket_key = self._prefix + check_key(key)
        return self._bulk_client.receive(self._bucket, bucket_key, key, offset, out)

    def fetch(self, key: str, *, limit: int) -> bytes:
        bucket_key = self._prefix + check_key(key)
        with self.translate_errors(key):
            return self._bulk_client.fetch(self._bucket, bucket_key, key, limit)

    def head(self, key: str) -> ObjectInfo:
        reply = self.call(key, "head_object")
        date = reply["LastModified"].timestamp()
        return ObjectInfo(key=key, size=int(reply["ContentLength"]), modified=date)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(check_prefix(prefix)):
            for entry in page.get("Contents", ()):
                key = str(entry["Key"]).removeprefix(self._prefix)
                if key and not key.endswith("/"):  # Consoles make such objects for empty folders
                    yield ObjectInfo(
                        key=key, size=int(entry["Size"]), modified=entry["LastModified"].timestamp()
                    )

    def folders(self, prefix: str) -> Iterator[str]:
        start = check_prefix(prefix).removesuffix("/")
        start = f"{start}/" if start else ""
        for page in self._pages(start, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                yield str(entry["Prefix"]).removeprefix(self._prefix + start).rstrip("/")

    def delete(self, key: str) -> None:
        with suppress(ObjectNotFound):
            self.call(key, "delete_object")

    def close(self) -> None:
        with suppress(Exception):  # A failed close needs no further action
            self._bulk_client.close()
        with suppress(Exception):
            self._fs.close_session(self._fs.loop, self._fs._s3)

    def call(self, key: str, method: str, **arguments: object) -> Any:
        """Make one request about the object ``key`` and return the answer. Errors are raised as
        storage errors.

        Args:
            key: The key of the object.
            method: The name of the request, such as "head_object".
            **arguments: The arguments of the request except for the bucket and the key.
        """
        check_key(key)
        with self.translate_errors(key):
            if method == "put_object":
                self._omit_expect_header()
            return self._fs.call_s3(
                method, Bucket=self._bucket, Key=self._prefix + key, **arguments
            )

    def _omit_expect_header(self) -> None:
        """Keep puts of s3fs from sending the header ``Expect: 100-continue``. With this header,
        aiohttp would wait without a time limit for the server's answer to the header.
        """
        client = self._fs.connect()
        if client is not self._client_without_header:
            client.meta.events.register_last("before-call.s3", remove_expect_header)
            self._client_without_header = client

    def abort_uploads(self, key: str) -> None:
        """Abort all unfinished uploads of exactly this key. Never raise."""
        with suppress(StorageError):
            for upload in self._unfinished_uploads.list(key):
                if upload.key == key:
                    self._unfinished_uploads.abort(upload)

    def unfinished_writes(self, prefix: str) -> Iterator[UnfinishedWrite]:
        """Yield the unfinished uploads to keys that start with ``prefix``. Yield none if the option
        ``abort_uploads_after_hours`` is 0.
        """
        if self._unfinished_uploads.max_age:
            yield from self._unfinished_uploads.list(check_prefix(prefix))

    def discard(self, write: UnfinishedWrite) -> None:
        self._unfinished_uploads.abort(write)

    def _call_bucket(self, method: str, **arguments: object) -> Any:
        """Make one request about the bucket. Errors are raised as storage errors."""
        with self.translate_errors(""):
            return self._fs.call_s3(method, Bucket=self._bucket, **arguments)

    def send_part(self, key: str, upload_id: str, number: int, data: memoryview) -> dict[str, Any]:
        """Send the part ``number`` of an upload, counted from 1. Return its entry for the list of
        parts in ``complete_multipart_upload``.
        """
        with self.translate_errors(key):
            return self._bulk_client.send_part(
                self._bucket, self._prefix + key, upload_id, number, data
            )

    def _put_if_none(self, key: str, value: bytes, *, repeats: bool = True) -> None:
        """Put an object with the condition that the key has none.

        After a lost reply, the client may repeat a put that succeeded, and the condition then
        fails. So each put stores a random id in the metadata of the object. If the object has the
        id of this call, the put has succeeded. With ``repeats``, the put is repeated once if
        the server reports a conflict with a concurrent request.
        """
        put_id = entropy.token_hex(16)
        try:
            self.call(key, "put_object", Body=value, IfNoneMatch="*", Metadata={PUT_ID: put_id})
        except ObjectExists:
            if self.put_id_of(key) != put_id:
                raise
        except TransientStorageError as error:
            if self.put_id_of(key) == put_id:
                return
            if not (repeats and "ConditionalRequestConflict" in error.detail):
                raise
            self._put_if_none(key, value, repeats=False)

    def _put_and_compare(self, key: str, value: bytes) -> None:
        """Put an object, read it back, and raise ``ObjectExists`` if it has another value.

        This is for servers without conditional puts. If two processes put an object at the same
        time, the later put replaces the earlier one. The process with the earlier put raises the
        error, unless it has read its own value before.
        """
        self.call(key, "put_object", Body=value)
        data = bytearray(self.head(key).size)
        self.read_into(key, 0, memoryview(data))
        if bytes(data) != value:
            raise ObjectExists(key, "written by another at the same time")

    def put_id_of(self, key: str) -> str:
        """Return the random id that a put or an upload has stored in the metadata of the object.

        Return '' if the object has no id, or if its metadata cannot be read.
        """
        with suppress(StorageError):
            metadata = self.call(key, "head_object").get("Metadata", {})
            return next(
                (str(value) for name, value in metadata.items() if name.lower() == PUT_ID), ""
            )
        return ""

    def _pages(self, prefix: str, **arguments: object) -> Iterator[Any]:
        """Yield the pages of a listing of the keys below the root that start with ``prefix``."""
        token: dict[str, object] = {}
        while True:
            with _listing_errors(), self.translate_errors(prefix):
                page = self._fs.call_s3(
                    "list_objects_v2",
                    Bucket=self._bucket,
                    Prefix=self._prefix + prefix,
                    **arguments,
                    **token,
                )
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}


@dataclass(frozen=True, slots=True)
class UploadId:
    """The identity of a multipart upload.

    Attributes:
        name: The name that the server has given to the upload.
        put_id: The random id in the metadata of the object that the upload makes.
    """

    name: str
    put_id: str


class _S3Upload:
    """A multipart upload.

    Thread safety: several threads may call ``write`` at the same time. See ``Upload`` for the other
    methods.
    """

    def __init__(
        self, backend: S3Backend, key: str, size: int, *, upload_id: UploadId, part_bytes: int
    ) -> None:
        self._backend, self._key, self._size = backend, key, size
        self._id, self.part_bytes = upload_id, part_bytes
        self._parts: dict[int, tuple[dict[str, Any], int]] = {}
        """The entry of each part for ``complete_multipart_upload`` and its bytes, by its number."""

    def write(self, offset: int, data: memoryview) -> None:
        number, remainder = divmod(offset, self.part_bytes)
        if remainder or offset + data.nbytes > self._size:
            raise StorageError(
                self._key, f"bytes {offset} to {offset + data.nbytes} are not part of this upload"
            )
        try:
            part = self._backend.send_part(self._key, self._id.name, number + 1, data)
        except ObjectNotFound as error:
            raise self._lost_upload_error(error) from error
        self._parts[number + 1] = (part, data.nbytes)

    def finish(self, size: int | None = None) -> ObjectInfo:
        total = sum(nbytes for _, nbytes in self._parts.values())
        size = check_written(self._key, total, self._size, size)
        parts = [part for _, (part, _) in sorted(self._parts.items())]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        except StorageError as error:
            if not self._is_complete():
                if isinstance(error, ObjectNotFound):
                    raise self._lost_upload_error(error) from error
                raise
        return ObjectInfo(key=self._key, size=size)

    def abort(self) -> None:
        with suppress(StorageError):
            self._call("abort_multipart_upload")

    def _lost_upload_error(self, error: ObjectNotFound) -> TransientStorageError:
        """Return the error for an upload that the server does not know, because the server was
        restarted or the upload was aborted.

        The parts of the upload are lost, and the caller may send the whole object again.
        """
        return TransientStorageError(
            self._key,
            f"the server has forgotten this upload: it must be sent again ({error.detail})",
        )

    def _is_complete(self) -> bool:
        """Return True if the upload was completed although the request failed, because only its
        reply was lost.

        This is so if the server no longer knows the upload, and the object has the id of the
        upload. A server that keeps no metadata gives the error, and the caller sends all again.
        """
        with suppress(StorageError):
            try:
                self._call("list_parts")
            except ObjectNotFound:
                return self._backend.put_id_of(self._key) == self._id.put_id
        return False

    def _call(self, method: str, **arguments: object) -> None:
        """Make one request about this upload."""
        self._backend.call(self._key, method, UploadId=self._id.name, **arguments)
