"""Real file servers on loopback, each over a folder that belongs to the test.

A server whose program is not installed skips its tests.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import SECRET, Server, free_port


@dataclass(frozen=True, slots=True)
class Share:
    """A folder that a file server serves.

    Attributes:
        url: The URL of the folder.
        options: The options of a tier for this server.
        folder: The folder on this machine.
        server: The server.
    """

    url: str
    options: Mapping[str, object]
    folder: Path
    server: Server


def need_module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def program(name: str) -> str:
    """Return the path of a program of Debian, which may be outside of the PATH of a user."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def ftp_share(work: Path, folder: Path) -> Share:
    need_module("pyftpdlib")
    port = free_port()
    command = [sys.executable, "-m", "pyftpdlib", "-i", "127.0.0.1", "-p", str(port), "-w"]
    command += ["-d", str(folder), "-u", "user", "-P", SECRET]
    server = Server("pyftpdlib", command, port, work / "log", speaks_http=False).start()
    options = {"username": "user", "password": SECRET}
    return Share(f"ftp://127.0.0.1:{port}", options, folder, server)


def webdav_share(work: Path, folder: Path) -> Share:
    need_module("wsgidav")
    need_module("webdav4")
    port = free_port()
    command = [sys.executable, "-m", "wsgidav.server.server_cli", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--root", str(folder), "--auth", "anonymous", "--no-config"]
    server = Server("wsgidav", command, port, work / "log").start()
    return Share("webdav://", {"base_url": server.url}, folder, server)


def asyncssh_share(work: Path, folder: Path) -> Share:
    need_module("asyncssh")
    need_module("paramiko")
    port = free_port()
    command = [sys.executable, "-P", str(Path(__file__).with_name("sftp_server.py"))]
    command += [str(port), str(folder), SECRET]
    server = Server("asyncssh", command, port, work / "log", speaks_http=False).start()
    options = {"username": "user", "password": SECRET}
    return Share(f"sftp://127.0.0.1:{port}", options, folder, server)


def openssh_share(work: Path, folder: Path) -> Share:
    need_module("paramiko")
    sshd, keygen = program("sshd"), program("ssh-keygen")
    if os.getuid() != 0:
        pytest.skip("sshd logs in its own user only if it runs as root")
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(work / name)], check=True
        )
    port, config = free_port(), work / "config"
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {work}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {work}/user.pub\nStrictModes no\nPermitRootLogin yes\n"
        "PasswordAuthentication no\nSubsystem sftp internal-sftp\n"
    )
    command = [sshd, "-D", "-e", "-f", str(config)]
    server = Server("sshd", command, port, work / "log", speaks_http=False).start()
    options = {
        "username": pwd.getpwuid(0).pw_name,
        "key_filename": str(work / "user"),
        "look_for_keys": False,
        "allow_agent": False,
    }
    return Share(f"sftp://127.0.0.1:{port}{folder}", options, folder, server)


def samba_share(work: Path, folder: Path) -> Share:
    need_module("smbprotocol")
    smbd, add_user = program("smbd"), program("smbpasswd")
    if os.getuid() != 0:
        pytest.skip("smbd needs root to act for its users")
    port, config = free_port(), work / "smb.conf"
    user = pwd.getpwuid(0).pw_name
    config.write_text(
        f"[global]\nsmb ports = {port}\ninterfaces = 127.0.0.1\nbind interfaces only = yes\n"
        f"lock directory = {work}\nstate directory = {work}\ncache directory = {work}\n"
        f"pid directory = {work}\nprivate dir = {work}\nncalrpc dir = {work}/rpc\n"
        f"log file = {work}/smb.log\nload printers = no\ndisable spoolss = yes\n"
        f"[share]\npath = {folder}\nread only = no\nvalid users = {user}\n"
    )
    subprocess.run(
        [add_user, "-c", str(config), "-a", "-s", user],
        input=f"{SECRET}\n{SECRET}\n".encode(),
        capture_output=True,
        check=True,
    )
    command = [smbd, "--foreground", "--no-process-group", "-s", str(config)]
    server = Server("smbd", command, port, work / "log", speaks_http=False).start()
    options = {"username": user, "password": SECRET}
    return Share(f"smb://127.0.0.1:{port}/share", options, folder, server)


SHARES = {
    "ftp": ftp_share,
    "webdav": webdav_share,
    "asyncssh": asyncssh_share,
    "openssh": openssh_share,
    "samba": samba_share,
}
"""The function that starts each server. It takes a folder for the server's own files, and the
folder to be served.
"""


def served(name: str, work: Path, folder: Path) -> Generator[Share]:
    """Yield a share of the server ``name``, and stop the server at the end."""
    work.mkdir(parents=True, exist_ok=True)
    share = SHARES[name](work, folder)
    try:
        yield share
    finally:
        share.server.kill()
