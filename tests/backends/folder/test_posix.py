from __future__ import annotations

import errno
import gc
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt.errors import (
    AccessDenied,
    ConfigError,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    RootLost,
    StorageError,
)
from ckpt.storage.api import KeepsUnfinishedWrites
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import fetch, page_aligned, payload, send, store
from ckpt_backends.folder import direct_io
from ckpt_backends.folder import mounts as mounts_module
from ckpt_backends.folder import posix as posix_module
from ckpt_backends.folder.posix import open_posix
from tests.kit.parts import parts_of

PART = 8 << 20
part_bytes = parts_of("ckpt_backends.folder.posix._PART_BYTES")


class TestDisk(BackendConformance):
    @pytest.fixture
    def open_root(self, tmp_path, part_bytes):
        return lambda name: open_posix(str(tmp_path / "made/later" / name), {})


class TestTmpfs(BackendConformance):
    @pytest.fixture
    def open_root(self, part_bytes):
        folder = tempfile.mkdtemp(dir="/dev/shm", prefix="ckpt-test-")
        yield lambda name: open_posix(f"file://{folder}/{name}", {})
        shutil.rmtree(folder)


class TestWithoutDirect(BackendConformance):
    @pytest.fixture
    def open_root(self, tmp_path, part_bytes):
        return lambda name: open_posix(str(tmp_path / name), {"direct": False})


class TestByLink(BackendConformance):
    """Tests on a file system without RENAME_NOREPLACE, such as NFS."""

    @pytest.fixture
    def open_root(self, tmp_path, monkeypatch, part_bytes):
        monkeypatch.setattr(direct_io, "_rename_noreplace", lambda source, target: False)
        return lambda name: open_posix(str(tmp_path / name), {})


class TestWithoutConditionalPut(BackendConformance):
    @pytest.fixture
    def open_root(self, tmp_path, part_bytes):
        return lambda name: open_posix(str(tmp_path / name), {"put_if_absent": False})


