from __future__ import annotations

import itertools
import time

import pytest

from ckpt.errors import AccessDenied, ConfigError, ObjectExists, StorageError, TransientStorageError
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import at_once, fetch, payload, store
from ckpt.storage.testing.uploads import UploadConformance
from ckpt_backends.s3 import open_s3
from tests.servers import KEY, SECRET

pytestmark = pytest.mark.server
_numbers = itertools.count()
RIGHT = {"key": KEY, "secret": SECRET, "region": "us-east-1"}
HASTY = {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 2}}


def fresh() -> str:
    return f"test-{next(_numbers)}"


class TestMoto(BackendConformance):
    @pytest.fixture
    def open_root(self, moto_server):
        test = fresh()
        # moto, one Python process, was seen once to leave a request of eight racing threads without an answer: ask again sooner
        options = {**RIGHT, "endpoint_url": moto_server.url, "config_kwargs": {"read_timeout": 5}}
        return lambda name: open_s3(f"s3://bucket/{test}/{name}", options)


class TestRclone(BackendConformance):
    """A real server, which ignores ``If-None-Match``."""

    @pytest.fixture
    def open_root(self, rclone_s3):
        test = fresh()
        options = {**RIGHT, "put_if_absent": False}
        return lambda name: open_s3(f"s3://bucket/{test}/{name}?endpoint_url={rclone_s3.url}", options)

    def test_an_aborted_upload_leaves_nothing(self, backend):
        """rclone makes the folder when an upload begins and leaves it there."""
        upload = backend.upload("gone/large", 20 << 20)
        upload.write(0, memoryview(payload(8 << 20)))
        upload.abort()
        assert list(backend.list("")) == []

    def test_reads_while_a_key_is_replaced_see_one_version_or_the_other(self, backend):
        """rclone writes over the file in place, which no client can help: a short answer must at least be seen as one."""
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
    """The other client for large objects; it has no part in small ones."""

    @pytest.fixture
    def open_root(self, moto_server):
        test = fresh()
        options = {**RIGHT, "endpoint_url": moto_server.url, "client": "obstore", "checksums": True}
        return lambda name: open_s3(f"s3://bucket/{test}/ü %20#{name}", options)


@pytest.fixture
def moto(moto_server):
    backend = open_s3(f"s3://bucket/{fresh()}", {**RIGHT, "endpoint_url": moto_server.url})
    yield backend
    backend.close()


@pytest.fixture
def rclone(rclone_s3):
    backend = open_s3(f"s3://bucket/{fresh()}", {**RIGHT, **HASTY, "endpoint_url": rclone_s3.url})
    yield backend
    backend.close()


def losing(backend, method: str, error: Exception, times: int = 1):
    """From now on the replies of ``method`` are lost, ``times`` times."""
    real, left = backend._fs.call_s3, [times]

    def call_s3(name, **arguments):
        result = real(name, **arguments)
        if name == method and left[0]:
            left[0] -= 1
            raise error
        return result

    backend._fs.call_s3 = call_s3


def test_a_lost_reply_to_the_last_request_is_no_failure(moto):
    losing(moto, "complete_multipart_upload", TimeoutError())
    data = payload(20 << 20)
    store(moto, "key", data)
    assert fetch(moto, "key") == data


def test_a_completion_that_never_happened_is_a_failure_even_over_an_older_object_of_that_size(moto):
    data = payload(20 << 20)
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


def uploads_of(backend) -> list[str]:
    reply = backend._fs.call_s3("list_multipart_uploads", Bucket="bucket")
    return [found["Key"] for found in reply.get("Uploads", ()) if found["Key"].startswith(backend._prefix)]


def test_an_abort_leaves_no_parts_to_pay_for(moto):
    upload = moto.upload("key", 20 << 20)
    upload.write(0, memoryview(payload(8 << 20)))
    assert uploads_of(moto)
    upload.abort()
    assert not uploads_of(moto)


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


def test_a_bucket_that_is_not_there_is_named(moto_server):
    backend = open_s3("s3://gone/x", {**RIGHT, "endpoint_url": moto_server.url})
    for verb in (
        lambda: backend.put("key", [b"x"]),
        lambda: backend.upload("key", 20 << 20),
        lambda: list(backend.list("")),
    ):
        with pytest.raises(StorageError, match="no bucket 'gone'") as caught:
            verb()
        assert type(caught.value) is StorageError
    backend.close()


def test_listings_go_over_pages(moto):
    at_once(lambda thread: [moto.put(f"many/{thread}-{number}/x", [b""]) for number in range(260)], 4)
    assert len({info.key for info in moto.list("many/")}) == 1040
    assert len(set(moto.folders("many/"))) == 1040


def test_parts_grow_with_the_object(moto):
    upload = moto.upload("huge", 200 << 30)
    assert upload.part_bytes == 21 << 20
    assert 10_000 * upload.part_bytes >= 200 << 30
    upload.abort()


def test_a_part_that_is_none_is_refused(moto):
    upload = moto.upload("key", 20 << 20)
    with pytest.raises(StorageError, match="no part"):
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


def test_the_url_shows_no_credentials():
    backend = open_s3("s3://AKID:hunter2@bucket/x?endpoint_url=http://u:p@h:1", {})
    assert backend.url == "s3://bucket/x"


def test_the_environment_may_name_the_endpoint(moto_server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.url)
    backend = open_s3(f"s3://bucket/{fresh()}", RIGHT)
    backend.put("key", [b"x"])
    assert fetch(backend, "key") == b"x"
    backend.close()


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


def test_a_server_that_dies_is_transient_and_work_goes_on_when_it_is_back(rclone, rclone_s3):
    data = payload(20 << 20)
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
            lambda: rclone.upload("key", 20 << 20),
        ):
            with pytest.raises(TransientStorageError):
                verb()
        assert time.monotonic() - started < 60
    finally:
        rclone_s3.start()
    assert fetch(rclone, "before") == data
    store(rclone, "after", data)
    assert sorted(info.key for info in rclone.list("")) == ["after", "before"]


def test_a_server_that_dies_under_an_upload(rclone, rclone_s3):
    upload = rclone.upload("key", 20 << 20)
    upload.write(0, memoryview(payload(8 << 20)))
    rclone_s3.kill()
    try:
        with pytest.raises(TransientStorageError):
            upload.write(8 << 20, memoryview(payload(8 << 20)))
        upload.abort()
    finally:
        rclone_s3.start()
    assert list(rclone.list("")) == []
