"""Files of ``torch.save`` of each rank, with DTensors, become whole tensors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.exchange.folders.compare import compare
from tests.exchange.folders.write_torch_checkpointing import main
from tests.kit.worlds import world

WRITER = Path(__file__).parent / "folders" / "write_rank_files.py"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_files_of_all_ranks_restore_as_a_whole(cli: Cli, tmp_path: Path, ranks: int) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    world(ranks, WRITER, theirs)
    actor = theirs / "actor"
    ran = cli("import", actor, "runs", "--step", 2)
    assert ran.code == 0, ran.err
    assert "not taken" not in ran.err
    assert compare(Path("runs"), theirs) == {
        "weights": "yes",
        "optimizer": "yes",
        "position": "yes",
    }

    name = f"model_world_size_{ranks}_rank_1.pt"
    ran = cli("import", actor / name, "alone", "--step", 2)
    assert ran.code == 2
    assert "holds one rank's part of 'first.weight': name the folder" in ran.err

    shutil.copytree(actor, "without")
    os.remove(Path("without") / name)
    ran = cli("import", "without", "alone", "--step", 2)
    assert ran.code == 4
    assert "rank 1 holds a part of 'first.weight', and its file" in ran.err
    assert not Path("alone").exists()


def test_the_files_of_a_job_of_one_rank_have_the_names_of_the_objects(
    cli: Cli, tmp_path: Path
) -> None:
    """torch_checkpointing writes such files."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    main(str(theirs))
    assert cli("import", theirs / "state", "runs", "--step", 2).code == 0
    assert compare(Path("runs"), theirs) == {
        "weights": "yes",
        "optimizer": "yes",
        "position": "yes",
    }
