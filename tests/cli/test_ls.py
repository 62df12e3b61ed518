from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ckpt import CheckpointManager
from ckpt.config import load_config
from ckpt.model.keys import StepRef
from ckpt.model.readable import size
from ckpt.root.claim_marker import claim_committed_for_removal
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Delay, FaultyBackend, Rule
from ckpt.storage.tiers import urls_of
from ckpt_backends.folder import shm
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli


def test_steps_are_listed_newest_first(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("ls")
    assert ran.code == 0
    header, *rows = ran.out.splitlines()
    assert header.split() == [
        "step",
        "committed",
        "at",
        "ranks",
        "tensors",
        "size",
        "state",
        "metadata",
    ]
    assert [row.split()[0] for row in rows] == ["100", "200", "300"]
    assert all(
        "committed" in row and "10.9 kB" in row and row.endswith("team=speech") for row in rows
    )
    assert ran.err == ""


def test_incomplete_and_damaged_steps_are_told_apart(
    cli: Cli, steps: dict[int, Written], backend: StorageBackend
) -> None:
    write_checkpoint(backend, 400, ARRAYS, commit=False)
    backend.put(StepRef(200, "abcxyz").manifest, [b"junk"])
    rows = {row.split()[0]: row for row in cli("ls").out.splitlines()}
    assert "incomplete: 1 rank finished, no manifest" in rows["400"]
    assert "damaged: " in rows["200"]
    found = {step["step"]: step["state"] for step in cli("ls", "--json").json["steps"]}
    assert found == {400: "incomplete", 300: "committed", 200: "damaged", 100: "committed"}


def test_json_holds_what_the_table_holds(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("ls", "--json")
    assert ran.json["root"] == str(Path("runs").absolute())
    assert ran.json["steps"][-1] == {
        "step": 300,
        "attempt": "abcxyz",
        "older": False,
        "abandoned": False,
        "state": "committed",
        "detail": None,
        "committed_at": "2023-11-14T22:18:20.000+00:00",
        "world_size": 2,
        "tensors": 3,
        "bytes": steps[300].manifest.nbytes,
        "metadata": {"team": "speech"},
        "metrics": {},
        "best": [],
        "stored_bytes": steps[300].manifest.nbytes,
        "tier_bytes": sum(path.stat().st_size for path in Path("runs").glob("step-*300.*/*")),
        "codecs": [],
        "adopted": False,
        "bases": [],
        "outer_bases": [],
        "pinned_until": None,
    }


def test_of_two_attempts_at_a_step_the_younger_is_last_and_the_other_is_older(
    cli: Cli, backend: StorageBackend
) -> None:
    """A restore takes the younger one, independently of the names."""
    for number, attempt in enumerate(("bbbbbb", "aaaaaa", "cccccc")):
        write_checkpoint(backend, 5, ARRAYS, attempt=attempt, created_at=1.7e9 + number % 2)
    write_checkpoint(backend, 5, ARRAYS, attempt="dddddd", commit=False)
    write_checkpoint(backend, 4, ARRAYS)
    rows = [row.split() for row in cli("ls").out.splitlines()[1:]]
    assert [row[1] for row in rows] == ["abcxyz", "dddddd", "bbbbbb,", "cccccc,", "aaaaaa"]
    assert [row[2] == "older" for row in rows] == [False, False, True, True, False]
    assert cli("show", 5, "--json").json["attempt"] == "aaaaaa"
    for words in (["ls"], ["ls", "runs", "empty"]):
        found = {step["attempt"]: step["older"] for step in cli(*words, "--json").json["steps"]}
        assert {attempt for attempt, is_older in found.items() if is_older} == {"bbbbbb", "cccccc"}
        assert cli(*words).out.count(", older") == 2


def test_steps_are_counted_and_not_the_attempts_at_them(cli: Cli, backend: StorageBackend) -> None:
    for step, attempt in ((3, "aaaaaa"), (4, "aaaaaa"), (4, "bbbbbb"), (5, "aaaaaa")):
        write_checkpoint(backend, step, ARRAYS, attempt=attempt)
    for place in (["runs"], ["runs", "empty"]):
        found = cli("ls", *place, "-n", 2, "--json").json["steps"]
        assert [row["step"] for row in found] == [4, 4, 5]


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


@pytest.fixture
def tiers(cli: Cli, steps: dict[int, Written]) -> str:
    """Steps 100 to 300 in 'runs', 200 and 300 in 'far', where 300 is cut short; both in
    ckpt.toml.
    """
    cli("copy", "runs", "far", "--step", 200)
    cli("copy", "runs", "far", "--step", 300)
    (Path("far") / steps[300].ref.manifest).unlink()
    (Path("far") / steps[300].ref.key("rank-00001.json")).unlink()
    Path("ckpt.toml").write_text('[[tiers]]\nurl = "runs"\n[[tiers]]\nurl = "far"\n')
    return "ckpt.toml"


def test_several_tiers_have_a_column_each(cli: Cli, tiers: str) -> None:
    ran = cli("ls", "--config", tiers)
    assert ran.code == 0
    header, *rows = [line.split() for line in ran.out.splitlines()]
    near, far = (str(Path(name).absolute()) for name in ("runs", "far"))
    assert header == ["step", "committed", "at", "ranks", near, far, "metadata"]
    assert [row[0] for row in rows] == ["100", "200", "300"]
    assert rows[-1][4:11] == ["10.9", "kB", "incomplete:", "1", "of", "2", "ranks,"]
    assert rows[1][4:] == ["10.9", "kB", "10.9", "kB", "team=speech"]
    assert rows[0][4:] == ["10.9", "kB", "-", "team=speech"]
    assert cli("ls", "--root", "runs", "--root", "far").out == ran.out


def test_json_of_several_tiers(cli: Cli, tiers: str) -> None:
    near, far = (str(Path(name).absolute()) for name in ("runs", "far"))
    found = cli("ls", "--config", tiers, "--json").json
    assert found["tiers"] == [{"root": near, "error": None}, {"root": far, "error": None}]
    assert found["steps"][-1]["tiers"][near]["state"] == "committed"
    assert found["steps"][-1]["tiers"][far]["state"] == "incomplete"
    assert found["steps"][-1]["tiers"][far]["finished_ranks"] == 1
    assert list(found["steps"][0]["tiers"]) == [near]
    assert found["steps"][0]["metadata"] == {"team": "speech"}


def test_a_tier_that_cannot_be_reached_beside_an_empty_one_is_no_sign_that_there_is_nothing(
    cli: Cli,
) -> None:
    Path("file.txt").write_text("")
    alone = cli("ls", "--root", "file.txt").code
    assert alone not in (0, 7)
    for more in ([], ["--json"]):
        assert cli("ls", "--root", "empty", "--root", "file.txt", *more).code == alone


@pytest.mark.parametrize("bad", ["nope://x", "file.txt"])
def test_a_tier_that_cannot_be_reached_does_not_hide_the_others(
    cli: Cli, tiers: str, bad: str
) -> None:
    Path("file.txt").write_text("")
    ran = cli("ls", "--root", "runs", "--root", bad)
    assert ran.code == 0
    assert ran.err.startswith("warning: ")
    assert ran.err.count("\n") == 1
    rows = ran.out.splitlines()[1:]
    assert len(rows) == 3
    assert all("10.9 kB" in row and "unreachable" in row for row in rows)
    found = cli("ls", "--root", "runs", "--root", bad, "--json").json
    assert found["tiers"][0]["error"] is None
    assert found["tiers"][1]["error"]


def test_an_empty_tier_is_a_column_of_dashes(cli: Cli, tiers: str) -> None:
    ran = cli("ls", "--root", "empty", "--root", "runs")
    assert ran.code == 0
    assert ran.err == ""
    assert [row.split()[4:7] for row in ran.out.splitlines()[1:]] == [["-", "10.9", "kB"]] * 3


def test_when_no_tier_has_anything_it_says_so(cli: Cli) -> None:
    assert cli("ls", "--root", "one", "--root", "two").code == 7
    ran = cli("ls", "--root", "one", "--root", "two", "--json")
    assert ran.code == 7
    assert ran.json["steps"] == []
    assert cli("ls", "--root", "nope://x", "--root", "nope://y").code == 2


def test_wrong_tiers_are_told(cli: Cli, tiers: str) -> None:
    assert "exclude each other" in cli("ls", "--root", "runs", "--config", tiers).err
    assert "named twice" in cli("ls", "--root", "runs", "--root", "./runs").err
    assert "cannot be read" in cli("ls", "--config", "none.toml").err


def test_numbers_in_the_metadata_and_of_metrics_are_short(
    cli: Cli, backend: StorageBackend
) -> None:
    write_checkpoint(
        backend, 1, ARRAYS, metadata={"lr": 0.123456789, "metrics": {"loss": 0.123456789, "n": 3}}
    )
    header, row = cli("ls").out.splitlines()
    assert header.split()[-5:] == ["size", "loss", "n", "state", "metadata"]
    assert row.split()[-5:] == ["*", "0.123457", "3", "committed", "lr=0.123457"]


def test_an_int_of_thousands_of_digits_in_the_metadata_is_shown_in_hexadecimal(
    cli: Cli, backend: StorageBackend
) -> None:
    """Python prints no int of more than 4,300 digits."""
    large = {"$": "int", "v": hex(10**5000)}
    write_checkpoint(backend, 1, ARRAYS, metadata={"n": large, "m": [large], "metrics": large})
    assert "n=0x31e2" in cli("ls").out
    (row,) = cli("ls", "--json").json["steps"]
    assert row["metadata"]["n"] == row["metadata"]["m"][0] == hex(10**5000)


# -- metrics ---------------------------------------------------------------------------------------


def write_losses(backend: StorageBackend, *losses: object, **metrics: object) -> None:
    """Steps 0, 1 and so on, each with a loss, and with the other metrics."""
    for step, loss in enumerate(losses):
        metadata = {"metrics": {"loss": loss, **metrics}}
        write_checkpoint(backend, step, ARRAYS, metadata=metadata)


NAN = {"$": "float", "v": "nan"}


def starred(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines() if "* " in line]


def test_the_best_step_has_a_star_and_nan_is_never_the_best(
    cli: Cli, backend: StorageBackend
) -> None:
    write_losses(backend, 2.0, 1.0, NAN, 1.5, {"$": "float", "v": "-inf"})
    assert starred(cli("ls").out) == ["1"]
    assert starred(cli("ls", "runs", "empty").out) == ["1"]
    best = {step["step"]: step["best"] for step in cli("ls", "--json").json["steps"]}
    assert best == {0: [], 1: ["loss"], 2: [], 3: [], 4: []}
    # A step that is saved again is as good as its last attempt.
    metadata = {"metrics": {"loss": 3.0}}
    write_checkpoint(backend, 1, ARRAYS, attempt="bbbbbb", created_at=1.9e9, metadata=metadata)
    assert starred(cli("ls").out) == ["3"]


def test_keep_best_of_the_file_says_which_value_is_the_best(
    cli: Cli, backend: StorageBackend
) -> None:
    for step, accuracy in enumerate((0.1, 0.9, 0.5)):
        metadata = {"metrics": {"accuracy": accuracy, "speed": 3.0}}
        write_checkpoint(backend, step, ARRAYS, metadata=metadata)
    assert starred(cli("ls").out) == []
    Path("ckpt.toml").write_text(
        '[[tiers]]\nurl = "runs"\nkeep_last = 1\nkeep_best = ["accuracy", "max"]\n'
    )
    for words in ([], ["runs"], ["--config", "ckpt.toml"]):
        assert starred(cli("ls", *words).out) == ["1"]


def test_steps_are_sorted_by_a_metric_with_the_best_last(cli: Cli, backend: StorageBackend) -> None:
    write_losses(backend, 2.0, 1.0, NAN, 1.5)
    write_checkpoint(backend, 4, ARRAYS)
    for place in (["runs"], ["runs", "empty"]):
        for sort, expected in (("loss", "2 4 0 3 1"), ("step", "0 1 2 3 4")):
            steps = cli("ls", *place, "--sort", sort, "--json").json["steps"]
            assert [str(step["step"]) for step in steps] == expected.split()
    lines = cli("ls", "--sort", "loss", "--reverse").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1", "3", "0", "4", "2"]
    ran = cli("ls", "--sort", "los")
    assert (ran.code, "no step has this metric; there is 'loss'" in ran.err) == (2, True)


def test_the_loss_stays_on_a_narrow_terminal(
    cli: Cli, backend: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_losses(backend, 2.0, 1.0, grad_norm=3.0, speed=4.0, size=5.0)
    shown: dict[int, str] = {}
    for width in (140, 80, 40):
        console = Console(width=width, color_system=None)
        monkeypatch.setattr("ckpt.cli.output._console", lambda _, console=console: console)
        shown[width] = " ".join(cli("ls").out.splitlines()[0].split())
    assert shown == {
        140: "step committed at ranks tensors size loss grad_norm metric size speed state",
        80: "step committed at size loss grad_norm metric size state",
        40: "step size loss state",
    }


def test_the_attempt_is_shown_where_it_tells_steps_apart(cli: Cli, backend: StorageBackend) -> None:
    write_checkpoint(backend, 1, ARRAYS)
    assert "abcxyz" not in cli("ls").out
    assert "abcxyz" in cli("ls", "--long").out
    write_checkpoint(backend, 1, ARRAYS, attempt="bbbbbb", created_at=1.9e9)
    assert "abcxyz, older" in cli("ls").out


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def memory(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Steps 1 and 2 in memory, and step 1 also in 'disk'; both are in ckpt.toml.

    The memory of other jobs is not visible.
    """
    monkeypatch.delenv("CKPT_ROOT")
    Path("ckpt.toml").write_text('[[tiers]]\nurl = "memory"\n[[tiers]]\nurl = "disk"\n')
    (url, _) = urls_of(load_config().tiers)
    true = shm.stores
    monkeypatch.setattr(
        "ckpt_backends.folder.shm.stores", lambda: [one for one in true() if one == url]
    )
    backend = open_backend(url)
    for step in (1, 2):
        write_checkpoint(backend, step, ARRAYS)
    write_checkpoint(open_backend("disk"), 1, ARRAYS)
    yield url
    for info in list(backend.list("")):
        backend.delete(info.key)
    backend.close()


def test_a_memory_tier_of_a_file_has_its_column(cli: Cli, memory: str) -> None:
    ran = cli("ls", "--config", "ckpt.toml")
    assert ran.code == 0, ran.err
    header, *rows = [line.split() for line in ran.out.splitlines()]
    assert header[4:] == [memory, str(Path("disk").absolute())]
    assert rows[0][4:6] == rows[0][6:]
    assert (rows[1][5:], len(rows)) == (["kB", "-"], 2)


def test_memory_shows_all_that_lies_in_this_machines_with_its_url(cli: Cli, memory: str) -> None:
    Path("ckpt.toml").unlink()
    ran = cli("ls", "--root", "memory")
    assert ran.code == 0, ran.err
    header, *rows = [line.split() for line in ran.out.splitlines()]
    assert header[4:] == [memory]
    assert [row[0] for row in rows] == ["1", "2"]
    assert cli("ls", "--root", "memory", "--root", "disk", "--json").json["tiers"] == [
        {"root": memory, "error": None},
        {"root": str(Path("disk").absolute()), "error": None},
    ]
    # a command that takes one place says how to find it
    assert "--root memory" in cli("show", "--root", "memory").err
    assert cli("show", "--root", memory).code == 0


def test_newer_steps_in_the_memory_before_a_tier_are_named(cli: Cli, memory: str) -> None:
    disk = str(Path("disk").absolute())
    reported = f"note: {memory} has newer steps, up to 2: `ckpt ls {memory} {disk}` shows both\n"
    for words in (["ls"], ["ls", "disk"], ["ls", "--root", "disk"]):
        ran = cli(*words)
        assert (ran.code, ran.err) == (0, reported)
        assert [row.split()[0] for row in ran.out.splitlines()[1:]] == ["1"]
    both = cli("ls", memory, disk)
    assert [row.split()[0] for row in both.out.splitlines()[1:]] == ["1", "2"]
    for words in (["ls", "--json"], ["ls", memory, disk], ["ls", memory]):
        assert cli(*words).err == ""
    write_checkpoint(open_backend("disk"), 2, ARRAYS)
    assert cli("ls").err == ""


def test_steps_that_only_memory_has_are_named_beside_the_error(cli: Cli, memory: str) -> None:
    shutil.rmtree("disk")
    ran = cli("ls")
    assert ran.code == 7
    assert f"note: {memory} has newer steps, up to 2" in ran.err


def test_several_stores_in_memory_have_a_table_each(
    cli: Cli, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "shm://another-of-test-ls"
    monkeypatch.setattr("ckpt_backends.folder.shm.stores", lambda: [memory, other])
    backend = open_backend(other)
    try:
        for step in (7, 8, 9):
            write_checkpoint(backend, step, ARRAYS)
        ran = cli("ls", "memory", "-n", 2)
        found = cli("ls", "memory", "--json").json
    finally:
        for info in list(backend.list("")):
            backend.delete(info.key)
        backend.close()
    assert (ran.code, ran.err) == (0, "")
    first, last = ran.out.split("\n\n")
    for text, url, steps in ((first, memory, ["1", "2"]), (last, other, ["8", "9"])):
        heading, header, *rows = text.splitlines()
        assert heading == url
        assert header.split()[-2:] == ["size", "state"]
        assert [row.split()[0] for row in rows] == steps
    assert [tier["root"] for tier in found["tiers"]] == [memory, other]


def test_without_any_memory_it_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_backends.folder.shm.stores", list)
    ran = cli("ls", "--root", "memory", "--json")
    assert ran.code == 7
    assert "no checkpoint in memory: this user has nothing" in ran.json["message"]


def test_of_dev_shm_only_what_is_this_users_memory_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = f"ckpt-memory-{os.getuid()}-"
    for name in (
        f"{own}b",
        f"{own}a",
        f"{own}.hidden",
        f"{own}",
        "ckpt-memory-4711-a",
        "ckpt-slot-1-2-3",
        "else",
    ):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / f"{own}file").write_text("")
    (tmp_path / f"{own}open").mkdir()
    (tmp_path / f"{own}open").chmod(0o755)
    monkeypatch.setattr(shm, "_SHM", str(tmp_path))
    assert shm.stores() == ["shm://a", "shm://b"]
    monkeypatch.setattr(shm, "_SHM", str(tmp_path / "none"))
    assert shm.stores() == []


def test_only_the_newest_are_listed_or_the_newest_first(cli: Cli, tiers: str) -> None:
    for place in (["runs"], ["runs", "far"]):
        shown = [
            [step["step"] for step in cli("ls", *place, *more, "--json").json["steps"]]
            for more in ([], ["-n", 2], ["--reverse"], ["-n", 2, "--reverse"])
        ]
        assert shown == [[100, 200, 300], [200, 300], [300, 200, 100], [300, 200]]
    assert cli("ls", "-n", 0).code == 2


def test_a_store_that_never_answers_is_told_and_then_given_up(
    cli: Cli, steps: dict[int, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.cli.watched_store.SILENT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and sends nothing
        (tmp_path / "ckpt.toml").write_text(
            f"""
[[tiers]]
url = "runs"
[[tiers]]
url = "s3://bucket/run"
[tiers.options]
endpoint_url = "http://127.0.0.1:{silent.getsockname()[1]}"
key = "a"
secret = "b"
config_kwargs = {{ read_timeout = 1, connect_timeout = 1, retries = {{ max_attempts = 0 }} }}
"""
        )
        both = cli("ls", "--config", "ckpt.toml", "--timeout", "0.5")
        alone = cli("ls", "s3://bucket/run", "--timeout", "0.5")
    assert both.code == 0
    assert "unreachable" in both.out
    for ran in (both, alone):
        assert "s3://bucket/run has not answered yet" in ran.err
        assert "'s3://bucket/run' (no answer within 0.5 s (--timeout))" in ran.err
    assert alone.code == 3


def test_two_tiers_of_one_url_are_refused_whether_on_one_server_or_on_two(cli: Cli) -> None:
    tier = '[[tiers]]\nurl = "s3://bucket/run"\noptions = {{ endpoint_url = "http://{}" }}\n'
    for servers, expected in (
        (("a", "a"), "s3://bucket/run is named twice"),
        (("a", "b"), "s3://bucket/run on different servers"),
    ):
        Path("ckpt.toml").write_text("".join(map(tier.format, servers)))
        ran = cli("ls", "--config", "ckpt.toml")
        assert (ran.code, expected in ran.err) == (2, True), ran.err


def test_a_store_that_answers_slowly_is_waited_for(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [Rule(verb="head", key="manifest", fault=Delay(0.3))]
    monkeypatch.setattr(
        "ckpt.cli.watched_store.open_backend",
        lambda url, options: FaultyBackend(open_backend(url, options), slow),
    )
    ran = cli("ls", "--timeout", "0.8")
    assert (ran.code, ran.err) == (0, "")
    assert len(ran.out.splitlines()) == 4


def test_a_metric_that_is_no_number_is_nan_in_the_table_and_null_in_json(
    cli: Cli, backend: StorageBackend
) -> None:
    metrics = {"loss": {"$": "float", "v": "nan"}, "accuracy": 0.5}
    write_checkpoint(backend, 4, ARRAYS, metadata={"metrics": metrics})
    assert cli("ls").out.splitlines()[1].split()[-3:] == ["nan", "0.5", "committed"]
    (step,) = cli("ls", "--json").json["steps"]
    assert step["metrics"] == step["metadata"]["metrics"] == {"loss": None, "accuracy": 0.5}


def test_ls_show_and_prune_give_a_step_the_size_that_its_files_have(
    cli: Cli, backend: StorageBackend
) -> None:
    write_checkpoint(backend, 3, ARRAYS)
    written = write_checkpoint(backend, 4, ARRAYS, world_size=2)
    folder = Path("runs", written.ref.folder)
    total = size(sum(path.stat().st_size for path in folder.iterdir()))
    assert f"  {total}  " in cli("ls", "-n", 1).out
    assert f"{total} in 5 files" in cli("show", 4).out
    assert f"  {total}  " in cli("prune", "--keep-last", 1, "--dry-run").out.splitlines()[2]


def test_a_step_that_is_being_removed_is_shown_as_such(cli: Cli, backend: StorageBackend) -> None:
    removed = write_checkpoint(backend, 3, ARRAYS, commit=False)
    assert claim_committed_for_removal(backend, removed.ref)
    write_checkpoint(backend, 4, ARRAYS)
    assert "incomplete: being removed" in cli("ls").out.splitlines()[1]
    assert "being removed, " in cli("ls", "runs", "empty").out.splitlines()[1]


def test_deltas_do_not_count_as_the_size_of_a_step(cli: Cli, tmp_path: Path) -> None:
    weights = torch.zeros(1 << 16, dtype=torch.bfloat16)
    with CheckpointManager(tmp_path / "run", deltas="model") as manager:
        for step in (1, 2):
            weights[::100] += 1
            manager.save({"model": weights}, step)
    lines = {
        int(line.split()[0]): line for line in cli("ls", tmp_path / "run").out.splitlines()[1:]
    }
    assert " deltas" not in lines[1]
    assert re.search(r"  13\d kB \+ \d+ B deltas  ", lines[2])
