"""The backend for Google Cloud Storage, over gcsfs.

A small object is put with one request. The request can have the condition that the key has no
object. A large object is written by one resumable upload.
"""

from __future__ import annotations

import logging
import os
import secrets as entropy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any, Final

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
    check_prefix,
)
from ckpt_backends.client_options import (
    BucketPrefix,
    missing_extra,
    parse_bucket_url,
    secrets_of,
)
from ckpt_backends.foreign_errors import clean
from ckpt_backends.fsspec_bridge import PART_BYTES, StorageBackendOnFsspec, modified_of
from ckpt_backends.gcs.upload import ResumableUpload
from ckpt_backends.jitter import separate_jitter_of_gcsfs

_PUT_ID: Final = "ckpt-put"
_ONE_CHUNK_BYTES: Final = 1 << 62  # A size of chunks that makes gcsfs send one request
_METADATA_HOST: Final = "169.254.169.254"  # Gives a virtual machine of Google its identity
_METADATA_SECONDS: Final = 2.0
_TRIES: Final = 3
_PAGE_KEYS: Final = 1000
"""The most keys that one request for a listing returns. It is the bound of Google."""


def open_gcs(url: str, options: Mapping[str, object]) -> GCSBackend:
    """Return the backend whose root is ``gs://bucket/prefix``.

    The bucket is not contacted yet. The search for credentials may contact Google's metadata
    server.

    Args:
        url: The root. Its query may be ``?endpoint_url=...``, the address of an emulator.
        options: ``token``, ``project``, ``endpoint_url``, and all other options of
            ``gcsfs.GCSFileSystem``.

    Raises:
        MissingExtra: gcsfs is not installed.
        ConfigError: The URL names no bucket, there are no credentials, or gcsfs refuses the
            options.
    """
    bucket_prefix, settings = parse_bucket_url(url, options, scheme="gs")
    clean_url, secrets = clean(url.partition("?")[0]), secrets_of(settings)
    try:
        fs = _file_system(settings)
    except ImportError as error:
        raise missing_extra(clean_url, error) from error
    except ConfigError as error:
        raise ConfigError(f"{clean_url!r} cannot be opened: {error}") from None
    except Exception as error:  # noqa: BLE001
        # google-auth may raise anything for a missing or broken credential.
        raise ConfigError(
            f"{clean_url!r} cannot be opened: {clean(f'{type(error).__name__}: {error}', secrets)}"
        ) from None
    return GCSBackend(fs, bucket_prefix, secrets=secrets)


def _file_system(settings: dict[str, Any]) -> Any:
    """Return the file system of gcsfs for these options, with fewer retries than by default."""
    from gcsfs.retry import retry_request

    separate_jitter_of_gcsfs()
    # gcsfs itself reads this variable.
    emulator = settings.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")  # noqa: TID251
    if emulator:
        # The default class of gcsfs asks for the storage layout of the bucket by gRPC. An emulator
        # does not answer this, and each request waits 20 to 60 s. gcsfs reads its switch
        # GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT only when it is first imported, which other code may
        # have done.
        from gcsfs.core import GCSFileSystem
    else:
        from gcsfs import GCSFileSystem

        if settings.get("token") is None:
            settings = {**settings, "token": _find_credentials()}
    # gcsfs logs the traceback of each failed request. Without this handler, Python would print it
    # to stderr in a process that has not configured logging.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    fs = GCSFileSystem(**settings, use_listings_cache=False, skip_instance_cache=True)
    # By default gcsfs tries six times, which takes half a minute. The pipeline retries too.
    # ``__wrapped__`` is the method without the decorator of gcsfs that retries.
    request: Any = GCSFileSystem._request
    retry: Any = retry_request
    fs._request = partial(retry(retries=_TRIES)(request.__wrapped__), fs)
    return fs


def _find_credentials() -> str | None:
    """Return the value of the option ``token`` of gcsfs for the credentials of this machine.

    The result is None, the default of the option, if the only credentials are those that an older
    gcsfs stored in a file. On a machine without any credentials, the default would make gcsfs try
    for 20 s to reach a metadata server, and then continue without credentials.

    Raises:
        ConfigError: No credentials were found.
    """
    from google.auth import _cloud_sdk, environment_vars

    sdk: Any = _cloud_sdk
    path = os.environ.get(environment_vars.CREDENTIALS)  # noqa: TID251 - google's own switch
    if path or os.path.isfile(sdk.get_application_default_credentials_path()):
        return "google_default"
    if os.path.exists(os.path.expanduser("~/.gcs_tokens")):
        return None  # An older gcsfs stored credentials there, and gcsfs still reads them
    if not _is_on_google(os.environ.get(environment_vars.GCE_METADATA_HOST) or _METADATA_HOST):  # noqa: TID251
        raise ConfigError(
            "no Google credentials were found: run 'gcloud auth application-default login', set "
            "GOOGLE_APPLICATION_CREDENTIALS to a key file, "
            'or give the option token ("anon" for a public bucket)'
        )
    return "google_default"


def _is_on_google(host: str) -> bool:
    """Return True if Google's metadata server answers at ``host``.

    Other clouds have servers at the same address, so the header of the answer is checked.
    """
    connection = HTTPConnection(host, timeout=_METADATA_SECONDS)
    try:
        connection.request("GET", "/", headers={"Metadata-Flavor": "Google"})
        return connection.getresponse().getheader("Metadata-Flavor") == "Google"
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


