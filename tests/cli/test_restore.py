from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ckpt.storage.registry import open_backend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, data_file, flip


def tree(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def test_a_local_checkpoint_is_verified_in_place(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("restore", "--latest")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "step 300 is intact, verified in place"
    assert str(Path("runs/step-000000300.abc123").absolute()) in ran.out
    assert "GB/s" in ran.out
    assert not Path("restored").exists()


def test_with_to_it_is_copied(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("restore", "--latest", "--to", "there", "--json")
    assert ran.code == 0
    place = Path("there/step-000000300.abc123").absolute()
    assert ran.json["step"] == 300
    assert ran.json["place"] == str(place)
    assert ran.json["root"] == str(place.parent)
    assert ran.json["copied"] is True
    assert ran.json["bytes"] == steps[300].manifest.nbytes
    assert tree(str(place)) == tree("runs/step-000000300.abc123")
    assert cli("verify", "--all", "--root", "there").code == 0


def test_from_elsewhere_it_goes_into_the_folder_restored(cli: Cli) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    write_checkpoint(open_backend(url), 5, ARRAYS, world_size=3)
    ran = cli("restore", "--root", url)
    assert ran.code == 0
    assert str(Path("restored/step-000000005.abc123").absolute()) in ran.out
    assert cli("ls", "--root", "restored").code == 0


@pytest.mark.parametrize("to", [[], ["--to", "there"]])
def test_a_damaged_step_is_passed_over_with_a_warning(
    cli: Cli, steps: dict[int, Written], to: list[str]
) -> None:
    flip(data_file(steps[300]), 4100)
    ran = cli("restore", "--latest", "--json", *to)
    assert ran.code == 0
    assert ran.json["step"] == 200
    assert ran.err.startswith(
        "warning: step 300 is damaged: checksum mismatch in 'step-000000300.abc123/rank-00000.safetensors'"
    )
    assert "bytes 4096 to 4104" in ran.err
    assert ran.err.endswith("trying step 200, the one before\n")
    assert not Path("there/step-000000300.abc123/manifest.json").exists()


@pytest.mark.parametrize("to", [[], ["--to", "there"]])
def test_a_step_that_was_asked_for_has_no_second_choice(
    cli: Cli, steps: dict[int, Written], to: list[str]
) -> None:
    data_file(steps[300], rank=1).unlink()
    ran = cli("restore", "--step", 300, *to)
    assert ran.code == 4
    assert ran.out == ""
    assert ran.err == "error: 'step-000000300.abc123/rank-00001.safetensors': is missing\n"


def test_when_all_are_damaged_the_error_says_so(cli: Cli, steps: dict[int, Written]) -> None:
    for written in steps.values():
        flip(data_file(written), 0)
    ran = cli("restore", "--latest")
    assert ran.code == 4
    assert ran.err.count("warning: ") == 3
    assert "error: none of 3 checkpoints in" in ran.err


def test_another_attempt_at_the_same_step_may_help(cli: Cli, steps: dict[int, Written]) -> None:
    write_checkpoint(open_backend("runs"), 300, ARRAYS, attempt="other1", created_at=1.0)
    flip(data_file(steps[300]), 0)
    ran = cli("restore", "--step", 300, "--json")
    assert ran.json["attempt"] == "other1"
    assert "trying another attempt at it, other1" in ran.err


def test_there_is_nothing_to_restore(cli: Cli) -> None:
    ran = cli("restore", "--latest")
    assert ran.code == 7
    assert ran.err.startswith("error: no checkpoint to restore in ")


def test_latest_and_step_exclude_each_other(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("restore", "--latest", "--step", 100).code == 2
