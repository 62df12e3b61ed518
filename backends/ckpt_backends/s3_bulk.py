"""The bytes of large objects, to and from S3 straight from the memory that holds them.

It uses botocore's blocking client, with one connection for each calling thread. A part is sent in
slices of the caller's memory, and an answer is received into that memory. Nothing is copied, and
the interpreter is free while the kernel moves bytes. s3fs's client copies each part twice and moves
all parts on one thread.

A slice that does not move for ``connect_timeout`` seconds, or an answer that brings nothing for
``read_timeout`` seconds, ends that request. The next try has another connection.
"""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from ckpt.errors import StorageError

_SLICE_BYTES: Final = 256 << 10
_RECEIVE_BYTES: Final = 1 << 20


class S3Bulk:
    """Parts and ranges of one bucket.

    Thread safety: several threads may use it at the same time, but no process that was forked.
    Nothing is made before the first call.

    Args:
        config: Of botocore's ``Config``.
        client: Of ``create_client``; ``profile`` beside it is the name of a profile.
        checksums: Send a CRC of each part, which the server compares.
        payer: Added to each request.
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
        self._made: Any = None
        self._lock = threading.Lock()

    @property
    def algorithm(self) -> dict[str, str]:
        """The checksum algorithm that the start of an upload declares for its parts."""
        return {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}

    def send_part(
        self, bucket: str, key: str, upload_id: str, number: int, data: memoryview
    ) -> dict[str, Any]:
        """Send a part; returns what the end of the upload must say about it."""
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

    def receive(self, bucket: str, key: str, name: str, offset: int, out: memoryview) -> int:
        """Fill ``out`` as far as the object goes; returns how many bytes came."""
        span = f"bytes={offset}-{offset + out.nbytes - 1}"
        reply = self._client().get_object(Bucket=bucket, Key=key, Range=span, **self._payer)
        stream = reply["Body"]._raw_stream
        try:
            if offset and not reply.get("ContentRange"):
                raise StorageError(name, "the server ignores Range")
            # The response of http.client receives into our memory. That of urllib3 would copy.
            response, done = stream._fp, 0
            while done < out.nbytes and (
                count := response.readinto(out[done : done + _RECEIVE_BYTES])
            ):
                done += count
            if done < min(out.nbytes, int(reply["ContentLength"])):
                raise ConnectionError(f"the answer broke off after {done} bytes")
            if response.isclosed():  # All of it was read, so the connection can be used again
                stream.release_conn()
            return done
        finally:
            stream.close()

    def settings(self) -> dict[str, Any]:
        """Return the settings for obstore: where the bucket is, how to sign, and the
        credentials.
        """
        client = self._client()
        anonymous = self._config.get("signature_version") is not None
        style = self._config.get("s3", {}).get("addressing_style", "auto")
        amazon = ".amazonaws.com" in client.meta.endpoint_url
        named: dict[str, Any] = {
            "region": client.meta.region_name,
            "unsigned_payload": self._config.get("s3", {}).get("payload_signing_enabled") is False,
            "virtual_hosted_style_request": style == "virtual" or (style == "auto" and amazon),
            "request_payer": bool(self._payer),
        }
        if not amazon:
            named["endpoint"] = client.meta.endpoint_url
        if self._checksums:
            named["checksum_algorithm"] = "CRC64NVME"
        return {
            **named,
            "credentials": None if anonymous else client._request_signer._credentials,
        }

    def close(self) -> None:
        """Give back the connections."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        from botocore.config import Config
        from botocore.session import Session

        session = Session(profile=self._profile)
        session.register_component("data_loader", _loader())
        client = session.create_client("s3", config=Config(**self._config), **self._arguments)
        # An "Expect: 100-continue" would let each part wait for a second where the server does not
        # answer it.
        client.meta.events.register_last("before-call.s3", expect_nothing)
        return client


def bulk_of(settings: Mapping[str, Any], config: Mapping[str, Any], *, checksums: bool) -> S3Bulk:
    """Return the mover of bytes for an ``s3fs.S3FileSystem`` with these settings."""
    named = {
        "key": "aws_access_key_id",
        "secret": "aws_secret_access_key",
        "token": "aws_session_token",
    }
    client: dict[str, Any] = {
        theirs: settings[ours] for ours, theirs in named.items() if settings.get(ours) is not None
    }
    client |= {
        name: settings[name]
        for name in ("endpoint_url", "use_ssl")
        if settings.get(name) is not None
    }
    client |= settings.get("client_kwargs", {})
    config = dict(config)
    if settings.get("anon"):
        from botocore import UNSIGNED

        config["signature_version"] = UNSIGNED
    payer = {"RequestPayer": "requester"} if settings.get("requester_pays") else {}
    return S3Bulk(config, client, profile=settings.get("profile"), checksums=checksums, payer=payer)


class Body:
    """Memory as a file, whose reads return slices of it. botocore seeks to its start to send it
    again.
    """

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data.cast("B"), 0

    def __len__(self) -> int:
        return self._data.nbytes

    def read(self, size: int | None = -1) -> memoryview:
        """Return at least ``size`` bytes if that many are left.

        A caller that asks for 16 KiB at a time gets larger slices.
        """
        end = self._data.nbytes if size is None or size < 0 else self._at + max(size, _SLICE_BYTES)
        part = self._data[self._at : end]
        self._at += part.nbytes
        return part

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._data.nbytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def session_of(arguments: Mapping[str, Any]) -> Any:
    """Return a session for s3fs, which makes one that reads the description of S3 itself."""
    from aiobotocore.session import AioSession

    session = AioSession(**arguments)
    session.register_component("data_loader", _loader())
    return session


@cache
def _loader() -> Any:
    """Return the loader of all clients, which reads the description of S3 once (a tenth of a
    second).
    """
    from botocore.session import Session

    return Session().get_component("data_loader")


def expect_nothing(params: dict[str, Any], **_: object) -> None:
    """Remove the header of a request that asks whether its body may be sent."""
    params["headers"].pop("Expect", None)


def _crc32(data: memoryview) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
