"""torchtitan's manager with the saves of ckpt.

The cases of its ``tests/unit_tests/test_checkpoint.py`` that apply are here under their names, with
the real components instead of mocks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.integrations.shared.resizing import same_or_first

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import torch.distributed.checkpoint as dcp
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager as Theirs
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

import ckpt
from ckpt.errors import CkptError, ConfigError, RestoreError
from ckpt.integrations import torchtitan as door
from ckpt.integrations.torchtitan import CkptManager
from tests import processes, servers
from tests.distributed.launch import TORCHRUN
from tests.integrations.titan_job import assets
from tests.integrations.titan_parts import Job, Net
from tests.kit.worlds import world
from tests.state.saving import manifest_of

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "titan.py"
WARM = ROOT / "tests" / "distributed" / "warm_torchrun.py"


def steps_in(folder: Path) -> list[int]:
    with ckpt.CheckpointManager(folder) as manager:
        return manager.steps()


def names_in(folder: Path) -> set[str]:
    """Return the names of the tensors of the newest step."""
    return {tensor.name for tensor in manifest_of(str(folder)).tensors}


# -- cases of torchtitan's tests -------------------------------------------------------------------


def test_trainer_uses_checkpoint_interface_with_concrete_default() -> None:
    config = Trainer.Config(checkpoint=CkptManager.Config(enable=True, nearer=["memory"]))
    assert config.checkpoint._owner is CkptManager
    assert config.checkpoint.to_dict()["nearer"] == ["memory"]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_save_load_restores_state(tmp_path: Path, mode: str) -> None:
    """It also stands for ``test_async_save_with_pinned_mem_assigns_staging_future``."""
    whole = Job(tmp_path / "whole").run(6)
    first = Job(tmp_path, async_mode=mode)
    assert first.run(3) == whole[:3]
    second = Job(tmp_path, seed=2, async_mode=mode)
    assert second.manager.load()
    assert (second.progress.step, second.loader.position) == (3, 3)
    assert second.states["seen_tokens"] == 1
    assert second.run(6) == whole[3:]
    assert second.parts[0].layer.seen.item() == 6


class Numbers(IterableDataset[int]):
    """A dataset whose position torchtitan's loader saves."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_the_loader_takes_no_number_of_the_restored_generators(tmp_path: Path) -> None:
    def job(seed: int) -> Job:
        loader = ParallelAwareDataloader(Numbers(), dp_rank=0, dp_world_size=1, batch_size=2)
        return Job(tmp_path, seed, loader=loader, keep_latest_k=0)

    def drawn(job: Job) -> list[tuple[list[int], float]]:
        """Return the batch and a random number of each step to the sixth."""
        batches: Iterator[torch.Tensor] = iter(job.loader)
        found: list[tuple[list[int], float]] = []
        while job.progress.step < 6:
            batch = next(batches)
            job.train()
            found.append((batch.tolist(), torch.rand(()).item()))
            job.manager.save(job.progress.step)
        job.manager.close()
        return found

    whole = drawn(job(1))
    second = job(2)
    assert second.manager.load(3)
    assert drawn(second) == whole[3:]


def test_save_and_purge_keeps_last_k_checkpoints(tmp_path: Path) -> None:
    Job(tmp_path, keep_latest_k=2).run(5)
    assert steps_in(tmp_path / "checkpoint") == [4, 5]
    Job(tmp_path / "all", keep_latest_k=0).run(5)
    assert steps_in(tmp_path / "all" / "checkpoint") == [1, 2, 3, 4, 5]


def test_load_returns_false_when_no_checkpoint_folder(tmp_path: Path) -> None:
    assert not Job(tmp_path).manager.load()


def test_explicit_load_step_raises_when_checkpoint_folder_missing(tmp_path: Path) -> None:
    """It also stands for ``test_explicit_load_step_raises_when_checkpoint_step_missing``."""
    with pytest.raises(FileNotFoundError, match="load_step=7"):
        Job(tmp_path).manager.load(7)
    Job(tmp_path).run(2)
    with pytest.raises(FileNotFoundError, match="load_step=7"):
        Job(tmp_path).manager.load(7)


