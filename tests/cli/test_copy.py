from __future__ import annotations

import errno
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder
from ckpt.root.claim_marker import claim_committed_for_removal
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, data_file, flip


def tree(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def results(cli: Cli, *args: object) -> dict[int, str]:
    return {step["step"]: step["result"] for step in cli("copy", *args, "--json").json["steps"]}


def test_the_newest_step_is_copied_byte_for_byte(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("copy", "runs", "there")
    assert ran.code == 0
    header, row, total = ran.out.splitlines()
    assert header.split() == ["step", "attempt", "size", "copied", "time", "result"]
    assert row.split()[0] == "300"
    assert row.endswith("copied")
    assert total.startswith("1 step at ")
    assert list(tree("there")) != []
    assert tree("there") == {
        k: v for k, v in tree("runs").items() if k.startswith("step-000000300")
    }


def test_all_are_copied_and_what_is_there_is_skipped(cli: Cli, steps: dict[int, Written]) -> None:
    assert results(cli, "runs", "there", "--step", 200) == {200: "copied"}
    assert results(cli, "runs", "there", "--all") == {
        300: "copied",
        200: "already there",
        100: "copied",
    }
    assert tree("there") == tree("runs")
    assert "0 B copied" in cli("copy", "runs", "there", "--all").out


@pytest.mark.parametrize("given", [[], ["--step", 300], ["--all"]])
def test_a_step_that_is_removed_meanwhile_is_not_called_damaged(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, given: list[object]
) -> None:
    """Retention removes the manifest first, and then the files."""

    def removed_first(sources: Any, folder: StepFolder, **options: Any) -> Any:
        if folder.ref.step == 300:
            sources[0].delete(folder.ref.manifest)
            data_file(steps[300]).unlink()
        return fetch_step(sources, folder, **options)

    monkeypatch.setattr("ckpt.cli.copy.fetch_step", removed_first)
    ran = cli("copy", "runs", "there", *given)
    assert "step 300 was removed during the command" in ran.err
    assert "damaged" not in ran.err
    if "--all" in given:
        assert ran.code == 0
        assert results(cli, "runs", "there", "--all") == dict.fromkeys((200, 100), "already there")
    else:
        assert ran.code == 7
        assert "ckpt pin" in ran.err


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_copy_of_all_steps_fails_if_all_were_removed_meanwhile(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    def removed_first(sources: Any, folder: StepFolder, **options: Any) -> Any:
        sources[0].delete(folder.ref.manifest)
        return fetch_step(sources, folder, **options)

    monkeypatch.setattr("ckpt.cli.copy.fetch_step", removed_first)
    ran = cli("copy", "runs", "there", "--all", *more)
    assert ran.code == 7
    for step in steps:
        assert f"warning: step {step} was removed during the command" in ran.err
    assert "ckpt pin" in ran.err


def test_to_another_kind_of_store_and_back(cli: Cli, steps: dict[int, Written]) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    assert cli("copy", "runs", url, "--all").code == 0
    assert cli("copy", url, "back", "--all").code == 0
    assert tree("back") == tree("runs")


def test_a_copy_that_was_cut_goes_on_where_it_was(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    true, other_is_there = os.rename, threading.Event()

    def cut(old: str, new: str, **where: object) -> None:
        if "rank-00001.safetensors" in str(new):
            assert other_is_there.wait(60)  # Otherwise there may be no step to go on with
            raise OSError(errno.EIO, "Input/output error")
        true(old, new)
        if "rank-00000.safetensors" in str(new):
            other_is_there.set()

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", cut)
        patch.setattr("os.replace", cut)
        assert cli("copy", "runs", "there").code == 3
    assert not list(Path("there").glob("*/manifest.json"))
    assert results(cli, "runs", "there") == {300: "completed"}
    assert cli("verify", "--root", "there").code == 0


def test_check_replaces_what_is_damaged_at_the_destination(
    cli: Cli, steps: dict[int, Written]
) -> None:
    cli("copy", "runs", "there")
    flip(Path("there") / steps[300].ref.key("rank-00001.safetensors"), 4100)
    assert results(cli, "runs", "there") == {300: "already there"}
    assert results(cli, "runs", "there", "--check") == {300: "completed"}
    assert results(cli, "runs", "there", "--check") == {300: "intact"}


def test_a_damaged_step_does_not_stop_the_others(cli: Cli, steps: dict[int, Written]) -> None:
    flip(data_file(steps[200]), 4100)
    ran = cli("copy", "runs", "there", "--all")
    assert ran.code == 4
    assert ran.err.startswith("warning: step 200 was not copied: checksum mismatch in ")
    assert {path.name for path in Path("there").glob("*/manifest.json")} == {"manifest.json"}
    assert sorted(
        step["step"]
        for step in cli("ls", "--root", "there", "--json").json["steps"]
        if step["state"] == "committed"
    ) == [100, 300]


def test_another_checkpoint_of_that_name_is_not_overwritten(
    cli: Cli, steps: dict[int, Written], backend: StorageBackend
) -> None:
    write_checkpoint(open_backend("there"), 300, ARRAYS, created_at=1.0)
    before = tree("there")
    ran = cli("copy", "runs", "there")
    assert ran.code == 3
    assert "another manifest of the same attempt" in ran.err
    assert tree("there") == before


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["nowhere", "there"], 7, "it is empty, or does not exist"),
        (["runs", "there", "--step", 7], 7, "step 7 is not there"),
        (["runs", "runs"], 2, "are the same place"),
        (["runs", "runs/backup"], 2, "is inside of"),
        (["runs", "."], 2, "is inside of"),
        (["runs", "there", "--all", "--step", 100], 2, "exclude each other"),
        (["runs", "nope://x"], 2, "no backend for"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    cli: Cli, steps: dict[int, Written], args: list[object], code: int, expected: str
) -> None:
    ran = cli("copy", *args)
    assert (ran.code, ran.out) == (code, "")
    assert expected in ran.err
    assert not Path("there").exists()


def test_one_url_on_two_servers_is_two_places(cli: Cli) -> None:
    keys = "&key=a&secret=b"
    one, two = (f"s3://b/run?endpoint_url=http://127.0.0.1:{port}{keys}" for port in (1, 2))
    assert "are the same place" in cli("copy", one, one, "--timeout", 0.1).err
    ran = cli("copy", one, two, "--timeout", 0.1)
    assert (ran.code, "no answer" in ran.err) == (3, True), ran.err


def test_a_name_that_only_begins_alike_is_another_place(
    cli: Cli, steps: dict[int, Written]
) -> None:
    assert cli("copy", "runs", "runs2").code == 0


def test_where_a_removal_was_cut_short_the_error_names_the_command_that_ends_it(
    cli: Cli, steps: dict[int, Written]
) -> None:
    assert cli("copy", "runs", "there").code == 0
    store = open_backend("there")
    ref = steps[300].ref
    assert claim_committed_for_removal(store, ref)
    store.delete(ref.manifest)
    ran = cli("copy", "runs", "there")
    assert ran.code == 3
    assert f"ckpt rm {store.url} 300" in ran.err
    assert cli("rm", store.url, 300).code == 0
    assert results(cli, "runs", "there") == {300: "copied"}


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_step_whose_removal_has_begun_does_not_count_as_there(
    cli: Cli, steps: dict[int, Written], options: list[str]
) -> None:
    assert cli("copy", "runs", "there", "--all").code == 0
    store = open_backend("there")
    assert claim_committed_for_removal(store, steps[200].ref)
    ran = cli("copy", "runs", "there", "--all", "--json", *options)
    assert ran.code == 3
    result = "intact" if options else "already there"
    rows = {step["step"]: step["result"] for step in ran.json["steps"]}
    assert rows == {300: result, 200: "not copied", 100: result}
    assert cli("rm", "there", 200).code == 0
    assert results(cli, "runs", "there", "--step", 200) == {200: "copied"}


def test_a_destination_without_permission_exits_with_3(cli: Cli, steps: dict[int, Written]) -> None:
    Path("file").write_text("")
    ran = cli("copy", "runs", "file/there")  # this works as root too, which CI may run as
    assert ran.code == 3
    assert "file is not a folder" in ran.err
    assert ran.err.count("\n") == 1


def newest(cli: Cli, root: str) -> int:
    return cli("show", root, "latest", "--json").json["step"]


def test_a_copy_has_the_newest_step_of_its_source(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("copy", "runs", "there", "--all").code == 0
    assert cli("rollback", "runs", 200).code == 0
    assert cli("rollback", "runs", 100).code == 0
    assert cli("copy", "runs", "there").code == 0
    assert newest(cli, "there") == 100
    assert cli("rollback", "there", 200).code == 0
    assert cli("copy", "runs", "there").err == "", "the copy has gone back once more"
    assert newest(cli, "there") == 200


def test_a_copy_to_a_run_with_another_history_leaves_its_rollbacks(
    cli: Cli, steps: dict[int, Written]
) -> None:
    assert cli("copy", "runs", "there", "--all").code == 0
    assert cli("rollback", "there", 200).code == 0
    assert cli("rollback", "runs", 100).code == 0
    ran = cli("copy", "runs", "there")
    assert ran.code == 0
    assert "has rollbacks of its own" in ran.err
    assert newest(cli, "there") == 200
