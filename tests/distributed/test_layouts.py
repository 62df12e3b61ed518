"""A number of ranks saves in one layout, and another number restores in another one.

Every element is where it belongs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, PerRank
from ckpt.catalog.step_listing import committed
from ckpt.catalog.verify import verify_step
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.distributed.launch import WORKERS
from tests.distributed.workers import nets
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


TWO = ["fsdp", "ddp", "tp", "fsdp1", "fsdp1-flat", "zero"]
FOUR = ["fsdp+tp", "hsdp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have saved under fsdp, ddp, tp, FSDP1 and a ZeroRedundancyOptimizer.

    Four ranks have saved under fsdp with tp, and as hsdp. Here and below, each layout is saved and
    read once or more. ``test_every_layout_is_read_by_every_other`` takes all pairs.
    """
    made = tmp_path_factory.mktemp("layouts")
    assert "ALL WELL" in world(
        2,
        WORKERS / "layouts.py",
        made,
        *TWO,
        "fsdp:fsdp",
    )
    assert "ALL WELL" in world(
        4,
        WORKERS / "layouts.py",
        made,
        *FOUR,
        "ddp:fsdp+tp",
        "fsdp:hsdp",
        "zero:fsdp1-copies",
    )
    return made


def test_three_ranks_read_what_two_have_saved(folder: Path) -> None:
    assert "ALL WELL" in world(3, WORKERS / "layouts.py", folder, "fsdp1-flat:ddp", "tp:fsdp1-flat")


def test_two_ranks_read_what_four_have_saved(folder: Path) -> None:
    assert "ALL WELL" in world(2, WORKERS / "layouts.py", folder, "fsdp+tp:fsdp1", "hsdp:tp")


@pytest.mark.parametrize("mode", [*TWO, *FOUR])
def test_one_process_reads_what_many_have_saved(folder: Path, mode: str) -> None:
    net, optimizer = nets.build("plain", seed=9)
    state = nets.state_of(net, optimizer, -1)
    state |= {"strict": PerRank(0, on_resize="first"), "columns": torch.zeros(96)}
    with CheckpointManager(folder / mode) as manager:
        assert manager.restore(state) is not None
    nets.assert_same(nets.full(net, optimizer), torch.load(folder / f"{mode}.pt")["expected"])
    assert net.other.weight is net.head.weight
    assert state["step"] == 3
    assert torch.equal(state["columns"], torch.arange(96.0))


@pytest.mark.parametrize("mode", ["fsdp", "ddp", "tp", "fsdp+tp", "hsdp"])
def test_every_byte_is_written_once_and_large_tensors_are_shared_evenly(
    folder: Path, mode: str
) -> None:
    sizes = [path.stat().st_size for path in sorted((folder / mode).rglob("*.safetensors"))]
    assert len(sizes) == (4 if "+" in mode or mode == "hsdp" else 2)
    kept = torch.load(folder / f"{mode}.pt")["expected"]
    copy = sum(tensor.nbytes for name, tensor in kept.items() if name != "model/other.weight")
    assert copy <= sum(sizes) < copy + len(sizes) * 20_000  # headers and random number states
    assert max(sizes) < 1.05 * min(sizes), sizes


@pytest.mark.parametrize("mode", [*TWO, *FOUR])
def test_what_many_have_saved_verifies(folder: Path, mode: str) -> None:
    backend = open_backend(str(folder / mode))
    with Workers("test", 2) as workers:
        reports = [verify_step(backend, ref, workers=workers) for ref in committed(backend)]
    assert [report.intact for report in reports] == [True]


EVERYWHERE = ("ddp", "fsdp", "tp", "fsdp1", "fsdp1-flat", "fsdp1-whole", "zero", "zero-view")
LAYOUTS = {
    1: ("plain", *EVERYWHERE),
    2: EVERYWHERE,
    3: EVERYWHERE,
    4: (*EVERYWHERE, "fsdp+tp", "hsdp", "fsdp1-copies"),
}
"""World size -> what it can run."""


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_every_layout_is_read_by_every_other(tmp_path: Path) -> None:
    """The test takes all pairs of layouts, and all pairs of world sizes."""
    tasks: dict[int, list[str]] = {world_size: [] for world_size in LAYOUTS}
    modes = dict.fromkeys(mode for layouts in LAYOUTS.values() for mode in layouts)
    worlds = {
        mode: [size for size, layouts in LAYOUTS.items() if mode in layouts] for mode in modes
    }
    met: set[tuple[int, int]] = set()
    for i, saved in enumerate(modes):
        for j, mode in enumerate(modes):
            one, two = (
                worlds[saved][(i + j) % len(worlds[saved])],
                worlds[mode][(i + 2 * j + j // 4) % len(worlds[mode])],
            )
            met.add((one, two))
            tasks[two].append(f"{one}/{saved}:{mode}")
    assert met == {(one, two) for one in LAYOUTS for two in LAYOUTS}
    for size, layouts in LAYOUTS.items():
        assert "ALL WELL" in world(
            size,
            WORKERS / "layouts.py",
            tmp_path,
            *(f"{size}/{mode}" for mode in layouts),
            timeout=900,
        )
    for size in LAYOUTS:
        assert "ALL WELL" in world(
            size, WORKERS / "layouts.py", tmp_path, *tasks[size], timeout=900
        )
