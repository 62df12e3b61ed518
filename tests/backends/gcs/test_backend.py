from __future__ import annotations

import itertools
import time
import tracemalloc

import pytest

from ckpt.errors import ConfigError, ObjectExists, StorageError, TransientStorageError
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import fetch, payload, send
from ckpt_backends.gcs.backend import GCSBackend, open_gcs
from tests.kit.parts import parts_of
from tests.servers import free_port

pytestmark = [
    pytest.mark.server,
    # gcsfs hands aiohttp whole parts, and Python hides this warning by default
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]
_numbers = itertools.count()
part_bytes = parts_of("ckpt_backends.gcs.backend.PART_BYTES")


def options(server) -> dict[str, object]:
    return {"endpoint_url": server.url, "token": "anon", "project": "p"}


class TestFakeGcs(BackendConformance):
    @pytest.fixture
    def open_root(self, fake_gcs, part_bytes):
        test = next(_numbers)
        return lambda name: open_gcs(f"gs://bucket/test-{test}/{name}", options(fake_gcs))


@pytest.fixture
def backend(fake_gcs, part_bytes):
    backend = open_gcs(f"gs://bucket/test-{next(_numbers)}", options(fake_gcs))
    yield backend
    backend.close()


def test_the_endpoint_may_be_in_the_url(fake_gcs):
    backend = open_gcs(
        f"gs://bucket/q-{next(_numbers)}?endpoint_url={fake_gcs.url}", {"token": "anon"}
    )
    backend.put("key", [b"x"])
    assert fetch(backend, "key") == b"x"
    assert "?" not in backend.url
    backend.close()


def test_a_conditional_put_whose_reply_was_lost_knows_itself(backend):
    real = backend._fs.pipe_file

    def pipe_file(path, value, **how):
        real(path, value, **how)
        return real(path, value, **how)

    backend._fs.pipe_file = pipe_file
    backend.put("marker", [b"mine"], if_absent=True)
    backend._fs.pipe_file = real
    with pytest.raises(ObjectExists):
        backend.put("marker", [b"mine"], if_absent=True)


