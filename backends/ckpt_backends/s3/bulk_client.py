"""The transfer of large objects to and from S3, without copies in this process.

This module uses the blocking client of botocore, with one connection for each calling thread. A
part is sent in slices of the caller's memory, and a range of an object is received into the
caller's memory. The GIL is released while the kernel moves bytes. The client of s3fs would copy
each part twice, and would move all parts on one thread.

A request fails if a slice is not sent within ``connect_timeout`` seconds, or if no bytes of the
answer arrive for ``read_timeout`` seconds. The retry uses another connection.
"""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from ckpt.errors import StorageError
from ckpt.storage.api import check_limit

_SLICE_BYTES: Final = 256 << 10
_RECEIVE_BYTES: Final = 1 << 20


class S3BulkClient:
    """A client that sends the parts of uploads, and receives ranges of objects.

    The client of botocore is made when it is first needed.

    Thread safety: several threads may call all methods at the same time. A forked process must not
    use this object.

    Args:
        config: The arguments of botocore's ``Config``.
        client: The arguments of botocore's ``Session.create_client``.
        profile: The name of the profile in the configuration files of AWS; None for the default.
        checksums: True if a CRC-32 is sent with each part, for the server to compare.
        payer: The arguments that are added to each request for a bucket whose requester pays; empty
            for other buckets.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        client: Mapping[str, Any],
        *,
        profile: str | None,
        checksums: bool,
        payer: Mapping[str, str],
    ) -> None:
        self._config, self._arguments, self._profile = dict(config), dict(client), profile
        self._payer = dict(payer)
        self._checksums = checksums
        self._made_client: Any = None
        self._lock = threading.Lock()

    @property
    def checksum_arguments(self) -> dict[str, str]:
        """The arguments of ``create_multipart_upload`` that declare the checksums of the parts."""
        return {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}

    def send_part(
        self, bucket: str, key: str, upload_id: str, number: int, data: memoryview
    ) -> dict[str, Any]:
        """Send the part ``number`` of an upload, counted from 1. Return its entry for the list of
        parts in ``complete_multipart_upload``.
        """
        checksum = {"ChecksumCRC32": _crc32(data)} if self._checksums else {}
        reply = self._client().upload_part(
            Bucket=bucket,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=Body(data),
            **checksum,
            **self._payer,
        )
        return {"PartNumber": number, "ETag": reply["ETag"], **checksum}

    def receive(
        self, bucket: str, key: str, relative_key: str, offset: int, out: memoryview
    ) -> int:
        """Fill ``out`` with the bytes of an object from ``offset`` on.

        Return the number of bytes, which is less than the length of ``out`` if the object ends
        before.

        Args:
            bucket: The name of the bucket.
            key: The key of the object in the bucket.
            relative_key: The key of the object relative to the root, for errors.
            offset: The first byte to read.
            out: The memory to fill.
        """
        span = f"bytes={offset}-{offset + out.nbytes - 1}"
        with self._object(bucket, key, Range=span) as reply:
            if offset and not reply.get("ContentRange"):
                raise StorageError(relative_key, "the server ignores Range")
            return _fill(reply, out)

    def fetch(self, bucket: str, key: str, relative_key: str, limit: int) -> bytes:
        """Return all bytes of an object. ``relative_key`` is its key relative to the root, for
        errors.

        Raises:
            ManifestCorrupt: The object has more than ``limit`` bytes.
        """
        with self._object(bucket, key) as reply:
            size = int(reply["ContentLength"])
            check_limit(relative_key, size, limit)
            out = bytearray(size)
            _fill(reply, memoryview(out))
            return bytes(out)

    @contextmanager
    def _object(self, bucket: str, key: str, **arguments: str) -> Generator[dict[str, Any]]:
        """Return a context manager for the reply to a request for an object, which closes it."""
        reply = self._client().get_object(Bucket=bucket, Key=key, **arguments, **self._payer)
        try:
            yield reply
        finally:
            reply["Body"]._raw_stream.close()

    def settings(self) -> dict[str, Any]:
        """Return the settings of obstore's ``S3Store`` that correspond to this client, and the
        entry ``credentials``.

        The entry ``credentials`` is not a setting of ``S3Store``. Its value is the credentials
        object of botocore, or None if requests are not signed.
        """
        client = self._client()
        anonymous = self._config.get("signature_version") is not None
        style = self._config.get("s3", {}).get("addressing_style", "auto")
        amazon = ".amazonaws.com" in client.meta.endpoint_url
        settings: dict[str, Any] = {
            "region": client.meta.region_name,
            "unsigned_payload": self._config.get("s3", {}).get("payload_signing_enabled") is False,
            "virtual_hosted_style_request": style == "virtual" or (style == "auto" and amazon),
            "request_payer": bool(self._payer),
        }
        if not amazon:
            settings["endpoint"] = client.meta.endpoint_url
        if self._checksums:
            settings["checksum_algorithm"] = "CRC64NVME"
        return {
            **settings,
            "credentials": None if anonymous else client._request_signer._credentials,
        }

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        with self._lock:
            client, self._made_client = self._made_client, None
        if client is not None:
            client.close()

    def _client(self) -> Any:
        with self._lock:
            if self._made_client is None:
                self._made_client = self._make_client()
            return self._made_client

    def _make_client(self) -> Any:
        """Return a new client of botocore."""
        from botocore.config import Config
        from botocore.session import Session

        session = Session(profile=self._profile)
        session.register_component("data_loader", _loader())
        client = session.create_client("s3", config=Config(**self._config), **self._arguments)
        # With the header "Expect: 100-continue", each part would wait for a second if the server
        # does not answer the header.
        client.meta.events.register_last("before-call.s3", remove_expect_header)
        return client


def bulk_client_of(
    settings: Mapping[str, Any], config: Mapping[str, Any], *, checksums: bool
) -> S3BulkClient:
    """Return a client with the same settings as an ``s3fs.S3FileSystem``.

    Args:
        settings: The options of ``s3fs.S3FileSystem``.
        config: The arguments of botocore's ``Config``.
        checksums: See `S3BulkClient`.
    """
    names = {
        "key": "aws_access_key_id",
        "secret": "aws_secret_access_key",
        "token": "aws_session_token",
    }
    client_arguments: dict[str, Any] = {
        argument: settings[option]
        for option, argument in names.items()
        if settings.get(option) is not None
    }
    client_arguments |= {
        name: settings[name]
        for name in ("endpoint_url", "use_ssl")
        if settings.get(name) is not None
    }
    client_arguments |= settings.get("client_kwargs", {})
    config = dict(config)
    if settings.get("anon"):
        from botocore import UNSIGNED

        config["signature_version"] = UNSIGNED
    payer = {"RequestPayer": "requester"} if settings.get("requester_pays") else {}
    return S3BulkClient(
        config, client_arguments, profile=settings.get("profile"), checksums=checksums, payer=payer
    )


def _fill(reply: Mapping[str, Any], out: memoryview) -> int:
    """Fill ``out`` with the body of a reply, which may be shorter, and return the number of bytes.

    Raises:
        ConnectionError: The body has ended before its end.
    """
    # The response of http.client can receive into ``out``. That of urllib3 would copy.
    stream = reply["Body"]._raw_stream
    response, total = stream._fp, 0
    while total < out.nbytes and (count := response.readinto(out[total : total + _RECEIVE_BYTES])):
        total += count
    if total < min(out.nbytes, int(reply["ContentLength"])):
        raise ConnectionError(f"the answer broke off after {total} bytes")
    if response.isclosed():  # The whole answer was read, so the connection is reusable
        stream.release_conn()
    return total


class Body:
    """A readable file over memory, as the body of a request. Reads return slices of this memory.

    botocore seeks to the start to send the body again.
    """

    def __init__(self, data: memoryview) -> None:
        self._data, self._offset = data.cast("B"), 0

    def __len__(self) -> int:
        return self._data.nbytes

    def read(self, size: int | None = -1) -> memoryview:
        """Return the next bytes: all of them if ``size`` is negative or None, else at least
        ``size`` bytes if that many remain.

        A caller that asks for 16 KiB at a time gets larger slices, which are sent faster.
        """
        end = (
            self._data.nbytes
            if size is None or size < 0
            else self._offset + max(size, _SLICE_BYTES)
        )
        part = self._data[self._offset : end]
        self._offset += part.nbytes
        return part

    def seek(self, offset: int, whence: int = 0) -> int:
        self._offset = offset + (0, self._offset, self._data.nbytes)[whence]
        return self._offset

    def tell(self) -> int:
        return self._offset


def session_of(arguments: Mapping[str, Any]) -> Any:
    """Return a session for s3fs that shares botocore's description of the S3 API with the other
    clients.

    A session that s3fs makes itself would read the description again. ``arguments`` are those of
    ``AioSession``.
    """
    from aiobotocore.session import AioSession

    session = AioSession(**arguments)
    session.register_component("data_loader", _loader())
    return session


@cache
def _loader() -> Any:
    """Return the loader of botocore that all clients share, so that botocore's description of the
    S3 API is read only once, which takes a tenth of a second.
    """
    from botocore.session import Session

    return Session().get_component("data_loader")


def remove_expect_header(params: dict[str, Any], **_: object) -> None:
    """Remove the header ``Expect`` of a request, so that the client sends the body without asking
    the server first. This is a handler of botocore's event ``before-call``.
    """
    params["headers"].pop("Expect", None)


def _crc32(data: memoryview) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
