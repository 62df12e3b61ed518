"""A follower has each version of the weights bit for bit, and reads only what it lacks."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager, LocalShards, Tier
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    EntryMissing,
    NoCheckpoint,
    StorageError,
    TransientStorageError,
)
from ckpt.exchange.weights import follow as module
from ckpt.exchange.weights.follow import Follower, Version
from ckpt.root.pins import all_pins
from ckpt.save import delta_writer
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.coordination.world import World
from tests.exchange.weights.trainer import Trainer, digest, update, weights_of
from tests.kit.damage import files, flip
from tests.servers import Server


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return weights_of(1)


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[Follower]:
    with follow(tmp_path / "run") as versions:
        yield versions


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", deltas="model") as manager:
        yield manager


def follow(root: Any, **options: Any) -> Follower:
    return ckpt.follow(root, poll_seconds=0.01, timeout_seconds=0.05, **options)


AWAY = Raise(TransientStorageError)


class Switch:
    """A store whose faults end when it is mended."""

    def __init__(self, url: str, *rules: Rule) -> None:
        self.store = open_backend(url)
        self.current: StorageBackend = FaultyBackend(self.store, rules)

    def mend(self) -> None:
        self.current = self.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


def is_idle(versions: Follower) -> bool:
    """Return True if there is no new version."""
    with pytest.raises(NoCheckpoint):
        next(versions)
    return True


def saved(manager: CheckpointManager, weights: dict[str, torch.Tensor], step: int) -> str:
    """Save the next version of the weights, and return its digest."""
    update(weights, step, 1)
    manager.save({"model": weights, "other": torch.full((1000,), float(step))}, step)
    return digest(weights)


def test_a_version_is_read_as_a_whole_and_the_next_one_as_a_difference(
    manager: CheckpointManager, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    content = saved(manager, weights, 1)
    first = next(versions)
    assert (first.step, first.base_step, digest(first.weights)) == (1, None, content)
    assert first.read_bytes == first.nbytes == sum(value.nbytes for value in weights.values())
    assert first.changes == weights.keys()
    next_content = saved(manager, weights, 2)
    second = next(versions)
    assert (second.step, second.base_step, digest(second.weights)) == (2, 1, next_content)
    assert 0 < second.read_bytes < 0.05 * second.nbytes
    assert digest(first.weights) == content


def test_the_versions_between_are_passed_over(
    manager: CheckpointManager, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    saved(manager, weights, 1)
    next(versions)
    for step in (2, 3, 4):
        content = saved(manager, weights, step)
    version = next(versions)
    assert (version.step, version.base_step, digest(version.weights)) == (4, 1, content)
    assert 0 < version.read_bytes < 0.15 * version.nbytes


def test_what_is_equal_is_not_read(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with CheckpointManager(tmp_path) as manager, follow(tmp_path) as versions:
        saved(manager, weights, 1)
        next(versions)
        weights["layer1.weight"] += 1
        manager.save({"model": weights}, 2)
        version = next(versions)
    assert version.changes == {"layer1.weight"}
    assert version.read_bytes == weights["layer1.weight"].nbytes
    assert digest(version.weights) == digest(weights)


def test_a_job_without_deltas_is_followed_by_chunks(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    with CheckpointManager(tmp_path) as manager, follow(tmp_path) as versions:
        for step in (1, 2):
            content = saved(manager, weights, step)
            version = next(versions)
            assert (version.read_bytes, digest(version.weights)) == (version.nbytes, content)


def test_a_module_is_followed_with_its_tied_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with CheckpointManager(tmp_path) as manager, follow(tmp_path) as versions:
        manager.save({"model": model}, 1)
        version = next(versions)
    assert version.changes == {"0.weight", "1.weight"}
    assert version.weights["0.weight"] is version.weights["1.weight"]
    assert version.nbytes == 64


@pytest.mark.parametrize("name", [None, "other", "model/layer0.weight"])
def test_any_part_is_followed(
    tmp_path: Path, weights: dict[str, torch.Tensor], name: str | None
) -> None:
    with CheckpointManager(tmp_path) as manager, follow(tmp_path, name=name) as versions:
        for step in (1, 2):
            saved(manager, weights, step)
            version = next(versions)
            value = ckpt.load(tmp_path, name)
            if name is None:
                assert version.weights.keys() == value.keys()
                assert version.changes >= {"other", "model/layer0.weight"}
            else:
                assert torch.equal(version.weights, value)


FIFTY = [(None, 1, 10), (8, 9, 12), (18, 19, 10), (26, 27, 8), (31, 32, 10)]
FEW = [(None, 1, 2), (1, 2, 2), (2, 3, 1), (2, 3, 2), (3, 4, 2)]


@pytest.mark.parametrize("plan", [FEW, pytest.param(FIFTY, marks=pytest.mark.torture)])
def test_each_version_is_equal_while_the_job_dies_and_goes_back(
    tmp_path: Path, plan: list[tuple[int | None, int, int]]
) -> None:
    """Three jobs are killed after a step, and the next one resumes from an earlier one. The fourth
    one goes back by itself. Each item of ``plan`` has the step to restore, the first step to save
    then, and how many.
    """
    root, shares = str(tmp_path / "run"), list[float]()
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(Trainer([root], branch, step, deltas="model"))
            for branch, (step, _, _) in enumerate(plan[:-1])
        ]  # Before the follower, since its threads would not be in the children
        versions = stack.enter_context(ckpt.follow(root, poll_seconds=0.01, timeout_seconds=60))

        def check(trainer: Trainer, first: int, count: int) -> None:
            for step in range(first, first + count):
                number, content = trainer.save()
                version = next(versions)
                assert (version.step, number) == (step, step)
                assert digest(version.weights) == content
                shares.append(version.read_bytes / version.nbytes)

        for trainer, (_, first, count) in zip(trainers, plan, strict=False):
            check(trainer, first, count)
            if trainer is not trainers[-1]:
                trainer.kill()
        step, first, count = plan[-1]
        assert step is not None
        trainers[-1].go_back(step)
        check(trainers[-1], first, count)
    assert len(shares) == sum(count for _, _, count in plan)
    # Only the first version is read as a whole. A job that resumes compares its first step with
    # the one that it has restored, and the deltas of the abandoned steps lead back to that.
    assert [share for share in shares if share > 0.5] == shares[:1]


def test_after_a_rollback_only_what_differs_is_read(
    tmp_path: Path, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        content = saved(manager, weights, 1)
        weights["layer0.weight"] += 1
        manager.save({"model": weights}, 2)
        assert next(versions).step == 2
        manager.restore({"model": weights}, step=1, only="model")
        assert is_idle(versions)
        manager.restore({"model": weights, "other": torch.zeros(1000)}, step=1)
    version = next(versions)
    assert (version.step, digest(version.weights)) == (1, content)
    assert version.read_bytes == weights["layer0.weight"].nbytes


def test_a_step_that_leaves_the_branch_while_it_is_read_is_not_yielded(
    tmp_path: Path,
    versions: Follower,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assemble = Follower._assemble

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        outcome = assemble(*arguments)
        with CheckpointManager(tmp_path / "run") as manager:
            manager.restore({"model": weights, "other": torch.zeros(1000)}, step=1)
        return outcome

    with CheckpointManager(tmp_path / "run") as manager:
        content = saved(manager, weights, 1)
        saved(manager, weights, 2)
    monkeypatch.setattr(Follower, "_assemble", late)
    version = next(versions)
    assert (version.step, digest(version.weights)) == (1, content)


def test_another_layout_is_read_as_a_whole(
    tmp_path: Path, versions: Follower, weights: dict[str, torch.Tensor], caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    with CheckpointManager(tmp_path / "run", deltas="model") as manager:
        saved(manager, weights, 1)
        next(versions)
        weights["layer0.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)
        content = saved(manager, weights | {"more": torch.ones(2, dtype=torch.bfloat16)}, 2)
        version = next(versions)
        assert (version.base_step, version.read_bytes) == (None, version.nbytes)
        assert "step 2 has another layout: it is read as a whole" in caplog.text
        content = saved(manager, weights, 3)
        assert digest(next(versions).weights) == content


def test_another_cut_of_the_same_tensors_costs_no_bytes(
    tmp_path: Path, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    for step, chunk_size in ((1, 1 << 20), (2, 4096)):
        with CheckpointManager(tmp_path / "run", chunk_size=chunk_size) as manager:
            manager.save({"model": weights}, step)
    version = next(versions)
    with CheckpointManager(tmp_path / "run", chunk_size=1 << 20) as manager:
        manager.save({"model": weights}, 3)
    assert next(versions).read_bytes == 0
    assert version.step == 2


class Shards:
    """Two ranks that hold halves of a matrix along ``dim``, and save it in the steps from ``first``
    on, up to 3, or in this step alone.
    """

    def __init__(self, root: Path, dim: int, first: int) -> None:
        self.root, self.dim, self.first = root, dim, first
        self.whole = weights_of(1)["layer0.weight"]
        self.orders = threading.Barrier(3)

    def train(self, coordinator: Coordinator) -> None:
        part = self.whole.chunk(2, self.dim)[coordinator.rank].clone()
        offsets = tuple(coordinator.rank * part.shape[dim] * (dim == self.dim) for dim in (0, 1))
        state = {"model": {"w": LocalShards(tuple(self.whole.shape), [(offsets, part)])}}
        with CheckpointManager(self.root, coordinator=coordinator, deltas="model") as manager:
            for step in range(self.first, max(self.first, 3) + 1):
                self.orders.wait(60)
                manager.save(state, step)
                self.orders.wait(60)
                part.view(torch.int16)[::7, ::5] += 1

    def save(self) -> None:
        self.orders.wait(60)
        self.orders.wait(60)


def test_shards_of_several_ranks_are_one_tensor(tmp_path: Path) -> None:
    columns = Shards(tmp_path, 1, 1)
    with follow(tmp_path) as versions, ThreadPoolExecutor(1) as pool:
        world = pool.submit(World(2, patience=60).run, columns.train)
        for _ in range(3):
            columns.save()
            version = next(versions)
            assert digest(version.weights) == digest(ckpt.load(tmp_path, "model"))
        assert version.step == 3
        assert 0 < version.read_bytes < 0.1 * version.nbytes
        assert world.result() == {0: None, 1: None}


def test_other_ranks_and_shards_of_the_same_bytes_cost_nothing(tmp_path: Path) -> None:
    columns, rows = Shards(tmp_path, 1, 3), Shards(tmp_path, 0, 4)
    with ThreadPoolExecutor(1) as pool, follow(tmp_path) as versions:
        for shards, read_bytes in ((columns, columns.whole.nbytes), (rows, 0)):
            world = pool.submit(World(2, patience=60).run, shards.train)
            shards.save()
            assert world.result() == {0: None, 1: None}
            version = next(versions)
            assert (version.step, version.read_bytes) == (shards.first, read_bytes)
            assert digest(version.weights) == digest({"w": shards.whole})


def test_the_first_step_of_a_job_that_resumes_has_a_delta(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    with follow(tmp_path) as versions:
        for step, chunk_size in ((1, 1 << 20), (2, 4096)):  # Another cut of the same tensors
            with CheckpointManager(tmp_path, deltas="model", chunk_size=chunk_size) as manager:
                manager.restore({"model": weights, "other": torch.zeros(1000)})
                content = saved(manager, weights, step)
            version = next(versions)
            assert digest(version.weights) == content
    assert 0 < version.read_bytes < 0.1 * version.nbytes


def test_a_write_of_the_caller_does_not_get_into_the_next_version(
    manager: CheckpointManager, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    saved(manager, weights, 1)
    next(versions).weights["layer0.weight"].zero_()
    content = saved(manager, weights, 2)
    assert digest(next(versions).weights) == content


def test_a_damaged_step_is_passed_over_and_the_last_version_stays(
    tmp_path: Path, weights: dict[str, torch.Tensor], versions: Follower, caplog: Any
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        content = saved(manager, weights, 1)
        first = next(versions)
        weights["layer2.weight"] += 1
        manager.save({"model": weights}, 2)
        flip(files(tmp_path / "run", 2)["data"])
        assert is_idle(versions)
        assert is_idle(versions)
        assert digest(first.weights) == content
        assert caplog.text.count("step 2 is passed over, and the version of step 1 stays") == 1
        content = saved(manager, weights, 3)
    version = next(versions)
    assert (version.step, version.base_step, digest(version.weights)) == (3, 1, content)


def test_a_damaged_step_that_is_mended_comes_later(
    tmp_path: Path, weights: dict[str, torch.Tensor], versions: Follower, caplog: Any
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        saved(manager, weights, 1)
        next(versions)
        content = saved(manager, weights, 2)
    data = files(tmp_path / "run", 2)["data"]
    intact = data.read_bytes()
    flip(data)
    assert is_idle(versions)
    assert is_idle(versions)
    data.write_bytes(intact)
    versions._timeout_seconds = 60
    version = next(versions)
    assert (version.step, digest(version.weights)) == (2, content)
    assert caplog.text.count("step 2 is passed over") == 1


def test_a_step_that_is_damaged_here_is_read_as_soon_as_a_further_tier_answers(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the tier was away says nothing about the step."""
    roots = [str(tmp_path / "near"), str(tmp_path / "far")]
    with CheckpointManager(roots) as manager:
        content = saved(manager, weights, 1)
    flip(files(tmp_path / "near", 1)["data"])
    monkeypatch.setattr(module, "_LONGEST_PAUSE_SECONDS", 3600.0)
    far = Switch(roots[1], *(Rule(verb=verb, fault=AWAY) for verb in ("list", "folders", "head")))
    monkeypatch.setattr(
        module,
        "open_backend",
        lambda url, options: far if url == roots[1] else open_backend(url, options),
    )
    with ckpt.follow(roots, poll_seconds=0.01, timeout_seconds=0.05) as versions:
        versions._poll_seconds = 3600.0
        assert is_idle(versions)
        far.mend()
        assert digest(next(versions).weights) == content


