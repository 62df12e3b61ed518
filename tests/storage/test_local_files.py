"""Files that other programs read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.storage.local_files import durable_file, write_durably


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the contents that each file had when it was forced to the medium."""
    contents: list[bytes] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: contents.append(Path(f"/proc/self/fd/{fd}").read_bytes())
    )
    return contents


def test_all_bytes_are_forced_to_the_medium(tmp_path: Path, synced: list[bytes]) -> None:
    write_durably(str(tmp_path / "index.json"), b"{}")
    with durable_file(str(tmp_path / "weights")) as file:
        file.write(b"one")
        file.write(b"two")
    assert synced == [b"{}", b"onetwo"]


def test_a_file_whose_writer_fails_is_not_forced(tmp_path: Path, synced: list[bytes]) -> None:
    with pytest.raises(ValueError), durable_file(str(tmp_path / "weights")):
        raise ValueError
    assert synced == []
