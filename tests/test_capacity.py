"""A tier with a capacity makes room for each save, and never removes what is needed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import AccessDenied, ConfigError, OutOfSpace, PeerFailed
from ckpt.save.tier_writer import TierWriter
from ckpt.storage.testing import Raise, Rule
from tests.coordination.world import World
from tests.kit.disks import run_script_mounted
from tests.kit.states import IMAGE, state
from tests.kit.stores import faulty, whole
from tests.kit.worlds import ROOT

THREE = 3 * IMAGE + 100_000


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("rank-*"))


def test_the_oldest_go_before_a_save_that_would_exceed_it(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ckpt")
    with CheckpointManager(Tier(str(tmp_path), capacity=THREE)) as manager:
        for step in range(1, 7):
            manager.save(state(step), step)
            assert size_of(tmp_path) <= THREE
    assert whole(tmp_path) == [4, 5, 6]
    assert "step 3 was evicted" in caplog.text


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return 400 kB, which zstd makes about a seventh smaller."""
    return {"x": torch.randn(100_000, generator=torch.Generator().manual_seed(step))}


def test_behind_a_codec_counts_what_is_stored(tmp_path):
    """Five raw images would not fit, but five encoded ones do, also for a job that finds them
    there.
    """
    with CheckpointManager(Tier(str(tmp_path / "all"), codec="zstd")) as manager:
        manager.save(weights(0), 0)
    stored = size_of(tmp_path / "all")
    assert stored < 0.9 * IMAGE
    capacity = 5 * stored + stored // 3
    tier = Tier(str(tmp_path / "runs"), codec="zstd", capacity=capacity)
    for steps in ((1, 2, 3), (4, 5, 6, 7)):
        with CheckpointManager(tier) as manager:
            manager.restore(weights(0))
            for step in steps:
                manager.save(weights(step), step)
                assert size_of(tmp_path / "runs") <= capacity
    assert whole(tmp_path / "runs") == [3, 4, 5, 6, 7]


