from __future__ import annotations

import itertools

import pytest

from ckpt.errors import ConfigError, ObjectExists, StorageError, TransientStorageError
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import fetch, payload, send
from ckpt_backends.gcs import open_gcs

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


def test_a_bucket_that_is_not_there_is_an_error(fake_gcs):
    backend = open_gcs("gs://gone/x", options(fake_gcs))
    with pytest.raises(StorageError):
        backend.put("key", [b"x"])
    backend.close()


def test_a_url_without_a_bucket_is_refused():
    with pytest.raises(ConfigError, match="bucket"):
        open_gcs("gs://", {})
