from __future__ import annotations

import itertools
import time

import pytest

from ckpt.errors import ConfigError, ObjectExists, StorageError, TransientStorageError
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import fetch, payload, send
from ckpt_backends.gcs import open_gcs
from tests.servers import free_port

pytestmark = [
    pytest.mark.server,
    # gcsfs hands aiohttp whole parts; Python does not show this one unless asked
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]
_numbers = itertools.count()


def options(server) -> dict[str, object]:
    return {"endpoint_url": server.url, "token": "anon", "project": "p"}


class TestFakeGcs(BackendConformance):
    @pytest.fixture
    def open_root(self, fake_gcs):
        test = next(_numbers)
        return lambda name: open_gcs(f"gs://bucket/test-{test}/{name}", options(fake_gcs))


@pytest.fixture
def backend(fake_gcs):
    backend = open_gcs(f"gs://bucket/test-{next(_numbers)}", options(fake_gcs))
    yield backend
    backend.close()


def test_the_endpoint_may_be_in_the_url(fake_gcs):
    backend = open_gcs(f"gs://bucket/q-{next(_numbers)}?endpoint_url={fake_gcs.url}", {"token": "anon"})
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


def test_a_part_that_breaks_the_stream_may_be_sent_again(backend):
    data = payload(20 << 20)
    view = memoryview(data)
    upload = backend.upload("key", len(data))
    upload.write(0, view[: 8 << 20])

    def broken(_):
        raise ConnectionResetError

    upload._file.write = broken
    with pytest.raises(TransientStorageError):
        upload.write(8 << 20, view[8 << 20 : 16 << 20])
    assert list(backend.list("")) == []
    send(upload, view)
    upload.finish()
    assert fetch(backend, "key") == data


def test_a_url_without_a_bucket_is_refused():
    with pytest.raises(ConfigError, match="bucket"):
        open_gcs("gs://", {})


def test_a_bucket_that_is_not_there_is_named(fake_gcs):
    backend = open_gcs("gs://gone/x", options(fake_gcs))
    for verb in (
        lambda: backend.put("key", [b"x"]),
        lambda: backend.upload("key", 20 << 20),
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
    backend = open_gcs("gs://bucket/x", {"token": "anon", "endpoint_url": f"http://127.0.0.1:{free_port()}"})
    began = time.monotonic()
    with pytest.raises(TransientStorageError):
        backend.head("key")
    assert time.monotonic() - began < 15
    backend.close()
    assert capfd.readouterr() == ("", "")