@contextmanager
def mounted(folder: Path, options: str):
    """A tmpfs of its own. It needs root: without it the test is skipped, and says so."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "t", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED, mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "small", "size=20m") as folder:
        yield folder


@pytest.fixture
def backend(tmp_path):
    return open_posix(str(tmp_path / "root"), {})


def leftovers(folder) -> list[str]:
    return [str(path) for path in Path(folder).rglob("*") if path.is_file()]


# opening


def test_opening_creates_nothing(tmp_path):
    backend = open_posix(str(tmp_path / "a/b"), {})
    assert list(backend.list("")) == []
    assert list(backend.folders("")) == []
    assert os.listdir(tmp_path) == []
    backend.put("x", [b"x"])
    assert (tmp_path / "a/b/x").read_bytes() == b"x"


def test_the_url_is_the_absolute_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_posix("~/runs", {}).url == f"{tmp_path}/runs"
    assert open_posix("runs/../x/", {}).url == f"{tmp_path}/x"
    assert open_posix(f"file://{tmp_path}/with%20blank", {}).url == f"{tmp_path}/with blank"
    assert open_posix(f"FILE://localhost{tmp_path}", {}).url == str(tmp_path)


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a folder"):
        open_posix(str(tmp_path / "file"), {})
    with pytest.raises(StorageError, match=r"not a folder|Not a directory"):
        open_posix(str(tmp_path / "file/below"), {}).put("x", [b""])


@pytest.mark.parametrize("options", [{"sharde": True}, {"shared": "yes"}])
def test_a_wrong_option_is_refused(tmp_path, options):
    with pytest.raises(ConfigError):
        open_posix(str(tmp_path), options)


def test_a_host_in_a_file_url_is_refused():
    with pytest.raises(ConfigError, match="host"):
        open_posix("file://server/share", {})


def test_every_character_of_a_url_counts(tmp_path):
    for url, path in (
        (f"file://{tmp_path}/a%23b%3Fc#d", "a#b?c#d"),
        (f"{tmp_path}/a?b#c%20", "a?b#c%20"),
    ):
        assert open_posix(url, {}).url == str(tmp_path / path)
    with pytest.raises(ConfigError, match=r"has a '\?'"):
        open_posix(f"file://{tmp_path}/a?b", {})
    with pytest.raises(ConfigError, match="null"):
        open_posix(f"{tmp_path}/a\0b", {})


def test_a_local_disk_is_not_shared_unless_told(tmp_path):
    assert not open_posix(str(tmp_path), {}).capabilities.shared
    assert open_posix(str(tmp_path), {"shared": True}).capabilities.shared


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("nfs4", True),
        ("lustre", True),
        ("fuse.gpfs", True),
        ("fuse", True),
        ("fuseblk", False),
        ("ext4", False),
        ("tmpfs", False),
    ],
)
def test_a_network_file_system_is_shared(tmp_path, monkeypatch, kind, shared):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x /data\\040set {kind} rw 0 0\n")
    real_open = open
    monkeypatch.setattr(
        mounts_module, "open", lambda path, **how: real_open(mounts, **how), raising=False
    )
    assert open_posix("/data set/run", {}).capabilities.shared is shared
    assert not open_posix("/data settlers", {}).capabilities.shared


# modes and links


def test_files_and_folders_are_private(backend, tmp_path):
    old = os.umask(0)
    try:
        backend.put("step/small", [b"x"])
        store(backend, "step/sub/large", payload(PART + 1))
    finally:
        os.umask(old)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "root").rglob("*")
    }
    assert modes == {"step": 0o700, "sub": 0o700, "small": 0o600, "large": 0o600}
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o700


def test_folders_that_were_there_keep_their_mode(tmp_path):
    (tmp_path / "root/step").mkdir(parents=True, mode=0o755)
    os.chmod(tmp_path / "root", 0o755)
    open_posix(str(tmp_path / "root"), {}).put("step/x", [b"x"])
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o755


def test_a_link_that_leads_out_of_the_root_is_not_followed(backend, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    backend.put("x", [b"x"])
    (tmp_path / "root/link").symlink_to(outside)
    (tmp_path / "root/file").symlink_to(outside / "secret")
    (tmp_path / "root-twin").mkdir()
    (tmp_path / "root/twin").symlink_to(tmp_path / "root-twin")
    for key in ("link/secret", "file"):
        with pytest.raises(AccessDenied):
            backend.read_into(key, 0, memoryview(bytearray(1)))
        with pytest.raises(AccessDenied):
            backend.head(key)
    for key in ("link/new", "twin/new"):
        with pytest.raises(AccessDenied):
            backend.put(key, [b"x"])
        with pytest.raises(AccessDenied):
            backend.upload(key, 5)
        with pytest.raises(AccessDenied):
            backend.delete(key)
    with pytest.raises(AccessDenied):
        list(backend.list("link/"))
    assert [info.key for info in backend.list("")] == ["x"]
    assert list(backend.folders("")) == []
    assert os.listdir(outside) == ["secret"]


def test_put_and_delete_act_on_a_link_not_on_its_target(backend, tmp_path):
    (tmp_path / "target").write_bytes(b"keep")
    backend.put("x", [b"x"])
    (tmp_path / "root/link").symlink_to(tmp_path / "target")
    with pytest.raises(ObjectExists):
        backend.put("link", [b"new"], if_absent=True)
    backend.put("link", [b"new"])
    assert fetch(backend, "link") == b"new"
    (tmp_path / "root/other").symlink_to(tmp_path / "target")
    backend.delete("other")
    assert (tmp_path / "target").read_bytes() == b"keep"


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    backend = open_posix(str(tmp_path / "root"), {})
    backend.put("a/b", [b"x"])
    assert fetch(backend, "a/b") == b"x"
    backend.delete("a/b")
    assert os.listdir(tmp_path / "real") == []


@pytest.mark.parametrize("above", [True, False])
def test_a_lost_root_is_not_made_again_if_its_path_goes_through_a_link(
    tmp_path: Path, above: bool
) -> None:
    """It may be a mount point, and the disk below it is another one."""
    (tmp_path / "real/run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" if above else tmp_path / "real/run")
    backend = open_posix(str(tmp_path / "link/run" if above else tmp_path / "link"), {})
    backend.put("step/a", [b"x"])
    shutil.rmtree(tmp_path / "real/run")
    with pytest.raises(RootLost):
        backend.put("step/b", [b"x"])
    assert os.listdir(tmp_path / "real") == []


# temporary files


def test_listings_do_not_show_temporary_files(backend, tmp_path):
    backend.put("step/x", [b"x"])
    for name in (".x.123.tmp", ".nfs000000001"):
        (tmp_path / "root/step" / name).write_bytes(b"half")
    assert [info.key for info in backend.list("")] == ["step/x"]


@pytest.mark.parametrize("name", [".nfs000000000082040500000001", ".fuse_hidden0000000500000001"])
def test_a_deleted_file_that_a_process_still_reads_is_no_object(backend, tmp_path, name):
    backend.put("step/key", [b"x"])
    (tmp_path / "root" / "step" / name).write_bytes(b"deleted")
    assert [info.key for info in backend.list("")] == ["step/key"]


def test_a_long_name_leaves_room_for_the_temporary_one(backend):
    for name in ("x" * 255, "é" * 127):
        backend.put(f"long/{name}", [b"x"])
        store(backend, f"longer/{name}", payload(5000))
        assert fetch(backend, f"longer/{name}") == payload(5000)


def test_delete_takes_abandoned_temporary_files_along_but_no_others(backend, tmp_path):
    for folder, age in (("old", 7200), ("young", 10)):
        backend.put(f"{folder}/x", [b"x"])
        half = tmp_path / "root" / folder / ".y.0123456789ab.tmp"
        half.write_bytes(b"half")
        os.utime(half, (time.time() - age, time.time() - age))
        backend.delete(f"{folder}/x")
    assert leftovers(tmp_path / "root") == [str(tmp_path / "root/young/.y.0123456789ab.tmp")]


@pytest.mark.parametrize(
    "name", [".x.tmp", ".y.1.tmp", ".notes.0123456789xy.tmp", "y.0123456789ab.tmp"]
)
def test_delete_leaves_temporary_files_of_others_however_old_they_are(backend, tmp_path, name):
    backend.put("step/x", [b"x"])
    theirs = tmp_path / "root/step" / name
    theirs.write_bytes(b"theirs")
    os.utime(theirs, (1, 1))
    backend.delete("step/x")
    assert theirs.read_bytes() == b"theirs"


def test_delete_leaves_what_is_not_ours(backend, tmp_path):
    backend.put("step/x", [b"x"])
    (tmp_path / "root/step/notes.txt").write_text("mine")
    backend.delete("step/x")
    assert leftovers(tmp_path / "root") == [str(tmp_path / "root/step/notes.txt")]


def test_a_failed_fsync_is_an_error_and_leaves_nothing(backend, tmp_path, monkeypatch):
    real, refused = os.fsync, []

    def fsync(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            refused.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    upload = backend.upload("step/large", 3 * 4096)
    upload.write(0, page_aligned(payload(3 * 4096)))
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="Input/output") as caught:
        upload.finish()
    assert type(caught.value) is StorageError
    with pytest.raises(StorageError):
        backend.put("step/small", [b"x"])
    assert len(refused) == 2
    assert leftovers(tmp_path / "root") == []


def test_folders_are_forced_to_the_medium_up_to_the_parent_of_the_root(tmp_path, monkeypatch):
    real, synced = os.fsync, []

    def fsync(fd):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    open_posix(str(tmp_path / "a/root"), {}).put("step/sub/x", [b"x"])
    assert {".", "a", "a/root", "a/root/step", "a/root/step/sub"} <= set(synced)
    file_at = next(n for n, path in enumerate(synced) if path.endswith(".tmp"))
    assert "a/root/step/sub" in synced[file_at:]


def test_a_new_folder_in_a_root_is_forced_when_a_file_in_it_is_published(tmp_path, monkeypatch):
    """Before that, the folder has no file that counts as durable."""
    real, synced = os.fsync, []

    def fsync(fd):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real(fd)

    backend = open_posix(str(tmp_path / "root"), {})
    backend.put("first/x", [b"x"])
    monkeypatch.setattr(os, "fsync", fsync)
    upload = backend.upload("second/sub/x", 1)
    assert synced == []
    upload.write(0, memoryview(b"x"))
    upload.finish()
    assert synced[-3:] == ["root/second/sub", "root/second", "root"]


# O_DIRECT


def direct_writes(monkeypatch) -> list[tuple[int, int]]:
    """Return the offsets and lengths that reach a direct descriptor from now on."""
    seen: list[tuple[int, int]] = []
    real = os.pwrite

    def pwrite(fd, data, offset):
        if is_direct(fd):
            seen.append((offset, len(data)))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return seen


def is_direct(fd: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def test_aligned_memory_goes_past_the_page_cache_with_its_end_padded(backend, monkeypatch):
    seen = direct_writes(monkeypatch)
    data = payload(PART + 2 * 4096 + 9)
    store(backend, "x", data)
    assert seen == [(0, PART), (PART, 2 * 4096), (PART + 2 * 4096, 4096)]
    assert fetch(backend, "x") == data


def test_unaligned_memory_goes_buffered(backend, monkeypatch):
    seen = direct_writes(monkeypatch)
    data = payload(PART)
    upload = backend.upload("x", PART)
    send(upload, page_aligned(data, shift=8))
    upload.finish()
    assert seen == []
    assert fetch(backend, "x") == data


@pytest.mark.parametrize("refused_at", [0, 1, 2, 3])
def test_a_direct_write_that_is_refused_half_way_goes_on_buffered(backend, monkeypatch, refused_at):
    real, direct = os.pwrite, []

    def pwrite(fd, data, offset):
        if is_direct(fd):
            direct.append(offset)
            if len(direct) > refused_at:
                raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = payload(2 * PART + 4096 + 1)
    store(backend, "x", data)
    assert len(direct) == refused_at + 1  # one refusal is enough
    assert fetch(backend, "x") == data


def test_a_direct_open_that_is_refused_goes_buffered(backend, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode, **how):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode, **how)

    monkeypatch.setattr(os, "open", refuse)
    data = payload(PART + 5)
    store(backend, "x", data)
    out = page_aligned(bytes(len(data)))
    backend.read_into("x", 0, out)
    assert out == data


@pytest.mark.parametrize("at_most", [1 << 20, 4096 * 3 + 100, 65_537])
def test_short_writes_and_reads_are_gone_on_with(backend, monkeypatch, at_most):
    pwrite, preadv, write = os.pwrite, os.preadv, os.write
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:at_most], offset))
    monkeypatch.setattr(
        os, "preadv", lambda fd, outs, offset: preadv(fd, [outs[0][:at_most]], offset)
    )
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: at_most // 7]))
    data = payload(PART + 4096 + 3)
    store(backend, "large", data)
    backend.put("small", [data[:400_000], data[400_000:800_000]])
    monkeypatch.setattr(os, "write", write)
    assert fetch(backend, "large") == data
    assert fetch(backend, "small") == data[:800_000]


def test_an_error_in_the_padded_end_is_told(backend, monkeypatch):
    upload = backend.upload("x", 4096 + 1)

    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    view = page_aligned(payload(4097))
    with pytest.raises(OutOfSpace):
        upload.write(4096, view[4096:])
    upload.abort()


def test_bytes_beyond_the_upload_are_refused(backend):
    upload = backend.upload("x", 10)
    with pytest.raises(StorageError, match="of an upload of 10"):
        upload.write(0, memoryview(bytes(11)))
    upload.abort()


# a full, a read-only, a forbidden store


def test_an_upload_too_large_for_the_disk_fails_at_once(small_disk):
    backend = open_posix(str(small_disk / "root"), {})
    with pytest.raises(OutOfSpace) as caught:
        backend.upload("step/large", 30 << 20)
    assert caught.value.key == "step/large"
    assert leftovers(small_disk) == []
    store(backend, "step/fits", payload(10 << 20))


def test_a_disk_that_fills_up_keeps_older_objects_whole(small_disk, monkeypatch):
    backend = open_posix(str(small_disk / "root"), {})
    backend.put("old", [payload(100)])
    with pytest.raises(OutOfSpace):
        backend.put("small", [payload(30 << 20)])
    # this is so where nothing can be reserved
    monkeypatch.setattr(posix_module, "reserve", lambda fd, size: None)
    upload = backend.upload("large", 30 << 20)
    with pytest.raises(OutOfSpace):
        send(upload, page_aligned(payload(30 << 20)))
    upload.abort()
    assert [info.key for info in backend.list("")] == ["old"]
    assert leftovers(small_disk) == [str(small_disk / "root/old")]
    assert fetch(backend, "old") == payload(100)


def test_a_read_only_disk_denies_writes_and_serves_reads(small_disk):
    backend = open_posix(str(small_disk / "root"), {})
    backend.put("old", [b"old"])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for verb in (
        lambda: backend.put("new", [b"x"]),
        lambda: backend.put("new", [b"x"], if_absent=True),
        lambda: backend.upload("new/large", 10),
        lambda: backend.delete("old"),
    ):
        with pytest.raises(AccessDenied):
            verb()
    assert fetch(backend, "old") == b"old"


def test_a_user_without_permission_is_denied(tmp_path):
    """Root may do everything, so a child process gives its rights up and tries."""
    if os.geteuid():
        pytest.skip("NOT TESTED: only root can become nobody")
    script = """
        import os, sys
        from ckpt_backends.folder.posix import open_posix
        from ckpt.errors import AccessDenied
        for key in ("step/x", "names/x"):
            open_posix(sys.argv[1], {}).put(key, [b"x"])
        open(sys.argv[1] + "/names/.x.0123456789ab.tmp", "x")
        os.chmod(sys.argv[1], 0o755)
        os.chmod(sys.argv[1] + "/names", 0o744)  # Its names can be read, and nothing else
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        backend = open_posix(sys.argv[1], {})
        verbs = [
            lambda: backend.put("y", [b""]), lambda: backend.upload("y", 5), lambda: backend.delete("step/x"),
            lambda: backend.head("step/x"), lambda: backend.read_into("step/x", 0, memoryview(bytearray(1))),
            lambda: list(backend.list("")), lambda: list(backend.list("step/")),
            lambda: list(backend.list("names/")), lambda: list(backend.unfinished_writes("names/")),
        ]
        for verb in verbs:
            try:
                verb()
            except AccessDenied:
                print("denied")
    """  # noqa: E501
    folder = tempfile.mkdtemp(dir="/tmp", prefix="ckpt-test-")
    os.chmod(folder, 0o755)
    try:
        command = [sys.executable, "-c", textwrap.dedent(script), f"{folder}/root"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.stderr == ""
        assert done.stdout.split() == ["denied"] * 9
    finally:
        shutil.rmtree(folder)


def test_a_file_system_without_any_conditional_rename_says_what_to_do(
    backend, tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(direct_io, "_rename_noreplace", lambda source, target: False)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="put_if_absent"):
        backend.put("x", [b"x"], if_absent=True)
    assert leftovers(tmp_path) == []


def test_a_name_that_another_client_makes_meanwhile_is_there(backend, tmp_path, monkeypatch):
    """Between the client's look and the link, sshfs reports it as EPERM."""
    monkeypatch.setattr(direct_io, "_rename_noreplace", lambda source, target: False)

    def link(source, target, **how):
        Path(target).write_bytes(b"other")
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ObjectExists):
        backend.put("key", [b"mine"], if_absent=True)
    assert leftovers(tmp_path) == [str(tmp_path / "root" / "key")]


