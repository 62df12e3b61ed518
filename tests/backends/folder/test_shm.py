from __future__ import annotations

import gc
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt.errors import ObjectNotFound, StorageError
from ckpt.storage.api import AdoptsFiles
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import fetch
from ckpt_backends.folder import shm
from ckpt_backends.folder.shm import open_shm, stores
from tests.kit.parts import parts_of

part_bytes = parts_of("ckpt_backends.folder.posix._PART_BYTES")


class TestShm(BackendConformance):
    @pytest.fixture
    def open_root(self, part_bytes):
        token = uuid.uuid4().hex[:8]
        made: list[str] = []

        def build(name: str):
            made.append(f"shm://test-{token}-{name}")
            return open_shm(made[-1], {})

        yield build
        for url in made:
            backend = open_shm(url, {})
            for info in list(backend.list("")):
                backend.delete(info.key)
            backend.close()
            assert not Path(
                f"/dev/shm/ckpt-memory-{os.getuid()}-{url.removeprefix('shm://')}"
            ).exists()

    def test_a_file_is_taken_without_a_copy_and_keeps_its_own_name(self, backend):
        path = Path(f"/dev/shm/ckpt-test-{uuid.uuid4().hex}")
        try:
            path.write_bytes(b"0123456789")
            adopting = backend
            assert isinstance(adopting, AdoptsFiles)
            assert adopting.adopt("step/x", str(path), 7).size == 7
            assert fetch(backend, "step/x") == b"0123456"
            assert path.stat().st_nlink == 2
            backend.adopt("step/x", str(path), 3)  # once more, which replaces the first
            assert backend.head("step/x").size == 3
            backend.delete("step/x")
            assert path.read_bytes() == b"012"
        finally:
            path.unlink()

    def test_a_file_elsewhere_is_refused_and_leaves_nothing(self, backend, tmp_path):
        (tmp_path / "x").write_bytes(b"abc")
        for path in (tmp_path / "x", "/dev/shm/ckpt-no-such-file"):
            with pytest.raises(StorageError):
                backend.adopt("step/x", str(path), 3)
        assert list(backend.list("")) == []

    def test_a_file_is_opened_by_its_key_and_no_other_is(self, backend):
        backend.put("step/x", [b"0123456789"])
        with backend.open_file("step/x") as file:
            assert file.read() == b"0123456789"
        Path(backend._resolved_root(), "step/link").symlink_to("x")
        with pytest.raises(StorageError):
            backend.open_file("step/link")
        with pytest.raises(ObjectNotFound):
            backend.open_file("step/y")
        Path(backend._resolved_root(), "step/link").unlink()

    def test_an_upload_is_aborted_after_the_store_was_closed(self, backend):
        upload = backend.upload("folder/key", 10)
        backend.close()
        upload.abort()  # This raises no error, as the contract says
        name = backend.url.removeprefix("shm://")
        shutil.rmtree(f"/dev/shm/ckpt-memory-{os.getuid()}-{name}")

    def test_a_folder_is_not_opened_as_an_object(self, backend):
        backend.put("step/x", [b"0123456789"])
        gc.collect()
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ObjectNotFound):
            backend.open_file("step")
        assert os.listdir("/proc/self/fd") == before

    def test_a_folder_that_is_removed_and_made_again_keeps_its_identity(self, open_root):
        """The ranks of a node may open it while a job that ends removes it."""
        ending = open_root("x")
        identity = ending.identity()
        assert identity != open_root("y").identity()
        inode = os.stat(ending._resolved_root()).st_ino
        ending.close()
        again = open_root("x")
        assert os.stat(again._resolved_root()).st_ino != inode
        assert again.identity() == identity
        again.close()


def test_a_store_that_a_job_removes_meanwhile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, scan = f"ckpt-memory-{os.getuid()}-", os.scandir
    for name in ("a", "b"):
        (tmp_path / f"{own}{name}").mkdir(mode=0o700)

    @contextmanager
    def listed_before_the_removal(path: str) -> Iterator[list[os.DirEntry[str]]]:
        with scan(path) as entries:
            yield list(entries)
        (tmp_path / f"{own}a").rmdir()

    monkeypatch.setattr(shm, "_SHM", str(tmp_path))
    monkeypatch.setattr(os, "scandir", listed_before_the_removal)
    assert stores() == ["shm://b"]
