"""Connections to an SFTP server, over paramiko."""

from __future__ import annotations

import logging
import posixpath
import stat
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from paramiko.sftp import CMD_EXTENDED, SFTP_OK, SFTP_OP_UNSUPPORTED, SFTP_PERMISSION_DENIED

from ckpt.errors import ObjectNotFound
from ckpt_backends.file_server.backend import WAIT_SECONDS, Entry

_REQUEST_BYTES: Final = 32 << 10  # The most bytes of one write that every server takes
_WINDOW: Final = 64  # How many writes are sent before the answers are read
_FLUSH: Final = "fsync@openssh.com"
_UNSUPPORTED: Final = (SFTP_OP_UNSUPPORTED, SFTP_PERMISSION_DENIED)
"""The answers of servers that lack an extension, or do not permit it."""

# A thread of the client logs each connection that fails, with its frames, as an error. Without a
# handler, Python prints that to standard error. The error of the request says the same in a line.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SftpConnection:
    """See ``ckpt_backends.file_server.backend.Connection``."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "timeout": WAIT_SECONDS,
        "banner_timeout": WAIT_SECONDS,
        "auth_timeout": WAIT_SECONDS,
        "channel_timeout": WAIT_SECONDS,
    }
    PASSES_OPTIONS: ClassVar[bool] = True

    def __init__(self, fs: Any) -> None:
        self._client, self._sftp = fs.client, fs.ftp
        self._sftp.get_channel().settimeout(float(fs.ssh_kwargs["timeout"]))

    def write(self, path: str, parts: Sequence[memoryview]) -> None:
        with self._sftp.open(path, "wb") as file:
            file.set_pipelined(True)
            for part in parts:
                for start in range(0, part.nbytes, _REQUEST_BYTES):
                    file.write(part[start : start + _REQUEST_BYTES])
                    if len(file._reqs) >= _WINDOW:
                        self._read_answers(file)
            self._read_answers(file)
            self._flush(file)

    def _read_answers(self, file: Any) -> None:
        """Read the answers to all writes of a file. ``file.close`` would drop them, and with them
        the errors.
        """
        while file._reqs:
            self._sftp._read_response(file._reqs.popleft())

    def _flush(self, file: Any) -> None:
        """Force the bytes of a file to the disk of the server, if the server can."""
        answer = _Answer()
        self._sftp._async_request(answer, CMD_EXTENDED, _FLUSH, file.handle)
        while answer.message is None:
            self._sftp._read_response()
        status = answer.message.get_int()
        if status != SFTP_OK and status not in _UNSUPPORTED:
            raise OSError(f"the server cannot flush the file: {answer.message.get_text()}")

    def replace(self, source: str, target: str) -> None:
        self._sftp.posix_rename(source, target)

    def read(self, path: str, offset: int, out: memoryview) -> int:
        ranges = [
            (offset + start, min(_REQUEST_BYTES, out.nbytes - start))
            for start in range(0, out.nbytes, _REQUEST_BYTES)
        ]
        count = 0
        try:
            with self._sftp.open(path, "rb") as file:
                for data in file.readv(ranges):
                    out[count : count + len(data)] = data
                    count += len(data)
        except OSError as error:
            if error.errno is None:
                self.stat(path)  # Raises if the path is that of a folder
            raise
        return count

    def stat(self, path: str) -> Entry:
        status = self._sftp.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFound(path, "not a file")
        return Entry(posixpath.basename(path), status.st_size, status.st_mtime)

    def entries(self, path: str) -> list[Entry]:
        return [
            Entry(
                item.filename,
                None if stat.S_ISDIR(item.st_mode) else item.st_size,
                item.st_mtime,
            )
            for item in self._sftp.listdir_attr(path)
        ]

    def make_folder(self, path: str) -> None:
        try:
            self._sftp.mkdir(path, 0o700)
        except OSError:
            # Many servers say "Failure" for a folder that exists.
            if not stat.S_ISDIR(self._sftp.stat(path).st_mode):
                raise

    def remove(self, path: str) -> None:
        self.stat(path)  # Some servers say "Failure" for a folder
        self._sftp.remove(path)

    def remove_folder(self, path: str) -> None:
        self._sftp.rmdir(path)

    def close(self) -> None:
        self._client.close()


class _Answer:
    """The answer to one request. The client's own method gives no status of a failed request."""

    message: Any = None

    def _async_response(self, _kind: int, message: Any, _number: int) -> None:
        self.message = message