def test_a_link_whose_reply_was_lost_has_won(backend, monkeypatch):
    """NFS repeats the request, and learns that the name is taken: by its own first request."""
    real = os.link

    def link(source, target, **how):
        real(source, target, **how)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(direct_io, "_rename_noreplace", lambda source, target: False)
    monkeypatch.setattr(os, "link", link)
    backend.put("x", [b"x"], if_absent=True)
    assert fetch(backend, "x") == b"x"


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_a_file_is_no_object_and_not_waited_for(backend, tmp_path):
    backend.put("step/x", [b"x"])
    os.mkfifo(tmp_path / "root" / "step" / "pipe")
    for verb in (
        lambda: backend.head("step/pipe"),
        lambda: backend.read_into("step/pipe", 0, memoryview(bytearray(10))),
        lambda: backend.read_into("step", 0, memoryview(bytearray(10))),
    ):
        with pytest.raises(ObjectNotFound, match="not a file"):
            verb()
    assert [info.key for info in backend.list("")] == ["step/x"]


def test_a_folder_is_no_object(backend):
    backend.put("step/x", [b"x"])
    with pytest.raises(ObjectNotFound):
        backend.head("step")
    with pytest.raises(StorageError):
        backend.put("step", [b"x"])
    with pytest.raises(StorageError):
        backend.put("step/x/y", [b"x"])
    assert [info.key for info in backend.list("")] == ["step/x"]


