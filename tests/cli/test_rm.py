"""Tests of `ckpt rm`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import ckpt.cli.run_tiers
from ckpt import CheckpointManager, Tier
from ckpt.catalog.watching import Watcher
from ckpt.cli.run_tiers import with_memory_of_run
from ckpt.config import load_config
from ckpt.coordination.step_files import delete_files
from ckpt.model.keys import data_name, fragment_name
from ckpt.observe.journal import Journal
from ckpt.root.owner import Owner, put_owner
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import urls_of
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, run_on_two_tiers


def numbers(cli: Cli, *roots: object) -> list[int]:
    return [step["step"] for step in cli("ls", "--json", *roots).json["steps"]]


def remove_memory(url: str) -> None:
    """Remove a store in memory. Its name comes from a path, which a later run of the tests may have
    too.
    """
    folder = f"/dev/shm/ckpt-memory-{os.getuid()}-{url.removeprefix('shm://')}"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[Path, Path]:
    """A run on two tiers, which ``ckpt.toml`` names. The near one has steps 1 to 4, the far one 1
    to 3.
    """
    return run_on_two_tiers(tmp_path, (1, 2, 3, 4), (1, 2, 3))


@pytest.fixture(autouse=True)
def _no_root(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_ROOT")


def test_a_step_goes_from_all_tiers_of_the_run(cli: Cli, tiers: tuple[Path, Path]) -> None:
    ran = cli("rm", 2)
    assert ran.code == 0
    assert ran.out.count(str(tiers[1])) == 1
    assert "1 step removed" in ran.out
    assert (numbers(cli, tiers[0]), numbers(cli, tiers[1])) == ([1, 3, 4], [1, 3])


@pytest.mark.parametrize("place", [[], ["near"], ["far"]])
def test_any_tier_of_the_configuration_stands_for_the_run(
    cli: Cli, tiers: tuple[Path, Path], place: list[str]
) -> None:
    ran = cli("rm", *place, "--after", 2, "--json")
    assert [(removed["step"], Path(removed["root"]).name) for removed in ran.json["removed"]] == [
        (4, "near"),
        (3, "near"),
        (3, "far"),
    ]
    assert (numbers(cli, tiers[0]), numbers(cli, tiers[1])) == ([1, 2], [1, 2])


def test_places_that_are_given_are_the_only_ones(
    cli: Cli, tiers: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "ckpt.toml").unlink()
    assert cli("rm", "near", 1, "latest").code == 0
    assert (numbers(cli, tiers[0]), numbers(cli, tiers[1])) == ([2, 3], [1, 2, 3])


def test_a_dry_run_shows_the_steps_and_removes_none(cli: Cli, tiers: tuple[Path, Path]) -> None:
    ran = cli("rm", "--after", 3, "--dry-run")
    assert "1 step would be removed" in ran.out
    assert numbers(cli, tiers[0]) == [1, 2, 3, 4]


def test_a_job_goes_on_from_the_step_that_a_person_has_gone_back_to(
    cli: Cli, tmp_path: Path
) -> None:
    tiers = [Tier("near"), Tier("far")]
    with CheckpointManager(tiers) as manager:
        for step in (1, 2, 3):
            manager.save({"x": torch.full((3,), float(step))}, step)
    assert cli("rm", "near", "far", "--after", 1).code == 0
    state = {"x": torch.zeros(3)}
    with CheckpointManager(tiers) as manager:
        report = manager.restore(state)
        assert report is not None
        assert report.step == 1
        manager.save({"x": torch.ones(3)}, 2)
    assert state["x"].tolist() == [1.0] * 3
    assert (numbers(cli, "near"), numbers(cli, "far")) == ([1, 2], [1, 2])


def test_the_last_step_of_the_branch_does_not_go_before_abandoned_ones(
    cli: Cli, tiers: tuple[Path, Path]
) -> None:
    assert cli("rollback", 1).code == 0
    for dry_run in ([], ["--dry-run"]):
        ran = cli("rm", 1, *dry_run)
        assert ran.code == 2
        assert "a start would take step 4, which a rollback has abandoned" in ran.err
    assert f"`ckpt rollback {tiers[0]} {tiers[1]} 4` first" in ran.err
    assert numbers(cli, tiers[0]) == [1, 2, 3, 4]
    assert cli("rm", 4).code == 0, "an abandoned step"
    assert cli("rollback", tiers[0], tiers[1], 3).code == 0
    assert cli("rm", 1).code == 0
    assert (numbers(cli, tiers[0]), numbers(cli, tiers[1])) == ([2, 3], [2, 3])


def test_a_whole_run_goes_with_its_memory_pins_and_journal(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ckpt.toml").write_text(
        '[[tiers]]\nurl = "memory"\n[[tiers]]\nurl = "runs"\nevery = 2\n', encoding="utf-8"
    )
    journal = Journal("runs")
    with CheckpointManager([Tier("memory"), Tier("runs", every=2)], observers=[journal]) as manager:
        for step in (1, 2, 3):
            manager.save({"x": torch.ones(3)}, step)
        memory = next(tier.url for tier in manager._tiers if tier.in_memory)
    journal.close()
    assert cli("rollback", 2).code == 0
    assert Path("runs/rollbacks/000001.json").exists()
    assert cli("pin", "runs", 2).code == 0
    assert cli("rm", "--run").code == 5, "a step is pinned"
    assert cli("unpin", "runs", 2).code == 0
    watcher = Watcher(open_backend("runs"), "default")
    watcher.mark_handled(watcher.look()[0])
    assert Path("runs/watchers/default").is_dir()
    try:
        ran = cli("rm", "--run")
        assert (ran.code, ran.err) == (0, "")
        assert cli("ls", "runs").code == 7
        assert not Path("runs").exists()
        assert not Path("runs.journal").exists()
        with CheckpointManager([Tier("memory"), Tier("runs", every=2)]) as manager:
            assert manager.restore({"x": torch.zeros(3)}) is None
    finally:
        remove_memory(memory)


def test_a_place_without_a_run_is_a_typing_error_and_not_a_removal(
    cli: Cli, tmp_path: Path
) -> None:
    Path("notes").mkdir()
    Path("notes/plan.txt").write_text("of a person", encoding="utf-8")
    for place in ("typo", "notes"):
        ran, listed = cli("rm", place, "--run"), cli("ls", place)
        assert (ran.code, ran.out) == (listed.code, "")
        assert ran.err == listed.err
    Path("left.journal").mkdir()
    Path("left.journal/1.jsonl").write_bytes(b"")
    assert cli("rm", "left", "--run").code == 0, "the journal of a run whose steps are gone"
    assert not Path("left.journal").exists()


def test_folders_with_files_of_others_and_those_of_a_group_stay_without_the_run(
    cli: Cli, tmp_path: Path
) -> None:
    for root in ("noted", "shared"):
        Path(root).mkdir()
        write_checkpoint(open_backend(root), step=1, arrays=ARRAYS)
        Path(f"{root}.journal").mkdir()
    Path("noted/notes.txt").write_text("of a person", encoding="utf-8")
    Path("noted.journal/notes.txt").write_text("of a person", encoding="utf-8")
    Path("shared").chmod(0o2770)
    for root in ("noted", "shared"):
        assert cli("rm", root, "--run").code == 0
    assert [os.listdir(root) for root in ("noted", "noted.journal")] == [["notes.txt"]] * 2
    assert os.listdir("shared") == []
    assert not Path("shared.journal").exists()


def test_the_memory_of_another_run_stays(cli: Cli, tmp_path: Path) -> None:
    tiers = {name: [Tier("memory"), Tier(name, every=2)] for name in ("runs", "others")}
    stores = []
    try:
        for name in tiers:
            with CheckpointManager(tiers[name]) as manager:
                stores.append(manager._tiers[0].url)
                for step in (2, 3):
                    manager.save({"x": torch.ones(3)}, step)
        removed = cli("rm", "memory", "runs", "--run", "--json").json["removed"]
        assert {step["root"] for step in removed} == {stores[0], str(tmp_path / "runs")}
        assert numbers(cli, stores[1]) == [3]
        assert cli("rm", "memory", "--run").code == 2
    finally:
        for store in stores:
            remove_memory(store)


def test_the_memory_of_a_run_is_known_by_the_options_of_its_next_tier(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a store in memory follows from the server of the tier after it."""
    (tmp_path / "ckpt.toml").write_text(
        '[[tiers]]\nurl = "near"\n[[tiers]]\nurl = "s3://bucket/run"\n'
        '[tiers.options]\nendpoint_url = "http://127.0.0.1:9"\n',
        encoding="utf-8",
    )
    tiers = load_config().tiers
    memory = urls_of([Tier("memory"), tiers[1]])[0]
    assert memory != urls_of([Tier("memory"), Tier("s3://bucket/run")])[0]
    monkeypatch.setattr(ckpt.cli.run_tiers, "stores_in_memory", lambda: [memory])
    assert with_memory_of_run(["memory", "s3://bucket/run"], None) == [memory, "s3://bucket/run"]


