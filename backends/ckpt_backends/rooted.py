"""What tells one folder from another of the same name: containers and nodes have a ``/nvme`` each."""

from __future__ import annotations

import os
from abc import abstractmethod

from ckpt.errors import StorageError
from ckpt_backends.oserrors import mapped


class RootedFolder:
    """A backend whose root is a folder."""

    _root: str

    def identity(self) -> str:
        """Device and inode of the root, which is made if there is none."""
        with mapped("", missing=StorageError):
            self._make_folders(self._root)
            found = os.stat(self._root)
        return f"{found.st_dev}:{found.st_ino}"

    @abstractmethod
    def _make_folders(self, folder: str) -> None: ...
