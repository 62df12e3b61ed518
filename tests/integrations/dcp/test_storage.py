"""``torch.distributed.checkpoint`` uses ckpt as its storage, through DCP's own calls."""

from __future__ import annotations

import io
import re
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpt import CheckpointManager, Tier
from ckpt.cli.main import main
from ckpt.errors import (
    ChecksumMismatch,
    CkptError,
    ConfigError,
    EntryMissing,
    HistoryHidden,
    NoCheckpoint,
    OutOfSpace,
    RestoreError,
    StepExists,
    UnsupportedValue,
)
from ckpt.integrations.dcp import CkptReader, CkptWriter
from ckpt.model.keys import OWNER
from ckpt.root.owner import read_owner
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Raise, Rule
from tests.integrations.workers.dcp import build as trained_as_sharded
from tests.integrations.workers.dcp import state_of, total
from tests.kit.disks import run_script_mounted
from tests.kit.pages import block
from tests.kit.stores import faulty
from tests.kit.worlds import run_forks, world

WORKER = Path(__file__).parents[1] / "workers" / "dcp.py"

# DCP says so whenever there is no process group
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def state(seed: int = 0) -> dict[str, Any]:
    values, moments = get_state_dict(*trained(seed))
    return {"model": values, "optimizer": moments, "step": seed}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return flat(dict(enumerate(value)), path)
    return {path: value}


def assert_equal(one: Any, two: Any) -> None:
    one, two = flat(one), flat(two)
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, two[name]), name
        else:
            assert value == two[name], name


def error_of(call: Any) -> BaseException:
    """Return the error that DCP has wrapped."""
    with pytest.raises(CheckpointException) as caught:
        call()
    (failure,) = caught.value.failures.values()
    return failure[0]


def test_a_saved_state_loads_and_is_an_ordinary_step(tmp_path, monkeypatch):
    saved = state(3)
    dcp.save(saved, storage_writer=CkptWriter(tmp_path, step=3))
    target = state(4)
    dcp.load(target, storage_reader=CkptReader(tmp_path))
    assert_equal(target, saved)
    for command in ("ls", "verify", "show"):
        monkeypatch.setattr(sys, "argv", ["ckpt", command, str(tmp_path)])
        assert main() == 0
    assert not list(tmp_path.rglob(".metadata"))


def test_the_manager_restores_what_the_writer_saved(tmp_path):
    model, optimizer = trained(1)
    values, moments = get_state_dict(model, optimizer)
    dcp.save({"model": values, "moments": moments}, storage_writer=CkptWriter(tmp_path, step=1))
    other, another = trained(2)
    target = {"model": other, "moments": get_state_dict(other, another)[1]}
    with CheckpointManager(tmp_path) as manager:
        report = manager.restore(target)
    assert report is not None
    assert report.missing == ()
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(target["moments"], moments)


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_manager_restores_a_saved_dict_into_the_optimizer_itself(tmp_path, is_flat):
    model, optimizer = in_groups(1)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    values, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": values, "optimizer": moments}, storage_writer=CkptWriter(tmp_path, step=1))
    other, another = in_groups(2)
    another.param_groups[0]["lr"] = 1.0
    with CheckpointManager(tmp_path) as manager:
        report = manager.restore({"model": other, "optimizer": another})
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(another.state_dict()["state"], optimizer.state_dict()["state"])
    assert [group["lr"] for group in another.param_groups] == [0.5, 0.25]


def test_a_saved_dict_without_a_parameter_of_the_optimizer_is_refused_by_name(tmp_path):
    saved = state(1)
    saved["optimizer"]["param_groups"][0]["params"].remove("0.bias")
    del saved["optimizer"]["state"]["0.bias"]
    dcp.save(saved, storage_writer=CkptWriter(tmp_path, step=1))
    other, another = trained(2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(EntryMissing, match=r"optimizer/model/0\.bias"),
    ):
        manager.restore({"model": other, "optimizer": another})
    assert_equal(other.state_dict(), before)


