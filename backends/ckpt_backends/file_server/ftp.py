"""Connections to an FTP server, over ``ftplib``."""

from __future__ import annotations

import posixpath
from calendar import timegm
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ftplib import Error, error_perm
from time import strptime
from typing import Any, ClassVar

from ckpt.errors import ObjectNotFound
from ckpt_backends.file_server.backend import WAIT_SECONDS, Entry


class FtpConnection:
    """See ``ckpt_backends.file_server.backend.Connection``."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {"timeout": WAIT_SECONDS}
    PASSES_OPTIONS: ClassVar[bool] = False

    def __init__(self, fs: Any) -> None:
        self._fs, self._ftp = fs, fs.ftp  # The file system closes its connection when it is freed
        self._ftp.voidcmd("TYPE I")  # Otherwise servers refuse to tell sizes

    def write(self, path: str, parts: Sequence[memoryview]) -> None:
        failure: OSError | None = None
        with self._ftp.transfercmd(f"STOR {path}") as sender:
            try:
                for part in parts:
                    sender.sendall(part)
                _end_encryption(sender)
            except TimeoutError:
                raise
            except OSError as error:
                failure = error  # The server has closed the transfer, and the reply says why
        self._ftp.voidresp()
        if failure is not None:
            raise failure

    def replace(self, source: str, target: str) -> None:
        self._ftp.rename(source, target)

    def read(self, path: str, offset: int, out: memoryview) -> int:
        total = 0
        with self._ftp.transfercmd(f"RETR {path}", rest=offset) as receiver:
            while total < out.nbytes and (count := receiver.recv_into(out[total:])):
                total += count
            is_at_end = total < out.nbytes
            if is_at_end:
                _end_encryption(receiver)
        try:
            self._ftp.voidresp()
        except Error:
            # The server says that the transfer was cut, since the rest of the file is not read.
            if is_at_end:
                raise
        return total

    def stat(self, path: str) -> Entry:
        size = self._ftp.size(path)
        if size is None:
            raise ObjectNotFound(path)
        date: float | None = None
        with suppress(error_perm):  # Servers need not have this command
            date = _parse_time(self._ftp.sendcmd(f"MDTM {path}").partition(" ")[2])
        return Entry(posixpath.basename(path), size, date)

    def entries(self, path: str) -> list[Entry]:
        try:
            items = list(self._ftp.mlsd(path))
        except error_perm as error:
            if str(error).startswith("501"):
                raise ObjectNotFound(path, str(error)) from None
            raise  # 550 is translated by its text: the folder is missing, or access is denied
        finally:
            self._ftp.voidcmd("TYPE I")  # The listing was sent as text
        return [
            Entry(name, size, _parse_time(facts.get("modify")))
            for name, facts in items
            if (kind := facts["type"].lower()) in ("dir", "file")
            for size in [int(facts["size"]) if kind == "file" else None]
        ]

    def make_folder(self, path: str) -> None:
        try:
            self._ftp.mkd(path)
        except error_perm:
            # The reply is the same for a folder that exists and for a missing parent.
            folder = self._ftp.pwd()
            self._ftp.cwd(path)
            self._ftp.cwd(folder)

    def remove(self, path: str) -> None:
        self._ftp.size(path)  # Raises if the path is that of a folder
        self._ftp.delete(path)

    def remove_folder(self, path: str) -> None:
        self._ftp.rmd(path)

    def close(self) -> None:
        self._ftp.close()


def _end_encryption(transfer: Any) -> None:
    """Tell the other side that an encrypted transfer ends. A plain one has no such message."""
    if hasattr(transfer, "unwrap"):
        transfer.unwrap()


def _parse_time(text: str | None) -> float | None:
    """Return a time of the protocol, such as "20261128034500.123", in seconds since 1970."""
    with suppress(ValueError):
        return float(timegm(strptime((text or "").partition(".")[0], "%Y%m%d%H%M%S")))
    return None
