"""Connections to a WebDAV server, over webdav4.

A folder is renamed before it is removed, so that nobody sees a part of it. If the client is killed
in between, the renamed folder is *abandoned*. The next client that removes a folder beside it
removes it too.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final
from urllib.parse import quote

from webdav4.client import ResourceAlreadyExists, ResourceConflict

from ckpt.errors import ObjectNotFound, StorageError
from ckpt_backends.file_server.backend import WAIT_SECONDS, Entry
from ckpt_backends.temporary import TEMPORARY, is_abandoned, temporary_beside

_BLOCK_BYTES: Final = 1 << 20


class WebdavConnection:
    """See ``ckpt_backends.file_server.backend.Connection``."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {"timeout": WAIT_SECONDS}
    PASSES_OPTIONS: ClassVar[bool] = True

    def __init__(self, fs: Any) -> None:
        self._client = fs.client
        self._searched_parents: set[str] = set()  # Folders that ``_remove_abandoned`` has searched

    def write(self, path: str, parts: Sequence[memoryview]) -> None:
        length = str(sum(part.nbytes for part in parts))
        self._request("PUT", path, content=_blocks(parts), headers={"Content-Length": length})

    def replace(self, source: str, target: str) -> None:
        self._client.move(quote(source), quote(target), overwrite=True)

    def read(self, path: str, offset: int, out: memoryview) -> int:
        self.stat(path)  # Some servers list a folder as text
        headers = {"Range": f"bytes={offset}-{offset + out.nbytes - 1}"}
        url = self._client.join_url(quote(path))
        with self._client.http.stream("GET", url, headers=headers) as response:
            if response.status_code == 416:
                return 0  # The range begins at the end of the file, or behind it
            response.raise_for_status()
            skip = 0 if response.status_code == 206 else offset  # 200: the server sends everything
            total = 0
            for block in response.iter_bytes():
                data = block[skip:]
                skip = max(0, skip - len(block))
                count = min(len(data), out.nbytes - total)
                out[total : total + count] = data[:count]
                total += count
                if total == out.nbytes:
                    break
        return total

    def stat(self, path: str) -> Entry:
        info = self._client.info(quote(path))
        if info["type"] != "file":
            raise ObjectNotFound(path, "not a file")
        return _entry(info)

    def entries(self, path: str) -> list[Entry]:
        entries = self._client.ls(quote(path), detail=True, allow_listing_resource=False)
        return list(map(_entry, entries))

    def make_folder(self, path: str) -> None:
        try:
            with suppress(ResourceAlreadyExists):
                self._client.mkdir(quote(path))
        except ResourceConflict as error:  # The status for a missing parent
            raise ObjectNotFound(path, str(error)) from None

    def remove(self, path: str) -> None:
        self.stat(path)  # A request for a folder would remove all that is in it
        self._client.remove(quote(path))

    def remove_folder(self, path: str) -> None:
        """Rename the folder, so that no other client can put a file into it, and remove it if it is
        empty. A request to remove a folder would also remove the files in it.
        """
        if self.entries(path):
            raise StorageError(path, "the folder is not empty")
        self._remove_abandoned(posixpath.dirname(path))
        trash = temporary_beside(path)
        self._client.move(quote(path), quote(trash))
        self._remove_trash(trash, path)

    def _remove_abandoned(self, parent: str) -> None:
        """Remove from ``parent`` the renamed folders that killed processes have left."""
        if parent in self._searched_parents:
            return
        self._searched_parents.add(parent)
        for entry in self.entries(parent):
            match = TEMPORARY.fullmatch(entry.name)
            if match and entry.size is None and entry.modified and is_abandoned(entry.modified):
                self._remove_trash(
                    posixpath.join(parent, entry.name), posixpath.join(parent, match["name"])
                )

    def _remove_trash(self, trash: str, path: str) -> None:
        """Remove the folder ``trash``, which was renamed from ``path``. Its files, which another
        client has put since, go back.
        """
        if files := self.entries(trash):
            self.make_folder(path)
            for file in files:
                self.replace(f"{trash}/{file.name}", f"{path}/{file.name}")
        self._client.remove(quote(trash))

    def close(self) -> None:
        self._client.http.close()

    def _request(self, method: str, path: str, **arguments: Any) -> None:
        response = self._client.http.request(
            method, self._client.join_url(quote(path)), **arguments
        )
        if response.status_code == 409:  # The status for a missing folder
            raise ObjectNotFound(path, "its folder is missing")
        response.raise_for_status()


def _entry(item: Mapping[str, Any]) -> Entry:
    return Entry(
        item["name"].rstrip("/").rpartition("/")[2],
        None if item["type"] == "directory" else int(item["content_length"]),
        item["modified"].timestamp() if item.get("modified") else None,
    )


def _blocks(parts: Sequence[memoryview]) -> Iterator[bytes]:
    for part in parts:
        for start in range(0, part.nbytes, _BLOCK_BYTES):
            yield bytes(part[start : start + _BLOCK_BYTES])