def test_load_finds_latest_and_an_explicit_step(tmp_path: Path) -> None:
    Job(tmp_path).run(3)
    for asked, found in ((-1, 3), (2, 2)):
        job = Job(tmp_path, seed=2)
        assert job.manager.load(asked)
        assert job.progress.step == found
        job.manager.close()


@pytest.mark.parametrize("kind", ["ckpt", "dcp"])
def test_initial_load_path_used_when_folder_has_no_valid_checkpoints(
    tmp_path: Path, kind: str
) -> None:
    source = Job(tmp_path / "source", seed=3)
    source.run(2)
    path = tmp_path / "source" / "checkpoint"
    if kind == "dcp":
        path = tmp_path / "dcp"
        dcp.save(source.parts[0].state_dict(), checkpoint_id=str(path), no_dist=True)
    job = Job(tmp_path, initial_load_path=str(path))
    assert job.manager.load()
    assert torch.equal(job.parts[0].layer.up.weight, source.parts[0].layer.up.weight)
    assert job.progress.step == 0  # only the model was loaded
    job.run(1)
    again = Job(tmp_path, seed=2, initial_load_path=str(path))  # ..._ignored_when_folder_has_...
    assert again.manager.load()
    assert torch.equal(again.parts[0].layer.up.weight, job.parts[0].layer.up.weight)
    assert again.progress.step == 1
    again.manager.close()
    assert not list(path.glob("*ckpt*")), "the source was written to"


def test_initial_load_of_all_of_a_run(tmp_path: Path) -> None:
    Job(tmp_path / "source", seed=3).run(2)
    path = str(tmp_path / "source" / "checkpoint")
    job = Job(tmp_path, initial_load_path=path, initial_load_model_only=False)
    assert job.manager.load()
    assert job.progress.step == 2
    job.manager.close()


def test_interval_respects_interval(tmp_path: Path) -> None:
    job = Job(tmp_path, interval=4, keep_latest_k=0)
    job.run(10, last=True)
    assert steps_in(tmp_path / "checkpoint") == [4, 8, 10]


def test_enable_first_step_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path, interval=4, keep_latest_k=0, enable_first_step_checkpoint=True)
    job.run(5)
    assert steps_in(tmp_path / "checkpoint") == [1, 4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_last_save_model_only_and_initial_load_model_only(tmp_path: Path, dtype: str) -> None:
    job = Job(tmp_path, last_save_model_only=True, export_dtype=dtype)
    job.run(3, last=True)
    root = tmp_path / "checkpoint"
    assert {name.partition("/")[0] for name in names_in(root)} == {"model"}
    exported = Net().to(getattr(torch, dtype))
    with ckpt.CheckpointManager(root) as manager:
        manager.restore({"model": exported}, 3)
    trained = job.parts[0].layer.up.weight
    assert torch.equal(exported.layer.up.weight, trained.to(exported.layer.up.weight.dtype))

    more = Job(tmp_path, seed=2)
    with pytest.raises(RestoreError, match=r"step 3 holds the model alone.*checkpoint\.load_step"):
        more.manager.load()
    assert more.manager.load(2)
    assert more.progress.step == 2
    more.manager.close()


def test_async_save_leaves_no_future_behind(tmp_path: Path) -> None:
    """It replaces ``test_async_save_calls_maybe_wait_for_saving``."""
    job = Job(tmp_path)
    job.train()
    assert job.manager.save(1)
    assert job.manager.save_future is not None
    job.manager.maybe_wait_for_saving()
    assert job.manager.save_future is None
    assert steps_in(tmp_path / "checkpoint") == [1]
    job.manager.maybe_wait_for_saving()
    job.manager.close()


def test_non_persist_buffer_not_saved_and_verify_prefix(tmp_path: Path) -> None:
    Job(tmp_path).run(1)
    names = names_in(tmp_path / "checkpoint")
    assert {"model/layers.0.up.weight", "model/layers.0.seen"} <= names
    assert "optimizer/model/layers.0.up.weight/exp_avg" in names
    assert not [name for name in names if "rope" in name]


def test_load_only_prevents_saving(tmp_path: Path) -> None:
    Job(tmp_path).run(1)
    job = Job(tmp_path, seed=2, load_only=True)
    assert job.manager.load()
    assert not job.manager.save(2, last_step=True)
    job.manager.close()
    assert steps_in(tmp_path / "checkpoint") == [1]


def test_nothing_happens_when_checkpoint_disabled(tmp_path: Path) -> None:
    manager = Job(tmp_path, enable=False).manager
    assert not manager.save(1, last_step=True)
    assert not manager.load()
    manager.maybe_wait_for_saving()
    manager.maybe_wait_for_staging()
    manager.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        {"folder": " "},
        {"interval": 0},
        {"keep_latest_k": 1},
        {"exclude_from_loading": ["model"]},
        {"initial_load_path": "relative"},
        {"last_save_in_hf": True, "last_save_model_only": False},
        {"last_save_in_hf": True, "folder": "s3://bucket/run"},
        {"async_mode": "sometimes"},
    ],
    ids=str,
)
def test_sanity_and_range_checks(wrong: dict[str, Any]) -> None:
    """It also stands for ``test_path_normalization``, ``test_dependency_assertions``,
    ``test_remote_hf_rejected`` and ``test_mode_normalization``.
    """
    upper = CkptManager.Config(async_mode="DISABLED")  # type: ignore[arg-type]
    assert upper.async_mode == "disabled"
    with pytest.raises(ValueError):
        CkptManager.Config(**{"last_save_model_only": True} | wrong)


