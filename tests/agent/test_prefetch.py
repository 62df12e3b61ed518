"""The near tiers of a replacement node are filled before its trainer starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from tests.cli.conftest import Cli, cli
from tests.kit.damage import files, flip, look
from tests.kit.disks import run_mounted
from tests.kit.stores import whole
from tests.kit.waiting import until

__all__ = ["cli"]
PREFETCH = [sys.executable, "-m", "ckpt.cli.main", "agent", "prefetch"]
NUMBERS = 2_000_000


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(NUMBERS, dtype=torch.float32) * step}


@pytest.fixture
def far(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "far") as manager:
        for step in (1, 2):
            manager.save(state(step), step)
    return tmp_path / "far"


def test_the_restore_after_it_reads_the_near_tier(tmp_path: Path, far: Path, cli: Cli) -> None:
    near, second = tmp_path / "near", tmp_path / "second"
    ran = cli("agent", "prefetch", far, "--to", near, "--to", second, "--json")
    assert ran.code == 0, ran.err
    assert [(tier["tier"], tier["step"]) for tier in ran.json["tiers"]] == [
        (str(near), 2),
        (str(second), 2),
    ]
    assert all(tier["copied_bytes"] >= 4 * NUMBERS for tier in ran.json["tiers"])
    assert whole(near) == whole(second) == [2]
    found = state(0)
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(found)
        assert report is not None
        assert (report.step, report.tier, report.cached_bytes) == (2, str(near), 0)
        assert torch.equal(found["w"], state(2)["w"])
        manager.save(state(3), 3)
    assert whole(near) == [2, 3]
    assert whole(far) == [1, 2, 3]


def test_a_second_call_copies_nothing(tmp_path: Path, far: Path, cli: Cli) -> None:
    for copied in (True, False):
        ran = cli("agent", "prefetch", far, "--to", tmp_path / "near", "--json")
        assert ran.code == 0, ran.err
        assert bool(ran.json["tiers"][0]["copied_bytes"]) is copied
    assert "already there" in cli("agent", "prefetch", far, "--to", tmp_path / "near").out


def test_a_later_step_of_the_near_tier_stays_the_newest(
    tmp_path: Path, far: Path, cli: Cli
) -> None:
    near = tmp_path / "near"
    with CheckpointManager(near) as manager:
        manager.save(state(9), 9)
    assert cli("agent", "prefetch", far, "--to", near, "--json").json["tiers"][0]["step"] == 9
    assert whole(near) == [9]
    assert cli("agent", "prefetch", far, "--step", 1, "--to", near).code == 0
    assert whole(near) == [1, 9]


def test_an_abandoned_step_of_the_near_tier_is_not_the_newest(
    tmp_path: Path, far: Path, cli: Cli
) -> None:
    near = tmp_path / "near"
    assert cli("copy", far, near, "--step", 2).code == 0
    assert cli("rollback", far, 1).code == 0
    assert cli("agent", "prefetch", far, "--to", near, "--json").json["tiers"][0]["step"] == 1
    assert cli("show", near, "latest", "--json").json["step"] == 1


def test_the_tiers_of_the_configuration_are_filled(tmp_path: Path, far: Path, cli: Cli) -> None:
    Path("ckpt.toml").write_text(
        f'[[tiers]]\nurl = "memory"\n[[tiers]]\nurl = "near"\ncodec = "zstd"\n'
        f'[[tiers]]\nurl = "{far}"\n'
    )
    ran = cli("agent", "prefetch", "--step", "latest")
    assert ran.code == 0, ran.err
    assert whole(tmp_path / "near") == [2]
    assert [path.suffix for path in (tmp_path / "near").glob("step*/rank-*[!n]")] != [
        ".safetensors"
    ]


def test_a_tier_of_the_configuration_has_its_settings_in_each_spelling(
    tmp_path: Path, far: Path, cli: Cli
) -> None:
    Path("ckpt.toml").write_text(
        f'[[tiers]]\nurl = "near"\ncodec = "zstd"\n[[tiers]]\nurl = "{far}"\n'
    )
    ran = cli("agent", "prefetch", f"{far}/", "--to", f"{tmp_path}/near/")
    assert ran.code == 0, ran.err
    assert list(Path("near").glob("step*/*.encoded"))


def test_a_newest_step_that_is_damaged_is_passed_over(tmp_path: Path, far: Path, cli: Cli) -> None:
    flip(files(far, 2)["data"])
    ran = cli("agent", "prefetch", far, "--to", tmp_path / "near")
    assert ran.code == 0, ran.err
    assert "step 2 is damaged" in ran.err
    assert whole(tmp_path / "near") == [1]
    ran = cli("agent", "prefetch", far, "--step", 2, "--to", tmp_path / "near")
    assert ran.code == 4
    assert whole(tmp_path / "near") == [1]


@pytest.mark.parametrize("part", ["manifest", "fragment", "data"])
def test_damage_on_a_nearer_tier_keeps_the_newest_step_from_no_other(
    tmp_path: Path, far: Path, cli: Cli, part: str
) -> None:
    near, second = tmp_path / "near", tmp_path / "second"
    assert cli("agent", "prefetch", far, "--to", near).code == 0
    flip(files(near, 2)[part])
    ran = cli("agent", "prefetch", far, "--to", near, "--to", second)
    assert ran.code == 0, ran.err
    assert whole(second) == [2]


def test_a_disk_without_room_gets_nothing(tmp_path: Path, far: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    ran = run_mounted(
        f"mount -t tmpfs -o size=4m none {disk}",
        f"{' '.join(PREFETCH)} {far} --to {disk}; echo $? $(ls {disk})",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["3"]
    assert "free, and the step needs" in " ".join(ran.stderr.split())


def test_a_capacity_without_room_gets_nothing(tmp_path: Path, far: Path, cli: Cli) -> None:
    Path("ckpt.toml").write_text(
        f'[[tiers]]\nurl = "near"\ncapacity = "1MB"\n[[tiers]]\nurl = "{far}"\n'
    )
    ran = cli("agent", "prefetch", far)
    assert ran.code == 3
    assert "0 B of its capacity of 1.00 MB, and the step needs 8.00 MB more" in ran.err
    assert not list(Path("near").glob("step*"))


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["nowhere", "--to", "near"], 7, "nowhere"),
        (["far", "--step", "7", "--to", "near"], 7, "7"),
        (["far", "--step", "soon", "--to", "near"], 2, "latest"),
        (["far"], 2, "--to"),
        ([], 2, "where are the checkpoints"),
        (["far", "--to", "far"], 2, "named twice"),
        (["far", "--to", "memory"], 2, "is memory"),
    ],
)
def test_what_cannot_be_done_is_refused(
    far: Path, cli: Cli, words, code: int, expected: str
) -> None:
    ran = cli("agent", "prefetch", *words)
    assert (ran.code, expected in ran.err) == (code, True), ran
    assert not list(Path("near").glob("step*"))


def test_its_options_belong_to_it_alone(cli: Cli) -> None:
    for words in (["--to", "near"], ["--step", "1"], ["far"], ["--config", "x.toml"]):
        ran = cli("agent", "status", *words)
        assert (ran.code, "belong to ckpt agent prefetch" in ran.err) == (2, True), ran


def test_a_tier_of_a_job_that_lives_is_left_alone(tmp_path: Path, far: Path, cli: Cli) -> None:
    near = tmp_path / "near"
    with CheckpointManager(near) as manager:
        manager.save(state(1), 1)
        ran = cli("agent", "prefetch", far, "--to", near)
        assert ran.code == 5
        assert "another CheckpointManager" in ran.err
        manager.save(state(2), 2)
    assert whole(near) == [1, 2]
    with CheckpointManager(far) as manager:  # it runs besides the job of the far tier
        manager.save(state(3), 3)
        assert cli("agent", "prefetch", far, "--to", near).code == 0
        manager.save(state(4), 4)
    assert whole(near) == [1, 2, 3]


def test_a_call_that_was_killed_is_continued(tmp_path: Path, far: Path, cli: Cli) -> None:
    near = tmp_path / "near"
    words = [
        sys.executable,
        "-m",
        "ckpt.cli.main",
        "agent",
        "prefetch",
        str(far),
        "--to",
        str(near),
    ]
    running = subprocess.Popen(words)
    assert until(lambda: list(near.glob("step*/.*.tmp")) or running.poll() is not None)
    running.kill()
    running.wait()
    assert cli("agent", "prefetch", far, "--to", near).code == 0
    assert look(Tier(str(near))).intact