def in_groups(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model with two parameter groups, in another order than in the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [
        {"params": list(model[1].parameters()), "lr": 0.5},
        {"params": list(model[0].parameters()), "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(3, 4)).pow(2).sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_reader_loads_what_the_manager_saved(tmp_path):
    model, optimizer = trained(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": model, "optimizer": optimizer, "step": 12, "note": ("a", {1, 2})})
    values, moments = get_state_dict(*trained(2))
    target: dict[str, Any] = {"model": values, "optimizer": moments, "step": 0, "note": None}
    dcp.load(target, storage_reader=CkptReader(tmp_path))
    wanted = get_state_dict(model, optimizer)
    assert_equal(target["model"], wanted[0])
    assert_equal(target["optimizer"]["state"], wanted[1]["state"])
    assert (target["step"], target["note"]) == (12, ("a", {1, 2}))


def test_targets_that_share_memory_take_what_was_saved_of_such(tmp_path):
    values = {"a": torch.full((4, 6), 3.0), "b": torch.arange(6.0), "c": torch.arange(2.0, 6.0)}
    dcp.save(values, storage_writer=CkptWriter(tmp_path, step=1))
    flat = torch.zeros(6)
    target = {"a": torch.zeros(1, 6).expand(4, 6), "b": flat, "c": flat[2:]}
    dcp.load(target, storage_reader=CkptReader(tmp_path))
    assert_equal({name: value.clone() for name, value in target.items()}, values)

    values["c"] += 1
    dcp.save(values, storage_writer=CkptWriter(tmp_path, step=2))
    with pytest.raises(CheckpointException, match=r"'[bc]' shares a part of its memory"):
        dcp.load(target, storage_reader=CkptReader(tmp_path))


def test_a_whole_checkpoint_loads_without_a_target(tmp_path):
    saved = {**state(1), "list": [torch.ones(2), {"k": 1}]}
    dcp.save(saved, storage_writer=CkptWriter(tmp_path, step=1))
    target: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(target, CkptReader(tmp_path), planner=planner, no_dist=True)
    assert_equal(target, saved)


def test_plain_values_and_buffers_keep_their_types(tmp_path):
    values = {
        "tuple": (1, "a", None), "set": {1, 2}, "large": 2**80, "nan": float("inf"),
        "bytes": b"\0\1", "dtype": torch.bfloat16, "list": [1, [2]], "complex": 1 + 2j,
    }  # fmt: skip
    dcp.save({**values, "io": io.BytesIO(b"abc")}, storage_writer=CkptWriter(tmp_path, step=1))
    target: dict[str, Any] = dict.fromkeys([*values, "io"])
    dcp.load(target, storage_reader=CkptReader(tmp_path))
    assert target.pop("io").getvalue() == b"abc"
    assert target == values
    assert {key: type(value) for key, value in target.items()} == {
        key: type(value) for key, value in values.items()
    }


def test_a_value_that_needs_pickle_is_refused_by_name(tmp_path):
    error = error_of(
        lambda: dcp.save({"a": {"b": object()}}, storage_writer=CkptWriter(tmp_path, step=1))
    )
    assert isinstance(error, UnsupportedValue)
    assert "a/b" in str(error)
    assert not list(tmp_path.glob("*/manifest.json"))


@pytest.mark.parametrize("value", [(torch.ones(1),), {"inner": torch.ones(1)}, {"inner": 1}])
def test_a_container_that_would_be_one_entry_is_refused_by_name(tmp_path, value):
    writer = CkptWriter(tmp_path, step=1)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    error = error_of(lambda: dcp.save({"held": value}, storage_writer=writer, planner=planner))
    assert isinstance(error, UnsupportedValue)
    assert "'held'" in str(error)


def test_pickle_in_a_file_is_never_loaded(tmp_path):
    """DCP's own reader runs the code in a file of its folder. Here there is no pickle to swap."""
    dcp.save({"a": 1, "t": torch.ones(3)}, storage_writer=CkptWriter(tmp_path, step=1))
    (folder,) = tmp_path.glob("step-*")
    for file in folder.iterdir():
        assert b"\x80\x02" not in file.read_bytes()[:64], file


def test_a_flipped_bit_raises_and_names_the_file(tmp_path):
    saved = {"t": torch.randn(1000), "step": 5}
    dcp.save(saved, storage_writer=CkptWriter(tmp_path, step=1))
    (file,) = tmp_path.glob("step-*/rank-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)
    target = {"t": torch.zeros(1000), "step": 0}
    error = error_of(lambda: dcp.load(target, storage_reader=CkptReader(tmp_path)))
    assert isinstance(error, ChecksumMismatch)
    assert file.name in str(error)
    assert target["step"] == 0


def test_a_damaged_near_tier_is_read_from_the_farther_one(tmp_path):
    tiers = [Tier(str(tmp_path / "near")), Tier(str(tmp_path / "far"))]
    saved = {"t": torch.randn(1000)}
    dcp.save(saved, storage_writer=CkptWriter(tiers, step=1))
    (file,) = tmp_path.glob("near/step-*/rank-*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    target = {"t": torch.zeros(1000)}
    dcp.load(target, storage_reader=CkptReader(tiers))
    assert torch.equal(target["t"], saved["t"])


def test_a_full_disk_raises_and_the_step_before_is_whole(tmp_path):
    mount = f"mount -t tmpfs -o size=4m none {tmp_path}"
    said = run_script_mounted(mount, WORKER, "full", tmp_path)
    assert f"{OutOfSpace.__name__} loaded 1" in said


@pytest.mark.parametrize(("asked", "found"), [(None, 2), (2, 2), (1, 1)])
def test_a_load_finishes_a_commit_that_lacks_only_its_manifest(tmp_path, asked, found, caplog):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save({"t": torch.full((3,), float(step))}, step)
        owner = read_owner(open_backend(str(tmp_path)))
    (manifest,) = tmp_path.glob("step-000000002.*/manifest.json")
    data = manifest.read_bytes()
    manifest.unlink()
    assert owner is not None
    dead = msgspec.structs.replace(owner, pid=2**22 + 1, started=1)
    (tmp_path / OWNER).write_bytes(msgspec.json.encode(dead))
    target, reader = {"t": torch.zeros(3)}, CkptReader(tmp_path, step=asked)
    dcp.load(target, storage_reader=reader)
    assert reader.step == found
    assert target["t"].eq(found).all()
    assert ("has finished its commit" in caplog.text) == (found == 2)
    assert (manifest.exists() and manifest.read_bytes() == data) == (found == 2)


def test_a_save_that_is_killed_leaves_the_step_before(tmp_path):
    """DCP's own writer overwrites files in place, and its reader then loads a mixture of both."""
    done = run_forks([WORKER, "killed", tmp_path], [{}], timeout=60)
    assert done.statuses == (-signal.SIGKILL,), done.said
    target = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
    dcp.load(target, storage_reader=CkptReader(tmp_path))
    assert torch.equal(target["a"], torch.ones(100_000))
    assert torch.equal(target["b"], torch.ones(100_000))


def test_ranks_that_found_different_steps_do_not_load_a_mixture(tmp_path):
    plans: list[LoadPlan] = []
    for step in (1, 2):
        dcp.save({"t": torch.full((2,), step)}, storage_writer=CkptWriter(tmp_path, step=step))
        reader = CkptReader(tmp_path)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(RestoreError, match="different steps"):
        CkptReader(tmp_path).prepare_global_plan(plans)


def test_a_kept_writer_numbers_steps_and_stages_into_the_same_memory(tmp_path, monkeypatch):
    writer = CkptWriter(tmp_path)
    weights = torch.zeros(1000)
    addresses: set[int] = set()
    stage = writer.stage

    def watched(given: dict[str, Any]) -> dict[str, Any]:
        staged = stage(given)
        addresses.add(staged["w"].data_ptr())
        return staged

    monkeypatch.setattr(writer, "stage", watched)
    for step in range(3):
        weights.fill_(step)
        future: Any = dcp.async_save({"w": weights}, storage_writer=writer)
        weights.fill_(-1)
        future.result()
    writer.close()
    assert len(addresses) == 1
    for step in range(3):
        target = {"w": torch.zeros(1000)}
        dcp.load(target, storage_reader=CkptReader(tmp_path, step=step))
        assert torch.equal(target["w"], torch.full((1000,), float(step)))


def test_a_state_staged_during_a_save_gets_memory_of_its_own(tmp_path):
    writer = CkptWriter(tmp_path)
    first = writer.stage({"w": torch.ones(10)})
    second = writer.stage({"w": torch.zeros(10)})
    assert torch.equal(first["w"], torch.ones(10))
    assert torch.equal(second["w"], torch.zeros(10))


def test_the_checkpoint_id_gives_the_step(tmp_path):
    dcp.save({"t": torch.ones(2)}, checkpoint_id="step-17", storage_writer=CkptWriter(tmp_path))
    target = {"t": torch.zeros(2)}
    dcp.load(target, checkpoint_id=f"{tmp_path}/17", storage_reader=CkptReader(tmp_path))
    assert torch.equal(target["t"], torch.ones(2))


@pytest.mark.parametrize("given", ["final", "elsewhere/step-3", ""])
def test_a_checkpoint_id_that_names_no_step_of_the_root_is_refused(tmp_path, given):
    for side in (CkptWriter(tmp_path), CkptReader(tmp_path)):
        with pytest.raises(ConfigError, match="checkpoint_id"):
            side.reset(given)


def test_a_step_is_saved_once(tmp_path):
    writer = CkptWriter(tmp_path)
    dcp.save({"t": torch.ones(2)}, checkpoint_id="3", storage_writer=writer)
    again = error_of(
        lambda: dcp.save({"t": torch.zeros(2)}, checkpoint_id="3", storage_writer=writer)
    )
    writer.close()
    assert isinstance(again, StepExists)


def save_step(writer: CkptWriter, step: int) -> None:
    dcp.save({"t": torch.full((2,), step)}, checkpoint_id=f"step-{step}", storage_writer=writer)


def with_steps(root: Path, *steps: int) -> None:
    writer = CkptWriter(root)
    for step in steps:
        save_step(writer, step)
    writer.close()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_goes_back_after_the_reader(tmp_path, monkeypatch, caplog, keeps):
    with_steps(tmp_path, 5, 10, 15, 20)
    monkeypatch.chdir(tmp_path.parent)
    reader = CkptReader(tmp_path.name, step=10)  # The same place by another path
    target = {"t": torch.zeros(2, dtype=torch.int64)}
    dcp.load(target, storage_reader=reader)
    assert reader.step == 10
    writer = CkptWriter(tmp_path, after=reader)
    for step in (15, 17):  # One that is there, and a new one
        save_step(writer, step)
        if not keeps:
            writer.close()
    again = error_of(lambda: save_step(writer, 15))
    assert isinstance(again, StepExists), "the step was saved after the load"
    save_step(writer, 21)
    writer.close()
    assert "holds step 20, and this job continues from step 10" in caplog.text
    dcp.load(target, storage_reader=(newest := CkptReader(tmp_path)))
    assert (newest.step, newest.latest_step()) == (21, 21)


def test_a_step_that_was_saved_with_a_cached_plan_is_not_saved_again(tmp_path):
    class Planner(DefaultSavePlanner):
        """DCP caches plans by the name of this class, and other tests must not find them."""

    with_steps(tmp_path, 10, 20)
    reader = CkptReader(tmp_path, step=10)
    dcp.load({"t": torch.zeros(2, dtype=torch.int64)}, storage_reader=reader)
    writer = CkptWriter(tmp_path, after=reader)
    for step in (15, 17):  # The plan of step 17 is the cached one of step 15
        planner = Planner(enable_plan_caching=True)
        state = {"t": torch.full((2,), step)}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner)
    writer.close()
    writer = CkptWriter(tmp_path, after=reader)
    assert isinstance(error_of(lambda: save_step(writer, 17)), StepExists)
    save_step(writer, 18)
    writer.close()


def test_a_save_that_has_failed_does_not_end_the_way_back(tmp_path, monkeypatch):
    with_steps(tmp_path, 10, 12, 20)
    reader = CkptReader(tmp_path, step=10)
    dcp.load({"t": torch.zeros(2, dtype=torch.int64)}, storage_reader=reader)
    with monkeypatch.context() as patch:
        faulty(patch, tmp_path, [Rule(verb="upload", key="safetensors", fault=Raise(OutOfSpace))])
        failing = CkptWriter(tmp_path, after=reader, on_error="warn")
        save_step(failing, 15)
        failing.close()
    writer = CkptWriter(tmp_path, after=reader)
    for step in (12, 15):
        save_step(writer, step)
    writer.close()
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [10, 12, 15, 20]


def test_a_reader_that_has_loaded_the_newest_step_gives_no_warning(tmp_path, caplog):
    with_steps(tmp_path, 5, 10)
    reader = CkptReader(tmp_path)
    dcp.load({"t": torch.zeros(2, dtype=torch.int64)}, storage_reader=reader)
    for step in (11, 12):
        state = {"t": torch.full((2,), step)}
        dcp.save(state, storage_writer=CkptWriter(tmp_path, step=step, after=reader))
    assert "continues from" not in caplog.text


@pytest.mark.parametrize(("step", "kind"), [(15, StepExists), (17, HistoryHidden)])
def test_a_save_of_a_step_that_is_hidden_names_the_way_back(tmp_path, step, kind):
    with_steps(tmp_path, 10, 15, 20)
    dcp.load({"t": torch.zeros(2, dtype=torch.int64)}, storage_reader=CkptReader(tmp_path, step=10))
    writer = CkptWriter(tmp_path)
    with pytest.raises(CheckpointException, match=r"CkptWriter\(\.\.\., after=reader\)") as caught:
        save_step(writer, step)
    writer.close()
    assert isinstance(caught.value.failures[0][0], kind)


def test_a_step_of_another_place_is_no_way_back(tmp_path):
    with_steps(tmp_path / "one", 10)
    reader = CkptReader(tmp_path / "one")
    CkptWriter(tmp_path / "two", after=reader)  # Nothing was loaded
    dcp.load({"t": torch.zeros(2, dtype=torch.int64)}, storage_reader=reader)
    with pytest.raises(ConfigError, match="after= has loaded step 10 of another place"):
        CkptWriter(tmp_path / "two", after=reader)


def test_a_load_from_an_empty_place_fails_with_no_checkpoint(tmp_path):
    reader = CkptReader(tmp_path / "new")
    assert (reader.latest_step(), reader.step) == (None, None)
    error = error_of(lambda: dcp.load({"t": torch.zeros(2)}, storage_reader=reader))
    assert isinstance(error, NoCheckpoint)
    assert "it is empty, or does not exist" in str(error)
    assert reader.step is None
    with pytest.raises(NoCheckpoint):
        CkptReader(tmp_path / "new").read_metadata()


@pytest.mark.parametrize("below", ["", "step-10"])
def test_a_folder_of_their_own_storage_is_named(tmp_path, below):
    dcp.save({"t": torch.ones(2)}, checkpoint_id=tmp_path / "step-10", no_dist=True)
    reader = CkptReader(tmp_path / below)
    error = error_of(lambda: dcp.load({"t": torch.zeros(2)}, storage_reader=reader))
    assert isinstance(error, NoCheckpoint)
    assert "files of torch.distributed.checkpoint" in str(error)
    assert "ckpt adopt" in str(error)


def test_a_missing_step_says_what_there_is(tmp_path):
    dcp.save({"t": torch.ones(2)}, storage_writer=CkptWriter(tmp_path, step=3))
    with pytest.raises(CheckpointException, match="step 4 is not there"):
        dcp.load({"t": torch.ones(2)}, storage_reader=CkptReader(tmp_path, step=4))


def test_one_checkpoint_for_each_rank_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="use_collectives"):
        CkptWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)


def test_a_plan_that_another_writer_cached_is_refused(tmp_path):
    saved = {"t": torch.ones(2)}
    kept = CkptWriter(tmp_path)
    for step in (1, 2):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(saved, checkpoint_id=f"step-{step}", storage_writer=kept, planner=planner)
    kept.close()
    planner = DefaultSavePlanner(enable_plan_caching=True)
    writer = CkptWriter(tmp_path, step=3)
    error = error_of(lambda: dcp.save(saved, storage_writer=writer, planner=planner))
    assert isinstance(error, ConfigError)
    assert "enable_plan_caching" in str(error)


def test_a_plan_that_was_cached_for_other_storage_is_refused(tmp_path):
    class PlannerOfOtherStorage(DefaultSavePlanner):
        """DCP caches plans by the name of this class, so no other test may have it."""

    class PlannerOfCkpt(PlannerOfOtherStorage):
        """The planner that the error asks for."""

    saved = {"t": torch.ones(2)}
    for name in ("one", "two"):
        other = FileSystemWriter(str(tmp_path / name))
        dcp.save(
            saved, storage_writer=other, planner=PlannerOfOtherStorage(enable_plan_caching=True)
        )
    writer = CkptWriter(tmp_path / "root")
    error = error_of(
        lambda: dcp.save(
            saved, storage_writer=writer, planner=PlannerOfOtherStorage(enable_plan_caching=True)
        )
    )
    assert isinstance(error, ConfigError)
    assert "cached for another storage writer" in str(error)
    for step in (1, 2):
        planner = PlannerOfCkpt(enable_plan_caching=True)
        dcp.save(saved, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner)
    writer.close()
    with CheckpointManager(tmp_path / "root") as manager:
        assert manager.steps() == [1, 2]


def test_an_empty_state_is_a_step(tmp_path):
    dcp.save({}, storage_writer=CkptWriter(tmp_path, step=1))
    dcp.load({}, storage_reader=CkptReader(tmp_path))
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [1]


def test_the_lines_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = "docs/integrations/dcp.md"
    names: dict[str, Any] = {
        "dcp": dcp,
        "CkptReader": CkptReader,
        "CkptWriter": CkptWriter,
        "state": {},
    }
    exec(compile(block(page, "after=reader"), "dcp.md", "exec"), names)  # The first start
    assert names["reader"].step is None
    exec(compile(block(page, "AdamW"), "dcp.md", "exec"), names)
    exec(compile(block(page, "after=reader"), "dcp.md", "exec"), names)
    assert names["reader"].step == 1200
    with CheckpointManager("runs/gpt") as manager:
        assert manager.steps() == [1200]


def test_tied_tensors_are_stored_once(tmp_path):
    weight = torch.randn(100, 100)
    dcp.save({"a": weight, "b": weight}, storage_writer=CkptWriter(tmp_path, step=1))
    (file,) = tmp_path.glob("step-*/rank-*.safetensors")
    assert file.stat().st_size < 1.5 * weight.nbytes
    target = {"a": torch.zeros(100, 100), "b": torch.zeros(100, 100)}
    dcp.load(target, storage_reader=CkptReader(tmp_path))
    assert torch.equal(target["b"], weight)


def test_errors_pass_between_processes_as_they_are():
    import pickle

    for error in (StepExists(3, "root"), ChecksumMismatch("key", 1, 2), CkptError("text")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), again.__dict__) == (str(error), error.__dict__)


def totals(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"total (\S+)", printed)]


@pytest.mark.distributed
def test_two_ranks_save_and_three_and_one_load(tmp_path):
    printed = world(2, WORKER, "save", tmp_path)
    saved = set(totals(printed))
    assert len(saved) == 1
    assert printed.count("refused {0: 'PeerFailed', 1: 'UnsupportedValue'}") == 2
    printed = world(3, WORKER, "load", tmp_path)
    assert totals(printed) == 6 * list(saved)
    assert printed.count("part [0.0, 1.0, 2.0, 3.0]") == 2
    model, optimizer = trained_as_sharded(5)
    target = state_of(model, optimizer, 0)
    dcp.load(target, storage_reader=CkptReader(tmp_path))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )
    assert {total(model, optimizer)} == saved
    assert (target["step"], target["lists"][1]) == (7, {"names": ["a", "b"]})
    model, optimizer = trained_as_sharded(6)
    with CheckpointManager(tmp_path) as manager:
        parts = {"model": model, "optimizer": optimizer}
        manager.restore(parts, 1, only=["model", "optimizer"])
    assert {total(model, optimizer)} == saved


@pytest.mark.distributed
@pytest.mark.torture
def test_the_process_executor_saves_and_refuses(tmp_path):
    printed = world(2, WORKER, "process", tmp_path)
    assert printed.count("refused {0: 'PeerFailed', 1: 'UnsupportedValue'}") == 2
    assert len(set(totals(printed))) == 1
