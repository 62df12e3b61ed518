"""Commands that read one step name the other steps if the newest one is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.storage.api import StorageBackend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, data_file

VERBS = [("show",), ("export", "runs", "out.safetensors")]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
def test_the_step_before_is_named(
    cli: Cli, steps: dict[int, Written], verb: tuple[str, ...], file: str
) -> None:
    path = Path("runs", steps[300].ref.folder, file)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    ran = cli(*verb)
    if (verb, file) == (VERBS[0], "rank-00001.safetensors"):
        assert ran.code == 0  # only the manifest is read
        return
    assert ran.code == 4
    root = Path("runs").absolute()
    ways = (
        "; the previous step is there too: --step 200; or mend it from another copy with "
        f"`ckpt copy OTHER {root} --step 300 --check`"
    )
    assert ran.err.rstrip().endswith(ways), ran.err
    ran = cli(*verb, "--step", 300)
    assert ran.code == 4
    assert ran.err.rstrip().endswith(ways), ran.err
    assert cli(*verb, "--step", 200).code == 0


def test_nothing_is_named_where_there_is_none_before(cli: Cli, steps: dict[int, Written]) -> None:
    for step in (100, 200):
        Path("runs", steps[step].ref.folder, "manifest.json").unlink()
    Path("runs", steps[300].ref.folder, "manifest.json").write_bytes(b"{}")
    ran = cli("show")
    assert ran.code == 4
    assert "is there too" not in ran.err
    assert "--step 300 --check`" in ran.err


COMMANDS = [
    ("export", "runs", "out.safetensors", "--step", "100"),
    ("diff", "runs", "100", "400", "--values"),
    ("restore", "--root", "runs", "100", "--to", "copy"),
    ("restore", "--root", "runs", "100"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=["export", "diff", "fetch", "restore"])
@pytest.mark.parametrize("damage", ["cut", "missing", "flipped"])
def test_a_damaged_data_file_is_damage_with_a_way_out(
    cli: Cli,
    backend: StorageBackend,
    steps: dict[int, Written],
    command: tuple[str, ...],
    damage: str,
) -> None:
    write_checkpoint(backend, 400, {name: each + 1 for name, each in ARRAYS.items()}, world_size=2)
    path = data_file(steps[100], 1)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    path.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "missing":
        path.unlink()
    ran = cli(*command)
    said = {
        "cut": f"has {len(data) - 1} bytes, should have {len(data)}: it was cut",
        "missing": "is missing",
        "flipped": "checksum mismatch",
    }[damage]
    assert ran.code == 4, ran.err
    assert said in ran.err
    assert "a later step is there too: --step 200; or mend it" in ran.err
    # The parts that were fetched before the damage was found stay for the next fetch.
    assert not Path("copy").exists() or any(Path("copy").rglob("*.safetensors"))
    assert not Path("out.safetensors").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_a_step_with_a_cut_file_is_damaged_in_the_list(cli: Cli, steps: dict[int, Written]) -> None:
    cut(data_file(steps[200]))
    states = {each["step"]: each["state"] for each in cli("ls", "--json").json["steps"]}
    assert states == {100: "committed", 200: "damaged", 300: "committed"}
    assert "1 of its files was cut, such as rank-00000.safetensors" in cli("ls").out
    data_file(steps[300], 1).unlink()
    assert "1 of its files is gone, such as rank-00001.safetensors" in cli("ls").out


def test_a_copy_replaces_a_file_that_was_cut(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("copy", "runs", "far", "--step", 200).code == 0
    cut(Path("far", steps[200].ref.key("rank-00000.safetensors")))
    ran = cli("copy", "runs", "far", "--step", 200)
    assert (ran.code, "completed" in ran.out) == (0, True), ran.out
    ran = cli("copy", "runs", "far", "--step", 200)
    assert "already there" in ran.out


def test_finalize_counts_no_damaged_step_as_committed(cli: Cli, steps: dict[int, Written]) -> None:
    cut(data_file(steps[200]))
    assert "2 steps committed, 1 damaged (ckpt ls says how)" in cli("finalize").out
