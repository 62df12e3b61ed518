from __future__ import annotations

import errno
import ftplib
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from ckpt import errors
from ckpt.errors import ConfigError, MissingExtra, StorageError
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import at_once, fetch, payload, send
from ckpt_backends import foreign_errors, fsspec_bridge
from ckpt_backends.client_options import missing_extra
from ckpt_backends.fsspec_bridge import StorageBackendOnFsspec, open_fsspec
from tests.kit.parts import parts_of

part_bytes = parts_of("ckpt_backends.fsspec_bridge.PART_BYTES")


class TestFsspecMemory(BackendConformance):
    @pytest.fixture
    def open_root(self, part_bytes):
        store = uuid.uuid4().hex
        yield lambda name: open_fsspec(f"memory://{store}/{name}", {})
        if fsspec.filesystem("memory").exists(f"/{store}"):
            fsspec.filesystem("memory").rm(f"/{store}", recursive=True)


class TestFsspecLocal(BackendConformance):
    @pytest.fixture
    def open_root(self, tmp_path, part_bytes):
        return lambda name: open_fsspec(f"file://{tmp_path}/{name}", {})


class TestChainedUrl(BackendConformance):
    @pytest.fixture
    def open_root(self, tmp_path, part_bytes):
        return lambda name: open_fsspec(f"dir::file://{tmp_path}/{name}", {})


def test_the_folder_of_a_chained_url_is_that_of_the_url_or_refused(tmp_path):
    def opened(name):
        options = {"dir": {"path": str(tmp_path)}, "file": {}}
        return open_fsspec(f"dir::file://{tmp_path}/{name}", options)

    if tuple(map(int, fsspec.__version__.split(".")[:2])) < (2025, 12):
        with pytest.raises(ConfigError, match="leave the option out"):
            opened("one")
    else:
        opened("one").put("key", [b"one"])
        assert list(opened("two").list("")) == []


@pytest.mark.parametrize(
    ("told", "modified"),
    [
        (1_700_000_000, 1.7e9),
        (1.7e9, 1.7e9),
        ("2023-11-14T22:13:20+00:00", 1.7e9),
        (datetime.fromtimestamp(1.7e9, tz=UTC), 1.7e9),
        ("yesterday", None),
        (True, None),
    ],
)
def test_the_time_of_a_file_is_read_in_each_form(told, modified):
    class Dated(MemoryFileSystem):
        def find(self, *args, **options):
            found = super().find(*args, **options)
            return {path: {**info, "mtime": told} for path, info in found.items()}

    backend = StorageBackendOnFsspec(Dated(), f"/{uuid.uuid4().hex}", "memory://x")
    backend.put("key", [b"one"])
    assert [info.modified for info in backend.list("")] == [modified]
    backend.delete("key")


# errors

TRANSIENT = "TransientStorageError"


