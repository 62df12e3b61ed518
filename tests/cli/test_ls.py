from __future__ import annotations

from pathlib import Path

from ckpt.model.layout import StepRef
from ckpt.storage.api import StorageBackend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli


def test_steps_are_listed_newest_first(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("ls")
    assert ran.code == 0
    header, *rows = ran.out.splitlines()
    assert header.split() == ["step", "attempt", "committed", "at", "ranks", "tensors", "size", "state"]
    assert [row.split()[0] for row in rows] == ["300", "200", "100"]
    assert all("committed" in row and "8.62 kB" in row for row in rows)
    assert ran.err == ""


def test_incomplete_and_damaged_steps_are_told_apart(
    cli: Cli, steps: dict[int, Written], backend: StorageBackend
) -> None:
    write_checkpoint(backend, 400, ARRAYS, commit=False)
    backend.put(StepRef(200, "abc123").manifest, [b"junk"])
    rows = {row.split()[0]: row for row in cli("ls").out.splitlines()}
    assert "incomplete: 1 rank finished, no manifest" in rows["400"]
    assert "damaged: " in rows["200"]
    found = {step["step"]: step["state"] for step in cli("ls", "--json").json["steps"]}
    assert found == {400: "incomplete", 300: "committed", 200: "damaged", 100: "committed"}


def test_json_holds_what_the_table_holds(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("ls", "--json")
    assert ran.json["root"] == str(Path("runs").absolute())
    assert ran.json["steps"][0] == {
        "step": 300,
        "attempt": "abc123",
        "state": "committed",
        "detail": None,
        "committed_at": "2023-11-14T22:18:20.000+00:00",
        "world_size": 2,
        "tensors": 3,
        "bytes": steps[300].manifest.nbytes,
        "stored_bytes": steps[300].manifest.nbytes,
        "codecs": [],
    }


def test_a_folder_that_is_missing_or_empty_says_so(cli: Cli) -> None:
    ran = cli("ls", "--root", "nowhere")
    assert ran.code == 7
    assert ran.err.count("\n") == 1
    assert "nowhere: it is empty, or does not exist" in ran.err
    assert not Path("nowhere").exists()


def test_a_foreign_folder_says_so(cli: Cli) -> None:
    Path("runs").mkdir()
    Path("runs/notes.txt").write_text("hello")
    ran = cli("ls")
    assert ran.code == 7
    assert "no steps, but other files, such as 'notes.txt'" in ran.err


def test_a_manifest_cannot_write_to_the_terminal(cli: Cli, backend: StorageBackend) -> None:
    backend.put("\x1b[2J.txt".replace("\x1b", "e"), [b""])
    write_checkpoint(backend, 1, {"evil\x1b[2J\nname": ARRAYS["count"]})
    ran = cli("show", 1)
    assert "\x1b" not in ran.out
    assert r"evil\x1b[2J\nname" in ran.out
