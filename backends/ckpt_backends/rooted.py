"""Identities of folders. Folders of different containers and nodes may have the same path."""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import suppress

from ckpt.errors import StorageError
from ckpt_backends.mounts import kind_of, on_network
from ckpt_backends.oserrors import mapped


class RootedFolder:
    """A backend whose root is a folder.

    It remembers which folder that was when it was opened, or when it was made.
    """

    _root: str
    _first: str | None = None

    def identity(self) -> str:
        """Return the device and the inode of the root, which is made if it does not exist."""
        with mapped("", missing=StorageError):
            self._make_folders(self._root)
            found = os.stat(self._root)
        return f"{found.st_dev}:{found.st_ino}"

    def is_replaced(self) -> bool:
        return self._first is not None and self._first != self._seen()

    def _remember_root(self) -> None:
        if self._first is None:
            self._first = self._seen()

    def _seen(self) -> str | None:
        """Return what identifies a folder.

        Numbers of network and user-space file systems may change while the folder stays, so they
        are left out.
        """
        with suppress(OSError):
            found = os.stat(self._root)
            return (
                kind_of(self._root) if on_network(self._root) else f"{found.st_dev}:{found.st_ino}"
            )
        return None

    @abstractmethod
    def _make_folders(self, folder: str) -> None: ...