@pytest.mark.parametrize("error", [StorageError, TransientStorageError])
def test_a_read_that_fails_is_no_damage(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch,
    error: type[StorageError],
) -> None:  # fmt: skip
    with CheckpointManager(tmp_path) as manager:
        content = saved(manager, weights, 1)
    store = Switch(str(tmp_path), Rule(verb="read_into", key="safetensors", fault=Raise(error)))
    monkeypatch.setattr(module, "open_backend", lambda *_: store)
    with follow(tmp_path) as versions:
        assert is_idle(versions)
        store.mend()
        assert digest(next(versions).weights) == content


def test_a_damaged_chunk_comes_from_the_next_tier(
    tmp_path: Path, weights: dict[str, torch.Tensor], caplog: Any
) -> None:
    roots = [str(tmp_path / "near"), str(tmp_path / "far")]
    with CheckpointManager(roots) as manager:
        content = saved(manager, weights, 1)
    flip(files(tmp_path / "near", 1)["data"])
    with follow([Tier(roots[0]), roots[1]]) as versions:
        assert digest(next(versions).weights) == content
    assert "is read from a farther tier" in caplog.text


def test_a_farther_tier_has_the_deltas_too(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    roots = [str(tmp_path / "near"), str(tmp_path / "far")]
    with CheckpointManager(roots, deltas="model") as manager, follow(roots[1]) as versions:
        for step in (1, 2):
            content = saved(manager, weights, step)
            version = next(versions)
            assert digest(version.weights) == content
    assert version.read_bytes < 0.05 * version.nbytes


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_deltas_stand_beside_any_codec(
    tmp_path: Path, weights: dict[str, torch.Tensor], codec: str
) -> None:
    tier = Tier(str(tmp_path), codec=codec)
    with CheckpointManager(tier, deltas="model") as manager, follow(tmp_path) as versions:
        for step in (1, 2):
            content = saved(manager, weights, step)
            version = next(versions)
            assert digest(version.weights) == content
    assert version.read_bytes < 0.05 * version.nbytes


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "foreign"])
def test_a_delta_that_is_of_no_use_costs_bytes_and_nothing_else(
    tmp_path: Path,
    manager: CheckpointManager,
    versions: Follower,
    weights: dict[str, torch.Tensor],
    harm: str,
) -> None:
    saved(manager, weights, 1)
    next(versions)
    saved(manager, weights, 2)
    content = saved(manager, weights, 3)
    delta, older = (files(tmp_path / "run", step)["data"].with_suffix(".delta") for step in (3, 2))
    match harm:
        case "flip":
            flip(delta, -20)
        case "cut":
            delta.write_bytes(delta.read_bytes()[:-20])
        case "remove":
            older.unlink()
        case "foreign":
            shutil.copy(older, delta)
    version = next(versions)
    assert (version.step, digest(version.weights)) == (3, content)
    assert version.read_bytes > 0.3 * version.nbytes


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_increments_are_followed_with_their_deltas(tmp_path: Path, codec: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).to(torch.bfloat16)
    for value in model[0].parameters():
        value.requires_grad_(False)
    tier = Tier(str(tmp_path), codec=codec)
    with CheckpointManager(tier, deltas="model") as manager, follow(tmp_path) as versions:
        for step in (1, 2, 3):
            with torch.no_grad():
                model.get_parameter("1.weight").view(torch.int16)[::7, ::5] += 1
            manager.save({"model": model}, step)
            version = next(versions)
            assert digest(version.weights) == digest(model.state_dict())
    assert version.changes == {"1.weight"}
    assert 0 < version.read_bytes < 0.05 * version.nbytes
    sizes = [files(tmp_path, step)["fragment"].parent for step in (1, 3)]
    first, last = (sum(file.stat().st_size for file in folder.iterdir()) for folder in sizes)
    assert last < 0.8 * first


