"""Each command gets a place that holds no checkpoints.

It prints one sentence, and ends with the exit code that docs/cli.md names.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Final

import pytest

from ckpt.cli.main import main
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli
from tests.kit.marks import each_once
from tests.users import act_as, fresh_user, only_root

REPO = Path(__file__).resolve().parents[2]

CALLS: Final = (
    "ls PLACE",
    "show PLACE",
    "verify PLACE",
    "restore PLACE",
    "restore runs --to PLACE",
    "copy PLACE there",
    "copy runs PLACE",
    "diff PLACE --step 1 --step 2",
    "finalize PLACE",
    "prune PLACE --keep-last 1",
    "export PLACE out.pt",
    "export runs PLACE --format torch",
    "import PLACE there --step 1",
    "import gpt.pt PLACE --step 1",
)
PLACES: Final = (
    "a file",
    "an empty folder",
    "a folder of others",
    "a missing folder",
    "a\nnewline",
    "a pipe",
)
WRITES: Final = ("runs --to PLACE", "copy runs PLACE", "export runs PLACE", "import gpt.pt PLACE")


def made(kind: str) -> str:
    match kind:
        case "a file" | "a\nnewline":
            Path(kind).write_text("hello")
        case "an empty folder":
            Path(kind).mkdir()
        case "a folder of others":
            Path(kind).mkdir()
            Path(kind, "notes.txt").write_text("hello")
        case "a pipe":
            os.mkfifo(kind)
    return kind


@pytest.mark.parametrize(("kind", "call"), each_once(PLACES, CALLS))
def test_a_place_without_checkpoints_is_told_in_one_sentence(
    cli: Cli, steps: object, call: str, kind: str
) -> None:
    import torch

    torch.save({"model": {"w": torch.ones(2)}}, "gpt.pt")
    place = made(kind)
    before = {path: path.is_dir() for path in Path().rglob("*")}
    ran = cli(*(place if word == "PLACE" else word for word in call.split()))
    if any(words in call for words in WRITES) and ran.code == 0:
        assert kind in ("an empty folder", "a folder of others", "a missing folder")
        return
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("error: ")
    assert "internal error" not in ran.err
    assert "Errno" not in ran.err
    assert ran.out == ""
    folder = "folder" in kind
    assert ran.code in (
        (7,) if folder and "import PLACE" not in call and "runs" not in call else (2,)
    ), ran.err
    assert {path: path.is_dir() for path in Path().rglob("*")} == before


def ran_as(user: int, words: list[str]) -> tuple[int, str, str]:
    """Return the exit code and both outputs of ``ckpt`` when ``user`` runs it.

    The user's group has the same number.
    """

    def work() -> tuple[int, str, str]:
        sys.argv = ["ckpt", *words]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main()
        return code, out.getvalue(), err.getvalue()

    code, out, err = act_as(user, work)
    return int(code), str(out), str(err)


@pytest.fixture
def shared(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in a place that every user may enter, with the root ``runs`` in it."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        monkeypatch.chdir(place)
        write_checkpoint(open_backend("runs"), 100, ARRAYS)
        yield Path(place)


@only_root
@pytest.mark.parametrize(
    "call", [call for call in CALLS if not call.startswith(("export runs", "import"))]
)
def test_a_folder_without_permission_is_told_in_one_sentence(
    cli: Cli, shared: Path, call: str
) -> None:
    locked = shared / "locked"
    locked.mkdir(mode=0o700)
    subprocess.run(["chmod", "-R", "a+rX", "runs"], check=True)
    (shared / "empty").mkdir()
    cli(
        *("empty" if word == "PLACE" else word for word in call.split())
    )  # this imports what the other user may not be able to read
    code, out, err = ran_as(
        fresh_user(), [str(locked) if word == "PLACE" else word for word in call.split()]
    )
    assert (code, out) == (3, ""), err
    assert err.startswith("error: access denied: ")
    assert err.count("\n") == 1


@only_root
def test_a_group_reads_a_root_after_the_commands_of_the_page_and_not_before(
    cli: Cli, shared: Path
) -> None:
    user = fresh_user()
    page = " ".join((REPO / "docs" / "quickstart.md").read_text().split())
    assert os.stat("runs").st_mode & 0o777 == 0o700
    for words in (["ls", "runs"], ["verify", "runs"], ["restore", "runs"]):
        # this also imports what the other user may not be able to read
        assert cli(*words).code == 0
        assert ran_as(user, words)[0] == 3
    for command in (
        "chgrp -R TEAM runs/gpt",
        "chmod -R g+rwX runs/gpt",
        "find runs/gpt -type d -exec chmod g+s {} +",
    ):
        assert f"`{command}`" in page
        call = command.replace("TEAM", str(user)).replace("runs/gpt", "runs")
        subprocess.run(call.split(), check=True)
    for words in (["ls", "runs"], ["verify", "runs"], ["restore", "runs"]):
        assert ran_as(user, words)[::2] == (0, "")


@pytest.mark.parametrize(
    "call", [call for call in CALLS if "runs" not in call and "import" not in call]
)
def test_the_folder_of_a_run_is_named_where_its_parent_is_given(
    cli: Cli, steps: object, call: str
) -> None:
    Path("experiments").mkdir()
    os.rename("runs", "experiments/gpt")
    ran = cli(*call.replace("PLACE", "experiments").split())
    assert ran.code == 7
    assert "its folder 'gpt' does: give that one" in ran.err
    shutil.copytree("experiments/gpt", "experiments/old/gpt-2")
    ran = cli(*call.replace("PLACE", "experiments").split())
    assert "its folders 'gpt', 'old/gpt-2' do: give one of them" in ran.err