def test_one_goes_back_to_a_checkpoint_only(cli: Cli, tmp_path: Path) -> None:
    for step, commit in ((1, True), (2, False), (3, True)):
        write_checkpoint(open_backend("runs"), step=step, arrays=ARRAYS, commit=commit)
    ran = cli("rm", "runs", "--after", 2)
    assert (ran.code, ran.out) == (7, "")
    assert "step 2, to go back to, is no checkpoint" in ran.err
    assert numbers(cli, "runs") == [1, 2, 3]


def test_a_pinned_step_stays_and_so_do_all_others(cli: Cli, tiers: tuple[Path, Path]) -> None:
    assert cli("pin", tiers[1], 2).code == 0
    for arguments in ((2,), (1, 2), ("--after", 1)):
        ran = cli("rm", *arguments)
        assert ran.code == 5, ran.err
        assert "step 2 on" in ran.err
        assert "is pinned until" in ran.err
        assert (numbers(cli, tiers[0]), numbers(cli, tiers[1])) == ([1, 2, 3, 4], [1, 2, 3])


def test_the_remains_of_a_save_go_with_its_step(cli: Cli, tmp_path: Path) -> None:
    for step, commit in ((1, True), (2, False)):
        write_checkpoint(open_backend("runs"), step=step, arrays=ARRAYS, commit=commit)
    ran = cli("rm", "runs", 2)
    assert "remains" in ran.out
    assert [path.name[:14] for path in Path("runs").glob("step-*")] == ["step-000000001"]


