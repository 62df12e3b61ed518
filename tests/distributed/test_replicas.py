"""Steps outlive nodes whose files other nodes keep copies of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launch import WORKERS
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed
WORKER = WORKERS / "replicas.py"


@pytest.mark.parametrize("scene", ["on_disk", "in_racks", "on_two_buddies", "slow_to_hear"])
def test_a_step_outlives_the_nodes_whose_buddies_are_left(tmp_path: Path, scene: str) -> None:
    assert world(4, WORKER, tmp_path, scene).count("ALL WELL") == 4


@pytest.mark.parametrize("scene", ["unfaithful", "full_disk", "no_room", "leaves", "not_local"])
def test_a_copy_that_cannot_be_made_costs_no_save(tmp_path: Path, scene: str) -> None:
    assert world(4, WORKER, tmp_path, scene).count("ALL WELL") == 4


@pytest.fixture
def shared_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder whose name the tiers in memory bear. What they leave is removed."""
    root = tmp_path / f"replicas-{tmp_path.parent.name}-{tmp_path.name}"
    root.mkdir()
    yield root
    for left in Path("/dev/shm").glob(f"ckpt-memory-*-{root.name}-*"):
        shutil.rmtree(left)


@pytest.mark.parametrize("lost", range(4))
def test_the_memory_of_a_lost_node_comes_back_from_its_buddy(
    shared_memory: Path, lost: int
) -> None:
    world(4, WORKER, shared_memory, "die_in_memory")
    (memory,) = Path("/dev/shm").glob(f"ckpt-memory-*-{shared_memory.name}-{lost}")
    shutil.rmtree(memory)
    assert world(4, WORKER, shared_memory, "come_back").count("ALL WELL") == 4
