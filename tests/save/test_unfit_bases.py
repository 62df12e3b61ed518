"""A base in another root that is none, is gone or is damaged costs nothing that was saved."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.cli.main import app
from ckpt.errors import ConfigError, IntegrityError, StorageError
from ckpt.model.fragment_columns import read_fragment
from ckpt.model.manifest import Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.retention.policy import Retention
from ckpt.retention.pruner import prune
from ckpt.root.claim_marker import claim_committed_for_removal
from ckpt.storage.registry import open_backend
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.save.adapted import (
    WIDTH,
    Adapted,
    base_pins,
    check,
    mend,
    outer_bases,
    ref_of,
    refer,
    save,
)
from tests.users import act_as, fresh_user, only_root


def test_a_base_that_is_gone_is_told_and_costs_no_further_step(roots, cli: Cli):
    run, base = roots
    save(base, 1)
    far = Tier(str(run.parent / "far"))
    tiers = [Tier(str(run), base=str(base)), far]
    weights = save(tiers, 2)
    ref = ref_of(base, 1)
    shutil.rmtree(base / ref.folder)
    ran = cli("ls", run)
    assert "step 1 of ../base, which holds a part of it, is gone" in ran.out
    ran = cli("verify", run)
    assert ran.code == 4
    assert f"../base/{ref.folder}/rank-00000.safetensors" in ran.out
    with pytest.raises(IntegrityError, match=rf"'\.\./base/{ref.folder}/.*': is missing"):
        ckpt.load(run, "model")
    training = Adapted()
    with CheckpointManager(tiers) as manager:
        manager.restore(training.state)
        assert all(
            torch.equal(value, weights[2][name]) for name, value in training.weights().items()
        )
        manager.save(training.state, 3)
    assert outer_bases(run, 3) == set()
    loaded = ckpt.load(run, "model", step=3)
    assert all(torch.equal(loaded[name], value) for name, value in weights[2].items())


def test_a_save_whose_base_was_removed_in_the_midst_of_the_run_is_whole(roots):
    run, base = roots
    save(base, 1)
    training = Adapted()
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        manager.save(training.state, 1)
        shutil.rmtree(base)
        manager.save(training.state, 2)
        manager.save(training.state, 3)
    assert outer_bases(run, 1) == {"../base 1"}
    assert outer_bases(run, 2) == outer_bases(run, 3) == set()
    assert not base.exists()
    training = Adapted()
    with CheckpointManager(run) as manager:
        report = manager.restore(training.state)
        assert report
        assert report.step == 3


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_damaged_base_is_found_and_the_step_mended_as_a_whole(roots, codec, cli: Cli):
    run, base = roots
    save(Tier(str(base), codec=codec), 1)
    far = run.parent / "far"
    weights = save([Tier(str(run), codec=codec, base=str(base)), Tier(str(far))], 2)
    (file,) = (path for path in base.rglob("rank-*") if path.suffix in (".safetensors", ".encoded"))
    data = bytearray(file.read_bytes())
    data[9000] ^= 1
    file.write_bytes(data)
    assert cli("verify", run).code == 4
    with pytest.raises(IntegrityError, match=r"\.\./base/"):
        ckpt.load(run, "model")
    mend(run, 2, far, codec)
    assert outer_bases(run, 2) == set()
    assert file.read_bytes() == data
    assert cli("verify", run).code == 0
    assert all(
        torch.equal(value, weights[2][name]) for name, value in ckpt.load(run, "model").items()
    )


@pytest.mark.parametrize(
    ("url", "base", "text"),
    [
        ("runs/a", "runs/a", "are one root"),
        ("runs/a", "runs/a/b", "are one root, or one is inside"),
        ("runs/a", "runs", "are one root, or one is inside"),
        ("runs/a", "s3://bucket/base", "is not on the store"),
        ("s3://bucket/a", "s3://other/base", "is not on the store"),
        ("s3://bucket/a", "gs://bucket/base", "is not on the store"),
        ("s3://bucket/a", "s3://bucket/b?endpoint_url=http://other:1", "is on another server"),
        ("runs/a", "", "base='': a base is the root of another run"),
        ("runs/a", 3, "base=3: a base is the root of another run"),
    ],
)
def test_a_base_that_cannot_be_one_is_refused(url, base, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        CheckpointManager(Tier(url, base=base))


@pytest.mark.parametrize(
    ("tier", "settings", "text"),
    [
        ({"local": True}, {}, "each node has its own"),
        ({}, {"incremental": False}, "incremental=False writes whole files"),
    ],
)
def test_a_tier_of_whole_files_takes_no_base(roots, tier, settings, text):
    run, base = roots
    with pytest.raises(ConfigError, match=text):
        CheckpointManager(Tier(str(run), base=str(base), **tier), **settings)


def empty(base: Path) -> None:
    base.mkdir()


def other_weights(base: Path) -> None:
    with CheckpointManager(base) as manager:
        manager.save({"model": nn.Linear(WIDTH, WIDTH)}, 1)


def other_codec(base: Path) -> None:
    save(Tier(str(base), codec="zstd"), 1)


def other_state(base: Path) -> None:
    with CheckpointManager(base) as manager:
        manager.save({"step": 3}, 1)


def adopted(base: Path) -> None:
    folder = base.with_name("hf")
    folder.mkdir()
    save_file({"weight": torch.ones(WIDTH, WIDTH)}, folder / "model.safetensors")
    ran = CliRunner().invoke(app, ["adopt", str(folder), str(base), "--step", "1"])
    assert ran.exit_code == 0, ran.output


def damaged(base: Path) -> None:
    save(base, 1)
    (base / ref_of(base, 1).manifest).write_text("{}")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: None, "it has no checkpoint: save one first"),
        (empty, "it has no checkpoint: save one first"),
        (other_weights, "step 1 begins with other parameters"),
        (other_codec, "step 1 has another codec"),
        (other_state, "step 1 begins with other parameters"),
        (adopted, "step 1 has no tensor like the first frozen parameter of rank 0"),
        (damaged, "is not a valid manifest"),
    ],
)
def test_without_a_step_that_fits_the_file_is_whole_and_a_warning_says_why(
    roots, make, text, caplog
):
    run, base = roots
    make(base)
    weights = save(Tier(str(run), base=str(base)), 2)
    assert outer_bases(run, 1) == set()
    check(run, weights)
    (warning,) = (one.message for one in caplog.records if "base=" in one.message)
    assert text in warning
    assert f"base={base}" in warning
    assert not base.exists() or base_pins(base) == []


@only_root
def test_without_the_right_to_pin_the_file_is_whole_and_a_warning_says_what_to_do(tmp_path):
    base = tmp_path / "base"
    save(base, 1)
    user = fresh_user()
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, user, user)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path != Path("/"):
            path.chmod(0o755)

    def work() -> list[str]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ckpt").addHandler(handler)
        save(Tier(str(home / "run"), base=str(base)), 1)
        return messages

    (warning,) = (text for text in act_as(user, work) if "base=" in text)
    assert "write below pins/" in warning
    assert outer_bases(home / "run", 1) == set()
    assert base_pins(base) == []


@only_root
def test_a_base_whose_root_denies_access_is_told_once_and_stops_no_retention(tmp_path):
    run, base = tmp_path / "run", tmp_path / "base"
    save(base, 1)
    save(Tier(str(run), base=str(base)), 3)
    user = fresh_user()
    for path in (run, *run.rglob("*")):
        os.chown(path, user, user)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path != Path("/"):
            path.chmod(0o755)
    base.chmod(0o700)

    def work() -> tuple[list[int], list[str]]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ckpt").addHandler(handler)
        store = open_backend(str(run))
        inventory = Inventory(store)
        for count in (2, 1):
            prune(store, Retention(keep_last=count), inventory=inventory)
        return [step.ref.step for step in inventory.look()], messages

    steps, warnings = act_as(user, work)
    assert steps == [3]
    (warning,) = warnings
    assert "give this user the right to read there" in warning


def test_two_runs_that_name_each_other_lose_nothing(roots):
    first, second = roots
    weights = save(Tier(str(first), base=str(second)), 1)
    second_weights = save(Tier(str(second), base=str(first)), 1)
    assert (outer_bases(first, 1), outer_bases(second, 1)) == (set(), {"../run 1"})
    training = Adapted()
    with CheckpointManager(Tier(str(first), base=str(second))) as manager:
        manager.restore(training.state)
        manager.save(training.state, 2)
    assert outer_bases(first, 2) == set()
    check(second, second_weights)
    assert all(
        torch.equal(value, weights[1][name])
        for name, value in ckpt.load(first, "model", step=2).items()
    )


def test_a_record_that_leads_out_of_the_store_is_damage(roots, cli: Cli):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 2)
    away = "/".join([".."] * 40)
    refer(run, 2, f"{away}/base/{ref_of(base, 1).folder}")
    assert "which holds a part of it, is gone" in cli("ls", run).out
    ran = cli("verify", run)
    assert ran.code == 4
    assert "leads out of the store" in ran.out
    with pytest.raises((IntegrityError, StorageError)):
        ckpt.load(run, "model", step=2)
    training = Adapted()
    with CheckpointManager(run) as manager:
        report = manager.restore(training.state)
        assert report
        assert report.step == 1


@pytest.mark.parametrize("place", ["file", "step-000000001.aaaaaa"])
def test_a_record_that_leads_to_no_root_is_damage(roots, place, cli: Cli):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 1)
    (run.parent / "file").touch()
    refer(run, 1, f"../{place}/{ref_of(base, 1).folder}")
    ran = cli("ls", run)
    assert ran.code == 0, ran.err
    assert "which holds a part of it, is gone" in ran.out
    assert cli("verify", run).code == 4
    with pytest.raises(StorageError):
        ckpt.load(run, "model", step=1)


def test_a_record_that_leads_to_another_step_is_damage_and_nothing_is_written_there(
    roots, cli: Cli
):
    run, base = roots
    save(base, 1)
    save(Tier(str(run), base=str(base)), 1)
    away = run.parent / "away"
    with CheckpointManager(away) as manager:
        manager.save({"model": nn.Linear(WIDTH, WIDTH)}, 1)
    present = sorted(path.relative_to(away) for path in away.rglob("*"))
    refer(run, 1, f"../away/{ref_of(away, 1).folder}")
    assert cli("verify", run).code == 4
    with pytest.raises(IntegrityError):
        ckpt.load(run, "model", step=1)
    assert cli("rm", run, "--run").code == 0
    assert sorted(path.relative_to(away) for path in away.rglob("*")) == present


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", "../../etc/../step-000000001.aaaaaaaa"),
        ("base", "step-000000009.aaaaaaaa"),
        ("base_lead", 0),
        ("base_lead", -1),
        ("base_lead", 10**9),
        ("count", 1),
        ("lead", 0),
        ("lead", 5),
    ],
)
def test_a_record_with_an_impossible_base_is_refused(roots, codec, field, value):
    run, base = roots
    save(Tier(str(base), codec=codec), 1)
    save(Tier(str(run), codec=codec, base=str(base)), 1)
    path = run / ref_of(run, 1).folder / "rank-00000.json"
    record = unpack(path.read_bytes(), Packed, key="fragment")
    wrong = replace(record.increments[0], **{field: value})
    with pytest.raises(IntegrityError):
        read_fragment(pack(replace(record, increments=(wrong,))), key="fragment")


def test_a_removal_that_was_cut_short_leaves_the_pin_of_the_steps_before(roots, cli: Cli):
    run, base = roots
    save(base, 2)
    weights = save(Tier(str(run), base=str(base)), 1)
    assert claim_committed_for_removal(open_backend(str(base)), ref_of(base, 1))
    training = Adapted()
    with CheckpointManager(Tier(str(run), base=str(base))) as manager:
        manager.restore(training.state)
        manager.save(training.state, 2)
    assert (outer_bases(run, 1), outer_bases(run, 2)) == ({"../base 1"}, set())
    assert base_pins(base) == [1]
    assert cli("prune", base, "--keep-last", 1).code == 0
    check(run, dict.fromkeys((1, 2), weights[1]))


@only_root
def test_a_pin_that_is_there_needs_no_right_to_write(tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    save(base, 1)
    save(Tier(str(run), base=str(base)), 1)
    user = fresh_user()
    for path in (run, *run.rglob("*")):
        os.chown(path, user, user)
    for path in (base, *base.rglob("*")):
        path.chmod(0o755)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path != Path("/"):
            path.chmod(0o755)

    def work() -> None:
        training = Adapted()
        with CheckpointManager(Tier(str(run), base=str(base)), journal=False) as manager:
            manager.restore(training.state)
            manager.save(training.state, 2)

    act_as(user, work)
    assert outer_bases(run, 2) == {"../base 1"}
