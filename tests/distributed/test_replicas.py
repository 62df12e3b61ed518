"""Steps outlive nodes whose files other nodes keep copies of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.launch import WORKERS
from tests.kit.marks import torture
from tests.kit.worlds import world as world_of_forks

pytestmark = pytest.mark.distributed
WORKER = WORKERS / "replicas.py"
world = partial(world_of_forks, imports=("tests.kit.certificates",))


@pytest.mark.parametrize(
    "scene",
    [
        "on_disk",
        "encrypted",
        *torture(
            "restored_stays",
            "in_racks",
            "on_two_buddies",
            "behind",
            "restored_again",
            "slow_to_hear",
        ),
    ],
)
def test_a_step_outlives_the_nodes_whose_buddies_are_left(tmp_path: Path, scene: str) -> None:
    assert world(4, WORKER, tmp_path, scene).count("ALL WELL") == 4


def test_fewer_nodes_go_on_with_copies_of_all_files(tmp_path: Path) -> None:
    world(4, WORKER, tmp_path, "saved")
    shutil.rmtree(tmp_path / "node1")
    assert world(3, WORKER, tmp_path, "on_fewer").count("ALL WELL") == 3


@pytest.mark.parametrize(
    "scene",
    [
        "unfaithful",
        "not_local",
        "tls_on_some",
        *torture("full_disk", "no_room", "leaves", "strange_certificate", "restored_goes"),
    ],
)
def test_a_copy_that_cannot_be_made_costs_no_save(tmp_path: Path, scene: str) -> None:
    assert world(4, WORKER, tmp_path, scene).count("ALL WELL") == 4


def memories(root: Path) -> list[Path]:
    """Return the folders of the nodes' tiers in memory, which have the name of ``root``."""
    return sorted(Path("/dev/shm").glob(f"ckpt-memory-*-{root.name}-*"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with copies of what four nodes have in memory after the death of their job."""
    root = tmp_path_factory.mktemp(f"replicas-{os.getpid()}-")
    try:
        world(4, WORKER, root, "die_in_memory")
        for memory in memories(root):
            shutil.copytree(memory, root / memory.name)
        yield root
    finally:
        for memory in memories(root):
            shutil.rmtree(memory)


@pytest.mark.parametrize("lost", [0, *torture(1, 2, 3)])
def test_the_memory_of_a_lost_node_comes_back_from_its_buddy(killed: Path, lost: int) -> None:
    for memory in memories(killed):
        shutil.rmtree(memory)
    for node, copy in enumerate(sorted(killed.iterdir())):
        if node != lost:
            shutil.copytree(copy, Path("/dev/shm", copy.name))
    assert len(memories(killed)) == 3
    assert world(4, WORKER, killed, "come_back").count("ALL WELL") == 4


@pytest.mark.parametrize(
    ("ends", "lost"),
    [("die_without_copies", 0), *torture(("die_without_copies", 2), ("leave_without_copies", 2))],
)
def test_what_a_job_goes_on_from_stays_until_a_later_step_has_its_copies(
    killed: Path, ends: str, lost: int
) -> None:
    """A node is lost when the first step of the next job is committed, and not yet copied."""
    for memory in memories(killed):
        shutil.rmtree(memory)
    for copy in sorted(killed.iterdir()):
        shutil.copytree(copy, Path("/dev/shm", copy.name))
    world(4, WORKER, killed, ends)
    shutil.rmtree(memories(killed)[lost])
    assert world(4, WORKER, killed, "come_back").count("ALL WELL") == 4


@pytest.mark.parametrize(("first", "second"), [(1, 2), *torture((3, 0), (0, 2))])
def test_a_step_that_a_job_goes_on_from_gets_its_copies_again(
    killed: Path, first: int, second: int
) -> None:
    """A node is lost with its memory, and after the next start another one is lost."""
    for memory in memories(killed):
        shutil.rmtree(memory)
    for node, copy in enumerate(sorted(killed.iterdir())):
        if node != first:
            shutil.copytree(copy, Path("/dev/shm", copy.name))
    world(4, WORKER, killed, "die_after_restore")
    shutil.rmtree(memories(killed)[second])
    assert world(4, WORKER, killed, "go_on").count("ALL WELL") == 4
