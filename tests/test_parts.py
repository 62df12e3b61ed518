"""Saving a part of a state: patterns, the trained part of a model, and what a restore does then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager
from ckpt.catalog.step_listing import committed
from ckpt.errors import ConfigError, EntryMissing, RestoreError
from ckpt.storage.registry import open_backend
from tests.distributed.launch import WORKERS
from tests.kit.damage import flip
from tests.kit.jobs import job, train, values
from tests.kit.marks import torture
from tests.kit.worlds import world


def stored(root: Path, step: int) -> set[str]:
    """Return the names of the tensors that a step has."""
    with ckpt.open(root, step=step) as opened:
        return set(opened.names())


def nbytes(root: Path, step: int) -> int:
    with ckpt.open(root, step=step) as opened:
        return sum(opened.tensor(name).nbytes for name in opened.names())


def assert_taken(now: dict[str, Any], saved: Any, before: Any, names: set[str]) -> None:
    """Check that ``names`` have the values that were saved, and all others those of before."""
    for name, value in values(now).items():
        assert torch.equal(value, (saved if name in names else before)[name]), name


@pytest.mark.parametrize(
    ("only", "exclude", "in_it", "not_in_it"),
    [
        ("model", None, ["model/0.base.weight", "model/2.running_mean"], ["optimizer/", "data/"]),
        ("model/*lora*", None, ["model/0.lora_a.weight"], ["model/0.base", "optimizer/"]),
        (
            ["*lora*"], None,
            ["model/1.lora_b.weight", "optimizer/model/1.lora_b.weight/exp_avg"],
            ["model/0.base", "model/2.", "optimizer/model/2.", "data/"],
        ),
        (
            None, ["model/0.*", "data/order"],
            ["model/1.lora_a.weight", "optimizer/model/1.lora_a.weight/exp_avg"],
            ["model/0.", "optimizer/model/0.", "data/"],
        ),
        (
            ["model", "optimizer"], "*.lora_a.*",
            ["model/0.lora_b.weight", "optimizer/model/0.lora_b.weight/exp_avg"],
            ["model/0.lora_a", "optimizer/model/0.lora_a", "data/"],
        ),
        ("optimizer", None, ["optimizer/model/2.weight/exp_avg"], ["model/", "data/"]),
        ("data/order", None, ["data/order"], ["model/", "optimizer/"]),
    ],
)  # fmt: skip
def test_a_part_is_saved_and_a_restore_of_all_names_what_it_left_alone(
    tmp_path: Path, only: Any, exclude: Any, in_it: list[str], not_in_it: list[str]
) -> None:
    state = job(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1, only=only, exclude=exclude)
    names = stored(tmp_path, 1)
    assert names.issuperset(in_it)
    assert not [name for name in names if name.startswith(tuple(not_in_it))]
    other = job(2)
    before = values(other)
    with CheckpointManager(tmp_path) as manager:
        report = manager.restore(other)
    assert report is not None
    assert report.missing == ()
    assert_taken(other, values(state), before, names)
    alone = values(other).keys() - names
    left = report.left_alone
    assert all(
        name in left or name.startswith(tuple(f"{each}/" for each in left)) for name in alone
    )
    assert not set(left) & names


@pytest.mark.parametrize("lacks", ["left out", "missing"])
def test_what_a_damaged_step_has_overwritten_does_not_count_as_left_alone(
    tmp_path: Path, lacks: str
) -> None:
    def new(value: float, *names: str) -> dict[str, Any]:
        return {name: torch.full((300_000,), value) for name in names}

    with CheckpointManager(tmp_path) as manager:
        if lacks == "left out":
            manager.save(new(1.0, "a", "b", "c"), 1, only="a")
        else:
            manager.save(new(1.0, "a"), 1)
        manager.save(new(2.0, "a", "b"), 2)
        (file,) = tmp_path.glob("step-000000002.*/rank-*.safetensors")
        flip(file)
        state = new(0.0, "a", "b", "c")
        with pytest.raises(RestoreError, match=r"step 1 lacks 'b', .*\(step 2: ") as caught:
            manager.restore(state, strict=False)
        assert "no step is intact" not in str(caught.value)
        state = new(0.0, "a", "b", "c")
        report = manager.restore(state, step=1, strict=False)
    assert report is not None
    assert sorted(report.left_alone + report.missing) == ["b", "c"]
    assert [state[name][0].item() for name in "abc"] == [1.0, 0.0, 0.0]


def test_a_name_that_no_step_has_does_not_stand_in_the_way_of_an_older_part(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            state = {"a": torch.full((300_000,), float(step)), "b": torch.zeros(2)}
            manager.save(state, step, only="a")
        (file,) = tmp_path.glob("step-000000002.*/rank-*.safetensors")
        flip(file)
        report = manager.restore(state)
    assert report is not None
    assert (report.step, report.left_alone) == (1, ("b",))


def test_plain_values_and_settings_are_parted_too(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(job(1), 1, exclude=["data/seen", "model/0.*"])
        other = job(2)
        report = manager.restore(other)
    assert report is not None
    assert "data/seen" in report.left_alone
    assert other["data"]["seen"] == 2
    assert other["data"]["log"] == [1]
    assert other["step"] == 1
    assert other["optimizer"].param_groups[0]["lr"] == 0.01


def test_a_pattern_that_fits_any_name_of_one_character_leaves_the_longer_ones(
    tmp_path: Path,
) -> None:
    """A name without an optimizer is not a name of a parameter, which the pattern could exclude."""
    with CheckpointManager(tmp_path) as manager:
        manager.save({"w": torch.ones(3), "long": torch.ones(4)}, 1, exclude="?")
        assert stored(tmp_path, 1) == {"long"}


def test_a_state_dict_is_parted_as_a_dict_is(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": model.state_dict()}, 1, only="model/weight")
        manager.save({"model": model.state_dict()}, 2, exclude="*bias")
        found = [stored(tmp_path, step) for step in (1, 2)]
    assert found == [{"model/weight"}] * 2


def test_what_a_save_did_not_leave_out_must_still_be_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(job(1), 1, only=["model/*lora*", "step"])
        other = job(2)
        other["model"].add_module("lora_new", nn.Linear(2, 2))
        with pytest.raises(EntryMissing, match=r"model/lora_new\.weight"):
            manager.restore(other)


def test_a_pattern_that_fits_no_name_is_an_error_and_nothing_is_saved(tmp_path: Path) -> None:
    state = job(1)
    with CheckpointManager(tmp_path) as manager:
        unknown: list[dict[str, Any]] = [
            {"only": "modle"},
            {"only": ["model", "data/order/x"]},
            {"exclude": "mdl"},
        ]
        for patterns in unknown:
            with pytest.raises(ConfigError, match=r"no name of the state fits .*; it has 'model'"):
                manager.save_async(state, 1, **patterns)
        wrong: list[dict[str, Any]] = [{"only": []}, {"exclude": [3]}, {"only": ""}]
        for patterns in wrong:
            with pytest.raises(ConfigError, match="give names or patterns"):
                manager.save_async(state, 1, **patterns)
        assert manager.steps() == []
        manager.save(state, 1)  # the manager still works
        assert manager.steps() == [1]


@pytest.mark.timeout(400)  # a hundred real saves, which may run on a busy machine
@pytest.mark.parametrize("saves", [24, *torture(100)])
def test_saves_whose_patterns_alternate_are_each_of_their_own_part(
    tmp_path: Path, saves: int
) -> None:
    state = job(1)
    kinds: list[dict[str, Any]] = [
        {"only": "*lora*"},
        {},
        {"exclude": "optimizer"},
        {"only": "model"},
    ]
    expected: dict[int, dict[str, torch.Tensor]] = {}
    with CheckpointManager(tmp_path) as manager:
        for step in range(saves):
            train(state)
            expected[step] = values(state)
            manager.save_async(state, step, **kinds[step % 4])
            if step == saves // 2:
                state["model"][0].half()  # the structure may change at the same time
                state["model"][0].float()
    sizes = {nbytes(tmp_path, step) for step in range(saves)}
    assert len(sizes) == 4
    with CheckpointManager(tmp_path) as manager:
        for step in range(saves - 7, saves):
            other = job(2)
            before = values(other)
            report = manager.restore(other, step)
            assert report is not None
            assert_taken(other, expected[step], before, stored(tmp_path, step))


def test_the_trained_part_of_a_model_is_what_requires_a_gradient(tmp_path: Path) -> None:
    state = job(1)
    part = state | {"model": ckpt.trainable(state["model"])}
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1)
        manager.save(part, 2)
        train(state)
        manager.save(part, 3)
    names = stored(tmp_path, 3)
    assert names == stored(tmp_path, 2)
    assert {name for name in names if name.startswith("model/")} == {
        *(f"model/{i}.lora_{each}.weight" for i in (0, 1) for each in "ab"),
        *(f"model/2.{each}" for each in ("weight", "bias", "running_mean", "running_var")),
        "model/2.num_batches_tracked",
    }
    assert "optimizer/model/0.lora_a.weight/exp_avg" in names
    saved = values(state)
    for other, other_state in ((job(2), False), (job(3), True)):
        before = values(other)
        target = other | ({"model": ckpt.trainable(other["model"])} if other_state else {})
        with CheckpointManager(tmp_path) as manager:
            report = manager.restore(target)
        assert report is not None
        assert_taken(other, saved, before, names)
        base = {f"model/{i}.base.{each}" for i in (0, 1) for each in ("weight", "bias")}
        assert base.issubset(report.left_alone) != other_state


def test_a_trained_part_restores_from_a_whole_model(tmp_path: Path) -> None:
    state, other = job(1), job(2)
    before = values(other)
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1)
        manager.restore(other | {"model": ckpt.trainable(other["model"])})
    assert_taken(other, values(state), before, {
        name for name in before if ".base." not in name and ".norm." not in name
    })  # fmt: skip


def test_a_parameter_that_is_trained_from_now_on_is_saved_from_now_on(tmp_path: Path) -> None:
    state = job(1)
    part = {"model": ckpt.trainable(state["model"])}
    with CheckpointManager(tmp_path) as manager:
        manager.save(part, 1)
        state["model"][0].base.requires_grad_(True)
        manager.save(part, 2)
        state["model"][0].lora_a.requires_grad_(False)
        manager.save(part, 3)
    assert stored(tmp_path, 2) - stored(tmp_path, 1) == {"model/0.base.weight", "model/0.base.bias"}
    assert stored(tmp_path, 2) - stored(tmp_path, 3) == {"model/0.lora_a.weight"}
    other = job(2)
    with CheckpointManager(tmp_path) as manager, pytest.raises(EntryMissing, match="optimizer"):
        manager.restore(other)  # nothing of it was left out, since it was not in the state


def test_a_trained_part_writes_the_bytes_of_the_adapter(tmp_path: Path) -> None:
    state = job(1, width=512)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": state["model"]}, 1)
        manager.save({"model": ckpt.trainable(state["model"])}, 2)
        manager.save({"model": state["model"]}, 3, only="model/*lora*")
    assert nbytes(tmp_path, 1) > 2_000_000
    assert nbytes(tmp_path, 2) < 50_000
    assert nbytes(tmp_path, 3) < 50_000


def test_trained_tensors_are_still_copied_while_training_goes_on(tmp_path: Path) -> None:
    """A step of an optimizer that is left out waits for the copies of its parameters too."""
    state = job(1, width=256)
    with CheckpointManager(tmp_path) as manager:
        for step in range(20):
            expected = values(state)
            pending = manager.save_async(state, step, only="model")
            train(state)
            pending.result()
            with ckpt.open(tmp_path, step=step) as opened:
                for name in opened.names():
                    assert torch.equal(opened.tensor(name)[...], expected[name]), name


def test_bad_arguments_of_trainable() -> None:
    with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
        ckpt.trainable(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ConfigError, match="give a module"):
        ckpt.trainable([1])  # type: ignore[arg-type]


def test_the_patterns_are_no_name_of_the_user_s_metadata(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="left_out"):
        CheckpointManager(tmp_path, metadata={"left_out": 1})


@pytest.mark.distributed
def test_two_ranks_under_fsdp2_save_a_part(tmp_path: Path) -> None:
    assert "ALL WELL" in world(2, WORKERS / "parts.py", tmp_path)
    backend = open_backend(str(tmp_path))
    assert [ref.step for ref in committed(backend)] == [5, 3, 2, 1]
    backend.close()
