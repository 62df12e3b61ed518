from __future__ import annotations

import gc
import logging
import pickle
import uuid
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt.storage.tiers
from ckpt import CheckpointManager, PerRank, RngState
from ckpt.cli.main import main
from ckpt.errors import (
    ConfigError,
    NoCheckpoint,
    OutOfSpace,
    RestoreError,
    StorageError,
    TransientStorageError,
)
from ckpt.events import Event, StepDamaged
from ckpt.model.readable import rate
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.kit.damage import cut, empty, files, flip, garbage
from tests.kit.states import assert_is, blank, state_of
from tests.overlap.jobs import job, train, trained


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3."""
    with CheckpointManager(tmp_path / "run", chunk_size=4096) as manager:
        for step in (1, 2, 3):
            manager.save(state_of(step))
    return tmp_path / "run"


def test_the_newest_step_is_restored_and_the_report_says_what_it_took(root: Path) -> None:
    target = blank()
    with CheckpointManager(root) as manager:
        report = manager.restore(target)
    assert report is not None
    assert_is(target, 3)
    assert (report.step, report.skipped, report.saved_world_size) == (3, (), 1)
    assert report.nbytes == (3000 + 2000) * 4 <= report.read_bytes
    assert report.seconds > 0
    assert report.gigabytes_per_second == pytest.approx(report.nbytes / report.seconds / 1e9)
    assert report.tier.endswith("run")


def test_the_log_says_where_from_how_much_and_how_fast(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(root) as manager, caplog.at_level(logging.INFO, "ckpt"):
        report = manager.restore(blank())
    assert report is not None
    [line] = [record.getMessage() for record in caplog.records if "restored" in record.getMessage()]
    assert f"step 3 from {root}" in line
    assert rate(report.nbytes, report.seconds) in line


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_the_garbage_collector_is_left_as_it_was(root: Path, collecting: bool, fits: bool) -> None:
    target = blank() if fits else {"x": torch.zeros(1)}
    was = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with (
            CheckpointManager(root) as manager,
            nullcontext() if fits else pytest.raises(RestoreError),
        ):
            manager.restore(target)
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if was else gc.disable)()


def test_any_step_can_be_asked_for(root: Path) -> None:
    target = blank()
    with CheckpointManager(root) as manager:
        for step in (2, 1, 3):
            manager.restore(target, step)
            assert_is(target, step)
        with pytest.raises(NoCheckpoint, match="step 7 is not there"):
            manager.restore(target, 7)
    assert_is(target, 3)


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a byte of the data": ("data", flip),
    "the first byte of a tensor": ("data", lambda path: flip(path, 4096)),
    "data cut": ("data", cut),
    "data empty": ("data", empty),
    "data gone": ("data", Path.unlink),
    "a byte of the manifest": ("manifest", flip),
    "the manifest's first byte": ("manifest", lambda path: flip(path, 0)),
    "manifest cut": ("manifest", cut),
    "manifest garbage": ("manifest", garbage),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_step_gives_way_to_the_one_before(
    root: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    what, harm = DAMAGES[damage]
    harm(files(root, 3)[what])
    reported: list[Event] = []
    target = blank()
    with (
        CheckpointManager(root, observers=[reported.append]) as manager,
        caplog.at_level(logging.WARNING, "ckpt"),
    ):
        report = manager.restore(target)
        assert report is not None
        assert_is(target, 2)
        assert [step for step, _ in report.skipped] == [3]
        assert report.skipped[0][1]
        assert "step 3" in caplog.text
        assert [event.step for event in reported if isinstance(event, StepDamaged)] == [3]
        # a step that is requested by number has no substitute
        with pytest.raises(NoCheckpoint, match="step 3"):
            manager.restore(target, 3)


@pytest.mark.parametrize("harm", [Path.unlink, empty], ids=["gone", "empty"])
def test_a_step_without_its_manifest_was_never_a_checkpoint(
    root: Path, harm: Callable[[Path], None]
) -> None:
    harm(files(root, 3)["manifest"])
    target = blank()
    with CheckpointManager(root) as manager:
        assert manager.steps() == [1, 2]
        report = manager.restore(target)
        assert report is not None
        assert report.skipped == ()
        with pytest.raises(NoCheckpoint):
            manager.restore(target, 3)
    assert_is(target, 2)


@pytest.mark.parametrize(
    "harm", [flip, cut, empty, Path.unlink], ids=["flip", "cut", "empty", "gone"]
)
def test_a_step_whose_fragment_is_damaged_is_passed_over(
    root: Path, harm: Callable[[Path], None]
) -> None:
    """The fragment says what is in the data file, so its loss is that of the file."""
    harm(files(root, 3)["fragment"])
    target = blank()
    with CheckpointManager(root) as manager:
        report = manager.restore(target)
    assert report is not None
    assert (report.step, [step for step, _ in report.skipped]) == (2, [3])
    assert_is(target, 2)


def test_a_flipped_byte_anywhere_in_the_data_of_a_tensor_is_found(root: Path) -> None:
    path = files(root, 3)["data"]
    whole = path.read_bytes()
    for position in range(4096, len(whole), 997):
        path.write_bytes(whole)
        flip(path, position)
        target = blank()
        with CheckpointManager(root) as manager:
            report = manager.restore(target)
        assert report is not None
        assert report.step == 2, position
        assert_is(target, 2)


def test_a_damaged_step_that_was_asked_for_is_named_and_no_other_is_tried(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(files(root, 2)["data"])
    with (
        CheckpointManager(root) as manager,
        pytest.raises(NoCheckpoint, match=r"step 2 is not intact \(step 2: checksum mismatch"),
    ):
        manager.restore(blank(), step=2)
    assert "is tried" not in caplog.text


def test_when_all_are_damaged_the_error_says_so_for_each(root: Path) -> None:
    for step in (1, 2, 3):
        flip(files(root, step)["data"])
    target = blank()
    with (
        CheckpointManager(root) as manager,
        pytest.raises(NoCheckpoint, match="no step is intact") as error,
    ):
        manager.restore(target)
    for step in (1, 2, 3):
        assert f"step {step}: checksum mismatch" in str(error.value)
    assert target["step"] == -1  # plain values are set last


def test_after_a_fall_back_the_damaged_step_may_be_saved_again(root: Path) -> None:
    flip(files(root, 3)["data"])
    target = blank()
    with CheckpointManager(root) as manager:
        manager.restore(target)
        manager.save(state_of(3))
    with CheckpointManager(root) as manager:
        report = manager.restore(target)
        assert report is not None
        assert report.skipped == ()
    assert_is(target, 3)


def test_nothing_to_restore_is_none_and_creates_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "empty"):
        if path.name == "empty":
            path.mkdir()
        with CheckpointManager(path) as manager:
            assert manager.restore(blank()) is None
            assert manager.steps() == []
            assert manager.latest_step() is None
            with pytest.raises(NoCheckpoint):
                manager.restore(blank(), 1)
    assert not (tmp_path / "missing").exists()


def test_the_log_names_the_places_in_which_nothing_was_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A root with a typing error looks like a first start, which is normal."""
    near, far = tmp_path / "runs" / "gtp", tmp_path / "far"
    with CheckpointManager([near, far]) as manager, caplog.at_level(logging.INFO, "ckpt"):
        assert manager.restore(blank()) is None
        [reported] = [record for record in caplog.records if "restored" in record.message]
        assert reported.levelno == logging.INFO
        assert reported.message == (
            f"ckpt: nothing is restored: there is no checkpoint in {near}, {far}"
        )