def boto_error(code: str, status: int):
    from botocore.exceptions import ClientError

    response = {
        "Error": {"Code": code, "Message": "told"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(response, "PutObject")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def gcs_error(status: int):
    from gcsfs.retry import HttpError

    return HttpError({"code": status, "message": "told"})


def examples():
    """Return the errors here, and not as parameters: gcsfs takes seconds to import."""
    import aiohttp
    from botocore import exceptions as boto

    return [
        (FileNotFoundError("x"), "ObjectNotFound"),
        (FileExistsError("x"), "ObjectExists"),
        (PermissionError("x"), "AccessDenied"),
        (OSError(errno.ENOSPC, "full"), "OutOfSpace"),
        (OSError(errno.EBUSY, "SlowDown"), "TransientStorageError"),
        (OSError(errno.EIO, "?"), "TransientStorageError"),
        (OSError("Failure"), "TransientStorageError"),
        (OSError("write: No space left on device"), "OutOfSpace"),
        (OSError("Forbidden: https://x"), "AccessDenied"),
        (TimeoutError(), "TransientStorageError"),
        (ConnectionResetError(), "TransientStorageError"),
        (boto_error("AccessDenied", 403), "AccessDenied"),
        (boto_error("403", 403), "AccessDenied"),
        (boto_error("404", 404), "ObjectNotFound"),
        (boto_error("PreconditionFailed", 412), "ObjectExists"),
        (boto_error("ConditionalRequestConflict", 409), "TransientStorageError"),
        (boto_error("TooManyRequests", 429), "TransientStorageError"),
        (boto_error("SlowDown", 503), "TransientStorageError"),
        (boto_error("SlowDown", 0), "TransientStorageError"),
        (boto_error("InvalidPart", 400), "TransientStorageError"),
        (boto_error("EntityTooLarge", 400), "StorageError"),
        (boto_error("InvalidRange", 416), "StorageError"),
        (caused(OSError(errno.EINVAL, "x"), boto_error("PreconditionFailed", 412)), "ObjectExists"),
        (boto.NoCredentialsError(), "AccessDenied"),
        (boto.EndpointConnectionError(endpoint_url="http://x"), "TransientStorageError"),
        (boto.ReadTimeoutError(endpoint_url="http://x"), "TransientStorageError"),
        (boto.ConnectionClosedError(endpoint_url="http://x"), "TransientStorageError"),
        (aiohttp.ClientPayloadError("x"), "TransientStorageError"),
        (aiohttp.ServerDisconnectedError(), "TransientStorageError"),
        (gcs_error(412), "ObjectExists"),
        (gcs_error(429), "TransientStorageError"),
        (gcs_error(503), "TransientStorageError"),
        (gcs_error(401), "AccessDenied"),
        # An unknown failure says nothing about the object, so it is not damage.
        (ValueError("what"), "TransientStorageError"),
        (ftplib.error_perm("550 /x is not retrievable."), "ObjectNotFound"),
        (ftplib.error_perm("550 /x: No such file or directory"), "ObjectNotFound"),
        (ftplib.error_perm("550 Permission denied."), "AccessDenied"),
        (ftplib.error_perm("550 Read-only file system."), "AccessDenied"),
        (ftplib.error_perm("550 Can't open /x: Input/output error"), TRANSIENT),
        (ftplib.error_perm("550 Too many open files."), TRANSIENT),
        (ftplib.error_perm("552 Quota exceeded"), "OutOfSpace"),
        (ftplib.error_perm("530 Authentication failed."), "AccessDenied"),
        (ftplib.error_perm("502 Command not implemented."), "StorageError"),
        (ftplib.error_temp("452 Insufficient storage space"), "OutOfSpace"),
        (ftplib.error_temp("426 Transfer aborted."), "TransientStorageError"),
    ]


def examples_of_file_servers():
    smb = pytest.importorskip("smbprotocol.exceptions")
    paramiko = pytest.importorskip("paramiko")
    dav = pytest.importorskip("webdav4.client")
    azure = pytest.importorskip("azure.core.exceptions")
    return [
        (smb.SMBOSError(0xC0000034, "x"), "ObjectNotFound"),
        (smb.SMBOSError(0xC00000BA, "x"), "ObjectNotFound"),
        (smb.SMBOSError(0xC0000035, "x"), "ObjectExists"),
        (smb.SMBOSError(0xC000007F, "x"), "OutOfSpace"),
        (smb.SMBOSError(0xC0000022, "x"), "AccessDenied"),
        (smb.SMBOSError(0xC0000043, "x"), "TransientStorageError"),  # somebody has it open
        (smb.SMBException("Request requires 4 credits but only 1 is available"), TRANSIENT),
        (smb.SMBAuthenticationError("x"), "AccessDenied"),
        (paramiko.AuthenticationException("x"), "AccessDenied"),
        (paramiko.SSHException("x"), TRANSIENT),
        (dav.ResourceNotFound("x"), "ObjectNotFound"),
        (dav.InsufficientStorage("x"), "OutOfSpace"),
        (dav.ForbiddenOperation("x"), "AccessDenied"),
        (azure.ResourceNotFoundError("x"), "ObjectNotFound"),
        (azure.ResourceExistsError("x"), "ObjectExists"),
        (azure.ServiceRequestError("x"), TRANSIENT),
    ]


def test_a_foreign_error_becomes_ours():
    for error, name in examples():
        with pytest.raises(StorageError) as caught, foreign_errors.translate_errors("the/key"):
            raise error
        assert (type(caught.value).__name__, repr(error)) == (name, repr(error))
        assert caught.value.key == "the/key"
        assert caught.value.__cause__ is None


def test_the_errors_of_file_servers_and_azure_become_ours():
    for error, name in examples_of_file_servers():
        with pytest.raises(StorageError) as caught, foreign_errors.translate_errors("the/key"):
            raise error
        assert (type(caught.value).__name__, repr(error)) == (name, repr(error))


class Busy(MemoryFileSystem):
    """A synchronous file system of fsspec that notes how many threads are in it."""

    protocol = "busy"
    inside = 0
    most = 0

    def cat_file(self, path, **options):
        Busy.inside += 1
        Busy.most = max(Busy.most, Busy.inside)
        found = super().cat_file(path, **options)
        Busy.inside -= 1
        return found


def test_a_synchronous_file_system_serves_one_request_at_a_time(monkeypatch):
    backend = StorageBackendOnFsspec(Busy(), f"/{uuid.uuid4().hex}", "busy://x")
    backend.put("key", [payload(1 << 20)])
    assert at_once(lambda _: fetch(backend, "key"), 16) == [payload(1 << 20)] * 16
    assert Busy.most == 1
    # A request that does not get its turn is told in time.
    monkeypatch.setattr(fsspec_bridge, "_TURN_SECONDS", 0.1)
    with backend.translate_errors("key"), ThreadPoolExecutor(1) as other:
        waiting = other.submit(backend.head, "key")
        with pytest.raises(errors.TransientStorageError, match="busy"):
            waiting.result()
    backend.delete("key")


def test_no_file_system_remembers_a_listing(tmp_path):
    pytest.importorskip("aiohttp")
    for url in ("http://host/x", "simplecache::http://host/x"):
        backend = open_fsspec(url, {"untested": True})
        assert isinstance(backend, StorageBackendOnFsspec)
        target = fsspec_bridge._chain_of(backend._fs)[-1]
        assert not target.dircache.use_listings_cache


@pytest.mark.parametrize(("chain", "creates"), [("dir", True), ("simplecache", False)])
def test_only_a_chain_that_passes_the_mode_of_a_put_on_has_a_put_if_absent(chain, creates):
    pytest.importorskip("s3fs")
    keys = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"}
    backend = open_fsspec(f"{chain}::s3://bucket/run", {"untested": True, "s3": keys})
    assert backend.capabilities.put_if_absent is creates


def test_our_own_errors_and_bugs_pass():
    for error in (ConfigError("x"), TypeError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)), foreign_errors.translate_errors("key"):
            raise error


def test_a_missing_bucket_is_named():
    with (
        pytest.raises(StorageError, match="no bucket 'gone'"),
        foreign_errors.translate_errors("key", bucket="gone"),
    ):
        raise caused(FileNotFoundError("x"), boto_error("NoSuchBucket", 404))


def test_no_credential_gets_into_a_message():
    reported = "http://user:hunter2@host/b?X-Amz-Signature=abcdef&x=1 and s3cr3t-token"
    with (
        pytest.raises(StorageError) as caught,
        foreign_errors.translate_errors("key", secrets=["s3cr3t-token"]),
    ):
        raise OSError(errno.EIO, reported)
    for secret in ("hunter2", "abcdef", "s3cr3t-token"):
        assert secret not in str(caught.value)


# opening


def test_a_missing_package_is_named():
    error = missing_extra("s3://b/x", ImportError("No module named s3fs", name="s3fs"))
    assert isinstance(error, MissingExtra)
    assert "ckpt-stream[s3]" in str(error)
    assert "ckpt-stream[gcs]" in str(
        missing_extra("gs://b", ImportError("Please install gcsfs to access Google Storage"))
    )
    assert "pip install adlfs" in str(
        missing_extra("abfs://b", ImportError("Install adlfs to access Azure Datalake Gen2"))
    )


@pytest.mark.parametrize(
    ("scheme", "package"),
    [("sftp", "paramiko"), ("ssh", "paramiko"), ("smb", "smbprotocol"), ("git", "pygit2")],
)
def test_a_scheme_is_not_taken_for_a_package(scheme: str, package: str):
    said = str(missing_extra(f"{scheme}://x", ImportError(known_implementations[scheme]["err"])))
    assert f"needs the package {package}: pip install {package}" in said
    assert "webdav4" in str(missing_extra("webdav://x", ImportError("", name="webdav4")))


@pytest.mark.parametrize("scheme", sorted(known_implementations))
def test_no_scheme_of_fsspec_gets_its_own_name_as_a_package(scheme: str):
    text = known_implementations[scheme].get("err", "it is not there")
    error = missing_extra(f"{scheme}://x", ImportError(text))
    own = {"dvc", "tosfs"}  # These are the names of the packages too
    assert getattr(error, "package", "") != scheme or scheme in own


def test_a_scheme_whose_package_is_missing():
    with pytest.raises(MissingExtra, match="pip install"):
        open_fsspec("dropbox://x", {"untested": True})


def test_options_that_the_file_system_refuses():
    with pytest.raises(ConfigError):
        open_fsspec("sgml://x", {})


def test_the_url_hides_user_and_password():
    fs = fsspec.filesystem("memory")
    assert (
        StorageBackendOnFsspec(fs, "/x", foreign_errors.clean("sftp://user:hunter2@host/x")).url
        == "sftp://host/x"
    )


# streaming


class Recorder:
    """A writable file of an object store, whose bytes appear at ``close``."""

    def __init__(self, store: dict[str, bytes], path: str, broken_after: int, lost_reply: bool):
        self.store, self.path, self.broken_after, self.lost_reply = (
            store,
            path,
            broken_after,
            lost_reply,
        )
        self.held, self.closed, self.discarded = bytearray(), False, False

    def write(self, data):
        if len(self.held) + len(data) > self.broken_after:
            raise ConnectionResetError
        self.held += data

    def close(self):
        assert not self.closed
        self.store[self.path] = bytes(self.held)
        self.closed = True
        if self.lost_reply:
            raise TimeoutError

    def discard(self):
        self.discarded = True


class FakeStore:
    protocol = "abfs"

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.files: list[Recorder] = []
        self.broken_after = [1 << 40]
        self.lost_reply = False

    def open(self, path, mode, block_size):
        broken_after = (
            self.broken_after.pop(0) if len(self.broken_after) > 1 else self.broken_after[0]
        )
        self.files.append(Recorder(self.objects, path, broken_after, self.lost_reply))
        return self.files[-1]

    def info(self, path):
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"type": "file", "size": len(self.objects[path])}

    def cat_file(self, path, start, end):
        return self.objects[path][start:end]

    def invalidate_cache(self):
        pass