def test_two_hundred_objects_leave_no_descriptor_open(backend):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        backend.put(f"step/{number}", [b"x"])
        store(backend, f"large/{number}", payload(5000))
        fetch(backend, f"large/{number}")
        backend.upload("never", 5000).abort()
    assert len(os.listdir("/proc/self/fd")) == before


def test_writes_that_were_cut_off_are_told_and_can_be_discarded(backend, tmp_path):
    keeping = backend
    assert isinstance(keeping, KeepsUnfinishedWrites)
    backend.put("step/other", [b"x"])
    upload = backend.upload("step/image", 20 << 20)
    upload.write(0, memoryview(bytes(8 << 20)))
    (tmp_path / "root/step/.theirs.tmp").write_bytes(b"theirs")
    [found] = backend.unfinished_writes("step/")
    assert found == next(iter(backend.unfinished_writes("")))
    assert found.key == "step/image"
    assert found.size >= 8 << 20
    assert not found.abandoned
    os.utime(tmp_path / "root" / found.name, (1, 1))
    assert next(backend.unfinished_writes("step/")).abandoned
    backend.discard(found)
    backend.discard(found)
    assert list(backend.unfinished_writes("")) == []
    assert sorted(os.listdir(tmp_path / "root/step")) == [".theirs.tmp", "other"]
    with pytest.raises(StorageError):
        upload.finish()
    backend.delete("step/other")
    (tmp_path / "root/step/.theirs.tmp").unlink()
    backend.upload("step/image", 1)
    backend.discard(next(backend.unfinished_writes("")))
    assert os.listdir(tmp_path / "root") == []


def test_a_root_that_another_thread_makes_meanwhile_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "root")
    backend = open_posix(root, {})
    look, others = os.path.isdir, ["first"]

    def isdir(path: str) -> bool:
        found = look(path)
        if path == root and others:
            backend.put(others.pop(), [b"1"])  # Another thread comes between the look and its use
        return found

    monkeypatch.setattr(os.path, "isdir", isdir)
    backend.put("second", [b"2"])
    assert {info.key for info in backend.list("")} == {"first", "second"}
