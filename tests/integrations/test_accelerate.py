"""Accelerate's own objects are saved and resumed to the bit, on one rank and on two."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.errors import ConfigError, RestoreError, UnsupportedValue
from ckpt.integrations.accelerate import AcceleratorCheckpoints
from ckpt.integrations.shared import once_warnings
from tests.distributed.launch import TORCHRUN
from tests.integrations.accelerate_job import BATCHES, Job, accelerator, forget
from tests.kit.worlds import run_forks

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "accelerated.py"
WARM = ROOT / "tests" / "distributed" / "warm_torchrun.py"
SAVED = 14  # within an epoch, and within an accumulation of gradients: see below


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def new(**how: Any) -> Job:
    forget()
    own = {key: how.pop(key) for key in ("seed", "draws") if key in how}
    return Job(accelerator(**how), **own)


def test_a_resumed_training_is_the_uninterrupted_one_to_the_bit(tmp_path: Path) -> None:
    reference = new().train()
    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        trained = job.train(after=lambda batch: batch == SAVED and checkpoints.save_state())
    assert trained == reference

    job = new(seed=8)
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        assert checkpoints.load_state() is not None
        assert job.seen.batches == SAVED
        assert job.accelerator.step == SAVED % BATCHES
        trained = job.train()
    assert len(trained) == len(reference) - SAVED
    assert trained == dict(islice(reference.items(), SAVED, None))
    assert job.seen.sum == sum(sum(numbers) for numbers, *_ in reference.values())


def test_a_loader_without_a_generator_takes_no_number_of_the_restored_one(tmp_path: Path) -> None:
    job = new(draws=True)
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        whole = job.train(after=lambda batch: batch == SAVED and checkpoints.save_state())
    job = new(draws=True, seed=8)
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        checkpoints.load_state()
        assert job.train() == dict(islice(whole.items(), SAVED, None))


def test_a_loader_that_is_prepared_later_takes_no_number_after_a_save(tmp_path: Path) -> None:
    """Else the next epoch of the first job would draw a number, and that of a resumed one none."""
    made = accelerator()
    with AcceleratorCheckpoints(made, tmp_path) as checkpoints:
        job = Job(made, draws=True)
        whole = job.train(after=lambda batch: batch == SAVED and checkpoints.save_state())
    job = new(draws=True, seed=8)
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        checkpoints.load_state()
        assert job.train() == dict(islice(whole.items(), SAVED, None))


@pytest.mark.parametrize("saved", [SAVED, 20], ids=["within an epoch", "between two"])
def test_a_stateful_loader_resumes_by_itself(tmp_path: Path, saved: int) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    reference = new(stateful=True).train()
    job = new(stateful=True)
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        job.train(after=lambda batch: batch == saved and checkpoints.save_state())
    for _ in range(2):  # a save before the next batch keeps the position
        job = new(stateful=True, seed=8)
        with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
            assert checkpoints.load_state() is not None
            checkpoints.save_state()
    assert job.train() == dict(islice(reference.items(), saved, None))


def test_a_run_that_goes_back_goes_on_with_its_new_branch(tmp_path: Path) -> None:
    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        first = job.train(after=lambda batch: batch > 25 and checkpoints.save_state(batch))
    job = new(seed=8)
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        assert checkpoints.load_state(26) is not None
        again = job.train(
            after=lambda batch: batch == 28 and checkpoints.save_state(batch).result()
        )
        assert checkpoints.manager.steps() == [26, 28], "steps 27, 29 and 30 are abandoned"
    assert again == dict(islice(first.items(), 26, None))
    job = new(seed=9)
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        report = checkpoints.load_state()
        assert report is not None
        assert report.step == job.seen.batches == 28
    assert len(list(tmp_path.glob("step-000000028.*"))) == 2, "two attempts, and the new one counts"


def test_the_names_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    job = new()
    job.train()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        checkpoints.save_state(30)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    with CheckpointManager(tmp_path) as manager:
        manager.restore({"model": net, "optimizer": optimizer}, only=["model", "optimizer"])
    for mine, theirs in zip(net.parameters(), job.net.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        kept = job.first.optimizer.state[theirs]
        assert torch.equal(optimizer.state[mine]["exp_avg"], kept["exp_avg"])


def test_the_project_names_the_place_the_step_and_the_limit(tmp_path: Path) -> None:
    project = {"project_dir": tmp_path, "automatic_checkpoint_naming": True, "total_limit": 2}
    job = new(**project)
    with AcceleratorCheckpoints(job.accelerator) as checkpoints:
        for _ in range(4):
            checkpoints.save_state().result()
    with CheckpointManager(tmp_path / "ckpt") as manager:
        assert manager.steps() == [2, 3]

    job = new(**project)
    with AcceleratorCheckpoints(job.accelerator) as checkpoints:
        report = checkpoints.load_state()
        assert report is not None
        assert report.step == 3
        assert job.accelerator.save_iteration == 4
        assert checkpoints.save_state().result().step == 4


def test_a_tier_keeps_what_it_says_and_an_iteration_may_be_given(tmp_path: Path) -> None:
    job = new(total_limit=1, iteration=5)
    tiers: list[str | Tier] = [str(tmp_path / "near"), Tier(str(tmp_path / "far"), keep_last=3)]
    with AcceleratorCheckpoints(job.accelerator, tiers) as checkpoints:
        for _ in range(4):
            checkpoints.save_state().result(tier=str(tmp_path / "far"))
    kept = [len(list((tmp_path / name).glob("step-*"))) for name in ("near", "far")]
    assert kept == [1, 3]
    with CheckpointManager(tmp_path / "far") as manager:
        assert manager.steps() == [6, 7, 8]


def test_memory_is_left_to_its_slots(tmp_path: Path) -> None:
    job = new(total_limit=1)
    with AcceleratorCheckpoints(job.accelerator, ["memory", tmp_path]) as checkpoints:
        for _ in range(2):
            checkpoints.save_state().result(tier=str(tmp_path))
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_the_scaler_is_saved(tmp_path: Path) -> None:
    def scaled() -> Job:
        job = new()
        job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        return job

    job = scaled()
    scaler = job.accelerator.scaler
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        checkpoints.save_state()
    job = scaled()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        checkpoints.load_state()
    assert job.accelerator.scaler.get_scale() == scaler.get_scale() == 16.0


def test_the_lines_of_the_page_run_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    page = (ROOT / "docs" / "integrations" / "accelerate.md").read_text()
    (lines,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for epochs in ("2", "4"):
        forget()
        exec(lines.replace("else 0, 10)", f"else 0, {epochs})"), {})
    printed = re.findall(r"^epoch (\d)", capsys.readouterr().out, re.MULTILINE)
    assert printed == ["0", "1", "2", "3"]


# -- several ranks ---------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.torture
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_killed_in_mid_save_resume_to_the_bit(tmp_path: Path, mode: str) -> None:
    torchrun = ["--standalone", "--nproc-per-node=2", WORKER, tmp_path, mode]
    ended = run_forks(
        [WARM, (log := tmp_path / "log"), *torchrun, "first", "--", *torchrun, "second"],
        [TORCHRUN],
        timeout=150,
        imports=["accelerate"],
    )
    assert ended.said == ("ended 0 -9\nended 1 0\n",), log.read_text()[-6000:]
    (cut_short,) = (tmp_path / "run").glob("step-000000018.*")
    assert not (cut_short / "manifest.json").exists()
    for rank in range(2):
        reference = json.loads((tmp_path / f"first-{rank}.json").read_text())
        resumed = json.loads((tmp_path / f"second-{rank}.json").read_text())
        assert resumed["step"] == 14
        assert resumed["iteration"] == 2
        assert len(resumed["trained"]) == 16
        assert resumed["trained"] == dict(islice(reference.items(), 14, None))
        # its own loss, not that of the first rank
        assert resumed["sum"] == sum(sum(numbers) for numbers, *_ in reference.values())


# -- what is refused -------------------------------------------------------------------------------


def test_a_folder_of_save_state_is_refused_with_the_way_to_load_it(tmp_path: Path) -> None:
    project = {"project_dir": tmp_path, "automatic_checkpoint_naming": True}
    job = new(**project)
    job.train(after=lambda batch: batch == 2 and job.accelerator.save_state())
    theirs = str(tmp_path / "checkpoints" / "checkpoint_0")
    way = re.escape(f"accelerator.load_state({theirs!r})")

    job = new(**project, seed=8)
    weights = [value.clone() for value in job.net.parameters()]
    for place in (theirs, f"file://{theirs}"):
        with pytest.raises(ConfigError, match=way):
            AcceleratorCheckpoints(job.accelerator, place)
    with AcceleratorCheckpoints(job.accelerator) as checkpoints:
        with pytest.raises(ConfigError, match=way):
            checkpoints.load_state()  # otherwise it would begin again silently
        with pytest.raises(ConfigError, match=re.escape(f"load_state({theirs!r})")):
            checkpoints.load_state(theirs)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=re.escape("save_state('out')")):
            checkpoints.save_state("out")  # type: ignore[arg-type]
        assert all(map(torch.equal, weights, job.net.parameters()))

        job.accelerator.load_state(theirs)  # the error says to do this
        checkpoints.save_state().result()
        assert job.seen.batches == 2
        assert checkpoints.load_state() is not None


def test_a_first_save_that_an_earlier_run_hides_is_refused(tmp_path: Path) -> None:
    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        for _ in range(3):
            checkpoints.save_state()
    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        for step in (None, 1, 2):
            with pytest.raises(ConfigError, match=r"holds step 2 .* call load_state\(\) before"):
                checkpoints.save_state(step)
        assert job.accelerator.save_iteration == 0
        assert checkpoints.manager.steps() == [0, 1, 2]
        assert checkpoints.load_state() is not None
        assert checkpoints.save_state().result().step == 3

    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        assert checkpoints.save_state(7).result().step == 7  # It is the newest
    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        assert checkpoints.load_state(2) is not None  # going back is the user's choice
        assert checkpoints.save_state().result().step == 3


@pytest.mark.parametrize("more", ["model_1", "optimizer_1", "registered"])
def test_another_number_of_objects_is_refused(tmp_path: Path, more: str) -> None:
    kept = {"model_1": "_models", "optimizer_1": "_optimizers", "registered": "_custom_objects"}

    def reduced() -> Job:
        job = new()
        getattr(job.accelerator, kept[more]).pop()
        if more == "model_1":
            job.accelerator._optimizers.pop()
        return job

    for make_saved, make_target in ((new, reduced), (reduced, new)):
        root = tmp_path / make_saved.__name__
        job = make_saved()
        with AcceleratorCheckpoints(job.accelerator, root) as checkpoints:
            checkpoints.save_state()
        job = make_target(seed=8) if make_target is new else make_target()
        weights = [value.clone() for value in job.net.parameters()]
        job.accelerator.step = 5
        with (
            AcceleratorCheckpoints(job.accelerator, root) as checkpoints,
            pytest.raises(RestoreError, match=more) as caught,
        ):
            checkpoints.load_state()
        assert f"{len(job.accelerator._models)} x model" in str(caught.value)
        assert all(map(torch.equal, weights, job.net.parameters()))
        assert job.accelerator.step == 5


def test_a_model_that_changed_is_named_by_its_tensor(tmp_path: Path) -> None:
    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        checkpoints.save_state()
    job = new()
    job.net.add_module("head", nn.Linear(1, 1))
    with (
        AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints,
        pytest.raises(RestoreError, match=re.escape("model/head.weight")),
    ):
        checkpoints.load_state()


def test_an_object_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    job = new()
    with pytest.raises(ValueError, match="state_dict"):  # accelerate's own
        job.accelerator.register_for_checkpointing(object())

    class Broken:
        state_dict = None
        load_state_dict = None

    job.accelerator.register_for_checkpointing(Broken())
    with (
        AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints,
        pytest.raises(UnsupportedValue, match="registered_1"),
    ):
        checkpoints.save_state()


def test_what_is_no_accelerator_or_has_no_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a Linear"):
        AcceleratorCheckpoints(nn.Linear(1, 1), "runs")
    with pytest.raises(ConfigError, match="automatic_checkpoint_naming"):
        AcceleratorCheckpoints(accelerator())


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_a_kind_of_training_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, kind: str
) -> None:
    made = accelerator()
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType(kind)
    with pytest.raises(ConfigError, match=kind):
        AcceleratorCheckpoints(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_version_that_is_installed_is_a_tested_one(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "ckpt"):
        AcceleratorCheckpoints(accelerator(), tmp_path).close()
    assert not caplog.records


def test_hooks_that_would_have_written_into_the_folder_are_reported(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once_warnings, "_logged_lines", set())
    job = new()
    job.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with (
        caplog.at_level(logging.WARNING, "ckpt"),
        AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints,
    ):
        checkpoints.save_state()
    assert "register_save_state_pre_hook" in caplog.text


def test_hooks_that_would_have_read_from_the_folder_are_reported(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once_warnings, "_logged_lines", set())
    job = new()
    job.accelerator.register_load_state_pre_hook(lambda models, folder: None)
    with (
        caplog.at_level(logging.WARNING, "ckpt"),
        AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints,
    ):
        checkpoints.save_state().result()
        assert "hook" not in caplog.text
        checkpoints.load_state()
        checkpoints.load_state()
    assert caplog.text.count("register_load_state_pre_hook are not called") == 1


def test_what_is_saved_can_be_opened_by_name(tmp_path: Path) -> None:
    job = new()
    with AcceleratorCheckpoints(job.accelerator, tmp_path) as checkpoints:
        checkpoints.save_state()
    with ckpt.open(tmp_path) as opened:
        assert torch.equal(opened.tensor("model_1/weight")[...], job.critic.weight.detach())