# -- cases that torchtitan's tests do not have -----------------------------------------------------


def test_exclude_from_loading(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.run(2)
    job = Job(tmp_path, seed=2, exclude_from_loading=["dataloader", "optimizer"])
    assert job.manager.load()
    assert (job.progress.step, job.loader.position) == (2, 0)
    assert not job.optimizers.optimizers[0].state
    assert torch.equal(job.parts[0].layer.up.weight, first.parts[0].layer.up.weight)
    wrong = Job(tmp_path, seed=2, exclude_from_loading=["loader"])
    with pytest.raises(ConfigError, match=r"names \['loader'\]: the state has model, optimizer"):
        wrong.manager.load()
    assert wrong.progress.step == 0


def test_a_seed_checkpoint_gives_the_model_alone(tmp_path: Path) -> None:
    seeded = Job(tmp_path, seed=3)
    seeded.manager.save(0, last_step=True)
    job = Job(tmp_path)
    assert job.manager.load()
    assert torch.equal(job.parts[0].layer.up.weight, seeded.parts[0].layer.up.weight)
    assert job.states["seen_tokens"] == 1
    job.manager.close()


def test_a_step_that_comes_after_the_listing_is_no_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded, later = Job(tmp_path / "run", seed=3), Job(tmp_path / "later", seed=5)
    seeded.manager.save(0, last_step=True)
    later.manager.save(1, last_step=True)
    job = Job(tmp_path / "run")
    listed = job.manager.manager.steps

    def steps() -> list[int]:
        found = listed()
        for folder in (tmp_path / "later" / "checkpoint").glob("step-*"):
            shutil.copytree(folder, tmp_path / "run" / "checkpoint" / folder.name)
        return found

    monkeypatch.setattr(job.manager.manager, "steps", steps)
    assert job.manager.load()
    assert torch.equal(job.parts[0].layer.up.weight, seeded.parts[0].layer.up.weight)
    for each in (seeded, job, later):
        each.manager.close()


@pytest.mark.distributed
def test_all_ranks_load_what_rank_0_finds(tmp_path: Path) -> None:
    assert world(2, WORKER.with_name("titan_listing.py"), tmp_path).count("ALL WELL") == 2


def saved_by_their_manager(base: Path, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> Job:
    theirs = Job(base, enable=False)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    manager = Theirs.Config(enable=True, interval=1, last_save_model_only=False).build(
        dataloader=theirs.loader,
        model_parts=theirs.parts,
        optimizers=theirs.optimizers,
        lr_schedulers=theirs.schedulers,
        states={"train_state": theirs.progress, "seen_tokens": 1},
        sd_adapter=None,
        base_folder=str(base),
    )
    while theirs.progress.step < max(steps):
        theirs.train()
        if theirs.progress.step in steps:
            manager.save(theirs.progress.step)
    manager.close()
    return theirs


def test_a_run_of_their_manager_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder stays as it is, and the steps of ckpt are added to it."""
    theirs = saved_by_their_manager(tmp_path, monkeypatch, {1})
    job = Job(tmp_path, seed=2)
    assert job.manager.load()
    assert job.progress.step == 1
    assert torch.equal(job.parts[0].layer.up.weight, theirs.parts[0].layer.up.weight)
    job.run(2)
    again = Job(tmp_path, seed=3)
    assert again.manager.load()
    assert again.progress.step == 2
    assert (tmp_path / "checkpoint" / "step-1" / ".metadata").exists()
    again.manager.close()


@pytest.mark.parametrize("exclusions", [[], ["dataloader"]])
def test_a_run_that_went_back_goes_on_with_its_new_branch(
    tmp_path: Path, exclusions: list[str]
) -> None:
    """Also if it does not take all of the step."""
    Job(tmp_path, keep_latest_k=0).run(6)
    back = Job(tmp_path, seed=2, interval=2, keep_latest_k=0, exclude_from_loading=exclusions)
    assert back.manager.load(2)
    back.states["seen_tokens"] = 9
    back.run(5)  # Saves step 4 again
    assert steps_in(tmp_path / "checkpoint") == [1, 2, 4]
    last = Job(tmp_path, seed=4)
    assert last.manager.load()
    assert (last.progress.step, last.states["seen_tokens"]) == (4, 9)
    last.manager.close()


def test_a_run_that_went_back_before_a_step_of_their_manager_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Job(tmp_path, keep_latest_k=0).run(3)
    saved_by_their_manager(tmp_path, monkeypatch, {6})
    back = Job(tmp_path, seed=2)
    assert back.manager.load(2)
    assert "holds step 6 of torchtitan's own manager" in caplog.text
    back.manager.close()


def test_a_run_goes_back_to_a_step_of_their_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_by_their_manager(tmp_path, monkeypatch, {2, 4})
    first = Job(tmp_path, seed=2, keep_latest_k=0)
    assert first.manager.load()
    first.run(7)
    back = Job(tmp_path, seed=3, keep_latest_k=0)
    assert back.manager.load(4)
    back.run(5)
    assert "holds step 7, and this job continues from step 4" in caplog.text, "no rollback began"


def test_a_step_that_is_missing_is_answered_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by_their_manager(tmp_path, monkeypatch, {1})
    job = Job(tmp_path)
    assert job.manager.load()
    job.run(3)
    with pytest.raises(FileNotFoundError, match=r"load_step=7 .*: it has the steps 1, 2, 3$"):
        Job(tmp_path).manager.load(7)


def test_the_parts_of_a_pipeline_rank_keep_their_optimizers_apart(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", parts=2).run(4)
    Job(tmp_path, parts=2).run(2)
    root = tmp_path / "checkpoint"
    assert {
        "optimizer/AdamW/model/layers.0.up.weight/exp_avg",
        "optimizer/AdamW_1/model/layers.1.up.weight/exp_avg",
    } <= names_in(root)
    job = Job(tmp_path, seed=2, parts=2)
    assert job.manager.load()
    assert job.run(4) == whole[2:]


def test_tiers_in_front_of_the_folder(tmp_path: Path) -> None:
    job = Job(tmp_path, nearer=["memory", "near"], settings={"on_error": "warn"})
    job.run(3)
    assert steps_in(tmp_path / "checkpoint") == [2, 3]
    assert len(list((tmp_path / "near").glob("step-*"))) == 2
    with pytest.raises(ConfigError, match="on_eror"):
        Job(tmp_path, settings={"on_eror": "warn"})


@pytest.mark.server
def test_a_remote_folder(tmp_path: Path, moto_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET)
    folder = f"s3://bucket/{tmp_path.name}"
    Job(tmp_path, folder=folder).run(2)
    job = Job(tmp_path, seed=2, folder=folder)
    assert job.manager.load()
    assert job.progress.step == 2
    job.manager.close()
    assert not list(tmp_path.iterdir())


def test_the_command_line_reaches_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ModuleType("recipe")
    recipe.run = lambda: Trainer.Config(checkpoint=CkptManager.Config(enable=True))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    words = ["--module", "recipe", "--config", "run", "--checkpoint.folder", "gs://bucket/run"]
    found = ConfigManager().parse_args([*words, "--checkpoint.nearer", "memory,/nvme/run"])
    assert isinstance(found.checkpoint, CkptManager.Config)
    assert found.checkpoint.folder == "gs://bucket/run"
    assert found.checkpoint.nearer == ["memory", "/nvme/run"]


def test_the_lines_of_the_page_choose_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "integrations" / "torchtitan.md").read_text()
    (lines,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    recipe = ModuleType("recipe")
    exec(lines, vars(recipe))
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    found = ConfigManager().parse_args(["--module", "recipe", "--config", "run"])
    assert isinstance(found.checkpoint, CkptManager.Config)
    assert (found.checkpoint.folder, found.checkpoint.enable) == ("s3://bucket/run42", True)
    assert found.training.steps > found.checkpoint.interval


def test_another_number_of_ranks_is_refused_with_the_way_out() -> None:
    assert callable(door._REFUSE_RESIZE)
    with pytest.raises(ConfigError, match="exclude_from_loading"):
        door._REFUSE_RESIZE(0, 2, 4)
    assert [same_or_first(rank, 3, 2) for rank in range(3)] == [0, 1, 0]


# -- the trainer -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("titan")
    assets(made)
    return made


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_of_fsdp2_killed_in_mid_save_have_the_losses_of_their_own_manager(
    folder: Path,
) -> None:
    lives = [
        word
        for life in ("whole", "killed", "resumed")
        for word in ("--", "--standalone", "--nproc-per-node=2", WORKER, folder, life)
    ]
    done = processes.run(
        [sys.executable, "-W", "ignore", WARM, (log := folder / "log"), *lives[1:]],
        env=os.environ | TORCHRUN,
        stderr=None,
        timeout=280,
    )
    assert done.stdout == "ended 0 0\nended 1 -9\nended 2 0\n", log.read_text()[-6000:]
    attempts = list((folder / "CkptManager").glob("step-000000006.*"))
    # what the killed job had begun of it may have been removed by now
    assert [(each / "manifest.json").exists() for each in attempts].count(True) == 1
    for rank in range(2):
        whole = json.loads((folder / f"whole-{rank}.json").read_text())
        resumed = json.loads((folder / f"resumed-{rank}.json").read_text())
        assert len(whole) == 7
        assert resumed == {step: loss for step, loss in whole.items() if int(step) > 4}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_waiting_raises_only_errors_that_end_the_training(tmp_path: Path, on_error: Any) -> None:
    """A skipped save, and with ``on_error="warn"`` a save that has failed, were logged."""
    root = tmp_path / "root"
    manager = ckpt.CheckpointManager(ckpt.Tier(str(root), every=2), on_error=on_error)
    root.write_text("a file in the place of the folder")
    for step in (1, 2):
        job: Any = SimpleNamespace(save_future=manager.save_async({"step": step}, step))
        fails = on_error == "raise" and step == 2
        with pytest.raises(CkptError, match=str(root)) if fails else nullcontext():
            CkptManager._wait_for_saving(job)
        assert job.save_future is None
    manager.close()