@pytest.fixture
def fake():
    return FakeStore()


@pytest.fixture
def data():
    return payload(3 * (8 << 20) + 5)


def test_a_stream_that_breaks_is_discarded_and_sent_again(fake, data):
    fake.broken_after = [20 << 20, 1 << 40]
    backend = StorageBackendOnFsspec(fake, "bucket/x", "abfs://bucket/x")
    upload = backend.upload("key", len(data))
    view = memoryview(data)
    with pytest.raises(errors.TransientStorageError):
        send(upload, view)
    assert fake.files[0].discarded
    assert fake.files[0].closed
    send(upload, view)
    upload.finish()
    assert fetch(backend, "key") == data
    assert len(fake.files) == 2


def test_a_lost_reply_at_the_end_is_no_failure(fake, data):
    fake.lost_reply = True
    backend = StorageBackendOnFsspec(fake, "bucket/x", "abfs://bucket/x")
    upload = backend.upload("key", len(data))
    send(upload, memoryview(data))
    assert upload.finish().size == len(data)


def test_an_older_object_of_the_same_size_is_no_upload_whose_reply_was_lost(fake, data):
    backend = StorageBackendOnFsspec(fake, "bucket/x", "abfs://bucket/x")
    fake.objects["bucket/x/key"] = bytes(len(data))
    upload = backend.upload("key", len(data))
    send(upload, memoryview(data))
    fake.files[-1].close = fails
    with pytest.raises(StorageError):
        upload.finish()


def fails():
    raise TimeoutError


def test_an_incomplete_stream_is_never_published(fake, data):
    backend = StorageBackendOnFsspec(fake, "bucket/x", "abfs://bucket/x")
    upload = backend.upload("key", len(data))
    upload.write(0, memoryview(data)[: 8 << 20])
    with pytest.raises(StorageError, match="were written"):
        upload.finish()
    upload.abort()
    assert fake.objects == {}
    assert all(file.discarded and file.closed for file in fake.files)
