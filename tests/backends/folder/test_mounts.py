"""Folders on real mounts, whose file systems differ from a local disk.

A test is skipped if this machine cannot mount the file system, or lacks its program.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.errors import OutOfSpace, RootInUse, RootLost
from ckpt.root.owner import Owner, claim, confirm, read_owner, release
from ckpt.storage.testing.conformance import store
from ckpt_backends.folder.posix import open_posix
from tests.kit import filesystems
from tests.kit.filesystems import Mounts, evict, mounts, unmount
from tests.kit.stores import whole

__all__ = ["mounts"]


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


@pytest.mark.parametrize("kind", ["overlay", "bindfs"])
def test_a_copy_where_inode_numbers_change_has_no_owner_and_another_path_to_the_root_has(
    mounts: Mounts, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "source").mkdir()
    mounted = mounts(
        filesystems.overlay(tmp_path)
        if kind == "overlay"
        else filesystems.bindfs(tmp_path / "source", tmp_path / "bound")
    )
    original, copy = mounted / "runs" / "a", mounted / "runs" / "b"
    written = claim(open_posix(str(original), {}), Owner.of_this_process("a"))
    shutil.copytree(original, copy)
    if kind == "overlay":
        evict(mounted)
    assert read_owner(open_posix(str(copy), {})) is None
    assert read_owner(open_posix(str(original), {})) == written
    path = mounts(filesystems.bound(mounted / "runs", tmp_path / "other"))
    assert read_owner(open_posix(str(path / "a"), {})) == written
    assert read_owner(open_posix(str(path / "b"), {})) is None


def test_a_root_that_a_second_file_system_of_fuse_shows_has_its_owner(
    mounts: Mounts, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    once, twice = (mounts(filesystems.bindfs(source, tmp_path / name)) for name in ("1", "2"))
    for place in (source, once):
        written = claim(open_posix(str(place / "run"), {}), Owner.of_this_process("a"))
        for other in (source, once, twice):
            assert read_owner(open_posix(str(other / "run"), {})) == written


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


@pytest.fixture
def ssh(mounts: Mounts, tmp_path: Path) -> tuple[Path, Path]:
    """A folder, and the same folder as another client sees it through sshfs."""
    source = tmp_path / "source"
    source.mkdir()
    return source, mounts(filesystems.sshfs(source, tmp_path / "ssh", tmp_path / "sshd"))


@pytest.mark.parametrize(("before", "after"), [("a", "b" * 40), ("a" * 40, "b")])
def test_an_owner_that_another_client_of_sshfs_has_noted_is_found(
    ssh: tuple[Path, Path], before: str, after: str
) -> None:
    """The first read after the replacement gives the new bytes at the old length."""
    here, there = (open_posix(str(place / "run"), {}) for place in ssh)
    written = claim(here, Owner.of_this_process(before))
    assert read_owner(there) == written
    release(here, Owner.of_this_process(before))
    written = claim(here, Owner.of_this_process(after))
    assert read_owner(there) == written
    with pytest.raises(RootInUse):
        confirm(there, Owner.of_this_process(before))


def test_a_full_disk_behind_sshfs_is_told_as_one_and_older_steps_make_room(
    mounts: Mounts, tmp_path: Path
) -> None:
    """sshfs reports EIO for it."""
    disk = mounts(filesystems.disk(tmp_path, "tmpfs", mib=8))
    root = mounts(filesystems.sshfs(disk, tmp_path / "ssh", tmp_path / "sshd")) / "run"

    def state(step: int, mib: int = 2) -> dict[str, torch.Tensor]:
        return {"x": torch.full((mib << 17,), step)}

    with CheckpointManager(Tier(str(root), capacity="1GB")) as manager:
        for step in range(1, 6):
            manager.save(state(step), step)
        assert whole(root)[-1] == 5
        assert len(whole(root)) < 5
        with pytest.raises(OutOfSpace):
            manager.save(state(6, 9), 6)
        manager.save(state(7), 7)
    assert whole(root)[-1] == 7


def test_a_small_object_on_a_full_disk_behind_sshfs_is_told_as_one(
    mounts: Mounts, tmp_path: Path
) -> None:
    disk = mounts(filesystems.disk(tmp_path, "tmpfs", mib=1))
    backend = open_posix(
        str(mounts(filesystems.sshfs(disk, tmp_path / "ssh", tmp_path / "sshd")) / "run"), {}
    )
    backend.put("first", [b"x"])
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
    with pytest.raises(OutOfSpace):
        backend.put("second", [b"x"])
    (disk / "filler").unlink()
    backend.put("second", [b"x"])
    assert not list(disk.rglob(".*"))


def test_a_step_that_is_removed_while_a_process_reads_it_is_not_shown_any_more(
    mounts: Mounts, tmp_path: Path
) -> None:
    """FUSE keeps the open file in the folder of the step, under a name of its own."""
    (tmp_path / "source").mkdir()
    root = mounts(filesystems.bindfs(tmp_path / "source", tmp_path / "bound")) / "run"

    def save(*steps: int) -> None:
        with CheckpointManager(Tier(str(root), keep_last=1)) as manager:
            for step in steps:
                manager.save({"x": torch.zeros(9000)}, step)

    save(1)
    with next(root.glob("*/*.safetensors")).open("rb") as reader:
        save(2, 3)
        assert len(list(root.rglob(".fuse_hidden*"))) == 1
        backend = open_posix(str(root), {})
        assert [info.key for info in backend.list("") if "fuse" in info.key] == []
        assert [held.ref.step for held in Inventory(backend, for_display=True).look()] == [3]
        reader.read()
    save(4, 5)
    assert len(list(root.iterdir())) == 1


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_on_btrfs_is_compressed_as_its_mount_says(
    mounts: Mounts, tmp_path: Path, compressed: bool
) -> None:
    """btrfs does not compress the bytes of reserved space."""
    options = "compress=zstd:1" if compressed else ""
    disk = mounts(filesystems.disk(tmp_path, "btrfs", mib=160, options=options))
    backend = open_posix(str(disk / "run"), {})
    free = backend.free_bytes()
    store(backend, "step/key", bytes(48 << 20))
    filesystems.command("sync", "-f", disk)
    assert (free - backend.free_bytes() < 16 << 20) == compressed
