from __future__ import annotations

from tests.checkpoints import Written
from tests.cli.conftest import Cli, data_file, flip


def test_the_newest_step_is_verified(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("verify")
    assert ran.code == 0
    assert ran.out.startswith("step 300 (attempt abc123): intact, 8.62 kB in ")
    assert ran.out.count("\n") == 1


def test_damage_exits_with_4_and_says_where(cli: Cli, steps: dict[int, Written]) -> None:
    flip(data_file(steps[200]), 4100)
    data_file(steps[200], rank=1).unlink()
    assert cli("verify").code == 0
    ran = cli("verify", 200)
    assert ran.code == 4
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert lines[0] == "step 200 (attempt abc123): damaged, 2 faults"
    assert lines[2:] == [
        "step-000000200.abc123/rank-00001.safetensors - is missing",
        "step-000000200.abc123/rank-00000.safetensors 4096 to 4104 its bytes were changed",
    ]


def test_all_steps_are_verified_though_one_is_damaged(cli: Cli, steps: dict[int, Written]) -> None:
    flip(data_file(steps[200]), 5)
    ran = cli("verify", "--all", "--json")
    assert ran.code == 4
    assert ran.json["intact"] is False
    assert {step["step"]: step["intact"] for step in ran.json["steps"]} == {300: True, 200: False, 100: True}
    assert ran.json["steps"][1]["faults"][0]["offset"] == 0


def test_all_and_a_step_exclude_each_other(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("verify", 100, "--all").code == 2
