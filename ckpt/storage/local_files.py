"""Write files of this machine that other programs read, and force them to the medium."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def durable_file(path: str) -> Generator[BinaryIO]:
    """Return a context manager that opens the new file ``path``. At its end, the bytes of the file
    are forced to the medium.

    Raises:
        OSError: The file cannot be written, such as for lack of room.
    """
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: str, data: bytes) -> None:
    """Write ``data`` to the file ``path``, and force it to the medium. Raises ``OSError``."""
    with durable_file(path) as file:
        file.write(data)