def test_steps_of_a_living_job_stay_unless_a_person_insists(
    cli: Cli, tiers: tuple[Path, Path]
) -> None:
    put_owner(open_backend(str(tiers[1])), Owner.of_this_process("a" * 12))
    ran = cli("rm", "--after", 2)
    assert ran.code == 5
    assert "is alive" in ran.err
    assert numbers(cli, tiers[0]) == [1, 2, 3, 4]
    assert cli("rm", "--after", 2, "--dry-run") == ran, "the trial is refused as the command is"
    assert "2 steps would be" in cli("rm", "--after", 2, "--dry-run", "--force").out
    assert cli("rm", "--after", 2, "--force").code == 0
    assert numbers(cli, tiers[0]) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "name what goes"),
        ((1, "--run"), 2, "name what goes"),
        ((1, "--after", 1), 2, "name what goes"),
        ((9,), 7, "step 9 is not there"),
        (("--after", 9), 7, "step 9, to go back to, is no checkpoint"),
        ((1, 2, 3, 4), 2, "4 checkpoints would go, and none be left"),
        (("elsewhere", 1), 7, "elsewhere"),
    ],
)
def test_bad_input_is_one_clear_error_and_removes_nothing(
    cli: Cli, tiers: tuple[Path, Path], arguments: tuple[object, ...], code: int, text: str
) -> None:
    ran = cli("rm", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert text in ran.err
    assert ran.err.count("\n") == 1
    assert (numbers(cli, tiers[0]), numbers(cli, tiers[1])) == ([1, 2, 3, 4], [1, 2, 3])


@pytest.mark.parametrize("is_declared", [True, False])
def test_the_last_checkpoints_of_a_nodes_own_folder_stay_too(
    cli: Cli, tmp_path: Path, is_declared: bool
) -> None:
    store = open_backend("own")
    for step in (1, 2):
        ref = write_checkpoint(store, step=step, arrays=ARRAYS, world_size=2).ref
        delete_files(store, [ref.key(data_name(1)), ref.key(fragment_name(1))])
    if is_declared:
        (tmp_path / "ckpt.toml").write_text(
            '[[tiers]]\nurl = "own"\nlocal = true\n', encoding="utf-8"
        )
    ran = cli("rm", "own", 1, 2)
    assert ran.code == 2
    assert "2 checkpoints would go, and none be left" in ran.err
    ran = cli("rm", "own", 1, "--json")
    state = "committed" if is_declared else "damaged"
    assert [(step["step"], step["state"]) for step in ran.json["removed"]] == [(1, state)]


def test_nothing_goes_if_a_tier_does_not_answer(cli: Cli, tiers: tuple[Path, Path]) -> None:
    shutil.rmtree(tiers[1])
    tiers[1].write_bytes(b"")
    ran = cli("rm", 2)
    assert ran.code in {2, 3}
    assert str(tiers[1]) in ran.err
    assert numbers(cli, tiers[0]) == [1, 2, 3, 4]
