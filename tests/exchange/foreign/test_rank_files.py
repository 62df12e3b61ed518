"""Files of ``torch.save`` of each rank, with DTensors, become whole tensors."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from ckpt import CheckpointManager
from tests.cli.conftest import Cli
from tests.exchange.folders.compare import compare
from tests.exchange.folders.write_torch_checkpointing import main
from tests.kit.marks import torture
from tests.kit.worlds import world
from tests.state.ranks import mesh_of, rank_of

WRITER = Path(__file__).parents[1] / "folders" / "write_rank_files.py"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *torture(4)])
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


WHOLE = torch.arange(8.0)


def content(rank: int, **others: Any) -> dict[str, Any]:
    """Return what a rank of two saves: its half of a weight."""
    part = WHOLE[rank * 4 : rank * 4 + 4].clone()
    return {"weight": DTensor.from_local(part, mesh_of([2]), [Shard(0)]), **others}


def write(files: Mapping[str, int], **others: Any) -> None:
    """Write files into the folder ``c``, each by the rank that it is given."""
    os.makedirs("c", exist_ok=True)
    for name, rank in files.items():
        with rank_of(rank, 2):
            torch.save(content(rank, **{key: each[rank] for key, each in others.items()}), name)


def test_files_that_one_rank_has_written_are_not_joined(cli: Cli) -> None:
    """A trainer may save an epoch after the other on its first rank."""
    write({"c/epoch_0.pt": 0, "c/epoch_1.pt": 0})
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 2
    assert "rank 0 has written epoch_1.pt" in ran.err
    assert "of several saves" in ran.err
    assert not Path("runs").exists()


def test_files_of_ranks_need_no_word_in_their_names(cli: Cli) -> None:
    write({"c/model_0.pt": 0, "c/model_1.pt": 1})
    assert cli("import", "c", "runs", "--step", 1).code == 0
    state = {"model": {"weight": torch.zeros(8)}}
    with CheckpointManager("runs") as manager:
        manager.restore(state)
    assert torch.equal(state["model"]["weight"], WHOLE)


@pytest.mark.parametrize(
    ("names", "is_joined"),
    [
        (("model_0", "model_1"), False),
        (("model_rank_0", "model_rank_1"), True),
        (("model_0", "model_1", "optim_0", "optim_1"), True),
    ],
)
def test_files_that_do_not_say_their_rank_need_the_word_or_company(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], is_joined: bool
) -> None:
    monkeypatch.setattr("ckpt.exchange.foreign.rank_files.writer_of_mesh", lambda _: None)
    write({f"c/{name}.pt": int(name[-1]) for name in names})
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == (0 if is_joined else 2), ran.err
    if not is_joined:
        assert "rename them to model_rank_N.pt" in ran.err


def test_files_of_ranks_that_are_of_different_steps_are_not_joined(cli: Cli) -> None:
    write({"c/model_rank_0.pt": 0, "c/model_rank_1.pt": 1}, step=[4, 2])
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 2
    assert "differ in 'step'" in ran.err


def test_other_files_with_numbers_are_not_taken_for_those_of_ranks(cli: Cli) -> None:
    write({"c/model_rank_0.pt": 0, "c/model_rank_1.pt": 1})
    for number in (5, 6):
        torch.save({"value": number}, f"c/epoch_{number}.pt")
    for number in (0, 1):
        torch.save({"epoch": number}, f"c/log_{number}.pt")
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 0, ran.err
    assert "'epoch' is not taken: epoch_5.pt, epoch_6.pt may be" in ran.err
    assert "'log' is not taken: log_0.pt, log_1.pt differ in 'epoch'" in ran.err
    assert "not taken from c: epoch_5.pt, epoch_6.pt, log_0.pt, log_1.pt" in ran.err


def test_tensors_that_differ_between_ranks_are_a_list_with_a_note(cli: Cli) -> None:
    buffers = [torch.tensor([1.0]), torch.tensor([2.0])]
    write({"c/model_rank_0.pt": 0, "c/model_rank_1.pt": 1}, mean=buffers)
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 0, ran.err
    assert "'mean' of 'model' differ between the ranks" in ran.err
    state: dict[str, Any] = {"model": {"mean": None, "weight": torch.zeros(8)}}
    with CheckpointManager("runs") as manager:
        manager.restore(state)
    assert [each.item() for each in state["model"]["mean"]] == [1, 2]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_each_file_is_read_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    reads: Counter[str] = Counter()
    load = torch.load

    def counted(path: str, **how: Any) -> Any:
        reads[path] += 1
        return load(path, **how)

    monkeypatch.setattr(torch, "load", counted)
    names = [f"c/model_rank_{rank}.pt" for rank in range(2)]
    if is_sharded:
        write({name: rank for rank, name in enumerate(names)})
    else:
        os.mkdir("c")
        for number, name in enumerate(names):
            torch.save({"weight": torch.full((2,), float(number))}, name)
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 0, ran.err
    assert reads == dict.fromkeys(names, 1)
    entries = {"model"} if is_sharded else {"model_rank_0", "model_rank_1"}
    assert all(entry in ran.out for entry in entries)
