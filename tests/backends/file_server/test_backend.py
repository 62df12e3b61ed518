"""The conformance suite and faults on real file servers.

``findings/`` shows without ckpt what surprised here: ``ftp-full-disk.sh``,
``sftp-pipelined-errors.sh``, ``webdav-percent.sh`` and ``webdav-rm-file.sh``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    OutOfSpace,
    RootInUse,
    StorageError,
    TransientStorageError,
)
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.root.owner import Owner, claim
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import BackendConformance
from ckpt.storage.testing.conformance import at_once, fetch, payload
from ckpt.storage.testing.uploads import UploadConformance
from ckpt_backends.file_server.backend import _Folders
from tests.kit.disks import mount
from tests.kit.file_servers import SHARES, need_module, served
from tests.kit.marks import torture
from tests.kit.worlds import run_code
from tests.servers import SECRET, Server, free_port

__all__ = ["mount"]
pytestmark = pytest.mark.server


SERVERS = [name for name in SHARES if name != "openssh"] + torture("openssh")
"""Another server of SFTP is among the first."""


@pytest.fixture(scope="module", params=SERVERS)
def share(request, tmp_path_factory):
    work = tmp_path_factory.mktemp(request.param)
    folder = work / "served"
    folder.mkdir()
    yield from served(request.param, work / "server", folder)


DISTINCT = {
    "test_an_upload_of_several_parts",
    "test_an_upload_is_invisible_until_it_is_finished",
    "test_an_upload_replaces_only_at_its_end",
    "test_an_aborted_upload_leaves_nothing",
}
"""The tests of uploads that each client passes in its own way: it writes, renames, and removes."""
UPLOADS = {name for name in vars(UploadConformance) if name.startswith("test_")} - DISTINCT


class TestFileServer(BackendConformance):
    repeats: ClassVar = dict.fromkeys(SHARES.keys() - {"ftp"}, UPLOADS)
    """All clients share the code of uploads, and the server of FTP is the quickest."""

    @pytest.fixture
    def open_root(self, share):
        place = uuid.uuid4().hex
        return lambda name: open_backend(f"{share.url}/{place}/{name}", share.options)

    def test_reads_while_a_key_is_replaced_see_one_version_or_the_other(self, backend):
        if backend.url.startswith("webdav"):
            pytest.skip("WebDAV removes the old file before it renames the new one")
        versions = [bytes([number]) * 50_000 for number in range(4)]
        backend.put("flip", [versions[0]])

        def work(number):
            if number < len(versions):
                # An SMB server refuses to replace a file that is open, so the put is retried.
                RetryPolicy().call(partial(backend.put, "flip", [versions[number]]))
                return set()
            return {fetch(backend, "flip")}

        assert set().union(*at_once(work, 10)) <= set(versions)


def test_a_folder_does_not_go_while_a_file_is_put_into_it():
    folders = _Folders()
    with folders.use("/root/a/b"), folders.removal("/root/a") as is_alone:
        assert not is_alone
    with folders.removal("/root/a") as is_alone:
        assert is_alone


def test_a_file_is_put_after_its_folder_went():
    folders, order = _Folders(), []

    def put():
        with folders.use("/root/a/b"):
            order.append("put")

    with folders.removal("/root/a"):
        thread = threading.Thread(target=put)
        thread.start()
        order.append("removed")
    thread.join()
    assert order == ["removed", "put"]


@pytest.fixture
def tier(share):
    return Tier(f"{share.url}/{uuid.uuid4().hex}", options=share.options)


def test_a_job_saves_restores_verifies_and_prunes(tier, share):
    with CheckpointManager(replace(tier, keep_last=2)) as manager:
        for step in range(1, 4):
            manager.save({"w": torch.full((100_000,), float(step))}, step=step)
    state = {"w": torch.zeros(100_000)}
    with CheckpointManager(tier) as manager:
        assert manager.steps() == [2, 3]
        manager.restore(state)
    assert state["w"].eq(3).all()
    place = share.folder / tier.url.rpartition("/")[2]
    assert len([path for path in place.iterdir() if path.is_dir()]) == 2
    backend = open_backend(tier.url, tier.options)
    with Workers("check", 4) as workers:
        for ref in committed(backend):
            assert verify_step(backend, ref, workers=workers).faults == ()
    backend.close()
    assert list(share.folder.rglob("*.tmp")) == []


def test_a_file_server_is_a_farther_tier(tier, tmp_path):
    with CheckpointManager([tmp_path / "near", tier]) as manager:
        manager.save({"w": torch.ones(10_000)}, step=1)
    shutil.rmtree(tmp_path / "near")
    state = {"w": torch.zeros(10_000)}
    with CheckpointManager([tmp_path / "near", tier]) as manager:
        manager.restore(state)
    assert state["w"].eq(1).all()


def test_many_threads_read_one_file_at_once(tier):
    backend = open_backend(tier.url, tier.options)
    data = payload((1 << 20) + 5)
    backend.put("file", [data])
    assert at_once(lambda _: fetch(backend, "file"), 16) == [data] * 16
    backend.close()


def test_the_login_at_an_smb_server_has_a_limit():
    """The client has none, and asks only after the login whether the server is alive."""
    pytest.importorskip("smbprotocol")
    from ckpt_backends.file_server.smb import _ConnectionCache

    class Connection:
        _receive_timeout = 600.0

        def __init__(self):
            self.session_table = {}

        def receive(self, request, wait=True, timeout=None):
            return request, wait, timeout

    cache, connection = _ConnectionCache(6), Connection()
    cache["server:445"] = connection
    assert connection._receive_timeout == 3
    assert connection.receive("login") == ("login", True, 6)
    assert connection.receive("login", timeout=2, wait=False) == ("login", False, 2)
    connection.session_table[1] = object()
    assert connection.receive("write") == ("write", True, None)


def test_a_listing_is_never_stale(tier):
    one, two = (open_backend(tier.url, tier.options) for _ in range(2))
    for number in range(3):
        assert len(list(one.list(""))) == number
        two.put(f"step/{number}", [b"x"])
        one.head(f"step/{number}")
    assert list(one.folders("")) == ["step"]
    one.close()
    two.close()


def test_an_object_has_the_date_that_its_listing_has(tier):
    backend = open_backend(tier.url, tier.options)
    backend.put("step/file", [b"x"])
    (listed,) = backend.list("step/")
    assert listed.modified is not None
    assert backend.head("step/file").modified == pytest.approx(listed.modified, abs=1)
    backend.close()


def test_what_a_killed_writer_leaves_in_a_folder_goes_after_an_hour(tier, share):
    backend = open_backend(tier.url, tier.options)
    backend.put("step/file", [b"x"])
    folder = share.folder / tier.url.rpartition("/")[2] / "step"
    (folder / ".file.0123456789ab.tmp").write_bytes(b"x")
    backend.delete("step/file")
    backend.delete("step/file")
    assert list(backend.folders("")) == ["step"]  # The writer may be alive
    hour = time.time() - 3700
    os.utime(folder / ".file.0123456789ab.tmp", (hour, hour))
    backend.delete("step/file")
    assert list(backend.folders("")) == []
    backend.close()


def test_the_top_folder_of_a_server_stays_when_the_last_object_goes(own_share):
    backend = open_backend(own_share.url, own_share.options)
    for key in ("file", "step/file"):
        backend.put(key, [b"x"])
        backend.delete(key)
        assert os.listdir(own_share.folder) == []
    backend.put("file", [b"x"])
    assert [info.key for info in backend.list("")] == ["file"]
    backend.close()


def test_a_url_without_a_path_is_the_top_folder_of_the_server(tmp_path):
    (tmp_path / "served").mkdir()
    for share in served("openssh", tmp_path / "server", tmp_path / "served"):
        backend = open_backend(share.url.removesuffix(str(share.folder)), share.options)
        assert share.folder.parts[1] in backend.folders("")
        backend.close()


def test_a_file_of_others_that_ends_in_tmp_is_listed_and_stays(tier, share):
    """It was hidden, and was removed after an hour."""
    backend = open_backend(tier.url, tier.options)
    backend.put("step/file", [b"x"])
    theirs = share.folder / tier.url.rpartition("/")[2] / "step" / "theirs.tmp"
    theirs.write_bytes(b"x")
    os.utime(theirs, (time.time() - 7200,) * 2)
    for _ in range(2):
        backend.delete("step/file")
    assert [info.key for info in backend.list("")] == ["step/theirs.tmp"]
    assert theirs.exists()
    backend.close()


def test_the_next_removal_ends_what_a_killed_one_began(tier, share):
    """The folder of WebDAV that was renamed for its removal had stayed for ever."""
    if not tier.url.startswith("webdav"):
        pytest.skip("only WebDAV renames a folder before it removes it")
    root = share.folder / tier.url.rpartition("/")[2]
    for name, files in (("empty", []), ("late", ["put-since"]), ("young", [])):
        (root / f".{name}.0123456789ab.tmp").mkdir(parents=True)
        for file in files:
            (root / f".{name}.0123456789ab.tmp" / file).write_bytes(b"x")
        if name != "young":
            os.utime(root / f".{name}.0123456789ab.tmp", (time.time() - 7200,) * 2)
    backend = open_backend(tier.url, tier.options)
    assert list(backend.folders("")) == []
    backend.put("step/file", [b"x"])
    backend.delete("step/file")
    assert sorted(os.listdir(root)) == [".young.0123456789ab.tmp", "late"]
    assert [info.key for info in backend.list("")] == ["late/put-since"]
    backend.close()


# faults of the server

FEW = ["ftp", "webdav", "asyncssh", *torture("openssh", "samba")]


@pytest.fixture(params=FEW)
def own_share(request, tmp_path):
    """Start a server of its own for a test that disturbs it."""
    folder = tmp_path / "served"
    folder.mkdir()
    yield from served(request.param, tmp_path / "server", folder)


@pytest.fixture(params=FEW)
def small_share(request, tmp_path, mount):
    """Start a server over a disk of 4 MiB."""
    yield from served(request.param, tmp_path / "server", mount("size=4m"))


def test_a_full_disk_is_out_of_space_and_leaves_nothing(small_share):
    backend = open_backend(f"{small_share.url}/root", small_share.options)
    backend.put("step/first", [payload(1 << 20)])
    with pytest.raises(OutOfSpace):
        backend.put("step/manifest.json", [payload(8 << 20)])
    assert [info.key for info in backend.list("")] == ["step/first"]
    assert [path.name for path in small_share.folder.rglob("*") if path.is_file()] == ["first"]
    # A server may keep the removed file open for as long as it likes, so the disk gets larger.
    subprocess.run(["mount", "-o", "remount,size=16m", small_share.folder], check=True)
    backend.put("step/last", [payload(1 << 20)])
    assert fetch(backend, "step/first") == payload(1 << 20)
    backend.close()


def test_a_rename_that_samba_denies_is_told_as_denied(tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    need_module("smbclient")
    import smbclient
    from smbprotocol.exceptions import SMBOSError

    def deny(source, target, **how):
        raise SMBOSError(0xC0000022, target)

    for share in served("samba", tmp_path / "server", tmp_path / "served"):
        backend = open_backend(f"{share.url}/root", share.options)
        with monkeypatch.context() as patch:
            patch.setattr(smbclient, "replace", deny)
            with pytest.raises(AccessDenied):
                backend.put("step/file", [b"x"])
        assert list(backend.list("")) == []
        backend.close()


def test_a_root_under_two_paths_of_a_server_has_one_owner(tmp_path):
    (tmp_path / "served/runs").mkdir(parents=True)
    (tmp_path / "served/link").symlink_to("runs")
    for share in served("asyncssh", tmp_path / "server", tmp_path / "served"):
        runs, link = (
            open_backend(f"{share.url}/{name}", share.options) for name in ("runs", "link")
        )
        claim(runs, Owner.of_this_process("first"))
        with pytest.raises(RootInUse):
            claim(link, Owner.of_this_process("second"))
        for backend in (runs, link):
            backend.close()


def test_bytes_that_a_disk_does_not_keep_are_no_object(tmp_path):
    (tmp_path / "served").mkdir()
    broken = tmp_path / "served.broken"
    for share in served("asyncssh", tmp_path / "server", tmp_path / "served"):
        backend = open_backend(f"{share.url}/root", share.options)
        backend.put("step/first", [b"1"])
        broken.touch()
        with pytest.raises(StorageError, match="cannot flush") as failed:
            backend.put("step/manifest.json", [b"2"])
        assert not isinstance(failed.value, OutOfSpace)
        assert [info.key for info in backend.list("")] == ["step/first"]
        broken.unlink()
        backend.put("step/manifest.json", [b"3"])
        assert fetch(backend, "step/manifest.json") == b"3"
        backend.close()


def test_a_server_that_stops_answering_is_a_transient_error_in_time(own_share):
    backend = open_backend(f"{own_share.url}/root", {**own_share.options, "timeout": 1})
    backend.put("file", [b"x"])
    processes = own_share.server.family()
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(TransientStorageError):
            backend.head("file")
        assert time.monotonic() - start < 10
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
    assert RetryPolicy().call(partial(fetch, backend, "file")) == b"x"
    backend.close()


def test_the_connections_of_a_restarted_server_are_replaced(own_share):
    backend = open_backend(f"{own_share.url}/root", own_share.options)
    at_once(lambda number: backend.put(f"file/{number}", [b"x"]), 4)
    own_share.server.kill()
    own_share.server.start()
    assert RetryPolicy().call(partial(fetch, backend, "file/3")) == b"x"
    assert RetryPolicy().call(lambda: len(list(backend.list("")))) == 4
    backend.close()


def test_a_server_that_is_away_at_the_first_request_is_a_transient_error(own_share):
    own_share.server.kill()
    backend = open_backend(f"{own_share.url}/root", own_share.options)
    with pytest.raises(TransientStorageError):
        backend.head("file")
    own_share.server.start()
    RetryPolicy().call(partial(backend.put, "file", [b"x"]))
    backend.close()


def test_a_connection_that_the_server_ends_prints_no_frames_of_the_client():
    need_module("paramiko")
    said = run_code("""
