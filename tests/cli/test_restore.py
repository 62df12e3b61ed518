from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog.transfer import fetch_nearest
from ckpt.catalog.verify import verify_step
from ckpt.errors import CkptError, StorageError
from ckpt.model.keys import StepRef
from ckpt.storage.registry import open_backend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, data_file, flip


def tree(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def test_a_local_checkpoint_is_verified_in_place(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("restore", "--latest")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "step 300 is intact, verified in place"
    assert str(Path("runs/step-000000300.abcxyz").absolute()) in ran.out
    assert "B/s" in ran.out
    assert not Path("restored").exists()


def test_with_to_it_is_copied(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("restore", "--latest", "--to", "there", "--json")
    assert ran.code == 0
    place = Path("there/step-000000300.abcxyz").absolute()
    assert ran.json["step"] == 300
    assert ran.json["place"] == str(place)
    assert ran.json["root"] == str(place.parent)
    assert ran.json["copied"] is True
    assert ran.json["bytes"] == steps[300].manifest.nbytes
    assert tree(str(place)) == tree("runs/step-000000300.abcxyz")
    assert cli("verify", "--all", "--root", "there").code == 0


def test_from_elsewhere_it_goes_into_the_folder_restored(cli: Cli) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    write_checkpoint(open_backend(url), 5, ARRAYS, world_size=3)
    ran = cli("restore", "--root", url)
    assert ran.code == 0
    assert str(Path("restored/step-000000005.abcxyz").absolute()) in ran.out
    assert cli("ls", "--root", "restored").code == 0


@pytest.mark.parametrize("to", [[], ["--to", "there"]])
def test_the_steps_are_listed_again_if_a_job_removes_those_that_were_found(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, to: list[str]
) -> None:
    """Retention removes the manifest first, and then the files."""
    backend = open_backend("runs")

    def goes_on(ref: StepRef) -> None:
        if 400 not in steps:  # The job goes on while the first step is read
            steps[400] = write_checkpoint(backend, 400, ARRAYS, world_size=3)
            for step in (100, 200, 300):
                backend.delete(steps[step].ref.manifest)
                data_file(steps[step]).unlink()

    monkeypatch.setattr("ckpt.cli.restore.verify_step", after(goes_on, verify_step))
    monkeypatch.setattr("ckpt.cli.restore.fetch_nearest", after(goes_on, fetch_nearest))
    ran = cli("restore", *to)
    assert ran.code == 0
    assert "step 400 is intact" in ran.out
    assert "damaged" not in ran.err
    assert "step 300 was removed during the command" in ran.err


@pytest.mark.parametrize("given", [[], ["--step", 300], ["--to", "there"]])
def test_a_step_that_is_removed_meanwhile_is_not_called_damaged(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, given: list[object]
) -> None:
    backend = open_backend("runs")

    def remove_all(ref: StepRef) -> None:
        for step in (100, 200, 300):
            with suppress(CkptError):
                backend.delete(steps[step].ref.manifest)
            data_file(steps[step]).unlink(missing_ok=True)

    monkeypatch.setattr("ckpt.cli.restore.verify_step", after(remove_all, verify_step))
    monkeypatch.setattr("ckpt.cli.restore.fetch_nearest", after(remove_all, fetch_nearest))
    ran = cli("restore", *given)
    assert ran.code == 7
    assert "step 300 was removed during the command" in ran.err
    assert "damaged" not in ran.err


def test_steps_that_are_all_removed_one_by_one_are_not_called_damaged(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(ref: StepRef) -> None:
        open_backend("runs").delete(ref.manifest)
        data_file(steps[ref.step]).unlink()

    monkeypatch.setattr("ckpt.cli.restore.verify_step", after(remove, verify_step))
    ran = cli("restore")
    assert ran.code == 7, ran.err
    assert "step 100 was removed during the command" in ran.err
    assert "all 3 that were found were removed" in ran.err


def test_a_store_that_fails_after_damage_does_not_hide_the_damage(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> bool:
        raise StorageError("manifest.json", "the store is down")

    for step in (100, 200, 300):
        flip(data_file(steps[step]), 4100)
    monkeypatch.setattr("ckpt.cli.options.is_committed", down)
    ran = cli("restore")
    assert ran.code == 4
    assert "step 300 is damaged" in ran.err


def test_a_folder_inside_of_the_root_is_refused(cli: Cli, steps: dict[int, Written]) -> None:
    before = tree("runs")
    ran = cli("restore", "--root", "runs", "--to", "runs/step")
    assert ran.code == 2
    assert "is inside of" in ran.err
    assert tree("runs") == before
    assert not Path("runs/step").exists()


def after(first: Callable[[StepRef], None], work: Callable[..., Any]) -> Callable[..., Any]:
    """Do ``work`` on a step, after ``first`` with that step."""

    def both(source: Any, step: Any, **options: Any) -> Any:
        first(step if isinstance(step, StepRef) else step.ref)
        return work(source, step, **options)

    return both


@pytest.mark.parametrize("to", [[], ["--to", "there"]])
def test_a_damaged_step_is_passed_over_with_a_warning(
    cli: Cli, steps: dict[int, Written], to: list[str]
) -> None:
    flip(data_file(steps[300]), 4100)
    ran = cli("restore", "--latest", "--json", *to)
    assert ran.code == 0
    assert ran.json["step"] == 200
    assert ran.err.startswith(
        "warning: step 300 is damaged: checksum mismatch in "
        "'step-000000300.abcxyz/rank-00000.safetensors'"
    )
    assert "bytes 4096 to 4104" in ran.err
    assert ran.err.endswith("trying step 200, the previous one\n")
    assert not Path("there/step-000000300.abcxyz/manifest.json").exists()


@pytest.mark.parametrize("to", [[], ["--to", "there"]])
def test_a_step_that_was_asked_for_has_no_second_choice(
    cli: Cli, steps: dict[int, Written], to: list[str]
) -> None:
    data_file(steps[300], rank=1).unlink()
    ran = cli("restore", "--step", 300, *to)
    assert ran.code == 4
    assert ran.out == ""
    assert ran.err.startswith("error: 'step-000000300.abcxyz/rank-00001.safetensors': is missing; ")
    assert "trying" not in ran.err


def test_when_all_are_damaged_the_error_says_so(cli: Cli, steps: dict[int, Written]) -> None:
    for written in steps.values():
        flip(data_file(written), 0)
    ran = cli("restore", "--latest")
    assert ran.code == 4
    assert ran.err.count("warning: ") == 3
    assert "error: none of 3 checkpoints in" in ran.err


def test_another_attempt_at_the_same_step_may_help(cli: Cli, steps: dict[int, Written]) -> None:
    write_checkpoint(open_backend("runs"), 300, ARRAYS, attempt="othera", created_at=1.0)
    flip(data_file(steps[300]), 0)
    ran = cli("restore", "--step", 300, "--json")
    assert ran.json["attempt"] == "othera"
    assert "trying another attempt at it, othera" in ran.err


def test_there_is_nothing_to_restore(cli: Cli) -> None:
    ran = cli("restore", "--latest")
    assert ran.code == 7
    assert ran.err.startswith("error: no checkpoint in ")


def test_latest_and_step_exclude_each_other(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("restore", "--latest", "--step", 100).code == 2


# -- several tiers ---------------------------------------------------------------------------------


@pytest.fixture
def tiers(cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folder near, which is empty, and runs, the far one; both are in ckpt.toml."""
    monkeypatch.delenv("CKPT_ROOT")
    Path("ckpt.toml").write_text('[[tiers]]\nurl = "near"\n[[tiers]]\nurl = "runs"\n')
    return ["--root", "near", "--root", "runs"]


def near_file(name: str) -> Path:
    return Path("near/step-000000300.abcxyz") / name


@pytest.mark.parametrize("named", [True, False], ids=["options", "ckpt.toml"])
def test_the_nearest_folder_is_filled_and_verified_in_place_ever_after(
    cli: Cli, tiers: list[str], steps: dict[int, Written], named: bool
) -> None:
    flags = tiers if named else []
    ran = cli("restore", "--latest", "--json", *flags)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["root"] == str(Path("near").absolute())
    assert (ran.json["copied"], ran.json["copied_bytes"]) == (True, steps[300].manifest.nbytes)
    assert tree("near/step-000000300.abcxyz") == tree("runs/step-000000300.abcxyz")
    again = cli("restore", "--latest", "--json", *flags)
    assert (again.json["copied"], again.json["copied_bytes"], again.json["repaired"]) == (
        False,
        0,
        [],
    )
    assert cli("restore", *flags).out.startswith("step 300 is intact, verified in place")


def test_what_is_damaged_near_comes_from_far_with_a_warning(
    cli: Cli, tiers: list[str], steps: dict[int, Written]
) -> None:
    cli("restore", *tiers)
    flip(near_file("rank-00001.safetensors"), 4100)
    near_file("rank-00000.json").unlink()
    ran = cli("restore", "--latest", "--json", *tiers)
    assert ran.code == 0
    assert ran.json["step"] == 300
    (repair, fragment) = sorted(ran.json["repaired"], key=lambda one: -one["nbytes"])
    assert repair["key"].endswith("rank-00001.safetensors")
    assert fragment["key"].endswith("rank-00000.json")
    assert repair["tier"] == str(Path("near").absolute())
    assert ran.err.count("warning: step 300: ") == 2
    assert tree("near/step-000000300.abcxyz") == tree("runs/step-000000300.abcxyz")


def test_a_torn_manifest_near_is_replaced(cli: Cli, tiers: list[str]) -> None:
    cli("restore", *tiers)
    near_file("manifest.json").write_bytes(b"{}")
    assert cli("restore", *tiers).code == 0
    assert tree("near/step-000000300.abcxyz") == tree("runs/step-000000300.abcxyz")


def test_what_is_damaged_everywhere_gives_way_to_the_step_before(
    cli: Cli, tiers: list[str], steps: dict[int, Written]
) -> None:
    cli("restore", *tiers)
    for path in (near_file("rank-00001.safetensors"), data_file(steps[300], 1)):
        flip(path, 4100)
    ran = cli("restore", "--json", *tiers)
    assert ran.code == 0
    assert ran.json["step"] == 200
    assert "no tier has" in ran.err
    assert "trying step 200, the previous one" in ran.err


def test_a_restore_that_was_cut_goes_on_where_it_was(
    cli: Cli, tiers: list[str], steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = """
import os, sys, threading
from ckpt.cli.main import main
from ckpt_backends.folder.posix import _PosixUpload
finish, finished, turn = _PosixUpload.finish, [], threading.Lock()
def once(self, *args):
    with turn:
        if finished:
            os.kill(os.getpid(), 9)
        finished.append(finish(self, *args))
        return finished[0]
_PosixUpload.finish = once
sys.argv = ["ckpt", "restore", "--root", "near", "--root", "runs"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", kill],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not near_file("manifest.json").exists()
    kept = {path.name for path in near_file("").glob("*.safetensors")}
    assert len(kept) == 1
    ran = cli("restore", "--json", *tiers)
    assert ran.code == 0
    sizes = {file.name: file.size for file in steps[300].manifest.files}
    assert ran.json["copied_bytes"] == sum(size for name, size in sizes.items() if name not in kept)
    assert cli("verify", "--root", "near").code == 0


def test_one_root_is_one_place_whatever_ckpt_toml_says(
    cli: Cli, tiers: list[str], steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("restore", "--root", "runs").out.startswith("step 300 is intact, verified in place")
    monkeypatch.setenv("CKPT_ROOT", "runs")
    assert cli("restore").out.startswith("step 300 is intact, verified in place")
    assert not Path("near").exists()


def test_nothing_on_any_tier_is_told_with_all_their_names(cli: Cli, tmp_path: Path) -> None:
    ran = cli("restore", "--root", "one", "--root", "two")
    assert ran.code == 7
    assert str(tmp_path / "one") in ran.err
    assert str(tmp_path / "two") in ran.err


@pytest.mark.parametrize(
    "name", ["step-{}", "step-{}/rank-00000.safetensors", "step-{}/manifest.json"]
)
def test_no_link_that_was_planted_at_the_destination_is_followed(
    cli: Cli, steps: dict[int, Written], name: str
) -> None:
    """Another user that can write to the destination knows the names of the files that a restore
    makes.
    """
    folder = steps[300].ref.folder
    place = Path("there") / name.replace("step-{}", folder)
    place.parent.mkdir(parents=True)
    Path("outside").mkdir()
    Path("outside/victim").write_text("mine")
    place.symlink_to(Path("outside" if place.name == folder else "outside/victim").absolute())
    ran = cli("restore", "--to", "there")
    assert ran.code in (0, 3, 4), ran.err
    assert "internal error" not in ran.err
    assert os.listdir("outside") == ["victim"]
    assert Path("outside/victim").read_text() == "mine"


def test_a_url_is_no_place_to_restore_to_and_copy_is_named(
    cli: Cli, steps: dict[int, Written]
) -> None:
    ran = cli("restore", "runs", "--to", "s3://user:hunter2@bucket/run")
    assert ran.code == 2
    assert "is a URL, and restore fetches into a local folder" in ran.err
    assert "ckpt copy " in ran.err
    assert "hunter2" not in ran.err
