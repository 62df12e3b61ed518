from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from ckpt.errors import ConfigError, UnknownScheme
from ckpt.storage.registry import open_backend, scheme_of
from ckpt_backends.folder.posix import PosixBackend
from ckpt_backends.fsspec_bridge import StorageBackendOnFsspec
from ckpt_backends.gcs.backend import GCSBackend
from ckpt_backends.memory import MemoryBackend
from ckpt_backends.s3.backend import S3Backend


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("runs/x", "file"),
        ("/runs/x", "file"),
        ("~/x", "file"),
        ("S3://b/x", "s3"),
        ("gs://b", "gs"),
        ("simplecache::s3://b", "fsspec"),
        ("C:/x", "file"),
    ],
)
def test_the_scheme_of_a_url(url, scheme):
    assert scheme_of(url) == scheme


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("some/folder", PosixBackend),
        ("file:///some/folder", PosixBackend),
        ("memory://registry", MemoryBackend),
        ("s3://bucket/x", S3Backend),
        ("dir::memory://x", StorageBackendOnFsspec),
    ],
)
def test_a_url_finds_its_backend(url, kind):
    assert isinstance(open_backend(url), kind)


def test_both_names_of_gcs_find_it():
    for scheme in ("gs", "gcs"):
        backend = open_backend(
            f"{scheme}://bucket/x", {"token": "anon", "endpoint_url": "http://127.0.0.1:1"}
        )
        assert isinstance(backend, GCSBackend)
        backend.close()


def test_an_unknown_scheme_is_told_with_those_known():
    with pytest.raises(UnknownScheme, match="s3") as caught:
        open_backend("nosuch://x")
    assert isinstance(caught.value, ConfigError)


def test_an_entry_point_is_found(monkeypatch):
    class Entry:
        name = "mine"

        def load(self):
            return lambda url, options: (url, options)

    def entry_points(*, group, name=None):
        return [Entry()] if group == "ckpt.backends" and name in (None, "mine") else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert open_backend("mine://x", {"a": 1}) == ("mine://x", {"a": 1})
    with pytest.raises(UnknownScheme, match="mine"):
        open_backend("other://x")


def test_a_folder_costs_no_import_of_clients_or_torch():
    code = (
        "import sys; from ckpt.storage.registry import open_backend; open_backend('/tmp/x');"
        "print([name for name in ('s3fs', 'gcsfs', 'fsspec', 'botocore', 'aiohttp', 'torch') if "
        "name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "[]"