import socket, threading
from ckpt.errors import TransientStorageError
from ckpt.storage.registry import open_backend
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: server.accept()[0].close()).start()
options = {"username": "user", "password": "x", "timeout": 5}
try:
    open_backend(f"sftp://127.0.0.1:{server.getsockname()[1]}/root", options).head("file")
except TransientStorageError:
    print("refused")
""")
    assert said == "refused\n"


BLIND = """
import sys
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer
port, folder, password = sys.argv[1:]
FTPHandler.authorizer = DummyAuthorizer()
FTPHandler.authorizer.add_user("user", password, folder, perm="eradfmwMT")
FTPServer(("127.0.0.1", int(port)), FTPHandler).serve_forever()
"""


def test_a_listing_by_ftp_that_is_not_allowed_is_no_empty_store(tmp_path):
    need_module("pyftpdlib")
    port, folder = free_port(), tmp_path / "served"
    folder.mkdir()
    command = [sys.executable, "-c", BLIND, str(port), str(folder), SECRET]
    server = Server("pyftpdlib", command, port, tmp_path / "log", speaks_http=False).start()
    try:
        options = {"username": "user", "password": SECRET}
        backend = open_backend(f"ftp://127.0.0.1:{port}/root", options)
        backend.put("step/file", [b"x"])
        for listing in (backend.list, backend.folders):
            with pytest.raises(AccessDenied):
                list(listing(""))
        assert (folder / "root/step/file").read_bytes() == b"x"
        backend.close()
    finally:
        server.kill()


FAILING = """
import errno, os, sys
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.filesystems import AbstractedFS
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer
port, folder, password = sys.argv[1:]
def fail(call):
    def wrapped(self, path, *args):
        if os.path.exists(folder + ".broken"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(self, path, *args)
    return wrapped
for name in ("open", "getsize", "listdir"):
    setattr(AbstractedFS, name, fail(getattr(AbstractedFS, name)))
FTPHandler.authorizer = DummyAuthorizer()
FTPHandler.authorizer.add_user("user", password, folder, perm="elradfmwMT")
FTPServer(("127.0.0.1", int(port)), FTPHandler).serve_forever()
"""


def test_a_file_that_the_disk_of_an_ftp_server_does_not_give_is_not_missing(tmp_path):
    """The reply has the code of a missing file, so an older step was restored."""
    need_module("pyftpdlib")
    port, folder = free_port(), tmp_path / "served"
    folder.mkdir()
    command = [sys.executable, "-c", FAILING, str(port), str(folder), SECRET]
    server = Server("pyftpdlib", command, port, tmp_path / "log", speaks_http=False).start()
    try:
        options = {"username": "user", "password": SECRET}
        backend = open_backend(f"ftp://127.0.0.1:{port}/root", options)
        backend.put("step/file", [b"x"])
        (tmp_path / "served.broken").touch()
        for ask in (backend.head, partial(fetch, backend), lambda key: list(backend.list(""))):
            with pytest.raises(TransientStorageError, match="Input/output error"):
                ask("step/file")
        (tmp_path / "served.broken").unlink()
        assert fetch(backend, "step/file") == b"x"
        backend.close()
    finally:
        server.kill()


def test_an_option_that_webdav_needs_is_named():
    need_module("webdav4")
    with pytest.raises(ConfigError, match=r"options=\{'base_url': \.\.\.\}\), or `options = "):
        open_backend("webdav://run")


def test_a_wrong_password_is_told_without_the_password(own_share):
    if "password" not in own_share.options:
        pytest.skip("this server asks for no password")
    backend = open_backend(f"{own_share.url}/root", {**own_share.options, "password": "hunter2"})
    with pytest.raises(AccessDenied) as caught:
        backend.head("file")
    assert "hunter2" not in str(caught.value)


def test_an_option_that_the_client_does_not_take_is_a_config_error(share):
    with pytest.raises(ConfigError, match="nosuch"):
        open_backend(f"{share.url}/root", {**share.options, "nosuch": 1}).head("file")
