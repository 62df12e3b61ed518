from __future__ import annotations

import os
from pathlib import Path

from ckpt.exchange.inert.input_limits import map_file


def test_a_file_that_is_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    """The kernel refuses copies of it, although none is made."""
    size = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open(tmp_path / "file", "wb") as file:
        file.truncate(size)
        file.write(b"begin")
    with open(tmp_path / "file", "rb") as file:
        data = map_file(file)
    assert len(data) == size
    assert bytes(data[:8]) == b"begin\0\0\0"


def test_an_empty_file_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open(tmp_path / "file", "rb") as file:
        assert map_file(file) == b""
