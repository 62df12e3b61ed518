"""All commands name places and steps in the same way, and older spellings still work."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpt import CheckpointManager
from ckpt.root.owner import Owner
from tests.cli.conftest import Cli, Written
from tests.kit.states import state

CONFIG = """
[[tiers]]
url = "runs"
[[tiers]]
url = "far"
every = 2
"""


@pytest.mark.parametrize("verb", ["show", "verify", "restore", "finalize"])
def test_a_step_is_an_argument_or_an_option(cli: Cli, steps: dict[int, Written], verb: str) -> None:
    one, other = cli(verb, 200, "--json"), cli(verb, "--step", 200, "--root", "runs", "--json")
    assert (one.code, other.code) == (0, 0), (one.err, other.err)
    assert {**one.json, "seconds": 0, "gb_per_s": 0, "steps": 0} == {
        **other.json, "seconds": 0, "gb_per_s": 0, "steps": 0,
    }  # fmt: skip
    assert cli(verb, 200, "--step", 200).code == 0
    twice = cli(verb, 200, "--step", 300)
    assert twice.code == 2
    assert "leave one out" in twice.err


def test_show_shows_the_newest(cli: Cli, steps: dict[int, Written]) -> None:
    assert "step 300" in cli("show").out


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "restore", "finalize", "prune"])
def test_the_place_is_an_option_or_that_of_a_file(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    Path("other.toml").write_text('root = "runs"\n')
    monkeypatch.setenv("CKPT_ROOT", "nowhere")
    extra = ["--keep-last", 9] if verb == "prune" else []
    for place in (["--root", "runs"], ["--config", "other.toml"]):
        ran = cli(verb, *place, *extra)
        assert ran.code == 0, (place, ran.err)
        assert "nowhere" not in ran.out + ran.err


@pytest.mark.parametrize(
    "call",
    ["ls", "show", "verify", "restore", "finalize", "prune --keep-last 9", "copy there", "export out.pt", "diff --step 100 --step 200", "import gpt.pt --step 400"],  # noqa: E501
)  # fmt: skip
def test_every_command_takes_the_place_as_an_argument_or_as_an_option(
    cli: Cli, steps: dict[int, Written], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    import torch

    torch.save({"model": {"w": torch.ones(2)}}, "gpt.pt")
    verb, *rest = call.split()
    root = Path("runs").absolute()
    argument = [*rest[:1], root, *rest[1:]] if verb == "import" else [root, *rest]
    monkeypatch.setenv("CKPT_ROOT", "nowhere")
    for words in (argument, ["--root", root, *rest]):
        ran = cli(verb, *words)
        assert ran.code in ((0, 1) if verb == "diff" else (0,)), (words, ran.err)
        assert not Path("nowhere").exists()
        Path("out.pt").unlink(missing_ok=True)
        if verb == "import":
            shutil.rmtree(next(Path("runs").glob("step-000000400*")))
    if verb != "diff":  # it compares two places
        twice = cli(verb, *argument, "--root", "runs")
        assert (twice.code, "two places" in twice.err) == (2, True)
    monkeypatch.delenv("CKPT_ROOT")
    missing = cli(verb, *rest)
    assert missing.code == 2
    assert all(way in missing.err for way in ("--root", "CKPT_ROOT", "ckpt.toml"))


@pytest.mark.parametrize("verb", ["show", "verify", "restore"])
def test_latest_is_a_step(cli: Cli, steps: dict[int, Written], verb: str) -> None:
    for words in (["latest"], ["runs", "latest"], ["latest", "--root", "runs"]):
        ran = cli(verb, *words)
        assert ran.code == 0
        assert "step 300" in ran.out
    assert cli(verb, "latest", "--step", 100).code == 2
    assert cli(verb, "100", "200").code == 2


def test_a_folder_that_looks_like_a_step_is_given_with_a_dot(
    cli: Cli, steps: dict[int, Written]
) -> None:
    os.rename("runs", "100")
    assert "step 200" in cli("show", "./100", "200").out
    assert cli("show", "100").code == 7  # step 100 of the folder that CKPT_ROOT names


def test_finalize_takes_a_folder_as_before(cli: Cli, steps: dict[int, Written]) -> None:
    assert cli("finalize", "runs").code == cli("finalize", "runs", "--step", 100).code == 0
    assert cli("finalize", "runs", "--root", "runs").code == 2


@pytest.mark.parametrize(
    "call",
    ["ls", "export nothing out.pt", "copy nothing there", "diff nothing other", "show 5", "verify", "finalize nothing"],  # noqa: E501
)  # fmt: skip
def test_what_is_not_there_is_told_in_words_of_the_verb(cli: Cli, call: str) -> None:
    ran = cli(*call.split())
    assert ran.code == 7
    assert "no checkpoint in " in ran.err
    assert "restor" not in ran.err


def test_diff_says_whether_it_has_read(cli: Cli) -> None:
    with CheckpointManager("runs") as manager:
        manager.save(state(1), 1)
        manager.save(state(2), 2)
    reported = cli("diff", "runs", "--step", 1, "--step", 2).out
    assert "compared by checksum alone: no data was read" in reported
    assert "but for --values" in cli("diff", "runs", "--step", 1, "--step", 2, "--values").out


# -- prune beside a job ----------------------------------------------------------------------------


def test_a_step_has_one_size_in_all_commands(cli: Cli, steps: dict[int, Written]) -> None:
    """With --json, "bytes" was the size of the image in some, and of all files in others."""
    files = Path("runs").glob("step-000000200.*/*")
    expected = sum(path.stat().st_size for path in files)
    [listed] = [step for step in cli("ls", "--json").json["steps"] if step["step"] == 200]
    shown = cli("show", 200, "--json").json
    [pruned] = [
        step
        for step in cli("prune", "--keep-last", 1, "--dry-run", "--json").json["pruned"]
        if step["step"] == 200
    ]
    [removed] = cli("rm", 200, "--dry-run", "--json").json["removed"]
    sizes = {step["tier_bytes"] for step in (listed, shown, pruned, removed)}
    assert sizes == {expected}
    assert listed["bytes"] == shown["bytes"] < expected


def test_prune_leaves_the_root_of_a_job_alone_whose_farther_tiers_it_does_not_know(
    cli: Cli,
) -> None:
    with CheckpointManager("runs") as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step)
        ran = cli("prune", "--keep-last", 1)
        assert ran.code == 5
        assert f"process {os.getpid()}" in ran.err
        assert "--force" in ran.err
        assert len(cli("prune", "--keep-last", 1, "--dry-run", "--json").json["pruned"]) == 2
        assert len(cli("ls", "--json").json["steps"]) == 3
        assert len(cli("prune", "--keep-last", 1, "--force", "--json").json["pruned"]) == 2


def test_prune_keeps_what_a_farther_tier_lacks(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_ROOT")
    Path("ckpt.toml").write_text(CONFIG)
    with CheckpointManager("runs") as manager:
        for step in (1, 2, 3, 4, 5):
            manager.save(state(step), step)
        cli("copy", "runs", "far", "--step", 2)
        found = cli("prune", "--keep-last", 1, "--json").json
    # far takes no odd steps, and has 2
    assert sorted(one["step"] for one in found["pruned"]) == [1, 2, 3]
    assert {one["step"]: one["why"] for one in found["kept"]}[4] == ["a farther tier waits for it"]


@pytest.mark.parametrize("process", ["dead", "none", "released"])
def test_prune_keeps_what_a_farther_tier_lacks_after_the_job_has_ended(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    """The agent, or the next job, still copies these steps."""
    monkeypatch.delenv("CKPT_ROOT")
    Path("ckpt.toml").write_text(CONFIG)
    with CheckpointManager("runs") as manager:
        for step in (1, 2, 3, 4, 5):
            manager.save(state(step), step)
        owner = json.loads(Path("runs/writer.json").read_bytes())
    if process != "released":
        owner["pid"] = 0 if process == "none" else int(f"9{owner['pid']}")
        Path("runs/writer.json").write_text(json.dumps(owner))
    cli("copy", "runs", "far", "--step", 2)
    found = cli("prune", "--keep-last", 1, "--json").json
    assert sorted(one["step"] for one in found["pruned"]) == [1, 2, 3]
    assert {one["step"]: one["why"] for one in found["kept"]}[4] == ["a farther tier waits for it"]


def test_prune_does_not_keep_what_a_farther_tier_would_not_keep(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPT_ROOT")
    Path("ckpt.toml").write_text(f'{CONFIG}keep_last = 1\nkeep_best = ["loss", "min"]\n')
    with CheckpointManager("runs") as manager:
        for step in range(1, 11):
            manager.save(state(step), step, metrics={"loss": 0.1 if step == 2 else 20 - step})
        cli("copy", "runs", "far", "--step", 6)
        found = cli("prune", "--keep-last", 1, "--json").json
    # far has 6, 8 is newer, and 2 is better
    kept = {one["step"]: one["why"] for one in found["kept"]}
    assert {step: why for step, why in kept.items() if step != 10} == {
        2: ["a farther tier waits for it"],
        8: ["a farther tier waits for it"],
    }


def test_prune_leaves_the_root_alone_that_a_job_has_left_to_its_agent(cli: Cli) -> None:
    with CheckpointManager("runs") as manager:
        for step in (1, 2):
            manager.save(state(step), step)
        owner = json.loads(Path("runs/writer.json").read_bytes())
    Path("runs/writer.json").write_text(json.dumps({**owner, "pid": 0}))
    ran = cli("prune", "--keep-last", 1)
    assert ran.code == 5
    assert "agent" in ran.err
    assert cli("prune", "--keep-last", 1, "--force").code == 0


def test_whether_a_job_on_another_machine_lives_nobody_knows(cli: Cli) -> None:
    with CheckpointManager("runs") as manager:
        for step in (1, 2):
            manager.save(state(step), step)
    import msgspec

    owner = Owner(attempt="b" * 12, host="node7", machine="other boot/1", pid=5, started=1)
    Path("runs/writer.json").write_bytes(msgspec.json.encode(owner))
    ran = cli("prune", "--keep-last", 1)
    assert ran.code == 5
    assert "may be alive" in ran.err
    assert cli("prune", "--keep-last", 1, "--force").code == 0


def test_a_job_that_is_dead_on_this_machine_is_no_obstacle(cli: Cli) -> None:
    with CheckpointManager("runs") as manager:
        for step in (1, 2):
            manager.save(state(step), step)
        owner = Path("runs/writer.json").read_bytes()
    Path("runs/writer.json").write_bytes(owner.replace(b'"pid":', b'"pid":9'))
    assert cli("prune", "--keep-last", 1).code == 0


def test_prune_of_a_root_that_is_not_there_is_no_success(cli: Cli) -> None:
    ran = cli("prune", "--keep-last", 1, "--dry-run", "--root", "nope")
    assert ran.code == 7
    assert "no checkpoint" in ran.err


def test_a_name_that_is_not_there_is_told_without_advice_for_a_state(
    cli: Cli, steps: dict[int, Written]
) -> None:
    ran = cli("export", "runs", "out.safetensors", "--name", "foo/*")
    assert ran.code == 7
    assert "ckpt show" in ran.err
    assert "strict=False" not in ran.err