def test_weights_that_change_in_every_word_have_no_deltas_and_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    value = torch.randn(1 << 14)
    with CheckpointManager(tmp_path, deltas="model") as manager, follow(tmp_path) as versions:
        for step in (1, 2, 3):
            value *= 0.999
            manager.save({"model": {"weight": value}}, step)
            assert digest(next(versions).weights) == digest({"weight": value})
    assert caplog.text.count("too many words of 'model' change in a step") == 1
    assert not [*tmp_path.glob("step-*/*.delta")]


def test_a_part_of_deltas_that_fits_nothing_is_an_error_before_anything_is_written(
    tmp_path: Path,
) -> None:
    state = {"model": torch.ones(3), "step": 1}
    with CheckpointManager(tmp_path, deltas="modle") as manager:
        with pytest.raises(ConfigError, match=r"deltas='modle' fits no tensor .* it has 'model'"):
            manager.save(state, 1)
        assert not [*tmp_path.glob("step-*")]


@pytest.mark.parametrize("name", ["modle", "model"])
def test_a_part_of_deltas_that_fits_nothing_on_any_rank_is_the_same_error_on_each(
    tmp_path: Path, name: str
) -> None:
    """The first rank has no tensor of the model in either case."""

    def train(coordinator: Any) -> list[int]:
        part = "model" if coordinator.rank else "head"
        state = {part: {f"x{coordinator.rank}": torch.ones(3)}}
        with CheckpointManager(tmp_path, deltas=name, coordinator=coordinator) as manager:
            manager.save({"head": torch.ones(3)}, 1, only="head")
            manager.save(state, 2)
            manager.save(state, 3)
            return manager.steps()

    results = World(2, patience=20).run(train)
    if name == "model":
        assert results == {0: [1, 2, 3], 1: [1, 2, 3]}
        return
    assert {type(error) for error in results.values()} == {ConfigError}
    assert {str(error) for error in results.values()} == {
        "deltas='modle' fits no tensor of the state: it has 'head', 'model'"
    }
    assert [path.parent.name[:14] for path in tmp_path.glob("*/manifest.json")] == [
        "step-000000001"
    ]


