"""Folders on real mounts, whose file systems differ from a local disk.

A test is skipped if this machine cannot mount the file system, or lacks its program.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import RootLost
from ckpt_backends.posix import open_posix
from tests.kit import filesystems
from tests.kit.filesystems import evict, mounts, unmount
from tests.kit.stores import whole

__all__ = ["mounts"]
Mounts = Callable[[AbstractContextManager[Path]], Path]


@pytest.fixture
def overlay(mounts: Mounts, tmp_path: Path) -> Path:
    return mounts(filesystems.overlay(tmp_path))


@pytest.mark.parametrize("name", ["image", "image/new", "."])
def test_an_overlay_that_numbers_its_folders_anew_keeps_the_root(overlay: Path, name: str) -> None:
    """A container has such a folder where its image and its disk are on two file systems."""
    root = overlay / name
    root.mkdir(exist_ok=True)
    with CheckpointManager(root) as manager:
        evict(overlay)
        (overlay / "other").mkdir()
        for step in (1, 2):
            manager.save({"x": torch.full((9000,), step)}, step)
            evict(overlay)
    assert whole(root) == [1, 2]


def test_two_processes_agree_on_the_identity_of_a_root_on_an_overlay(overlay: Path) -> None:
    root, other = overlay / "image", overlay / "other"
    first = open_posix(str(root), {}).identity()
    assert open_posix(str(other), {}).identity() != first
    evict(overlay)
    assert open_posix(str(other), {}).identity() != first
    assert open_posix(str(root), {}).identity() == first


@pytest.mark.parametrize("name", ["image", "."])
def test_an_overlay_that_is_unmounted_is_a_lost_root(overlay: Path, name: str) -> None:
    root = overlay / name
    with CheckpointManager(root) as manager:
        manager.save({"x": torch.zeros(9000)}, 1)
        unmount(overlay)
        with pytest.raises(RootLost):
            manager.save({"x": torch.zeros(9000)}, 2)
    assert list(overlay.iterdir()) == []


def test_bindfs_counts_as_a_network_file_system(mounts: Mounts, tmp_path: Path) -> None:
    """Its type in the table of mounts is plain "fuse"."""
    (tmp_path / "source").mkdir()
    root = mounts(filesystems.bindfs(tmp_path / "source", tmp_path / "bound"))
    assert open_posix(str(root / "run"), {}).capabilities.shared
