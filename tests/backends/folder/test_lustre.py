"""Striping on Lustre.

There is no Lustre here. A table of mounts claims it, and an ``lfs`` of ours records its arguments.
"""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt_backends.folder.posix
from ckpt import CheckpointManager, Tier
from ckpt.errors import ConfigError
from ckpt_backends.folder.lustre import Striping
from ckpt_backends.folder.mounts import kind_of
from ckpt_backends.folder.posix import open_posix

Asked = Callable[[], list[list[str]]]
LAYOUT = ["setstripe", "-E", "64M", "-c", "1", "-S", "4M", "-E", "-1", "-c"]


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Make ``tmp_path/scratch`` Lustre, and return the arguments of all calls of ``lfs`` so far."""
    mounts, log, programs = tmp_path / "mounts", tmp_path / "log", tmp_path / "bin"
    (tmp_path / "scratch").mkdir()
    programs.mkdir()
    mounts.write_text(f"none / ext4 rw 0 0\n10.0.0.1@tcp:/fs {tmp_path}/scratch lustre rw 0 0\n")
    program = programs / "lfs"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"open({str(log)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "if sys.argv[1] == 'getstripe': print(os.environ.get('LAYOUT', '1'))\n"
        "elif os.environ.get('BROKEN'): sys.exit('lfs setstripe: out of targets')\n"
        "else: assert os.path.isdir(sys.argv[-1]) and not os.listdir(sys.argv[-1])\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr(
        ckpt_backends.folder.posix, "kind_of", lambda path: kind_of(path, str(mounts))
    )
    return lambda: (
        [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    )


@pytest.mark.parametrize("name", ["a b", "tab\there", "back\\slash", "#1", "\\040"])
def test_a_mount_point_may_have_any_name(tmp_path: Path, name: str) -> None:
    """The kernel writes some characters as three octal digits."""
    mounts, point = tmp_path / "mounts", tmp_path / name
    codes = {each: f"\\{ord(each):03o}" for each in " \t\n\\#"}
    escaped = "".join(codes.get(each, each) for each in str(point))
    mounts.write_text(f"none / ext4 rw 0 0\nfs {escaped} lustre rw 0 0\n")
    assert kind_of(str(point / "run"), str(mounts)) == "lustre"


def save(tier: Tier, *steps: int) -> None:
    with CheckpointManager(tier) as manager:
        for step in steps:
            manager.save({"x": torch.ones(1000)}, step)


def folders(root: Path) -> list[str]:
    return sorted(str(path) for path in root.glob("step-*"))


def test_each_step_has_a_layout_before_its_first_file(tmp_path: Path, lustre: Asked) -> None:
    root = tmp_path / "scratch" / "runs"
    save(Tier(str(root)), 1, 2)
    first, *others = lustre()
    assert first == ["getstripe", "-d", "-c", str(root)]
    striped = [call for call in others if "step-" in call[-1]]
    assert striped == [[*LAYOUT, "4", "-S", "4M", folder] for folder in folders(root)]


@pytest.mark.parametrize("count", [16, -1])
def test_the_number_of_targets_can_be_given(tmp_path: Path, lustre: Asked, count: int) -> None:
    root = tmp_path / "scratch" / "runs"
    save(Tier(str(root), options={"stripe_count": count}), 1)
    assert [*LAYOUT, str(count), "-S", "4M", *folders(root)] in lustre()
    assert not [call for call in lustre() if call[0] == "getstripe"]


def test_a_layout_of_the_site_is_left_alone(
    tmp_path: Path, lustre: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there in ("8", "lcm_layout_gen: 0"):
        monkeypatch.setenv("LAYOUT", there)
        save(Tier(str(tmp_path / "scratch" / there[:3])), 1)
    assert {call[0] for call in lustre()} == {"getstripe"}


def test_it_can_be_switched_off_and_is_only_for_lustre(tmp_path: Path, lustre: Asked) -> None:
    save(Tier(str(tmp_path / "scratch" / "runs"), options={"stripe_count": 0}), 1)
    save(Tier(str(tmp_path / "elsewhere"), options={"stripe_count": 8}), 1)
    assert lustre() == []


def test_what_lfs_refuses_costs_one_warning(
    tmp_path: Path, lustre: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BROKEN", "1")
    root = tmp_path / "scratch" / "runs"
    save(Tier(str(root)), 1, 2)
    assert len(folders(root)) == 2
    reported = [
        record.getMessage() for record in caplog.records if "no striping" in record.getMessage()
    ]
    assert len(reported) == 1
    assert "out of targets" in reported[0]


@pytest.mark.parametrize("broken", [False, True])
def test_threads_that_make_folders_at_once_all_stripe_them_or_warn_once(
    tmp_path: Path,
    lustre: Asked,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: bool,
) -> None:
    """One thread still looks for ``lfs`` while the other thread makes its folder."""
    if broken:
        monkeypatch.setenv("BROKEN", "1")
    looks, is_made = threading.Event(), threading.Event()
    striping = Striping(str(tmp_path / "scratch"), 8)
    made = [tmp_path / "scratch" / name for name in ("one", "two")]
    find = striping._find_lfs

    def find_slowly() -> str | None:
        looks.set()
        is_made.wait(0.05)  # A thread that does not wait for this one sets it at once
        return find()

    def make(folder: Path) -> None:
        folder.mkdir()
        striping.apply(str(folder))
        is_made.set()

    monkeypatch.setattr(striping, "_find_lfs", find_slowly)
    threads = [threading.Thread(target=make, args=[folder]) for folder in made]
    threads[0].start()
    assert looks.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    warnings = [record for record in caplog.records if "no striping" in record.getMessage()]
    if broken:
        assert len(warnings) == 1
    else:
        assert sorted(call[-1] for call in lustre()) == sorted(map(str, made))


def test_without_lfs_nothing_is_done(tmp_path: Path, lustre: Asked) -> None:
    (tmp_path / "bin" / "lfs").unlink()
    save(Tier(str(tmp_path / "scratch" / "runs")), 1)
    assert lustre() == []


@pytest.mark.parametrize("count", [True, "4", -2, 2001, 1.5])
def test_a_number_that_is_none_is_refused(tmp_path: Path, count: object) -> None:
    with pytest.raises(ConfigError, match="stripe_count"):
        open_posix(str(tmp_path), {"stripe_count": count})
