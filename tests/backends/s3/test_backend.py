from __future__ import annotations

import base64
import itertools
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.loaders import JSONFileLoader

from bench.proxy import Proxy
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    MissingExtra,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import at_once, fetch, page_aligned, payload, send, store
from ckpt.storage.testing.uploads import UploadConformance
from ckpt_backends.folder.direct_io import address
from ckpt_backends.s3.backend import open_s3
from tests.kit.marks import torture
from tests.kit.parts import parts_of
from tests.servers import KEY, SECRET

pytestmark = pytest.mark.server
_numbers = itertools.count()
RIGHT = {"key": KEY, "secret": SECRET, "region": "us-east-1"}
HASTY = {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 2}}

part_bytes = parts_of("ckpt_backends.s3.backend.PART_BYTES")


def fresh() -> str:
    return f"test-{next(_numbers)}"


class TestMoto(BackendConformance):
    @pytest.fixture
    def open_root(self, moto_server, part_bytes):
        test = fresh()
        # moto, one Python process, was seen once to leave a request of eight racing threads without
        # an answer, so a request is repeated sooner
        options = {**RIGHT, "endpoint_url": moto_server.url, "config_kwargs": {"read_timeout": 5}}
        return lambda name: open_s3(f"s3://bucket/{test}/{name}", options)


class TestRclone(BackendConformance):
    """Tests on a real server, which ignores ``If-None-Match``."""

    @pytest.fixture
    def open_root(self, rclone_s3, part_bytes):
        test = fresh()
        options = {**RIGHT, "put_if_absent": False}
        return lambda name: open_s3(
            f"s3://bucket/{test}/{name}?endpoint_url={rclone_s3.url}", options
        )

    def test_an_aborted_upload_leaves_nothing(self, backend):
        """rclone makes the folder when an upload begins, and leaves it there."""
        part = backend.capabilities.part_bytes
        upload = backend.upload("gone/large", 3 * part)
        upload.write(0, memoryview(payload(part)))
        upload.abort()
        assert list(backend.list("")) == []

    def test_deleting_a_folder_or_a_key_below_an_object_removes_nothing(self, backend):
        """rclone takes such keys for paths. It fails with the status 500, or removes the object. So
        only a key beside the object is deleted here.
        """
        backend.put("there/is/this", [b"x"])
        backend.delete("there/is/thi")
        assert [info.key for info in backend.list("")] == ["there/is/this"]

    def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(self, backend):
        """rclone removes a folder that becomes empty, although another request puts an object
        there. One object stays, so that no folder becomes empty.
        """
        backend.put("busy/stays", [b""])

        def work(number: int) -> None:
            for turn in range(5):
                backend.put(f"busy/{number}", [payload(100, turn)])
                assert fetch(backend, f"busy/{number}") == payload(100, turn)
                backend.delete(f"busy/{number}")

        at_once(work, 8)
        assert [info.key for info in backend.list("busy/")] == ["busy/stays"]

    def test_reads_while_a_key_is_replaced_see_one_version_or_the_other(self, backend):
        """rclone writes over the file in place, which no client can prevent. A short answer must at
        least be detected.
        """
        backend.put("flip", [payload(50_000)])

        def work(number: int) -> None:
            if number % 2:
                backend.put("flip", [payload(50_000)])
            else:
                out = bytearray(50_000)
                try:
                    backend.read_into("flip", 0, memoryview(out))
                except StorageError:
                    return
                assert out == payload(50_000)

        at_once(work, 10)


class TestObstore(UploadConformance):
    """Tests with the other client for large objects. It does not write small ones, and does not
    read.
    """

    @pytest.fixture
    def open_root(self, rclone_s3, part_bytes):
        test = fresh()
        options = {
            **RIGHT,
            "endpoint_url": rclone_s3.url,
            "put_if_absent": False,
            "client": "obstore",
        }
        return lambda name: open_s3(f"s3://bucket/{test}/ü %20#{name}", options)

    test_an_aborted_upload_leaves_nothing = TestRclone.test_an_aborted_upload_leaves_nothing


