from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpt_backends.folder.places import are_apart
from ckpt_backends.folder.posix import open_posix
from ckpt_backends.folder.shm import open_shm


def place(path: Path) -> str:
    return open_posix(str(path), {}).place()


def test_a_copy_of_a_folder_is_elsewhere_and_other_paths_to_it_are_not(tmp_path: Path) -> None:
    original, copy, link = (tmp_path / name for name in ("original", "copy", "link"))
    at = place(original)
    shutil.copytree(original, copy)
    link.symlink_to(original)
    assert open_posix(str(copy), {}).is_elsewhere(at)
    assert not open_posix(str(link), {}).is_elsewhere(at)
    assert not open_posix(os.path.relpath(original), {}).is_elsewhere(at)
    original.rename(tmp_path / "new name")
    assert not open_posix(str(tmp_path / "new name"), {}).is_elsewhere(at)
    copy.rename(original)
    assert open_posix(str(original), {}).is_elsewhere(at)


def test_a_store_in_memory_that_was_made_again_is_the_same(shm_name: str) -> None:
    first = open_shm(f"shm://{shm_name}", {})
    at = first.place()
    first.close()
    again, other = open_shm(f"shm://{shm_name}", {}), open_shm(f"shm://{shm_name}-2", {})
    assert not again.is_elsewhere(at)
    assert other.is_elsewhere(at)
    again.close()
    other.close()


@pytest.fixture
def shm_name() -> str:
    return f"places-{os.getpid()}"


@pytest.mark.parametrize(
    ("one", "two", "apart"),
    [
        ("1:5::", "1:5::", False),
        ("1:5::", "1:6::", True),
        ("1:5::", "2:5::", True),  # Another disk, or a snapshot of btrfs
        (":5::", ":6::", True),  # A network file system
        (":5::", "2:5::", False),  # NFS from this very machine, or a copy on its local disk
        ("1::1:a", "1::1:b", True),  # An overlay
        ("1::1:a", "2:5::", True),
        ("::1:a", "::1:b", True),  # FUSE
        ("::1:a", "::2:b", False),  # Two mounts, perhaps of one folder
        ("::1:a", "2:5::", False),  # The folder that is mounted, perhaps
        (":::", ":::", False),
        ("1:5::", "s3://a:b:c/d:e/", False),
        ("1:5::", "1:6:::", False),
        ("1:5::", "", False),
    ],
)
def test_two_folders_are_apart_only_if_that_is_certain(one: str, two: str, apart: bool) -> None:
    assert are_apart(one, two) == apart


def test_a_job_that_only_reads_the_owner_forces_nothing_to_the_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A medium that cannot be written to may refuse that."""
    at = place(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("the medium cannot be written to"))
    assert not open_posix(str(tmp_path), {}).is_elsewhere(at)
