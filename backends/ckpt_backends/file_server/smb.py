"""Connections to an SMB server, over smbprotocol."""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import smbclient
from smbprotocol.exceptions import SMBOSError

from ckpt.errors import ObjectNotFound, TransientStorageError
from ckpt_backends.file_server.backend import WAIT_SECONDS, Entry

_ACCESS_DENIED: Final = 0xC0000022
_SHARE_READS: Final = "r"  # Others may only read the file while it is open
_SHARE_ALL: Final = "rwd"  # By default, the client opens a file for itself alone


class _ConnectionCache(dict[str, Any]):
    """The connections of the client, which wait at most ``seconds`` for an answer.

    By default the client waits 10 minutes, then asks whether the server is alive, and waits once
    more. It asks only after the login, for whose answer it would wait for ever.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def __setitem__(self, server: str, connection: Any) -> None:
        connection._receive_timeout = self._seconds / 2
        receive = connection.receive

        def receive_in_time(request: Any, *, timeout: float | None = None, **options: Any) -> Any:
            if timeout is None and not connection.session_table:
                timeout = self._seconds
            return receive(request, timeout=timeout, **options)

        connection.receive = receive_in_time
        super().__setitem__(server, connection)


class SmbConnection:
    """See ``ckpt_backends.file_server.backend.Connection``."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "timeout": WAIT_SECONDS,
        # All file systems of fsspec share one connection, so each of ours makes its own.
        "register_session_retries": -1,
    }
    PASSES_OPTIONS: ClassVar[bool] = False

    def __init__(self, fs: Any) -> None:
        self._host = fs.host
        self._cache = _ConnectionCache(fs.timeout)
        # The client connects again by itself if the server has closed the connection.
        self._session: dict[str, Any] = {
            "port": fs._port,
            "connection_cache": self._cache,
            "username": fs.username,
            "password": fs.password,
            "encrypt": fs.encrypt,
            "connection_timeout": fs.timeout,
        }
        smbclient.register_session(fs.host, **self._session)

    def write(self, path: str, parts: Sequence[memoryview]) -> None:
        with self._open(path, "wb", _SHARE_READS) as file:
            for part in parts:
                while part.nbytes:
                    part = part[file.write(part) :]
            file.fd.flush()

    def replace(self, source: str, target: str) -> None:
        try:
            smbclient.replace(self._unc(source), self._unc(target), **self._session)
        except SMBOSError as error:
            if error.ntstatus != _ACCESS_DENIED or not self._exists(target):
                raise
            # The server gives the same answer if somebody reads the target
            raise TransientStorageError(target, "it cannot be replaced now") from None

    def _exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except (SMBOSError, ObjectNotFound):
            return False
        return True

    def read(self, path: str, offset: int, out: memoryview) -> int:
        total = 0
        with self._open(path, "rb", _SHARE_ALL) as file:
            file.seek(offset)
            while total < out.nbytes and (count := file.readinto(out[total:])):
                total += count
        return total

    def stat(self, path: str) -> Entry:
        status = smbclient.stat(self._unc(path), **self._session)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFound(path, "not a file")
        return Entry(posixpath.basename(path), status.st_size, status.st_mtime)

    def entries(self, path: str) -> list[Entry]:
        return [
            Entry(
                item.name,
                None if item.is_dir() else item.smb_info.end_of_file,
                item.smb_info.last_write_time.timestamp(),
            )
            for item in smbclient.scandir(self._unc(path), **self._session)
        ]

    def make_folder(self, path: str) -> None:
        smbclient.makedirs(self._unc(path), exist_ok=True, **self._session)

    def remove(self, path: str) -> None:
        smbclient.remove(self._unc(path), **self._session)

    def remove_folder(self, path: str) -> None:
        smbclient.rmdir(self._unc(path), **self._session)

    def close(self) -> None:
        smbclient.reset_connection_cache(fail_on_error=False, connection_cache=self._cache)

    def _open(self, path: str, mode: str, share_access: str) -> Any:
        client: Any = smbclient
        return client.open_file(
            self._unc(path), mode, buffering=0, share_access=share_access, **self._session
        )

    def _unc(self, path: str) -> str:
        return f"\\\\{self._host}" + path.replace("/", "\\")
