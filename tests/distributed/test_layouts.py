"""Saved by so many ranks in this layout, restored by so many in that one: every element is where it belongs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, PerRank
from ckpt.catalog.index import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.distributed.launch import WORKERS, torchrun

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have saved under fsdp, ddp and tp, and four under fsdp with tp and as hsdp."""
    made = tmp_path_factory.mktemp("layouts")
    assert "ALL WELL" in torchrun(2, "layouts.py", made, "fsdp", "ddp", "tp", "fsdp:fsdp", "ddp:ddp", "tp:tp")
    assert "ALL WELL" in torchrun(
        4, "layouts.py", made, "fsdp+tp", "hsdp", "fsdp:fsdp", "ddp:fsdp+tp", "tp:fsdp", "fsdp:hsdp", "fsdp:ddp", "fsdp+tp:fsdp+tp"
    )  # fmt: skip
    return made


def test_three_ranks_read_what_two_have_saved(folder: Path) -> None:
    assert "ALL WELL" in torchrun(3, "layouts.py", folder, "fsdp:fsdp", "ddp:fsdp", "tp:ddp", "fsdp:tp")


def test_two_ranks_read_what_four_have_saved(folder: Path) -> None:
    assert "ALL WELL" in torchrun(2, "layouts.py", folder, "fsdp+tp:fsdp", "hsdp:tp", "fsdp+tp:ddp")


@pytest.mark.parametrize("mode", ["fsdp", "ddp", "tp", "fsdp+tp", "hsdp"])
def test_one_process_reads_what_many_have_saved(
    folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(WORKERS))
    sys.modules.pop("nets", None)
    import nets

    net, optimizer = nets.build("plain", seed=9)
    state = nets.state_of(net, optimizer, -1)
    state["strict"] = PerRank(0, on_resize="first")
    with CheckpointManager(folder / mode) as manager:
        assert manager.restore(state) is not None
    nets.assert_same(nets.full(net, optimizer), torch.load(folder / f"{mode}.pt")["expected"])
    assert net.other.weight is net.head.weight
    assert state["step"] == 3


@pytest.mark.parametrize("mode", ["fsdp", "ddp", "tp", "fsdp+tp", "hsdp"])
def test_every_byte_is_written_once_and_large_tensors_are_shared_evenly(folder: Path, mode: str) -> None:
    sizes = [path.stat().st_size for path in sorted((folder / mode).rglob("*.safetensors"))]
    assert len(sizes) == (4 if "+" in mode or mode == "hsdp" else 2)
    kept = torch.load(folder / f"{mode}.pt")["expected"]
    copy = sum(tensor.nbytes for name, tensor in kept.items() if name != "model/other.weight")
    assert copy <= sum(sizes) < copy + len(sizes) * 20_000  # headers and random number states
    assert max(sizes) < 1.05 * min(sizes), sizes


@pytest.mark.parametrize("mode", ["fsdp", "ddp", "tp", "fsdp+tp", "hsdp"])
def test_what_many_have_saved_verifies(folder: Path, mode: str) -> None:
    backend = open_backend(str(folder / mode))
    with Workers("test", 2) as workers:
        reports = [verify_step(backend, ref, workers=workers) for ref in committed(backend)]
    assert [report.intact for report in reports] == [True]