def test_a_part_that_breaks_the_stream_may_be_sent_again(backend, part_bytes):
    data = payload(5 * part_bytes // 2)
    view = memoryview(data)
    upload = backend.upload("key", len(data))
    upload.write(0, view[:part_bytes])
    real = backend.request

    def broken(key, method, url, **how):
        raise TransientStorageError(key, "reset")

    backend.request = broken
    with pytest.raises(TransientStorageError):
        upload.write(part_bytes, view[part_bytes : 2 * part_bytes])
    backend.request = real
    assert list(backend.list("")) == []
    send(upload, view)
    upload.finish()
    assert fetch(backend, "key") == data


def test_a_part_that_has_been_sent_is_let_go(backend, part_bytes):
    """Its memory may be another part's at once, and nothing refers to it."""
    size = 8 * part_bytes
    memory = bytearray(part_bytes)
    upload = backend.upload("key", size)
    tracemalloc.start()
    try:
        for number in range(8):
            memory[:] = bytes([number + 1]) * len(memory)
            upload.write(number * len(memory), memoryview(memory))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    upload.finish()
    assert peak < 3 * part_bytes
    assert fetch(backend, "key") == b"".join(
        bytes([number + 1]) * len(memory) for number in range(8)
    )


def test_parts_in_any_order_and_one_shorter_than_was_announced(backend, part_bytes):
    data = payload(5 * part_bytes + 12345)
    view, part = memoryview(data), part_bytes
    upload = backend.upload("key", 6 * part_bytes)
    for number in (1, 0, 5, 3, 4, 2):
        upload.write(number * part, view[number * part : (number + 1) * part])
    assert list(backend.list("")) == []
    assert upload.finish(len(data)).size == len(data)
    assert fetch(backend, "key") == data


def test_early_parts_are_sent_after_the_request_for_one_of_them_has_failed(backend, part_bytes):
    part, data = part_bytes, payload(4 * part_bytes)
    view, real, failures = memoryview(data), backend.request, [1]
    upload = backend.upload("key", len(data))
    for number in (1, 2, 3):
        upload.write(number * part, view[number * part : (number + 1) * part])

    def request(key, method, url, *, headers=None, data=None):
        if headers and headers.get("Content-Range", "").startswith(f"bytes {part}-") and failures:
            raise TransientStorageError(key, f"cut {failures.pop()}")
        return real(key, method, url, headers=headers, data=data)

    backend.request = request
    with pytest.raises(TransientStorageError, match="cut 1"):
        upload.write(0, view[:part])
    upload.write(0, view[:part])
    assert upload.finish(len(data)).size == len(data)
    assert fetch(backend, "key") == data


def halved(headers, data, nbytes):
    """Return the headers and the data of a request whose server takes only the first part of
    ``nbytes``.
    """
    begin = int(headers["Content-Range"].split()[1].split("-")[0])
    data = data[:nbytes]
    span = f"bytes {begin}-{begin + data.nbytes - 1}/*"
    return {"Content-Range": span, "Content-Length": str(data.nbytes)}, data


def test_the_rest_of_a_last_part_is_sent_if_the_server_took_half_of_it(backend, part_bytes):
    data = payload(5 * part_bytes // 2 + 5)
    real, cuts = backend.request, [1]

    def request(key, method, url, *, headers=None, data=None):
        if headers and headers["Content-Range"].endswith(f"/{5 * part_bytes // 2 + 5}") and cuts:
            cuts.pop()
            headers, data = halved(headers, data, part_bytes // 2)
        return real(key, method, url, headers=headers, data=data)

    backend.request = request
    upload = backend.upload("key", len(data))
    send(upload, memoryview(data))
    with pytest.raises(TransientStorageError):
        upload.finish()
    assert not cuts
    assert upload.finish().size == len(data)
    assert fetch(backend, "key") == data


def test_the_rest_of_an_early_part_is_sent_if_a_request_within_it_has_failed(backend, part_bytes):
    part, data = part_bytes, payload(4 * part_bytes)
    view, real, failures = memoryview(data), backend.request, ["reset", "half"]

    def request(key, method, url, *, headers=None, data=None):
        begin = (headers or {}).get("Content-Range", "").removeprefix("bytes ").split("-")[0]
        if failures and begin in (f"{part}", f"{part + part_bytes // 2}"):
            if failures.pop() == "reset":
                raise TransientStorageError(key, "reset")
            headers, data = halved(headers, data, part_bytes // 2)
        return real(key, method, url, headers=headers, data=data)

    backend.request = request
    upload = backend.upload("key", len(data))
    for number in (1, 2, 3):
        upload.write(number * part, view[number * part : (number + 1) * part])
    with pytest.raises(TransientStorageError, match="reset"):
        upload.write(0, view[:part])
    assert not failures
    upload.write(0, view[:part])
    assert upload.finish().size == len(data)
    assert fetch(backend, "key") == data


def test_a_size_that_ends_with_a_part_and_is_less_than_was_announced(backend, part_bytes):
    data = payload(3 * part_bytes)
    upload = backend.upload("key", 5 * part_bytes)
    send(upload, memoryview(data))
    assert upload.finish(len(data)).size == len(data)
    assert fetch(backend, "key") == data


def test_a_server_that_takes_half_a_part_gets_the_other_half(backend, part_bytes):
    """Google's server may do so. The emulator takes all, so its answers are cut here."""
    data = payload(3 * part_bytes)
    real, asked = backend.request, []

    def half(key, method, url, *, headers=None, data=None):
        if data is not None and "/*" in headers["Content-Range"] and data.nbytes > part_bytes // 2:
            headers, data = halved(headers, data, part_bytes // 2)
        asked.append((headers or {}).get("Content-Range"))
        return real(key, method, url, headers=headers, data=data)

    backend.request = half
    upload = backend.upload("key", len(data))
    send(upload, memoryview(data))
    upload.finish()
    assert fetch(backend, "key") == data
    assert len(asked) == 7


def test_a_last_reply_that_was_lost_is_found_out(backend, part_bytes):
    data = payload(5 * part_bytes // 2)
    upload = backend.upload("key", len(data))
    send(upload, memoryview(data))
    real = backend.request

    def lost(key, method, url, **how):
        real(key, method, url, **how)
        raise TransientStorageError(key, "reset")

    backend.request = lost
    with pytest.raises(TransientStorageError):
        upload.finish()
    backend.request = real
    upload.finish()
    assert fetch(backend, "key") == data


def test_an_object_of_the_same_size_is_no_upload_whose_last_reply_was_lost(backend, part_bytes):
    """Such an object is from an earlier try of the same upload, or from another job."""
    size = 5 * part_bytes // 2
    backend.put("key", [payload(size)])
    upload = backend.upload("key", size)
    send(upload, memoryview(bytes(size)))
    real = backend.request

    def forgotten(key, method, url, **how):
        return real(key, method, url + "gone", **how)

    backend.request = forgotten
    with pytest.raises(TransientStorageError, match="forgotten"):
        upload.finish()


def test_a_reply_lost_in_the_middle_never_passes_for_whole(backend, part_bytes):
    """Google ignores what it has. The emulator appends it once more, which must be detected."""
    data = payload(3 * part_bytes)
    view, part = memoryview(data), part_bytes
    upload = backend.upload("key", len(data))
    upload.write(0, view[:part])
    real = backend.request

    def lost(key, method, url, **how):
        real(key, method, url, **how)
        raise TransientStorageError(key, "reset")

    backend.request = lost
    with pytest.raises(TransientStorageError):
        upload.write(part, view[part : 2 * part])
    backend.request = real
    upload.write(part, view[part : 2 * part])
    upload.write(2 * part, view[2 * part :])
    with pytest.raises(TransientStorageError, match="sent again"):
        upload.finish()


def test_an_upload_that_the_server_has_forgotten_must_be_sent_anew(backend, part_bytes):
    data = payload(5 * part_bytes // 2)
    upload = backend.upload("key", len(data))
    upload.write(0, memoryview(data)[:part_bytes])
    upload._location += "gone"
    for _ in range(2):
        with pytest.raises(TransientStorageError, match="forgotten"):
            upload.write(part_bytes, memoryview(data)[part_bytes : 2 * part_bytes])
    upload.abort()
    assert list(backend.list("")) == []


def test_a_url_without_a_bucket_is_refused():
    with pytest.raises(ConfigError, match="bucket"):
        open_gcs("gs://", {})


def test_a_bucket_that_is_not_there_is_named(fake_gcs, part_bytes):
    backend = open_gcs("gs://gone/x", options(fake_gcs))
    for verb in (
        lambda: backend.put("key", [b"x"]),
        lambda: backend.upload("key", 5 * part_bytes // 2),
        lambda: list(backend.list("")),
        lambda: list(backend.folders("")),
    ):
        with pytest.raises(StorageError, match="no bucket 'gone'"):
            verb()
    backend.close()


def test_without_credentials_it_fails_at_once_with_the_way_out(monkeypatch, tmp_path):
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(ConfigError, match="gcloud auth application-default login") as caught:
        open_gcs("gs://user:hunter2@bucket/x", {})
    assert "hunter2" not in str(caught.value)
    assert time.monotonic() - began < 10


def test_a_store_that_cannot_be_reached_is_told_in_seconds_and_prints_nothing(capfd):
    backend = open_gcs(
        "gs://bucket/x", {"token": "anon", "endpoint_url": f"http://127.0.0.1:{free_port()}"}
    )
    began = time.monotonic()
    with pytest.raises(TransientStorageError):
        backend.head("key")
    assert time.monotonic() - began < 15
    backend.close()
    assert capfd.readouterr() == ("", "")


def test_a_page_of_a_listing_is_asked_for_when_the_one_before_it_was_taken(backend, monkeypatch):
    pages = []
    page = GCSBackend._page

    def recorded(self, key, /, **arguments):
        pages.append(arguments)
        return page(self, key, **arguments)

    for number in range(5):
        backend.put(f"step-{number}/file", [b"x"])
    monkeypatch.setattr("ckpt_backends.gcs.backend._PAGE_KEYS", 2)
    monkeypatch.setattr(GCSBackend, "_page", recorded)
    listed = backend.list("step-")
    assert [next(listed).key, next(listed).key] == ["step-0/file", "step-1/file"]
    assert len(pages) == 1
    assert [info.key for info in listed] == [f"step-{number}/file" for number in (2, 3, 4)]
    assert len(pages) == 3
    assert list(backend.folders("")) == [f"step-{number}" for number in range(5)]
