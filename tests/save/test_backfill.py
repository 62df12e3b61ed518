"""The next job copies to the farther tiers what a dead job had not copied."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import ckpt.storage.tiers
from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.errors import AccessDenied, TransientStorageError
from ckpt.retention.pruner import Pruner
from ckpt.save.backfill import Backfill
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Raise, Rule
from ckpt.upkeep.step_copier import StepCopier
from tests.coordination.world import World, WorldCoordinator
from tests.kit.states import IMAGE, state
from tests.kit.stores import Gated, Wrapped, faulty, whole, wrap_stores


def left_by_a_job(near: Tier | Path | list[Path], *steps: int) -> None:
    """The job copied nothing before it died."""
    with CheckpointManager(near) as manager:
        manager.restore(state(0))
        for step in steps:
            manager.save(state(step), step)


def go_on(near: Tier | Path, *far: Tier | Path, step: int, **settings: object) -> None:
    with CheckpointManager([near, *far], **settings) as manager:  # type: ignore[arg-type]
        assert manager.restore(state(0)) is not None
        manager.save(state(step), step)


def test_the_newest_follow_and_restore_from_there(near, far, caplog):
    caplog.set_level(logging.INFO, "ckpt")
    left_by_a_job(near, 1, 2, 3, 4, 5)
    go_on(near, far, step=6, backlog=3)
    assert whole(far) == [3, 4, 5, 6]
    assert "lacks steps 5, 4, 3" in caplog.text
    assert "step 4 of an earlier job is on " + str(far) in caplog.text
    shutil.rmtree(near)
    with CheckpointManager(far) as manager:
        for step in (3, 4, 5, 6):
            found = state(0)
            manager.restore(found, step)
            assert found["x"].unique().tolist() == [step]


def test_abandoned_steps_do_not_follow(near, far):
    left_by_a_job(near, 1, 2, 3)
    with CheckpointManager(near) as manager:
        manager.restore(state(0), 1)
        manager.save(state(5), 5)
    go_on(near, far, step=6)
    assert whole(far) == [1, 5, 6]


def test_only_what_the_far_tier_takes_and_would_keep(near, far, tmp_path):
    left_by_a_job(near, 100, 150, 200, 250, 300, 310)
    some = tmp_path / "some"
    go_on(
        near,
        Tier(str(far), every=50, keep_last=2, keep_every=100),
        Tier(str(some), every=300),
        step=320,
    )
    assert whole(far) == [100, 200, 250, 300]
    assert whole(some) == [300]


@pytest.mark.parametrize("codecs", [("none", "zstd"), ("zstd", "none"), ("zstd", "zstd:3")])
def test_a_far_tier_gets_what_was_left_with_its_own_codec(near, far, tmp_path, codecs):
    tiers = [Tier(str(near), codec=codecs[0]), Tier(str(far), codec=codecs[1])]
    with CheckpointManager(tiers[0]) as manager:
        manager.restore(state(0))
        manager.save(state(1), 1)
    go_on(*tiers, step=2)
    for folder in (near, far):
        shutil.move(folder, tmp_path / "away")
        backend = open_backend(str(tmp_path / "away"))
        manifests = [read_manifest(backend, ref) for ref in committed(backend)]
        codec = codecs[0 if folder == near else 1].partition(":")[0]
        assert [manifest.codecs for manifest in manifests] == [
            () if codec == "none" else ("zstd",)
        ] * 2
        assert len({file.name for manifest in manifests for file in manifest.files}) == 1
        assert whole(tmp_path / "away") == [1, 2]
        with CheckpointManager(tmp_path / "away") as manager:
            for step in (1, 2):
                found = state(0)
                manager.restore(found, step)
                assert found["x"].unique().tolist() == [step]
        shutil.rmtree(tmp_path / "away")


def test_nothing_without_a_restore_nor_before_the_first_commit(near, far):
    left_by_a_job(near, 1, 2)
    with CheckpointManager([near, far]) as manager:
        manager.restore(state(0))
    assert not far.exists()
    with CheckpointManager([near, far]) as manager:
        manager.save(state(3), 3)
    assert whole(far) == [3]


def test_history_that_was_given_up_stays_where_it_is(near, far):
    left_by_a_job(near, 10, 20, 30)
    with CheckpointManager([near, far]) as manager:
        manager.restore(state(0), step=20)
        manager.save(state(25), 25)
    assert whole(far) == [10, 20, 25]


def test_what_is_on_its_way_is_not_pruned_near(near, far, gated):
    left_by_a_job(near, 1, 2, 3)
    with CheckpointManager([Tier(str(near), keep_last=1), far]) as manager:
        manager.restore(state(0))
        manager.save_async(state(4), 4).result(20, tier=str(near))
        threading.Timer(0.5, gated.open.set).start()
    assert whole(far) == [1, 2, 3, 4]


def test_a_far_tier_that_does_not_take_it_costs_a_warning(near, far, monkeypatch, caplog):
    left_by_a_job(near, 1, 2)
    faulty(monkeypatch, far, [Rule(verb="upload", key="step-000000002", fault=Raise(AccessDenied))])
    go_on(near, far, step=3)
    assert whole(far) == [1, 3]
    assert "step 2 of an earlier job was not copied to" in caplog.text


def test_a_far_tier_that_was_away_has_it_in_the_end(near, far, monkeypatch):
    left_by_a_job(near, 1, 2)
    away = [
        Rule(verb="upload", key="step-000000002", nth=n, fault=Raise(TransientStorageError))
        for n in (1, 2)
    ]
    faulty(monkeypatch, far, away)
    go_on(near, far, step=3)
    assert whole(far) == [1, 2, 3]


def test_a_file_damaged_near_is_not_taken_farther(near, far, caplog):
    left_by_a_job(near, 1, 2, 3)
    (data,) = near.glob("step-000000002.*/*.safetensors")
    damaged = bytearray(data.read_bytes())
    damaged[-5] ^= 1
    data.write_bytes(damaged)
    go_on(near, far, step=4)
    assert whole(far) == [1, 3, 4]
    assert "checksum mismatch" in caplog.text


def bytes_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_what_is_encoded_near_and_raw_far_keeps_to_the_capacity_there(near, far):
    left_by_a_job(Tier(str(near), codec="zstd"), 1, 2, 3, 4)
    capacity = 3 * IMAGE + 100_000
    go_on(Tier(str(near), codec="zstd"), Tier(str(far), capacity=capacity), step=5)
    assert whole(far)[-2:] == [4, 5]
    assert bytes_of(far) <= capacity


def test_what_is_raw_near_and_encoded_far_needs_no_more_room_than_encoded(near, far):
    left_by_a_job(near, 1, 2, 3, 4)
    capacity = IMAGE // 2
    go_on(near, Tier(str(far), codec="zstd", capacity=capacity), step=5)
    assert whole(far) == [1, 2, 3, 4, 5]
    assert bytes_of(far) <= capacity


def test_a_far_tier_with_a_capacity_gives_up_older_ones_only(near, far):
    left_by_a_job(near, 1, 2, 3, 4)
    go_on(near, Tier(str(far), capacity=3 * IMAGE + 100_000), step=5)
    assert whole(far) == [3, 4, 5]


def test_the_leader_takes_the_files_of_all_ranks(near, far, monkeypatch):
    def job(coordinator, tiers, steps):
        mine = {f"x{coordinator.rank}": torch.ones(50_000)}
        with CheckpointManager(tiers, coordinator=coordinator) as manager:
            manager.restore(mine)
            for step in steps:
                manager.save(mine, step)

    assert World(2, patience=30).run(lambda one: job(one, [near], (1, 2))) == {0: None, 1: None}
    monkeypatch.setattr(WorldCoordinator, "attempt", "defuvw")
    assert World(2, patience=30).run(lambda one: job(one, [near, far], (3,))) == {0: None, 1: None}
    assert whole(far) == [1, 2, 3]


def test_an_old_step_stays_near_until_the_far_tier_that_lacks_it_was_asked(near, far, monkeypatch):
    left_by_a_job(near, 1, 2, 3)
    for folder in near.glob("step-00000000[23].*"):
        shutil.copytree(folder, far / folder.name)
    pruned = threading.Event()
    missing_steps, prune = StepCopier.missing_steps, Pruner._prune

    def slow(self, line, most):
        pruned.wait(30)
        return missing_steps(self, line, most)

    def noted(self):
        prune(self)
        pruned.set()

    monkeypatch.setattr(StepCopier, "missing_steps", slow)
    monkeypatch.setattr(Pruner, "_prune", noted)
    go_on(Tier(str(near), keep_last=1), far, step=4, backlog=1)
    assert whole(far) == [1, 2, 3, 4]
    assert whole(near) == [4]


def test_a_far_tier_that_cannot_be_asked_keeps_no_more_near_than_the_backlog(
    near, far, monkeypatch, caplog
):
    left_by_a_job(near, 1, 2, 3)
    faulty(monkeypatch, far, [Rule(verb="head", key="step-000000003", fault=Raise(AccessDenied))])
    with CheckpointManager([Tier(str(near), keep_last=1), far], backlog=2) as manager:
        assert manager.restore(state(0), 3) is not None
        manager.save_async(state(4), 4).result(20, tier=str(near))
    assert whole(near) == [2, 3, 4]
    assert "steps of earlier jobs were not copied to" in caplog.text


class Leaving(Wrapped):
    """A store that denies access once it has ``left``."""

    def __init__(self, inner):
        super().__init__(inner)
        self.left = False

    def __getattr__(self, name):
        if self.left and name in {"folders", "list", "head", "read_into", "put", "upload"}:
            raise AccessDenied(name)
        return super().__getattr__(name)


@pytest.mark.parametrize("lost", ["between", "far"])
def test_a_tier_that_is_lost_keeps_no_step_from_the_others(
    near, far, tmp_path, monkeypatch, caplog, lost
):
    places = {"near": near, "between": tmp_path / "between", "far": far}
    left_by_a_job(near, 1, 2, 3)
    stores: dict[str, Leaving] = {}
    wrap_stores(monkeypatch, lambda url, store: stores.setdefault(url, Leaving(store)))
    with CheckpointManager(
        [
            Tier(str(near), keep_last=1),
            Tier(str(places["between"]), required=False),
            Tier(str(far), required=False),
        ],
        backlog=2,
        commit_timeout_seconds=30,
    ) as manager:
        assert manager.restore(state(0)) is not None
        stores[str(places[lost])].left = True
        manager.save_async(state(4), 4).result(20, tier=str(near))
    (other,) = {"between", "far"} - {lost}
    assert whole(places[other]) == [2, 3, 4]
    assert whole(near) == [2, 3, 4]
    assert f"steps of earlier jobs were not copied to {places[lost]}" in caplog.text


def test_what_the_near_tier_kept_meanwhile_goes_when_it_is_not_needed_any_more(
    near, far, monkeypatch
):
    left_by_a_job(near, 1, 2)
    pruned = threading.Event()
    go, prune = Backfill._copy_steps, Pruner._prune

    def slow(self, writer, steps):
        # the prune after the first commit comes while the steps still have to be read
        pruned.wait(30)
        go(self, writer, steps)

    def noted(self):
        prune(self)
        pruned.set()

    monkeypatch.setattr(Backfill, "_copy_steps", slow)
    monkeypatch.setattr(Pruner, "_prune", noted)
    go_on(Tier(str(near), keep_last=1), far, step=3)
    assert whole(far) == [1, 2, 3]
    assert whole(near) == [3]


class Held(Gated):
    """A store that lets all through but the fragment of one step, which waits at the gate."""

    def upload(self, key, size):
        return self.inner.upload(key, size)

    def put(self, key, parts, *, if_absent=False):
        if key.startswith("step-000000001.") and key.endswith(".json"):
            self.began.append(key)
            assert self.open.wait(30)
        return self.inner.put(key, parts, if_absent=if_absent)


def test_what_was_evicted_while_it_was_on_its_way_is_not_listed(near, far, monkeypatch, caplog):
    """The far tier has room for two, and the steps of the running job come first."""
    left_by_a_job(near, 1)
    held = Held(str(far))
    monkeypatch.setattr(
        ckpt.storage.tiers,
        "open_backend",
        lambda url, options: held if url == str(far) else open_backend(url, options),
    )
    with CheckpointManager([near, Tier(str(far), capacity=2 * IMAGE + 100_000)]) as manager:
        assert manager.restore(state(0)) is not None
        manager.save(state(2), 2)
        while not held.began:
            time.sleep(0.01)
        manager.save(state(3), 3)  # it removes what the backfill has put there so far
        held.open.set()
    assert whole(far) == [2, 3]
    assert not list(far.glob("step-000000001.*/manifest.json"))
    assert "step 1 of an earlier job was not copied to" in caplog.text


class Newest(Gated):
    """A store at whose gate only files of step 3 wait."""

    def __init__(self, url):
        super().__init__(url)
        self.begun = threading.Event()

    def upload(self, key, size):
        if key.startswith("step-000000003."):
            self.begun.set()
            assert self.open.wait(60)
        return self.inner.upload(key, size)


@pytest.mark.parametrize("stops", [True, False])
def test_a_planned_stop_waits_for_the_copy_under_way_only(near, far, monkeypatch, caplog, stops):
    left_by_a_job(near, 1, 2, 3)
    store = Newest(str(far))
    wrap_stores(monkeypatch, lambda url, found: store if url == str(far) else found)
    with CheckpointManager([near, far]) as manager:
        manager.restore(state(0))
        backfill = manager._saver._backfill
        assert backfill is not None
        store.open = backfill._hurry  # ``close`` opens the gate
        last = 4
        if stops:
            stop = manager.on_stop_request()
            manager.request_stop()
            last = next(step for step in itertools.count(4) if stop.requested(step))
        manager.save(state(last), last)
        assert store.begun.wait(60)
    assert whole(far) == ([3, last] if stops else [1, 2, 3, last])
    assert ("steps 2, 1 of earlier jobs are not copied to" in caplog.text) == stops


def test_what_several_jobs_in_a_row_could_not_copy_follows(near, far):
    """The near tier keeps it until the far tier has it."""
    tiers = Tier(str(near), keep_last=2), Tier(str(far), every=100)
    left_by_a_job(near, 100)
    for step in (110, 120, 130):  # Each job dies before it can copy
        with CheckpointManager(near) as manager:
            assert manager.restore(state(0)) is not None
            manager.save(state(step), step)
    with CheckpointManager(tiers) as manager:
        assert manager.restore(state(0)) is not None
        for step in (140, 150):
            manager.save(state(step), step)
    assert (whole(near), whole(far)) == ([140, 150], [100])


@pytest.mark.parametrize("fault", [AccessDenied, TransientStorageError])
def test_a_far_tier_that_takes_nothing_leaves_the_steps_on_the_near_one(
    near, far, monkeypatch, fault
):
    tiers = Tier(str(near), keep_last=1), Tier(str(far), every=100)
    left_by_a_job(near, 100)
    with monkeypatch.context() as away:
        faulty(away, far, [Rule(verb="upload", nth=n, fault=Raise(fault)) for n in range(1, 99)])
        for step in (110, 120):
            go_on(*tiers, step=step)
            assert whole(near) == [100, step]
    go_on(*tiers, step=130)
    assert (whole(near), whole(far)) == ([130], [100])


def test_a_far_tier_that_cannot_be_listed_leaves_the_steps_on_the_near_one(near, far, monkeypatch):
    tiers = Tier(str(near), keep_last=1), Tier(str(far), every=100)
    left_by_a_job(near, 100)
    with monkeypatch.context() as away:
        faulty(away, far, [Rule(verb="head", nth=n, fault=Raise(AccessDenied)) for n in range(99)])
        go_on(*tiers, step=110)
    assert whole(near) == [100, 110]


def test_a_far_tier_that_comes_back_gets_the_steps_in_the_same_job(near, far, monkeypatch):
    left_by_a_job(near, 1, 2)
    fault = Raise(AccessDenied)
    rules = [Rule(verb="upload", key="step-000000002", nth=n, fault=fault) for n in (1, 2)]
    faulty(monkeypatch, far, rules)
    with CheckpointManager([Tier(str(near), keep_last=1), far]) as manager:
        assert manager.restore(state(0)) is not None
        backfill = manager._saver._backfill
        assert backfill is not None
        for step in range(3, 9):
            manager.save(state(step), step)
            backfill._watcher.submit(int).result(30)  # A try that has begun is over
    assert (whole(near), whole(far)) == ([8], [*range(1, 9)])


def test_a_farther_tier_gets_what_only_a_tier_between_has(near, far, tmp_path):
    between, tiers = tmp_path / "between", [str(near), str(tmp_path / "between")]
    left_by_a_job([near, between], 100, 101)
    shutil.rmtree(next(near.glob("step-000000100.*")))
    kept = [Tier(tiers[0], keep_last=1), Tier(tiers[1], keep_last=1), Tier(str(far), every=100)]
    with CheckpointManager(kept) as manager:
        assert manager.restore(state(0)) is not None
        for step in (102, 103):
            manager.save(state(step), step)
    assert whole(far) == [100]
    assert (whole(near), whole(between)) == ([103], [103])


def test_a_tier_with_a_capacity_evicts_what_a_far_tier_lacks_last(near, far, monkeypatch):
    left_by_a_job(near, 100, 101)
    faulty(
        monkeypatch, far, [Rule(verb="upload", nth=n, fault=Raise(AccessDenied)) for n in (1, 2)]
    )
    tiers = [Tier(str(near), capacity=3 * IMAGE + 100_000), Tier(str(far), every=100)]
    with CheckpointManager(tiers) as manager:
        assert manager.restore(state(0)) is not None
        for step in (102, 103, 104):
            manager.save(state(step), step)
    assert whole(near) == [100, 103, 104]


def test_steps_of_a_job_that_was_gone_back_from_are_not_copied(near, far):
    left_by_a_job(near, 10, 20, 30)
    with CheckpointManager(near) as manager:
        manager.restore(state(0), step=10)
        for step in (15, 40):
            manager.save(state(step), step)
    go_on(near, far, step=50)
    assert whole(far) == [10, 15, 40, 50]