@pytest.fixture
def moto(moto_server, part_bytes):
    backend = open_s3(f"s3://bucket/{fresh()}", {**RIGHT, "endpoint_url": moto_server.url})
    yield backend
    backend.close()


@pytest.fixture
def rclone(rclone_s3, part_bytes):
    backend = open_s3(f"s3://bucket/{fresh()}", {**RIGHT, **HASTY, "endpoint_url": rclone_s3.url})
    yield backend
    backend.close()


@pytest.fixture
def obstore(moto_server, part_bytes):
    options = {**RIGHT, "endpoint_url": moto_server.url, "client": "obstore", "checksums": True}
    backend = open_s3(f"s3://bucket/{fresh()}", options)
    yield backend
    backend.close()


def test_a_part_is_not_taken_as_sent_after_an_early_part_was_lost(obstore):
    part = obstore.capabilities.part_bytes
    data = payload(2 * part)
    upload: Any = obstore.upload("key", len(data))
    upload.write(part, memoryview(data)[part:])
    real, calls = upload._file, []

    class Cut:
        def write(self, given):
            calls.append(len(given))
            if len(calls) == 2:
                raise OSError("connection reset")
            return real.write(given)

    upload._file = Cut()
    for _ in range(2):  # The second call must not return as if all were sent
        with pytest.raises(TransientStorageError):
            upload.write(0, memoryview(data)[:part])
    with pytest.raises(TransientStorageError):
        upload.finish()
    upload.abort()
    assert len(calls) == 2


def test_the_description_of_s3_is_read_once(moto_server, rclone_s3, monkeypatch, part_bytes):
    """Otherwise it takes a tenth of a second of CPU for each client of a tier."""
    read: list[str] = []
    load_file = JSONFileLoader.load_file

    def noted(self, path):
        read.append(path)
        return load_file(self, path)

    for server in (rclone_s3, moto_server):
        backend = open_s3(f"s3://bucket/{fresh()}", {**RIGHT, "endpoint_url": server.url})
        store(backend, "large", payload(part_bytes + 1))
        assert fetch(backend, "large") == payload(part_bytes + 1)
        backend.close()
        assert read == []
        monkeypatch.setattr(JSONFileLoader, "load_file", noted)


def losing(backend, method: str, error: Exception, times: int = 1):
    """Lose the replies of ``method`` from now on, ``times`` times."""
    real, left = backend._fs.call_s3, [times]

    def call_s3(name, **arguments):
        result = real(name, **arguments)
        if name == method and left[0]:
            left[0] -= 1
            raise error
        return result

    backend._fs.call_s3 = call_s3


def test_a_lost_reply_to_the_last_request_is_no_failure(moto, part_bytes):
    losing(moto, "complete_multipart_upload", TimeoutError())
    data = payload(3 * part_bytes - 9)
    store(moto, "key", data)
    assert fetch(moto, "key") == data


