from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.catalog.verify import VerifyReport, verify_step
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import Written, write_checkpoint
from tests.cli.conftest import ARRAYS, Cli, Ran, data_file, flip


def test_the_newest_step_is_verified(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("verify")
    assert ran.code == 0
    assert ran.out.startswith("step 300 (attempt abcxyz): intact, 8.62 kB in ")
    assert ran.out.count("\n") == 1


def test_damage_exits_with_4_and_says_where(cli: Cli, steps: dict[int, Written]) -> None:
    flip(data_file(steps[200]), 4100)
    data_file(steps[200], rank=1).unlink()
    assert cli("verify").code == 0
    ran = cli("verify", 200)
    assert ran.code == 4
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert lines[0] == "step 200 (attempt abcxyz): damaged, 2 faults"
    assert lines[2:] == [
        "step-000000200.abcxyz/rank-00001.safetensors - is missing",
        "step-000000200.abcxyz/rank-00000.safetensors 4096 to 4104 its bytes were changed",
    ]


def test_all_steps_are_verified_though_one_is_damaged(cli: Cli, steps: dict[int, Written]) -> None:
    flip(data_file(steps[200]), 5)
    ran = cli("verify", "--all", "--json")
    assert ran.code == 4
    assert ran.json["intact"] is False
    assert {step["step"]: step["intact"] for step in ran.json["steps"]} == {
        300: True,
        200: False,
        100: True,
    }
    assert ran.json["steps"][1]["faults"][0]["offset"] == 0


@pytest.mark.parametrize("given", [(), (300,), ("--all",), ("--all", "--json")])
def test_a_step_that_a_job_removes_meanwhile_is_not_damaged(
    given: tuple[object, ...],
    cli: Cli,
    steps: dict[int, Written],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retention removes the manifest first, and then the files."""

    def removed_first(backend: StorageBackend, ref: StepRef, **options: Any) -> VerifyReport:
        if ref.step == 300:
            backend.delete(ref.manifest)
            data_file(steps[300]).unlink()
        return verify_step(backend, ref, **options)

    monkeypatch.setattr("ckpt.cli.verify.verify_step", removed_first)
    ran = cli("verify", *given)
    assert "damaged" not in ran.out
    if "--all" in given:
        assert ran.code == 0
        assert "300" not in ran.out
    else:
        assert ran.code == 7
        assert "step 300 was removed during the command" in ran.err


def test_all_and_a_step_exclude_each_other(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("verify", 100, "--all").code == 2


@pytest.fixture
def far(cli: Cli, steps: dict[int, Written]) -> str:
    """Copy all steps to 'far' too; both tiers are in ckpt.toml."""
    copied = cli("copy", "runs", "far", "--all")
    assert copied.code == 0, copied
    Path("ckpt.toml").write_text('[[tiers]]\nurl = "runs"\n[[tiers]]\nurl = "far"\n')
    return str(Path("far").absolute())


def rows(ran: Ran) -> list[list[str]]:
    return [line.split() for line in ran.out.splitlines()]


def test_all_tiers_are_verified(cli: Cli, far: str) -> None:
    ran = cli("verify", "--all-tiers")
    assert ran.code == 0
    header, near, other = rows(ran)
    assert header == ["tier", "step", "attempt", "verified", "state"]
    assert near == [str(Path("runs").absolute()), "300", "abcxyz", "8.62", "kB", "intact"]
    assert other[0] == far
    assert len(rows(cli("verify", "--all", "--root", "runs", "--root", "far"))) == 7


def test_damage_says_which_tier_has_it_intact(
    cli: Cli, far: str, steps: dict[int, Written]
) -> None:
    flip(data_file(steps[300]), 4100)
    ran = cli("verify", "--all-tiers", "--config", "ckpt.toml")
    assert ran.code == 4
    assert "damaged: 1 fault" in ran.out
    reported = rows(ran)[-1]
    assert reported[:2] == [
        str(Path("runs").absolute()),
        "step-000000300.abcxyz/rank-00000.safetensors",
    ]
    assert reported[-1] == far


def test_damage_on_both_tiers_at_the_same_place_is_intact_on_none(
    cli: Cli, far: str, steps: dict[int, Written]
) -> None:
    flip(data_file(steps[300]), 4100)
    flip(Path("far") / steps[300].ref.key("rank-00000.safetensors"), 4101)
    flip(data_file(steps[300]), 4200)
    found = {
        tier["root"]: tier["steps"][0]["faults"]
        for tier in cli("verify", "--all-tiers", "--json").json["tiers"]
    }
    near, other = found[str(Path("runs").absolute())], found[far]
    assert [fault["intact_on"] for fault in near] == [[], [far]]
    assert [fault["intact_on"] for fault in other] == [[]]
    assert "no other tier" in cli("verify", "--all-tiers").out


def test_an_older_step_elsewhere_is_asked_when_it_can_help(
    cli: Cli, far: str, steps: dict[int, Written], backend: StorageBackend
) -> None:
    write_checkpoint(open_backend("far"), 400, ARRAYS)
    flip(data_file(steps[300]), 4100)
    ran = cli("verify", "--all-tiers")
    assert ran.code == 4
    assert [row[1] for row in rows(ran)[1:4]] == ["300", "400", "300"]
    assert rows(ran)[-1][-1] == far


def test_a_tier_that_cannot_be_reached_is_told_and_the_others_verified(
    cli: Cli, far: str, steps: dict[int, Written]
) -> None:
    ran = cli("verify", "--root", "runs", "--root", "nope://x")
    assert ran.code == 2
    assert "intact" in ran.out
    assert "unreachable: no backend for 'nope://x'" in ran.out


def test_a_step_that_one_tier_lacks(cli: Cli, far: str, backend: StorageBackend) -> None:
    write_checkpoint(backend, 500, ARRAYS)
    ran = cli("verify", 500, "--all-tiers")
    assert ran.code == 0
    assert "none: step 500 is not there" in ran.out
    assert cli("verify", 7, "--all-tiers").code == 7