def test_the_folder_of_a_step_is_no_root_and_the_error_names_the_root(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [folder] = root.glob("step-000000002.*")
    for given in (folder, f"{folder}/", f"file://{folder}"):
        place = str(given).rstrip("/").rpartition("/")[0]
        reported = f"is the folder of step 2, and not a root: give {place}, and the step as 2"
        with pytest.raises(ConfigError, match=reported):
            CheckpointManager(given)
        with pytest.raises(ConfigError, match=reported):
            ckpt.open(given)
        monkeypatch.setattr("sys.argv", ["ckpt", "show", str(given)])
        assert main() == ConfigError.exit_code
        assert reported in capsys.readouterr().err
    monkeypatch.chdir(root)
    with pytest.raises(ConfigError, match=r"give \., and"):
        CheckpointManager(folder.name)


def test_a_tier_that_cannot_be_listed_is_an_error_not_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training that starts from nothing because a store was down for a minute would be lost."""
    rules = [Rule(verb="folders", fault=Raise(OutOfSpace))]
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: FaultyBackend(open_backend(url, options), rules),
    )
    with CheckpointManager(f"memory://{uuid.uuid4().hex}") as manager, pytest.raises(StorageError):
        manager.restore(blank())


def test_a_store_that_stumbles_while_it_is_read_is_asked_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [
        Rule(verb="read_into", key="manifest", nth=1, fault=Raise(TransientStorageError)),
        Rule(verb="read_into", key="safetensors", nth=1, fault=Raise(TransientStorageError)),
        Rule(verb="folders", nth=1, fault=Raise(TransientStorageError)),
    ]
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: FaultyBackend(open_backend(url, options), rules),
    )
    target = blank()
    with CheckpointManager(root) as manager:
        report = manager.restore(target)
        assert report is not None
        assert report.skipped == ()
    assert_is(target, 3)


def test_nothing_is_ever_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
        return {
            "m": model,
            "o": optimizer,
            "s": scheduler,
            "rng": PerRank(RngState()),
            "misc": [1, (2, b"x")],
        }

    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("something was unpickled")

    root = tmp_path / "run"
    state = job(0)
    for module, name in [
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
        (torch.serialization, "load"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
    target = job(1)
    with CheckpointManager(root) as manager:
        manager.restore(target)
    assert torch.equal(target["m"][0].weight, state["m"][0].weight)
    for command in (
        ["ls"],
        ["show", "1"],
        ["verify"],
        ["restore", "--latest", "--to", str(tmp_path / "there")],
    ):
        monkeypatch.setattr("sys.argv", ["ckpt", *command, "--root", str(root)])
        code = main()
        assert code == 0, (command, capsys.readouterr())


def large(step: int) -> dict[str, Any]:
    """Return tensors that are read straight into their place.

    They have whole chunks, odd lengths, and one has many chunks.
    """
    generator = torch.Generator().manual_seed(step)
    numbers = torch.randint(0, 256, (4_000_003,), dtype=torch.uint8, generator=generator)
    return {
        "one": numbers[:700_001].clone(),
        "half": numbers[: 2 * 600_007].view(torch.bfloat16).clone(),
        "many": numbers.clone(),
        "grid": numbers[:3_000_000].view(1000, 3000).clone(),
    }


def somewhere(like: dict[str, Any], odd: int) -> dict[str, Any]:
    """Return the same shapes in memory that begins ``odd`` bytes behind where tensors
    usually do.
    """
    return {
        name: torch.full((tensor.nbytes + odd,), 7, dtype=torch.uint8)[odd:]
        .view(tensor.dtype)
        .view(tensor.shape)
        for name, tensor in like.items()
    }


@pytest.mark.parametrize("odd", [0, 2, 64, 448, 4032])
def test_large_tensors_land_bit_for_bit_at_any_address(tmp_path: Path, odd: int) -> None:
    with CheckpointManager(tmp_path / "run", chunk_size=1 << 20) as manager:
        manager.save(large(1), 1)
        target = somewhere(large(1), odd)
        manager.restore(target)
    for name, tensor in large(1).items():
        assert torch.equal(target[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("position", [4096, 4096 + 700_000, 2_000_000, -1])
def test_a_damaged_large_chunk_gives_way_to_the_step_before(tmp_path: Path, position: int) -> None:
    """By then the target has bytes of the damaged one. All of them are replaced."""
    root = tmp_path / "run"
    with CheckpointManager(root, chunk_size=1 << 20) as manager:
        for step in (1, 2):
            manager.save(large(step), step)
    flip(files(root, 2)["data"], position)
    target = somewhere(large(1), 64)
    with CheckpointManager(root) as manager:
        with pytest.raises(NoCheckpoint, match="checksum mismatch"):
            manager.restore(target, 2)
        report = manager.restore(target)
    assert report is not None
    assert [step for step, _ in report.skipped] == [2]
    for name, tensor in large(1).items():
        assert torch.equal(target[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_tensors_that_a_restore_makes_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    state, fresh = trained(), job(seed=5)
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, 1)
        with torch.inference_mode():
            manager.restore(fresh)
    for one in (state, fresh):
        train(one, 2)
    pairs = zip(state["model"].parameters(), fresh["model"].parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("fits", [True, False])
def test_the_manager_keeps_nothing_of_a_state_that_is_evaluated_or_does_not_fit(
    tmp_path: Path, fits: bool
) -> None:
    def restored(manager: CheckpointManager) -> weakref.ref[nn.Module]:
        """Return the model that the call does not need any more."""
        model = nn.Linear(4 if fits else 5, 4)
        state: dict[str, Any] = {"model": model}
        if not fits:
            state["optimizer"] = torch.optim.AdamW(model.parameters())
        with nullcontext() if fits else suppress(RestoreError):
            manager.restore(state)
        return weakref.ref(model)

    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"model": model, "optimizer": optimizer}, 1, only="model" if fits else None)
    with CheckpointManager(tmp_path / "run") as manager:
        model_ref = restored(manager)
        gc.collect()
        assert model_ref() is None