def test_a_save_of_another_part_than_that_of_deltas_is_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    with CheckpointManager(tmp_path, deltas="model") as manager:
        manager.save({"model": torch.ones(3), "other": torch.ones(3)}, 1, only="other")
    assert "deltas='model' fits no tensor that this rank writes" in caplog.text


@pytest.mark.parametrize("place", ["_layout_of", "difference"])
def test_an_error_of_a_delta_costs_no_save(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with CheckpointManager(tmp_path, deltas="model") as manager, follow(tmp_path) as versions:
        with monkeypatch.context() as patch:
            patch.setattr(delta_writer, place, fail)
            for step in (1, 2):
                content = saved(manager, weights, step)
                assert digest(next(versions).weights) == content
        for step in (3, 4):
            content = saved(manager, weights, step)
            version = next(versions)
            assert digest(version.weights) == content
    assert version.read_bytes < 0.05 * version.nbytes


@pytest.mark.parametrize("host_memory", ["64MiB", "1x"])
def test_the_bytes_that_deltas_keep_are_host_memory(
    tmp_path: Path, weights: dict[str, torch.Tensor], caplog: Any, host_memory: str
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    with CheckpointManager(tmp_path, deltas="model", host_memory=host_memory) as manager:
        saved(manager, weights, 1)
        reservation = manager._saver.slots.reservation
        nbytes = sum(value.nbytes for value in weights.values())
        assert (reservation.last_step_bytes, reservation.used_bytes) == (nbytes, nbytes)
        saved(manager, weights, 2)
        assert reservation.used_bytes == nbytes
    assert "more keep the last step for deltas" in caplog.text


def test_deltas_go_with_their_step(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with CheckpointManager(Tier(str(tmp_path), keep_last=1), deltas="model") as manager:
        for step in (1, 2, 3):
            saved(manager, weights, step)
    assert [path.parent.name[:14] for path in tmp_path.glob("step-*/*")] == ["step-000000003"] * 4
    assert ckpt.load(tmp_path, "other")[0] == 3


def test_a_follower_waits_for_the_first_step_and_says_what_is_there(
    tmp_path: Path, weights: dict[str, torch.Tensor], versions: Follower
) -> None:
    with pytest.raises(NoCheckpoint, match=r"no new version within 0\.05 s: it is empty, or does"):
        next(versions)
    with CheckpointManager(tmp_path / "run") as manager:
        saved(manager, weights, 1)
    assert next(versions).step == 1
    with pytest.raises(NoCheckpoint, match="the last one is step 1"):
        next(versions)


def test_a_root_that_is_gone_leaves_the_version(
    tmp_path: Path, manager: CheckpointManager, versions: Follower,
    weights: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    content = saved(manager, weights, 1)
    version = next(versions)
    shutil.rmtree(tmp_path / "run")
    assert is_idle(versions)
    assert digest(version.weights) == content


@pytest.mark.server
def test_a_bucket_is_followed(weights: dict[str, torch.Tensor], moto_server: Server) -> None:
    options = {"endpoint_url": moto_server.url, "key": "k", "secret": "s"}
    tier = Tier("s3://bucket/follow", options=options)
    with CheckpointManager(tier, deltas="model") as manager, follow(tier) as versions:
        for step in (1, 2):
            content = saved(manager, weights, step)
            version = next(versions)
            assert digest(version.weights) == content
    assert version.read_bytes < 0.05 * version.nbytes


def test_two_followers_have_the_same_versions(
    tmp_path: Path, manager: CheckpointManager, weights: dict[str, torch.Tensor]
) -> None:
    with follow(tmp_path / "run") as one, follow(tmp_path / "run") as two:
        for step in (1, 2):
            content = saved(manager, weights, step)
            assert digest(next(one).weights) == digest(next(two).weights) == content


def test_a_step_stays_while_it_is_read(
    tmp_path: Path, versions: Follower, weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assemble = Follower._assemble

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        with CheckpointManager(Tier(str(tmp_path / "run"), keep_last=1)) as manager:
            for step in (2, 3):
                saved(manager, weights, step)
        return assemble(*arguments)

    with CheckpointManager(tmp_path / "run") as manager:
        content = saved(manager, weights, 1)
    monkeypatch.setattr(Follower, "_assemble", late)
    assert digest(next(versions).weights) == content
    assert all_pins(open_backend(str(tmp_path / "run"))) == []
    assert next(versions).step == 3


def test_a_store_that_may_only_be_read_is_followed_without_a_pin(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path) as manager:
        content = saved(manager, weights, 1)
    rule = Rule(verb="put", fault=Raise(AccessDenied("pins", "read-only")))
    monkeypatch.setattr(
        module, "open_backend", lambda *arguments: FaultyBackend(open_backend(*arguments), [rule])
    )
    with follow(tmp_path) as versions:
        assert digest(next(versions).weights) == content


def test_a_follower_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with ckpt.follow(tmp_path, stop=stop) as versions:
        assert list(versions) == []


def test_a_part_that_is_not_there_is_named(
    tmp_path: Path, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save({"net": weights}, 1)
    with pytest.raises(EntryMissing, match="'model'"):
        next(versions)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), "name at least one root"),
        (("x", ""), "give the name of a part"),
        (("nosuch://x",), "nosuch"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ckpt.follow(*arguments)


@pytest.mark.parametrize("setting", ["poll_seconds", "timeout_seconds"])
def test_bad_times_are_refused(setting: str) -> None:
    times: dict[str, Any] = {setting: 0}
    with pytest.raises(ConfigError, match="give a positive number of seconds"):
        ckpt.follow("x", **times)


def test_a_version_is_shown_in_one_line(
    manager: CheckpointManager, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    saved(manager, weights, 1)
    version: Version = next(versions)
    assert repr(version).startswith("<version 1, read as a whole: ")


def test_a_part_of_deltas_has_a_name() -> None:
    with pytest.raises(ConfigError, match="deltas=''"):
        CheckpointManager("x", deltas="")


def test_a_version_is_taken_by_its_step(
    manager: CheckpointManager, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    """Several processes that must have the same version do not ask for the newest one."""
    contents = {step: saved(manager, weights, step) for step in (1, 2, 3)}
    for step in (2, 3, 1):
        version = versions.version_of(step)
        assert (version.step, digest(version.weights)) == (step, contents[step])
    assert versions.version_of(1, version.attempt) is version
    assert next(versions).step == 3


def test_a_version_that_does_not_come_is_named(
    manager: CheckpointManager, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    saved(manager, weights, 1)
    version = next(versions)
    with pytest.raises(
        NoCheckpoint, match=r"no version of step 2 within 0\.05 s: step 2 is not there"
    ):
        versions.version_of(2)
    with pytest.raises(NoCheckpoint, match="no version of step 1 "):
        versions.version_of(1, "abcdefghijkl")
    assert versions.version_of(1) is version


def test_a_step_of_an_abandoned_branch_is_no_version(
    manager: CheckpointManager, versions: Follower, weights: dict[str, torch.Tensor]
) -> None:
    for step in (1, 2, 3):
        saved(manager, weights, step)
    manager.restore({"model": weights, "other": torch.zeros(1000)}, step=1)
    with pytest.raises(NoCheckpoint, match="step 2"):
        versions.version_of(2)
    content = saved(manager, weights, 2)
    version = versions.version_of(2)
    assert digest(version.weights) == content
    assert is_idle(versions)


def test_a_version_that_never_was_read_is_missed_by_what_the_root_has(
    tmp_path: Path, manager: CheckpointManager, weights: dict[str, torch.Tensor]
) -> None:
    for step in (1, 2, 3):
        saved(manager, weights, step)
    with follow([tmp_path / "run", tmp_path / "away"]) as versions:
        for step, attempt, words in (
            (99, None, "step 99 is not there; the newest are 3, 2, 1; it is empty, or does not"),
            (3, "abcdefghijkl", "attempt abcdefghijkl at step 3 is not there"),
        ):
            with pytest.raises(NoCheckpoint, match=f"within 0.05 s: {words}"):
                versions.version_of(step, attempt)
    manager.restore({"model": weights, "other": torch.zeros(1000)}, step=1)
    with follow(tmp_path / "run") as versions:
        with pytest.raises(NoCheckpoint, match="step 2 is on an abandoned branch"):
            versions.version_of(2)
        assert next(versions).step == 1
        with pytest.raises(NoCheckpoint, match="an abandoned branch; the last one is step 1"):
            versions.version_of(2)
    with follow(tmp_path / "run") as versions:
        flip(files(tmp_path / "run", 1)["data"])
        with pytest.raises(
            NoCheckpoint, match="step 1 was not read: a warning in the log says why"
        ):
            next(versions)


def test_a_root_without_steps_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: dict[str, torch.Tensor]
) -> None:
    """The root may be mistyped, or the parent of the root."""
    with CheckpointManager(tmp_path / "gpt") as manager:
        saved(manager, weights, 1)
    with follow(tmp_path / "gtp") as versions:
        assert is_idle(versions)
        assert is_idle(versions)
    with follow(tmp_path) as versions:
        assert is_idle(versions)
    with follow([tmp_path / "gtp", tmp_path / "gpt"]) as versions, pytest.raises(NoCheckpoint):
        versions.version_of(2)
    mistyped, parent = caplog.messages
    assert mistyped.endswith("gtp: it is empty, or does not exist")
    assert parent.startswith("ckpt: ckpt.follow waits for the first step: no checkpoint in ")
    assert parent.endswith("its folder 'gpt' does: give that one")


def test_the_wait_for_a_version_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with (
        ckpt.follow(tmp_path, stop=stop) as versions,
        pytest.raises(NoCheckpoint, match="the wait for step 1 was ended"),
    ):
        versions.version_of(1)


@pytest.mark.parametrize("step", ["1", None, -1, True])
def test_a_version_has_a_number(step: Any, tmp_path: Path) -> None:
    with ckpt.follow(tmp_path) as versions, pytest.raises(ConfigError, match="step"):
        versions.version_of(step)