class GCSBackend(StorageBackendOnFsspec):
    """A prefix of a bucket of Google Cloud Storage as a store.

    Thread safety: several threads may call all methods at the same time. An ``Upload`` takes only
    one ``write`` at a time.
    """

    def __init__(self, fs: Any, bucket_prefix: BucketPrefix, *, secrets: Sequence[str]) -> None:
        capabilities = Capabilities(
            put_if_absent=True,
            shared=True,
            part_bytes=PART_BYTES,
            max_concurrency=16,
            parallel_parts=False,
            takes_parts=True,
        )
        super().__init__(
            fs, bucket_prefix.root, bucket_prefix.url, secrets=secrets, capabilities=capabilities
        )
        self._bucket, self._prefix = (
            bucket_prefix.bucket,
            f"{bucket_prefix.prefix}/" if bucket_prefix.prefix else "",
        )

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Put an object of any size with a single request.

        A resumable upload is not used, since emulators ignore the condition of such an upload.
        """
        value = b"".join(parts)
        path, put_id = self.path_of(key), entropy.token_hex(16)
        mode = "create" if if_absent else "overwrite"
        try:
            with self.translate_errors(key):
                self._fs.pipe_file(
                    path, value, metadata={_PUT_ID: put_id}, mode=mode, chunksize=_ONE_CHUNK_BYTES
                )
        except (ObjectExists, TransientStorageError):
            # If the object has the id of this call, the put succeeded, but its reply was lost.
            if not if_absent or self.put_id_of(key) != put_id:
                raise
        except ObjectNotFound:
            self._check_bucket(key)
            raise
        return ObjectInfo(key=key, size=len(value))

    def upload(self, key: str, size: int) -> Upload:
        check_key(key)
        if size < 2 * self.capabilities.part_bytes:
            return PutUpload(self, key, size)
        self._check_bucket(key)
        name, put_id = self.path_of(key).removeprefix(f"{self._bucket}/"), entropy.token_hex(16)
        with self.translate_errors(key):
            from fsspec.asyn import sync
            from gcsfs.core import initiate_upload

            location: object = sync(
                self._fs.loop,
                initiate_upload,
                self._fs,
                self._bucket,
                name,
                metadata={_PUT_ID: put_id},
            )
        # For a bucket of a single zone, gcsfs begins an upload of another kind, without a URL.
        return (
            ResumableUpload(self, key, size, location, put_id)
            if isinstance(location, str)
            else PutUpload(self, key, size)
        )

    def request(
        self,
        key: str,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: memoryview | None = None,
    ) -> tuple[int, Mapping[str, Any]]:
        """Make one request without the retries of gcsfs. Return the status and the headers of the
        answer. ``key`` is the key of the object, for errors.
        """
        from fsspec.asyn import sync

        send = type(self._fs)._request.__wrapped__
        with self.translate_errors(key):
            response: Any = sync(
                self._fs.loop, send, self._fs, method, url, headers=headers, data=data
            )
        status, reply_headers, *_ = response
        return status, reply_headers

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(check_prefix(prefix)):
            for item in page.get("items", ()):
                key = str(item["name"]).removeprefix(self._prefix)
                if key and not key.endswith("/"):  # Consoles make such objects for empty folders
                    yield ObjectInfo(key=key, size=int(item["size"]), modified=modified_of(item))

    def folders(self, prefix: str) -> Iterator[str]:
        start = check_prefix(prefix).removesuffix("/")
        start = f"{start}/" if start else ""
        for page in self._pages(start, delimiter="/"):
            for name in page.get("prefixes", ()):
                yield str(name).removeprefix(self._prefix + start).rstrip("/")

    def close(self) -> None:
        with suppress(Exception):  # A failed close needs no further action
            self._fs.close_session(self._fs.loop, self._fs._session)

    def _pages(self, prefix: str, **arguments: object) -> Iterator[Mapping[str, Any]]:
        """Yield the pages of a listing of the keys below the root that start with ``prefix``. A
        page is asked for when it is taken.
        """
        token: dict[str, object] = {}
        start = self._prefix + prefix
        while True:
            page = self._page(prefix, prefix=start, maxResults=_PAGE_KEYS, **arguments, **token)
            yield page
            if not page.get("nextPageToken"):
                return
            token = {"pageToken": page["nextPageToken"]}

    def _check_bucket(self, key: str) -> None:
        """Raise ``StorageError`` about ``key`` if the bucket does not exist. gcsfs treats such a
        bucket as an empty one.
        """
        self._page(key, maxResults=1)

    def _page(self, key: str, /, **arguments: object) -> Mapping[str, Any]:
        """Return one page of a listing. Errors are raised as storage errors about ``key``."""
        try:
            with self.translate_errors(key):
                page: Mapping[str, Any] = self._fs.call(
                    "GET", "b/{}/o", self._bucket, json_out=True, **arguments
                )
                return page
        except ObjectNotFound:
            raise StorageError(
                key, f"there is no bucket {self._bucket!r}: create it, or correct the URL"
            ) from None

    def put_id_of(self, key: str) -> str:
        """Return the id that a put or an upload stored in the metadata of the object, or '' if
        it cannot be read.
        """
        with suppress(StorageError), self.translate_errors(key):
            self._fs.invalidate_cache()
            return str(self._fs.info(self.path_of(key)).get("metadata", {}).get(_PUT_ID, ""))
        return ""