def test_a_checkpoint_that_fits_only_behind_its_codec_is_saved(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager(
        [Tier(str(near), codec="zstd", capacity=IMAGE - 20_000), far]
    ) as manager:
        for step in (1, 2):
            manager.save(weights(step), step)
    assert (whole(near), whole(far)) == ([2], [1, 2])


def test_what_the_codec_did_not_shrink_as_before_goes_off_after_the_commit(tmp_path):
    """The steps on the tier are all zeros, and the next one is not. Its size was estimated as
    theirs.
    """
    with CheckpointManager(Tier(str(tmp_path / "other"), codec="zstd")) as manager:
        manager.save(weights(1), 1)
    root, random_bytes = tmp_path / "runs", size_of(tmp_path / "other")
    with CheckpointManager(Tier(str(root), codec="zstd", capacity=random_bytes)) as manager:
        for step in (1, 2, 3):
            manager.save({"x": torch.zeros(100_000)}, step)
        assert whole(root) == [1, 2, 3]
        manager.save(weights(4), 4)
        assert size_of(root) <= random_bytes
    assert whole(root) == [4]


def test_what_is_larger_than_the_capacity_also_behind_its_codec_is_told(tmp_path, caplog):
    with CheckpointManager(Tier(str(tmp_path), codec="zstd", capacity=IMAGE // 2)) as manager:
        manager.save(weights(1), 1)
        assert "more than the capacity" in caplog.text
        with pytest.raises(OutOfSpace, match=r"before the codec.* is larger than the capacity"):
            manager.save(weights(2), 2)
    assert whole(tmp_path) == [1]


def test_what_an_earlier_job_has_left_counts_too(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in range(1, 5):
            manager.save(state(step), step)
    (tmp_path / "notes.txt").write_text("mine")
    with CheckpointManager(Tier(str(tmp_path), capacity=THREE)) as manager:
        manager.restore(state(0))
        manager.save(state(5), 5)
    assert whole(tmp_path) == [3, 4, 5]
    assert (tmp_path / "notes.txt").exists()


def test_the_best_go_last(tmp_path):
    tier = Tier(str(tmp_path), capacity=THREE, keep_last=9, keep_best=("loss", "min"))
    with CheckpointManager(tier) as manager:
        for step, loss in enumerate([0.1, 5.0, 4.0, 3.0, 2.0]):
            manager.save(state(step), step, metrics={"loss": loss})
    assert whole(tmp_path) == [0, 3, 4]


def test_a_checkpoint_larger_than_the_capacity_is_told_and_evicts_nothing(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(1), 1)
    with CheckpointManager(Tier(str(tmp_path), capacity=IMAGE // 2)) as manager:
        with pytest.raises(
            OutOfSpace, match=r"larger than the capacity of 202 kB: raise it"
        ) as reported:
            manager.save(state(2), 2)
        assert str(tmp_path) in str(reported.value)
    assert whole(tmp_path) == [1]


def test_a_tier_that_is_too_small_and_not_required_costs_the_farther_one_nothing(tmp_path, caplog):
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager([Tier(str(near), capacity="1kB", required=False), far]) as manager:
        save = manager.save(state(1), 1)
        assert isinstance(save.exception(tier=str(near)), OutOfSpace)
    assert (whole(near), whole(far)) == ([], [1])
    assert "larger than the capacity" in caplog.text


def test_the_newest_goes_only_if_it_lies_elsewhere(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager(Tier(str(near), capacity=IMAGE + 100_000)) as manager:
        manager.save(state(1), 1)
        with pytest.raises(OutOfSpace, match="room for two checkpoints"):
            manager.save(state(2), 2)
    assert whole(near) == [1]
    with CheckpointManager([Tier(str(near), capacity=IMAGE + 100_000), far]) as manager:
        manager.restore(state(0))
        with pytest.raises(OutOfSpace):
            manager.save(state(2), 2)
    with CheckpointManager([Tier(str(far), capacity=IMAGE + 100_000), near]) as manager:
        # near and far are exchanged: each step is on both when its save has ended
        for step in (3, 4):
            manager.save(state(step), step)
    assert (whole(far), whole(near)) == ([4], [1, 3, 4])


def test_the_copy_here_stays_while_a_far_tier_does_not_answer(tmp_path, monkeypatch):
    near, far = tmp_path / "near", tmp_path / "far"
    faulty(monkeypatch, far, [Rule(verb="head", key="manifest", fault=Raise(AccessDenied))])
    with CheckpointManager([Tier(str(near), capacity=IMAGE + 100_000), far]) as manager:
        manager.save(state(1), 1)
        with pytest.raises(OutOfSpace, match="the newest has no other copy"):
            manager.save(state(2), 2)
    assert (whole(near), whole(far)) == ([1], [1])


def test_what_a_farther_tier_waits_for_stays(tmp_path, gated):
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager([Tier(str(near), capacity=THREE), far], backlog=9) as manager:
        saves = [manager.save_async(state(step), step) for step in range(1, 5)]
        assert isinstance(saves[3].exception(20, tier=str(near)), OutOfSpace)
        assert "wait for these steps: 1, 2, 3" in str(saves[3].exception(20, tier=str(near)))
        assert whole(near) == [1, 2, 3]
        gated.open.set()
        for save in saves[:3]:
            save.result(20)
        saves[3].exception()
        manager.save(state(5), 5)
    assert (whole(near), whole(far)) == ([2, 3, 5], [1, 2, 3, 5])


def test_a_disk_that_is_full_below_the_capacity_is_treated_alike(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        with CheckpointManager(tmp_path) as manager:
            manager.restore(state(0))
            manager.save(state(step), step)
    faulty(
        monkeypatch,
        tmp_path,
        [Rule(verb="upload", key="safetensors", nth=1, fault=Raise(OutOfSpace))],
    )
    with CheckpointManager(Tier(str(tmp_path), capacity="1GB")) as manager:
        manager.restore(state(0))
        manager.save(state(4), 4)
    assert whole(tmp_path) == [2, 3, 4]


def test_a_full_disk_with_nothing_to_give_up_is_told(tmp_path, monkeypatch):
    faulty(monkeypatch, tmp_path, [Rule(verb="upload", key="safetensors", fault=Raise(OutOfSpace))])
    with (
        CheckpointManager(Tier(str(tmp_path), capacity="1GB")) as manager,
        pytest.raises(OutOfSpace, match=str(tmp_path)),
    ):
        manager.save(state(1), 1)


def test_a_step_given_up_by_a_rollback_goes_before_those_of_the_running_job(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 30):
            manager.save(state(step), step)
    with CheckpointManager(Tier(str(tmp_path), capacity=THREE)) as manager:
        manager.restore(state(0), step=10)
        manager.save(state(11), 11)
        # a restarted job would need 10 until 11 existed
        assert whole(tmp_path) == [10, 11, 30]
        manager.save(state(12), 12)
        manager.save(state(13), 13)
    assert whole(tmp_path) == [11, 12, 13]


def test_the_images_of_all_ranks_count(tmp_path):
    """Each rank writes its own image, and two images are a checkpoint."""

    def save(coordinator):
        mine = {f"x{coordinator.rank}": torch.ones(50_000, dtype=torch.int64)}
        tier = Tier(str(tmp_path), capacity=5 * IMAGE + 100_000)
        with CheckpointManager(tier, coordinator=coordinator) as manager:
            for step in range(1, 6):
                manager.save(mine, step)

    assert World(2, patience=30).run(save) == {0: None, 1: None}
    assert whole(tmp_path) == [4, 5]


def test_a_rank_that_does_not_lead_makes_room_of_what_the_leader_has_found(tmp_path, monkeypatch):
    """The job before has closed in order, so no note names it.

    The disk is full once, and for rank 1 alone.
    """
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(state(step), step)
    write, full = TierWriter._write_all, [True]

    def once_full(writer, *args):
        if writer._coordinator.rank == 1 and full and full.pop():
            raise OutOfSpace("somewhere")
        return write(writer, *args)

    monkeypatch.setattr(TierWriter, "_write_all", once_full)

    def save(coordinator):
        mine = {f"x{coordinator.rank}": torch.ones(50_000, dtype=torch.int64)}
        with CheckpointManager(
            Tier(str(tmp_path), capacity="1GB"), coordinator=coordinator
        ) as manager:
            manager.save(mine, 3)

    assert World(2, patience=30).run(save) == {0: None, 1: None}
    assert whole(tmp_path) == [2, 3]


def test_no_room_is_told_to_all_ranks(tmp_path):
    def save(coordinator):
        with CheckpointManager(
            Tier(str(tmp_path), capacity="1kB"), coordinator=coordinator
        ) as manager:
            return manager.save_async({"x": torch.ones(50_000)}, 1).exception(30)

    found = World(2, patience=30).run(save)
    assert [type(found[rank]) for rank in (0, 1)] == [OutOfSpace, OutOfSpace]


@pytest.mark.parametrize("lazy", [0, 1])
def test_a_rank_that_does_not_begin_a_save_holds_up_nobody(tmp_path, lazy):
    def save(coordinator):
        with CheckpointManager(
            Tier(str(tmp_path), capacity="1GB"), coordinator=coordinator
        ) as manager:
            if coordinator.rank == lazy:
                with pytest.raises(ConfigError):
                    manager.save_async({"x": torch.ones(5)}, 2, metrics={"loss": "low"})  # type: ignore[dict-item]
                return None
            return manager.save_async({"x": torch.ones(5)}, 2).exception(120)

    began = time.monotonic()
    found = World(2, patience=60).run(save)
    assert isinstance(found[1 - lazy], PeerFailed)
    assert time.monotonic() - began < 60


def test_on_a_disk_that_is_really_full(tmp_path):
    said = run_script_mounted(
        f"mount -t tmpfs -o size=4m none {tmp_path}",
        ROOT / "tests" / "full_disk.py",
        tmp_path,
    )
    # the save that is larger than the disk removed all but the newest in vain, and said so
    assert said.splitlines()[-1] == "left 5 7", said[-3000:]
