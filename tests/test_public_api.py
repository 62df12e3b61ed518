"""What ``import ckpt`` promises.

A name that is added or removed here changes something for users: say so in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

import ckpt

PUBLIC = {
    "CheckpointManager",
    "CkptError",
    "HfFolders",
    "LocalShards",
    "PendingSave",
    "PerRank",
    "RestoreReport",
    "RngState",
    "SaveConfig",
    "Tier",
    "Tls",
    "__version__",
    "declare_part",
    "follow",
    "join",
    "join_horovod",
    "join_mpi",
    "load",
    "open",
    "trainable",
    "watch",
}
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def test_the_public_names_are_pinned() -> None:
    assert sorted(ckpt.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ckpt, name) is not None
    assert name in dir(ckpt)


def test_a_star_import_brings_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from ckpt import *", names)
    assert set(names) - {"__builtins__"} == PUBLIC


def test_another_system_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match="ckpt needs Linux, and this is darwin: run it in a cont"):
        importlib.reload(ckpt)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ckpt.no_such_name


def test_the_version_is_the_distribution_s() -> None:
    assert ckpt.__version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]
