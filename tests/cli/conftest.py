from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.cli.main import main
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import Arrays, Written, write_checkpoint

ARRAYS: Arrays = {
    "model/embed": np.arange(96, dtype=np.float32).reshape(12, 8),
    "model/bias": np.arange(5, dtype=np.int64),
    "count": np.array(2.5),
}
TREE = {
    "epoch": 3,
    "optimizer": {
        "$": "optimizer",
        "groups": [{"params": ["a"], "values": {"lr": 0.01}}],
        "state": {},
    },
}


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ran]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """``ckpt`` in an empty folder, with the folder ``runs`` in it as the root."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPT_ROOT", "runs")
    monkeypatch.delenv("CKPT_DEBUG", raising=False)

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, args)])
        capsys.readouterr()
        code = main()
        reported = capsys.readouterr()
        return Ran(code, reported.out, reported.err)

    return run


@pytest.fixture
def backend(cli: Cli) -> StorageBackend:
    return open_backend("runs")


@pytest.fixture
def steps(backend: StorageBackend) -> dict[int, Written]:
    """Steps 100, 200 and 300, each of two ranks."""
    return {
        step: write_checkpoint(
            backend,
            step,
            ARRAYS,
            world_size=2,
            tree=TREE,
            metadata={"team": "speech"},
            per_rank={rank: {"rng": rank} for rank in range(2)},
            tied={"model/head": "model/embed"},
        )
        for step in (100, 200, 300)
    }


def run_on_two_tiers(folder: Path, near: Iterable[int], far: Iterable[int]) -> tuple[Path, Path]:
    """Make a run on two tiers with these steps, which ``ckpt.toml`` in ``folder`` names."""
    roots = folder / "near", folder / "far"
    for root, steps in zip(roots, (near, far), strict=True):
        for step in steps:
            write_checkpoint(open_backend(str(root)), step=step, arrays=ARRAYS)
    tables = (f'[[tiers]]\nurl = "{root}"\n' for root in roots)
    (folder / "ckpt.toml").write_text("".join(tables), encoding="utf-8")
    return roots


def data_file(written: Written, rank: int = 0) -> Path:
    return Path("runs") / written.ref.key(f"rank-{rank:05d}.safetensors")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