def test_a_completion_that_does_not_find_the_parts_may_be_repeated(moto, part_bytes):
    """The server may still be at work on an earlier request, whose reply was lost."""
    data = payload(3 * part_bytes - 9)
    upload = moto.upload("key", len(data))
    send(upload, memoryview(data))
    real, failures = moto._fs.call_s3, [1]

    def call_s3(name, **arguments):
        if name == "complete_multipart_upload" and failures:
            failures.clear()
            answer = {"Error": {"Code": "InvalidPart"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
            raise ClientError(answer, name)
        return real(name, **arguments)

    moto._fs.call_s3 = call_s3
    with pytest.raises(TransientStorageError, match="InvalidPart"):
        upload.finish()
    assert upload.finish().size == len(data)
    assert fetch(moto, "key") == data


def test_a_completion_that_never_happened_is_a_failure_even_over_an_older_object_of_that_size(
    moto, part_bytes
):
    data = payload(3 * part_bytes - 9)
    store(moto, "key", data)
    real = moto._fs.call_s3

    def call_s3(name, **arguments):
        if name == "complete_multipart_upload":
            raise TimeoutError
        return real(name, **arguments)

    upload = moto.upload("key", len(data))
    for offset in range(0, len(data), upload.part_bytes):
        upload.write(offset, memoryview(data)[offset : offset + upload.part_bytes])
    moto._fs.call_s3 = call_s3
    with pytest.raises(TransientStorageError):
        upload.finish()


@pytest.mark.parametrize("name", ["moto", "rclone"])
def test_an_upload_that_the_server_has_dropped_is_a_failure_over_an_object_of_that_size(
    name, request, part_bytes
):
    """Another job may have stored the object, or an earlier try of this one."""
    backend = request.getfixturevalue(name)
    old, new = payload(3 * part_bytes - 9), payload(3 * part_bytes - 9)[::-1]
    store(backend, "key", old)
    upload = backend.upload("key", len(new))
    send(upload, memoryview(new))
    backend.abort_uploads("key")
    with pytest.raises(TransientStorageError):
        upload.finish()
    assert fetch(backend, "key") == old
    store(backend, "key", new)
    assert fetch(backend, "key") == new


def uploads_of(backend) -> list[str]:
    reply = backend._fs.call_s3("list_multipart_uploads", Bucket="bucket")
    return [
        found["Key"]
        for found in reply.get("Uploads", ())
        if found["Key"].startswith(backend._prefix)
    ]


def test_an_abort_leaves_no_parts_to_pay_for(moto, part_bytes):
    upload = moto.upload("key", 3 * part_bytes - 9)
    upload.write(0, memoryview(payload(part_bytes)))
    assert uploads_of(moto)
    upload.abort()
    assert not uploads_of(moto)


def test_uploads_that_were_cut_off_are_told_and_can_be_discarded(moto, part_bytes):
    moto.upload("step-1/rank-0", 3 * part_bytes - 9).write(0, memoryview(payload(part_bytes)))
    other = moto.upload("step-2/rank-0", 3 * part_bytes - 9)
    [found] = moto.unfinished_writes("step-1/")
    assert found.key == "step-1/rank-0"
    assert len(list(moto.unfinished_writes(""))) == 2
    moto.discard(found)
    moto.discard(found)
    assert [left.key for left in moto.unfinished_writes("")] == ["step-2/rank-0"]
    other.abort()
    assert uploads_of(moto) == []


def test_a_server_without_an_upload_under_way_lists_none(rclone):
    """rclone answers NoSuchUpload, which ended each pruning with a warning."""
    rclone.put("step-1/rank-0", [b"x"])
    assert list(rclone.unfinished_writes("")) == []
    assert list(rclone.unfinished_writes("step-1/")) == []


def test_a_conditional_put_whose_reply_was_lost_knows_itself(moto):
    losing(moto, "put_object", TimeoutError())
    moto.put("marker", [b"mine"], if_absent=True)
    assert fetch(moto, "marker") == b"mine"
    with pytest.raises(ObjectExists):
        moto.put("marker", [b"mine"], if_absent=True)


def test_a_conditional_put_that_the_client_repeated_knows_itself(moto):
    real = moto._fs.call_s3

    def call_s3(name, **arguments):
        if name == "put_object":
            real(name, **arguments)
        return real(name, **arguments)

    moto._fs.call_s3 = call_s3
    moto.put("marker", [b"mine"], if_absent=True)


def test_a_bucket_that_is_not_there_is_named(moto_server, part_bytes):
    backend = open_s3("s3://gone/x", {**RIGHT, "endpoint_url": moto_server.url})
    for verb in (
        lambda: backend.put("key", [b"x"]),
        lambda: backend.upload("key", 3 * part_bytes - 9),
        lambda: list(backend.list("")),
    ):
        with pytest.raises(StorageError, match="no bucket 'gone'") as caught:
            verb()
        assert type(caught.value) is StorageError
    backend.close()


@pytest.mark.parametrize(("most", "puts"), [(10, 6), *torture((1000, 260))])
def test_listings_go_over_pages(moto, most, puts):
    real, asked = moto._fs.call_s3, []

    def call_s3(name, **arguments):
        asked.append(name)
        return real(name, **arguments, **({"MaxKeys": most} if "list" in name else {}))

    at_once(
        lambda thread: [moto.put(f"many/{thread}-{number}/x", [b""]) for number in range(puts)], 4
    )
    moto._fs.call_s3 = call_s3
    assert len({info.key for info in moto.list("many/")}) == 4 * puts
    assert len(set(moto.folders("many/"))) == 4 * puts
    assert asked == ["list_objects_v2"] * 2 * -(-4 * puts // most)


def test_parts_grow_with_the_object(moto):
    upload = moto.upload("huge", 200 << 30)
    assert upload.part_bytes == 21 << 20
    assert 10_000 * upload.part_bytes >= 200 << 30
    upload.abort()


def test_a_part_that_is_none_is_refused(moto, part_bytes):
    upload = moto.upload("key", 3 * part_bytes - 9)
    with pytest.raises(StorageError, match="not part"):
        upload.write(5, memoryview(b"x"))
    upload.abort()


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix"])
def test_a_url_without_a_bucket_is_refused(url):
    with pytest.raises(ConfigError, match="bucket"):
        open_s3(url, {})


def test_options_that_contradict_each_other_are_refused_without_telling_them():
    with pytest.raises(ConfigError) as caught:
        open_s3("s3://bucket", {"key": "AKIDSECRET", "username": "AKIDSECRET", "secret": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_roots_that_differ_after_a_number_sign_are_apart(moto_server):
    options, test = {**RIGHT, "endpoint_url": moto_server.url}, fresh()
    one, two = (open_s3(f"s3://bucket/{test}/run#{number}", options) for number in (1, 2))
    store(one, "key", b"1")
    assert fetch(one, "key") == b"1"
    with pytest.raises(ObjectNotFound):
        fetch(two, "key")


def test_the_url_shows_no_credentials():
    backend = open_s3("s3://AKID:hunter2@bucket/x?endpoint_url=http://u:p@h:1", {})
    assert backend.url == "s3://bucket/x"


def test_the_environment_may_name_the_endpoint(moto_server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.url)
    backend = open_s3(f"s3://bucket/{fresh()}", RIGHT)
    backend.put("key", [b"x"])
    assert fetch(backend, "key") == b"x"
    backend.close()


# the bytes of large objects


def test_a_part_is_sent_from_the_memory_it_lies_in(moto, monkeypatch, part_bytes):
    """The kernel gets slices of the caller's memory, and of nothing else."""
    import socket

    data = page_aligned(payload(3 * part_bytes - 9))
    first, seen, real = address(data), [0], socket.socket.sendall

    def sendall(self, given, *flags):
        view = memoryview(given)
        if view.nbytes > 100_000:
            assert first <= address(view) < first + data.nbytes
            seen[0] += view.nbytes
        return real(self, given, *flags)

    upload = moto.upload("key", data.nbytes)
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "sendall", sendall)
        send(upload, data)
    assert seen[0] > 0.95 * data.nbytes
    upload.finish()
    assert fetch(moto, "key") == data


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_request_that_moves_no_byte_is_cut_and_tried_again(rclone_s3, way):
    config = {"retries": {"max_attempts": 1}, "connect_timeout": 1, "read_timeout": 1}
    with Proxy(rclone_s3.port) as wire:
        options = {
            **RIGHT,
            "endpoint_url": wire.url,
            "put_if_absent": False,
            "config_kwargs": config,
        }
        backend = open_s3(f"s3://bucket/{fresh()}", options)
        data = payload(20 << 20)
        out = bytearray(len(data))
        store(backend, "before", data)
        upload = backend.upload("key", len(data))
        upload.write(0, memoryview(data)[: 8 << 20])
        verb = {
            "up": lambda: upload.write(8 << 20, memoryview(data)[8 << 20 : 16 << 20]),
            "down": lambda: backend.read_into("before", 0, memoryview(out)),
        }[way]
        wire.held = True
        began = time.monotonic()
        with pytest.raises(TransientStorageError):
            verb()
        assert time.monotonic() - began < 10
        wire.held = False
        verb()
        upload.write(8 << 20, memoryview(data)[8 << 20 : 16 << 20])
        upload.write(16 << 20, memoryview(data)[16 << 20 :])
        upload.finish()
        assert fetch(backend, "key") == data
        assert way == "up" or out == data
        backend.close()


def test_a_slow_wire_is_no_stall(rclone_s3):
    """A part takes longer than any timeout, but moves."""
    config = {"retries": {"max_attempts": 1}, "connect_timeout": 1, "read_timeout": 3}
    with Proxy(rclone_s3.port) as wire:
        options = {
            **RIGHT,
            "endpoint_url": wire.url,
            "put_if_absent": False,
            "config_kwargs": config,
        }
        backend = open_s3(f"s3://bucket/{fresh()}", options)
        data = payload(16 << 20)
        upload = backend.upload("key", len(data))
        wire.bytes_per_second = 2.5e6
        began = time.monotonic()
        upload.write(0, memoryview(data)[: 8 << 20])
        assert time.monotonic() - began > 3
        wire.bytes_per_second = 0.0
        upload.write(8 << 20, memoryview(data)[8 << 20 :])
        upload.finish()
        assert fetch(backend, "key") == data
        backend.close()


def test_an_answer_that_breaks_off_is_worth_another_try(rclone_s3):
    with Proxy(rclone_s3.port) as wire:
        options = {**RIGHT, **HASTY, "endpoint_url": wire.url, "put_if_absent": False}
        backend = open_s3(f"s3://bucket/{fresh()}", options)
        data = payload(16 << 20)
        store(backend, "key", data)
        out = bytearray(len(data))
        wire.bytes_per_second = 8e6
        threading.Timer(0.5, setattr, (wire, "down", True)).start()
        with pytest.raises(TransientStorageError):
            backend.read_into("key", 0, memoryview(out))
        wire.down, wire.bytes_per_second = False, 0.0
        backend.read_into("key", 0, memoryview(out))
        assert out == data
        backend.close()


@pytest.mark.parametrize("by", ["option", "client_kwargs", "AWS_ENDPOINT_URL_S3"])
def test_a_server_that_is_not_of_amazon_gets_no_checksums(moto_server, monkeypatch, by, part_bytes):
    """Servers of others may refuse them, however the server is named."""
    options: dict[str, Any] = {**RIGHT}
    if by == "option":
        options["endpoint_url"] = moto_server.url
    elif by == "client_kwargs":
        options["client_kwargs"] = {"endpoint_url": moto_server.url}
    else:
        monkeypatch.setenv(by, moto_server.url)
    backend = open_s3(f"s3://bucket/{fresh()}", options)
    data = payload(3 * part_bytes - 9)
    upload: Any = backend.upload("key", len(data))
    send(upload, memoryview(data))
    assert [part.get("ChecksumCRC32") for part, _ in upload._parts.values()] == [None] * 3
    upload.finish()
    assert fetch(backend, "key") == data
    backend.close()


@pytest.mark.parametrize("checksums", [True, "false"])
def test_checksums_of_parts_are_sent_where_asked_for(moto_server, checksums, part_bytes):
    options = {**RIGHT, "endpoint_url": moto_server.url, "checksums": checksums}
    backend = open_s3(f"s3://bucket/{fresh()}", options)
    data = payload(3 * part_bytes - 9)
    upload: Any = backend.upload("key", len(data))
    send(upload, memoryview(data))
    sent = [part.get("ChecksumCRC32") for part, _ in upload._parts.values()]
    if checksums is True:
        first = zlib.crc32(data[:part_bytes]).to_bytes(4, "big")
        assert base64.b64decode(sent[0]) == first
    else:
        assert sent == [None] * 3
    upload.finish()
    assert fetch(backend, "key") == data
    backend.close()


def test_uploads_that_killed_jobs_left_behind_are_aborted_but_only_old_ones_of_ours(
    rclone_s3, part_bytes
):
    root = fresh()
    options = {**RIGHT, "endpoint_url": rclone_s3.url, "put_if_absent": False}
    keep = open_s3(f"s3://bucket/{root}", {**options, "abort_uploads_after_hours": 0})
    left = [
        "step-000000001.aa/rank-00003.safetensors",
        "step-000000001.aa/notes.bin",
        "else/rank-00000.safetensors",
    ]
    for key in left:
        keep.upload(key, 3 * part_bytes - 9)
    young = open_s3(f"s3://bucket/{root}", options)
    young.upload("step-000000002.bb/rank-00000.safetensors", 3 * part_bytes - 9).abort()
    assert sorted(uploads_of(keep)) == sorted(f"{root}/{key}" for key in left)
    hasty = open_s3(f"s3://bucket/{root}", {**options, "abort_uploads_after_hours": 1e-9})
    hasty.upload("step-000000002.bb/rank-00001.safetensors", 3 * part_bytes - 9).abort()
    assert len(uploads_of(keep)) == 3, "rank 0 does it, not everybody"
    hasty.upload("step-000000002.bb/rank-00000.safetensors", 3 * part_bytes - 9).abort()
    assert sorted(uploads_of(keep)) == sorted(f"{root}/{key}" for key in left[1:])
    for backend in (keep, young, hasty):
        backend.close()


# obstore


def test_obstore_that_is_given_up_leaves_no_parts_to_pay_for(obstore, part_bytes):
    upload = obstore.upload("key", 5 * part_bytes)
    send(upload, memoryview(payload(4 * part_bytes)))
    assert uploads_of(obstore)
    upload.abort()
    assert not uploads_of(obstore)
    with pytest.raises(TransientStorageError, match="start again"):
        upload.write(4 * part_bytes, memoryview(payload(part_bytes)))


def test_a_lost_reply_to_the_last_request_of_obstore_is_no_failure(obstore, part_bytes):
    data = payload(3 * part_bytes - 9)
    upload = obstore.upload("key", len(data))
    send(upload, memoryview(data))
    upload._file.close()  # it has arrived, and another try fails
    assert upload.finish().size == len(data)
    assert fetch(obstore, "key") == data


def test_an_upload_of_obstore_is_a_failure_if_another_has_replaced_the_object(
    obstore, moto_server, part_bytes
):
    data = payload(3 * part_bytes - 9)
    store(obstore, "key", data)
    upload = obstore.upload("key", len(data))
    send(upload, memoryview(data))
    store(obstore, "key", data[::-1])
    obstore.abort_uploads("key")
    with pytest.raises(StorageError):
        upload.finish()
    assert fetch(obstore, "key") == data[::-1]


def test_a_server_that_dies_under_obstore(rclone_s3, monkeypatch, part_bytes):
    monkeypatch.setattr("ckpt_backends.s3.obstore._TRIES", 1)
    options = {
        **RIGHT,
        **HASTY,
        "endpoint_url": rclone_s3.url,
        "put_if_absent": False,
        "client": "obstore",
    }
    backend = open_s3(f"s3://bucket/{fresh()}", options)
    data = payload(5 * part_bytes)
    upload = backend.upload("key", len(data))
    upload.write(0, memoryview(data)[:part_bytes])
    rclone_s3.kill()
    try:
        with pytest.raises(TransientStorageError) as caught:
            [send(upload, memoryview(data)), upload.finish()]
        assert SECRET not in str(caught.value)
        upload.abort()
    finally:
        rclone_s3.start()
    store(backend, "key", data)
    assert fetch(backend, "key") == data
    backend.close()


def test_obstore_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"ckpt-stream\[obstore\]"):
        open_s3("s3://bucket", {"client": "obstore"})


@pytest.mark.parametrize(
    "options",
    [{"client": "curl"}, {"abort_uploads_after_hours": "soon"}, {"abort_uploads_after_hours": -1}],
)
def test_an_option_that_makes_no_sense_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        open_s3("s3://bucket", options)


# a real server


@pytest.mark.parametrize("wrong", [{"secret": "WRONG"}, {"key": "NOBODY"}])
def test_wrong_credentials_are_denied_and_not_told(rclone_s3, wrong):
    backend = open_s3("s3://bucket/x", {**RIGHT, **wrong, "endpoint_url": rclone_s3.url})
    for verb in (
        lambda: backend.put("key", [b"x"]),
        lambda: backend.head("key"),
        lambda: list(backend.list("")),
    ):
        with pytest.raises(AccessDenied) as caught:
            verb()
        assert not any(secret in str(caught.value) for secret in (SECRET, "WRONG"))
    backend.close()


def test_a_conditional_put_on_a_server_that_ignores_it_still_spares_what_is_there(rclone):
    rclone.put("marker", [b"first"])
    with pytest.raises(ObjectExists):
        rclone.put("marker", [b"second"], if_absent=True)
    assert fetch(rclone, "marker") == b"first"


def test_a_server_that_dies_is_transient_and_work_goes_on_when_it_is_back(
    rclone, rclone_s3, part_bytes
):
    data = payload(3 * part_bytes - 9)
    store(rclone, "before", data)
    rclone_s3.kill()
    try:
        started = time.monotonic()
        for verb in (
            lambda: rclone.put("key", [b"x"]),
            lambda: rclone.put("key", [b"x"], if_absent=True),
            lambda: rclone.head("before"),
            lambda: rclone.read_into("before", 0, memoryview(bytearray(10))),
            lambda: list(rclone.list("")),
            lambda: rclone.upload("key", 3 * part_bytes - 9),
        ):
            with pytest.raises(TransientStorageError):
                verb()
        assert time.monotonic() - started < 60
    finally:
        rclone_s3.start()
    assert fetch(rclone, "before") == data
    store(rclone, "after", data)
    assert sorted(info.key for info in rclone.list("")) == ["after", "before"]


def test_a_server_that_dies_under_an_upload(rclone, rclone_s3, part_bytes):
    upload = rclone.upload("key", 3 * part_bytes - 9)
    upload.write(0, memoryview(payload(part_bytes)))
    rclone_s3.kill()
    try:
        with pytest.raises(TransientStorageError):
            upload.write(part_bytes, memoryview(payload(part_bytes)))
        upload.abort()
    finally:
        rclone_s3.start()
    assert list(rclone.list("")) == []


@pytest.mark.parametrize("when", ["a part", "the end"])
def test_an_upload_that_the_server_has_forgotten_may_be_sent_anew(rclone, when, part_bytes):
    """A server that was restarted does not know its uploads any more. Everything that is missing
    can be sent again.
    """
    data = memoryview(payload(3 * part_bytes - 9))
    upload = rclone.upload("key", len(data))
    part = upload.part_bytes
    upload.write(0, data[:part])
    if when == "the end":
        send(upload, data)
    rclone.call("key", "abort_multipart_upload", UploadId=upload._id.name)
    go_on = (
        upload.finish if when == "the end" else lambda: upload.write(part, data[part : 2 * part])
    )
    with pytest.raises(TransientStorageError, match="sent again"):
        go_on()
    upload.abort()


class Refusal(BaseHTTPRequestHandler):
    """Answers each request as S3 does without the permission, or with a wrong key."""

    code = "AccessDenied"

    def do_GET(self) -> None:
        body = f"<Error><Code>{self.code}</Code><Message>refused</Message></Error>".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId"])
def test_a_listing_that_is_not_permitted_names_the_permission(code, monkeypatch):
    monkeypatch.setattr(Refusal, "code", code)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        backend = open_s3("s3://bucket/run", {**RIGHT, "endpoint_url": url})
        with pytest.raises(AccessDenied, match=code) as caught:
            list(backend.folders(""))
        server.shutdown()
        thread.join()
    assert ("allow s3:ListBucket" in str(caught.value)) == (code == "AccessDenied")
