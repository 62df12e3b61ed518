"""A run leaves out the frozen tensors that a step in another root has."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.catalog.verify import verify_step
from ckpt.config import load_config
from ckpt.errors import ConfigError, ObjectExists
from ckpt.model.checksum import checksum
from ckpt.model.keys import BaseRef, StepRef
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import Retention
from ckpt.retention.pruner import prune
from ckpt.root.pins import all_pins
from ckpt.storage.registry import open_backend
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.kit.examples import examples
from tests.save.adapted import (
    Adapted,
    Lora,
    base_pins,
    check,
    check_model,
    mend,
    outer_bases,
    ref_of,
    save,
    save_lora,
    size_of,
)
from tests.servers import KEY, SECRET


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_first_save_leaves_out_what_a_step_of_another_run_has(roots, codec, cli: Cli):
    run, base = roots
    save(Tier(str(base), codec=codec), 2)
    weights = save(Tier(str(run), codec=codec, base=str(base)), 3)
    assert [outer_bases(run, step) for step in (1, 2, 3)] == [{"../base 1"}] * 3
    assert size_of(run, 1) < size_of(base, 1) / 2
    check(run, weights)
    ran = cli("verify", run, "--all")
    assert ran.code == 0, ran.out


@pytest.mark.parametrize("rank", [2, 64])
def test_another_adapter_and_a_step_of_the_model_alone_do_as_well(roots, rank, cli: Cli):
    run, base = roots
    with CheckpointManager(base) as manager:
        manager.save({"model": Lora().base}, 7)
    model = save_lora(Tier(str(run), base=str(base)), rank)
    assert outer_bases(run, 1) == {"../base 7"}
    check_model(run, model)
    assert cli("verify", run, "--all").code == 0
    third = run.parent / "third"
    model = save_lora(Tier(str(third), base=str(run)), 2 * rank)
    assert outer_bases(third, 1) == set()  # A run with a base of its own is none
    check_model(third, model)


def test_the_file_is_a_safetensors_file_of_what_it_holds(roots):
    run, base = roots
    save_lora(base)
    model = save_lora(Tier(str(run), base=str(base)), 8)
    path = run / ref_of(run, 2).folder / "rank-00000.safetensors"
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        assert torch.equal(file.get_tensor("model/up.weight"), model.up.weight)
        header = bytes(file.get_tensor("image-header").tolist())
    assert "model/base.0.weight" not in names
    manifest = read_manifest(open_backend(str(run)), ref_of(run, 2))
    assert checksum(header) == manifest.files[0].chunks[0].checksum


def test_the_next_job_refers_to_the_same_step_though_the_other_run_went_on(roots):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 1)
    training = Adapted()
    with CheckpointManager(base) as manager:
        manager.restore(training.state)
        manager.save(training.state, 5)
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        manager.restore(training.state)
        manager.save(training.state, 6)
    assert outer_bases(run, 6) == {"../base 1"}
    assert base_pins(base) == [1]


def test_a_run_that_has_a_base_itself_is_no_base_and_the_warning_names_the_root_to_give(
    roots, caplog
):
    run, base = roots
    last = run.with_name("last")
    save(base, 1)
    save(Tier(str(run), base=str(base)), 1)
    save(Tier(str(last), base=str(run)), 1)
    (warning,) = (entry.message for entry in caplog.records if "base=" in entry.message)
    assert warning.endswith(f"step 1 has its base in {base}: give that root")
    assert outer_bases(last, 1) == set()


def test_a_state_that_gets_an_optimizer_after_the_first_save_keeps_the_base(roots):
    run, base = roots
    save(base, 1)
    training = Adapted()
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        manager.save(training.state, 0)
        training.train()
        manager.save(training.state, 1)
        training.change(0)
        manager.save(training.state, 2)
        manager.save(training.state, 3)
    assert [outer_bases(run, step) for step in (0, 1)] == [{"../base 1"}] * 2
    assert size_of(run, 1) < size_of(base, 1) / 2
    assert outer_bases(run, 3) == set()  # Something has changed that was frozen


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_farther_tier_has_a_base_beside_it(roots, codec, cli: Cli):
    run, base = roots
    save(Tier(str(base), codec=codec), 1)
    near = run.parent / "near"
    weights = save([Tier(str(near)), Tier(str(run), codec=codec, base=str(base))], 2)
    assert (outer_bases(near, 1), outer_bases(run, 1)) == (set(), {"../base 1"})
    assert cli("verify", run, "--all").code == 0
    shutil.rmtree(near)
    check(run, weights)


def test_the_base_stays_until_the_run_that_needs_it_is_removed(roots, cli: Cli):
    run, base = roots
    save(base, 2)
    save(Tier(str(run), base=str(base), keep_last=1), 3)
    prune(open_backend(str(base)), Retention(keep_last=1))
    prune(open_backend(str(run)), Retention(keep_last=1))
    assert {ref.step for ref in committed(open_backend(str(base)))} == {1, 2}
    assert "base of another run" in cli("ls", base).out
    assert "base of another run" in cli("prune", base, "--keep-last", 1, "--dry-run").out
    for words in (["1"], ["--run"]):
        ran = cli("rm", base, *words)
        assert ran.code != 0
        assert f"{run} saves increments of it" in ran.err
    other = run.with_name("other")
    save(Tier(str(other), base=str(base)), 1)
    ran = cli("rm", base, 1)
    assert all(f"{name} saves increments of it" in ran.err for name in (run, other))
    assert "holds a part of other runs" in ran.err
    assert cli("rm", other, "--run").code == 0
    assert "other runs need" in cli("unpin", base).err
    assert base_pins(base) == [1]
    assert cli("rm", run, "--run").code == 0
    assert base_pins(base) == []
    ran = cli("rm", base, "--run")
    assert ran.code == 0, ran.err


def test_a_step_that_may_still_be_finished_keeps_the_base(roots, cli: Cli):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 2)
    (run / ref_of(run, 2).manifest).unlink()  # As a crash before the commit leaves the step
    with CheckpointManager(run) as manager:
        manager.save(Adapted().state, 3)
    assert cli("rm", run, 1).code == 0
    assert base_pins(base) == [1]


@pytest.mark.parametrize("left", ["the fragment", "nothing"])
def test_the_removal_of_an_unfinished_step_ends_its_pin(roots, left, cli: Cli):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 1)
    (run / ref_of(run, 1).manifest).unlink()  # As a crash before the commit leaves the step
    config = run.with_name("ckpt.toml")
    config.write_text(f'tiers = [{{url = "{run}", base = "{base}"}}]')
    (record,) = run.rglob("rank-00000.json")
    options = []
    if left == "nothing":
        record.unlink()  # As a crash while the file was written
        options = ["--config", config]
    assert base_pins(base) == [1]
    ran = cli("rm", run, "--run", *options)
    assert ran.code == 0, ran.err
    assert base_pins(base) == []


def test_a_base_is_where_it_was_after_the_process_went_to_another_folder(
    roots, monkeypatch: pytest.MonkeyPatch
):
    run, base = roots
    weights = save(base, 1)
    monkeypatch.chdir(run.parent)
    training = Adapted()
    training.train()
    with CheckpointManager(Tier("run", base="base")) as manager:
        manager.prepare(training.state)
        (run.parent / "elsewhere").mkdir()
        monkeypatch.chdir(run.parent / "elsewhere")
        manager.save(training.state, 1)
    assert outer_bases(run, 1) == {"../base 1"}
    check(run, weights)


def test_a_root_may_be_in_a_folder_whose_name_is_no_text(tmp_path: Path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9"))
    run, base = folder / "run", folder / "base"
    save(base, 1)
    weights = save(Tier(str(run), base=str(base)), 2)
    assert outer_bases(run, 2)
    check(run, weights)
    with pytest.raises(ConfigError, match="no text"):
        CheckpointManager(Tier(str(tmp_path / "run"), base=str(base)))


def test_a_pin_of_a_run_that_is_gone_can_be_ended(roots, cli: Cli):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 1)
    shutil.rmtree(run)
    assert cli("unpin", base, 1).code == 0
    assert cli("rm", base, "--run").code == 0


def test_the_listing_says_what_is_where(roots, cli: Cli):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 2)
    (row, _) = cli("ls", run, "--json").json["steps"]
    folder = ref_of(base, 1).folder
    assert row["outer_bases"] == [f"../base/{folder}"]
    assert row["stored_bytes"] < row["bytes"] / 2
    assert "and step 1 of ../base" in cli("ls", run).out
    files = cli("show", run, 2, "--json").json["files"]
    assert files[0]["base"] == f"../base/{folder}/rank-00000.safetensors"
    assert "a part is in step 1 of ../base" in cli("show", run, 2, "--files").out
    assert cli("diff", run, 1, 2).code in (0, 1)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_copy_is_whole(roots, codec, cli: Cli):
    run, base = roots
    save(Tier(str(base), codec=codec), 1)
    far = run.parent / "far"
    tiers = [Tier(str(run), codec=codec, base=str(base)), Tier(str(far))]
    weights = save(tiers, 2)
    target = run.parent / "target"
    assert cli("copy", run, target, "--all").code == 0
    shutil.rmtree(base)
    shutil.rmtree(run)
    for root in (target, far):
        check(root, weights)
        assert cli("verify", root, "--all").code == 0


def test_a_damaged_file_of_the_run_is_mended_as_it_was(roots, cli: Cli):
    run, base = roots
    save(base, 1)
    far = run.parent / "far"
    save([Tier(str(run), base=str(base)), Tier(str(far))], 1)
    (file,) = run.rglob("rank-*.safetensors")
    intact = file.read_bytes()
    for position in (3, len(intact) // 2, len(intact) - 1):
        file.write_bytes(intact[:position] + bytes([intact[position] ^ 1]) + intact[position + 1 :])
        assert cli("verify", run).code == 4
        mend(run, 1, far)
        assert file.read_bytes() == intact


def test_a_base_is_not_encoded_again_under_the_run_that_refers_to_it(roots):
    run, base = roots
    far = run.parent / "far"
    save([Tier(str(base), codec="zstd"), Tier(str(far))], 1)
    weights = save(Tier(str(run), codec="zstd", base=str(base)), 1)
    (file,) = base.rglob("rank-*.encoded")
    data = file.read_bytes()
    file.write_bytes(data[:-9000] + bytes(byte ^ 1 for byte in data[-9000:]))
    with pytest.raises(ObjectExists, match="saves increments of it"):
        mend(base, 1, far, "zstd")
    check(run, weights)


def test_a_file_of_settings_names_the_base_relative_to_itself(tmp_path):
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "job.toml"
    file.write_text('tiers = [{url = "run", base = "base"}, {url = "s3://b/r", base = "s3://b/c"}]')
    tiers = load_config(file).tiers
    assert [tier.base for tier in tiers] == [str(tmp_path / "deep" / "base"), "s3://b/c"]


@pytest.mark.parametrize("codec", ["none", pytest.param("zstd", marks=pytest.mark.torture)])
def test_runs_of_one_bucket_share_a_base(rclone_s3, codec, cli: Cli):
    options = {
        "endpoint_url": rclone_s3.url,
        "key": KEY,
        "secret": SECRET,
        "region": "us-east-1",
    }
    base, run = (f"s3://bucket/other-root-{codec}/{name}" for name in ("base", "runs/b"))
    save_lora(Tier(base, options, codec=codec))
    tier = Tier(run, options, codec=codec, base=base)
    model = save_lora(tier, 8)
    store, base_store = open_backend(run, options), open_backend(base, options)
    (step,) = [step for step in Inventory(store).look() if step.ref.step == 1]
    (whole,) = [ref for ref in committed(base_store) if ref.step == 1]
    assert step.outer_bases == {BaseRef("../../base", whole)}
    assert step.stored_bytes < step.staged_bytes / 4
    check_model(tier, model, 2)
    query = urlencode(options)
    ran = cli("ls", f"{run}?{query}", "--json")
    assert {row["state"] for row in json.loads(ran.out)["steps"]} == {"committed"}
    ran = cli("verify", f"{run}?{query}")
    assert ran.code == 0, ran.out
    assert [pin.ref for pin in all_pins(base_store)] == [whole]
    with Workers("test", 1) as workers:
        assert verify_step(store, step.ref, workers=workers).intact
    assert cli("rm", f"{run}?{query}", "--run").code == 0
    assert all_pins(base_store) == []


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 1), st.integers(-1, 5)),
        st.tuples(st.just("prune"), st.integers(0, 1), st.integers(1, 2)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("remove"), st.just(1), st.just(0)),
    ),
    min_size=4,
    max_size=12,
)


@given(actions=ACTIONS)
@settings(max_examples=examples(20), deadline=None)
def test_whatever_two_runs_do_each_listed_step_is_what_was_saved(tmp_path_factory, actions):
    folder = tmp_path_factory.mktemp("roots")
    roots = folder / "base", folder / "run"
    tiers = Tier(str(roots[0])), Tier(str(roots[1]), base=str(roots[0]))
    trainings = Adapted(), Adapted()
    saved: dict[StepRef, Mapping[str, torch.Tensor]] = {}
    managers = [CheckpointManager(tier, journal=False) for tier in tiers]
    steps = [0, 0]
    try:
        for action, run, number in [("save", 0, -1), ("save", 1, -1), *actions]:
            store = open_backend(tiers[run].url)
            if action == "save":
                trainings[run].train()
                if number >= 0:
                    trainings[run].change(number)
                steps[run] += 1
                managers[run].save(trainings[run].state, steps[run])
                new = next(ref for ref in committed(store) if ref not in saved)
                saved[new] = trainings[run].weights()
            elif action == "prune":
                prune(store, Retention(keep_last=number))
            else:
                managers[run].close()
                if action == "remove":
                    shutil.rmtree(roots[run], ignore_errors=True)
                managers[run] = CheckpointManager(tiers[run], journal=False)
                report = managers[run].restore(trainings[run].state)
                steps[run] = report.step if report else steps[run]
            for root in roots:
                for ref in committed(open_backend(str(root))):
                    loaded = ckpt.load(root, "model", step=ref.step)
                    for name, value in saved[ref].items():
                        assert torch.equal(loaded[name], value), (root, ref, name)
    finally:
        for manager in managers:
            manager.close()
