"""A restore from several tiers.

Each chunk comes from the nearest tier that has it intact, and what came from far stays near.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import is_committed
from ckpt.errors import (
    AccessDenied,
    NoCheckpoint,
    ObjectNotFound,
    OutOfSpace,
    StorageError,
    TransientStorageError,
)
from ckpt.events import Event, Repaired, StepDamaged
from ckpt.model.keys import OWNER
from ckpt.pipeline.retry import RetryPolicy
from ckpt.retention.policy import PruneContext, Retention
from ckpt.retention.pruner import prune
from ckpt.root.attempts import step_refs
from ckpt.root.owner import Owner, claim
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Delay, FaultyBackend, Raise, Rule
from tests.checkpoints import write_checkpoint
from tests.kit.damage import cut, empty, files, flip, garbage
from tests.kit.states import assert_is, blank, state_of
from tests.kit.stores import Wrapped, whole, wrap_stores
from tests.kit.waiting import until

Watch = Callable[..., FaultyBackend]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    with CheckpointManager([root / "near", root / "far"], chunk_size=4096) as manager:
        for step in (1, 2, 3):
            manager.save(state_of(step))
    return root


@pytest.fixture
def saved(template: Path, near: Path, far: Path) -> list[Path]:
    """Steps 1, 2 and 3 on both."""
    for root in (near, far):
        shutil.copytree(template / root.name, root)
    return [near, far]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Wrap the store of a folder whenever a manager opens it.

    Calling the result returns the last one.
    """

    def watching(folder: Path, *rules: Rule) -> FaultyBackend:
        store = FaultyBackend(open_backend(str(folder)), rules)
        wrap_stores(monkeypatch, lambda url, before: store if url == str(folder) else before)
        return store

    return watching


def reads(store: FaultyBackend) -> list[str]:
    """Return what was read, except for the owner of the root, which each restore looks at."""
    calls = [call for call in store.calls if call.verb in ("read_into", "head")]
    return [call.key for call in calls if call.key != OWNER]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_flipped_bit_is_mended_from_the_next_tier_and_told(
    saved: list[Path], near: Path, far: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    flip(files(near, 3)["data"])
    store = watch(far)
    reported: list[Event] = []
    target = blank()
    with CheckpointManager([near, far], observers=[reported.append]) as manager:
        report = manager.restore(target)
    assert report is not None
    assert_is(target, 3)
    assert (report.step, report.skipped, report.tier) == (3, (), str(near))
    (repair,) = report.repaired
    assert (repair.tier, repair.nbytes) == (str(near), 20 * 50 * 4)  # the last chunk of y
    assert repair.key.endswith("rank-00000.safetensors")
    assert "checksum mismatch" in repair.reason
    (line,) = warnings(caplog)
    assert repair.key in line
    assert str(near) in line
    (event,) = [event for event in reported if isinstance(event, Repaired)]
    assert (event.step, event.key, event.nbytes) == (3, repair.key, repair.nbytes)
    assert repair.mended
    assert event.mended
    assert not [event for event in reported if isinstance(event, StepDamaged)]
    asked = [
        call for call in store.calls if call.verb == "read_into" and "manifest" not in call.key
    ]
    assert len(asked) == 2  # for the state, and for the file on near
    # a disk is read in whole blocks
    assert all(call.nbytes <= repair.nbytes + 2 * 4096 for call in asked)
    assert files(near, 3)["data"].read_bytes() == files(far, 3)["data"].read_bytes()
    with CheckpointManager(near) as manager:
        alone = manager.restore(blank())
    assert alone is not None
    assert (alone.step, alone.repaired) == (3, ())


def test_what_is_another_jobs_is_not_mended(
    saved: list[Path], near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(files(near, 3)["data"])
    damaged = files(near, 3)["data"].read_bytes()
    with CheckpointManager(near) as running:
        running.save(state_of(4))
        with CheckpointManager([near, far]) as manager:
            report = manager.restore(blank(), step=3)
    assert report is not None
    assert [repair.mended for repair in report.repaired] == [False]
    assert files(near, 3)["data"].read_bytes() == damaged
    assert "belongs to another job" in caplog.text


def test_a_file_that_cannot_be_written_anew_stays_as_it_is_and_is_told(
    saved: list[Path], near: Path, far: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    flip(files(near, 3)["data"])
    damaged = files(near, 3)["data"].read_bytes()
    watch(near, Rule(verb="upload", fault=Raise(OutOfSpace)))
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert [repair.mended for repair in report.repaired] == [False]
    assert files(near, 3)["data"].read_bytes() == damaged
    assert "stays damaged" in caplog.text


def test_the_report_names_every_tier_that_should_have_had_it(tmp_path: Path) -> None:
    """It is changed on the first, removed from the second, and cut on the third; the
    fourth has it.
    """
    roots = [tmp_path / name for name in "abcd"]
    with CheckpointManager(roots) as manager:
        manager.save(state_of(3))
    flip(files(roots[0], 3)["data"])
    files(roots[1], 3)["data"].unlink()
    cut(files(roots[2], 3)["data"])
    target = blank()
    with CheckpointManager(roots) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert [repair.tier for repair in report.repaired] == [str(root) for root in roots[:3]]


def test_a_file_encoded_otherwise_than_far_is_read_from_there_and_stays_damaged(
    tmp_path: Path,
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [Tier(str(near), codec="zstd"), Tier(str(far))]
    with CheckpointManager(tiers) as manager:
        manager.save(state_of(3))
    (data,) = near.rglob("*.encoded")
    flip(data)
    target = blank()
    with CheckpointManager(tiers) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert [repair.mended for repair in report.repaired] == [False]


def test_a_full_cache_gives_up_its_oldest_for_what_is_restored(
    saved: list[Path], near: Path, far: Path
) -> None:
    with CheckpointManager(far) as manager:
        manager.restore(blank())
        manager.save(state_of(4))
    nbytes = sum(path.stat().st_size for path in near.rglob("rank-*"))
    with CheckpointManager([Tier(str(near), capacity=nbytes + 8000), far]) as manager:
        report = manager.restore(blank())
    assert report is not None
    assert (report.step, report.cached_bytes) == (4, files(far, 4)["data"].stat().st_size)
    assert whole(near) == [2, 3, 4]


def test_a_cache_that_another_job_writes_to_gives_up_nothing(
    saved: list[Path], near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That job's farther tiers may still read what is there, which no other job can know."""
    with CheckpointManager(far) as manager:
        manager.restore(blank())
        manager.save(state_of(4))
    nbytes = sum(path.stat().st_size for path in near.rglob("rank-*"))
    claim(open_backend(str(near)), Owner.of_this_process("anotherabcde"))
    target = blank()
    with CheckpointManager([Tier(str(near), capacity=nbytes + 8000), far]) as manager:
        report = manager.restore(target)
    assert_is(target, 4)
    assert report is not None
    assert (report.tier, report.cached_bytes) == (str(far), 0)
    assert whole(near) == [1, 2, 3]
    assert "belongs to another job" in caplog.text


def test_a_restore_of_a_running_job_evicts_nothing_that_another_job_has_saved_since(
    saved: list[Path], near: Path, far: Path
) -> None:
    """That job has released the root again. Its own farther tiers may still need its step."""
    for step in (1, 2):
        shutil.rmtree(files(near, step)["data"].parent)
    nbytes = sum(path.stat().st_size for path in near.rglob("rank-*"))
    with CheckpointManager([Tier(str(near), capacity=3 * nbytes + 8000), far]) as manager:
        manager.restore(blank())
        manager.save(state_of(4))
        store = open_backend(str(near))
        other = write_checkpoint(store, 2, {"x": np.zeros(nbytes // 8)}, attempt="anotherabcde")
        store.delete(OWNER)
        report = manager.restore(blank(), step=1)
    assert report is not None
    assert report.cached_bytes > 0
    assert whole(near) == [1, 2, 4]
    assert is_committed(store, other.ref)


def test_an_owner_that_cannot_be_read_costs_no_restore(
    saved: list[Path], near: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    flip(files(near, 3)["data"])
    watch(near, Rule(verb="head", key="writer.json", fault=Raise(AccessDenied)))
    target = blank()
    with CheckpointManager(saved) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert [repair.mended for repair in report.repaired] == [False]
    assert "its owner cannot be read" in caplog.text


def test_a_cache_never_gives_up_the_only_copy_of_its_newest(
    saved: list[Path], near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 1 to 3 far has only 2, and near has only 3: room for 2 would have to be the place of 3."""
    for step in (1, 3):
        shutil.rmtree(files(far, step)["data"].parent)
    for step in (1, 2):
        shutil.rmtree(files(near, step)["data"].parent)
    nbytes = sum(path.stat().st_size for path in near.rglob("rank-*"))
    target = blank()
    with CheckpointManager([Tier(str(near), capacity=nbytes + 8000), far]) as manager:
        report = manager.restore(target, step=2)
    assert_is(target, 2)
    assert report is not None
    assert (report.tier, report.cached_bytes) == (str(far), 0)
    assert whole(near) == [3]
    assert "the newest has no other copy" in caplog.text


def test_a_partial_cache_is_listed_only_if_it_is_right(
    saved: list[Path], near: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All files are there with the right sizes, so only reading them shows it."""
    found = files(near, 3)
    found["manifest"].unlink()
    flip(found["data"])
    damaged = found["data"].read_bytes()
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
        assert_is(target, 3)
        assert report is not None
        assert whole(near) == [1, 2]
        assert "is not listed on" in caplog.text
        assert [repair.mended for repair in report.repaired] == [True]
        assert found["data"].read_bytes() != damaged
        manager.restore(target)
    assert whole(near) == [1, 2, 3]


def test_nothing_far_is_read_while_the_near_tier_is_whole(
    saved: list[Path], near: Path, far: Path, watch: Watch
) -> None:
    store = watch(
        far, *(Rule(verb=verb, fault=Raise(AccessDenied)) for verb in ("read_into", "head", "list"))
    )  # type: ignore[arg-type]
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert (report.tier, report.repaired) == (str(near), ())
    assert [call.verb for call in store.calls if call.key != OWNER] == ["folders"]


@pytest.mark.parametrize("harm", [cut, empty, garbage], ids=["cut", "empty", "garbage"])
def test_a_torn_manifest_near_stops_nobody(
    saved: list[Path], near: Path, far: Path, watch: Watch, harm: Callable[[Path], None]
) -> None:
    harm(files(near, 3)["manifest"])
    store = watch(far)
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
        assert report is not None
        assert_is(target, 3)
        assert [repair.key.rpartition("/")[2] for repair in report.repaired] == ["manifest.json"]
        # the data was near
        assert {key.rpartition("/")[2] for key in reads(store)} == {
            "manifest.json",
            "rank-00000.json",
        }
        again = manager.restore(target)
    assert again is not None
    assert again.repaired == ()  # an intact one has replaced it
    assert whole(near) == [1, 2, 3]


def test_what_is_damaged_on_all_tiers_gives_way_to_the_step_before(
    saved: list[Path], near: Path, far: Path
) -> None:
    for root in saved:
        flip(files(root, 3)["data"])
    reported: list[Event] = []
    target = blank()
    with CheckpointManager([near, far], observers=[reported.append]) as manager:
        report = manager.restore(target)
        assert report is not None
        assert_is(target, 2)
        ((step, reason),) = report.skipped
        assert step == 3
        assert str(near) in reason
        assert str(far) in reason
        assert report.repaired == ()  # the report is about step 2, which has none
        assert [event.step for event in reported if isinstance(event, StepDamaged)] == [3]
        with pytest.raises(NoCheckpoint, match="no tier has"):
            manager.restore(target, 3)


def test_damage_in_different_places_of_three_tiers_is_no_damage(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("a", "b", "c")]
    with CheckpointManager(roots, chunk_size=4096) as manager:
        manager.save(state_of(3))
    for number, root in enumerate(roots):
        for chunk in range(4):
            if chunk != number:
                flip(files(root, 3)["data"], 4096 + 4096 * chunk)
    files(roots[2], 3)["manifest"].unlink()
    flip(
        files(roots[2], 3)["data"], 4096 + 4096 * 3
    )  # 0 and 1 have it flipped, and this is the second flip here
    target = blank()
    with CheckpointManager(roots) as manager:
        report = manager.restore(target, read_through=False)
    assert_is(target, 3)
    assert report is not None
    assert {repair.tier for repair in report.repaired} == {str(roots[0]), str(roots[1])}


def test_a_far_tier_that_is_down_is_told_and_the_near_one_serves(
    saved: list[Path], near: Path, far: Path, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    watch(
        far,
        *(
            Rule(verb=verb, fault=Raise(AccessDenied))
            for verb in ("read_into", "head", "list", "folders")
        ),
    )  # type: ignore[arg-type]
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
        assert_is(target, 3)
        assert report is not None
        assert len(warnings(caplog)) == 1
        assert "cannot be listed" in warnings(caplog)[0]
        flip(files(near, 3)["data"])
        report = manager.restore(target)  # as before: a tier that cannot be listed does not help
    assert_is(target, 2)


@pytest.fixture
def answers(far: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make the farther tier wait until it is set."""
    event = threading.Event()

    class Silent(Wrapped):
        def folders(self, prefix: str) -> Any:
            assert event.wait(60)
            return self.inner.folders(prefix)

        def head(self, key: str) -> Any:
            assert event.wait(60)
            return self.inner.head(key)

    wrap_stores(monkeypatch, lambda url, store: Silent(store) if url == str(far) else store)
    yield event
    event.set()
    assert until(lambda: not listing())


def listing() -> list[str]:
    """Return the threads that list a tier."""
    return [each.name for each in threading.enumerate() if each.name.startswith("ckpt-list")]


def test_a_far_tier_that_hangs_is_not_waited_for(
    saved: list[Path],
    near: Path,
    far: Path,
    answers: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckpt.catalog.candidates.LISTING_SECONDS", 0.2)
    monkeypatch.setattr("ckpt.closing._LIST_SECONDS", 0.1)
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
        assert_is(target, 3)
        assert report is not None
        assert report.seconds < 50
        assert "no answer within" in caplog.text
    assert listing(), "nor at the end"
    for path in near.rglob("manifest.json"):  # the only copy is worth any wait
        path.unlink()
    target = blank()
    threading.Timer(3, answers.set).start()
    with CheckpointManager([near, far]) as manager:
        manager.restore(target)
    assert answers.is_set()
    assert_is(target, 3)


def test_a_far_tier_that_is_down_is_not_waited_for_as_long_as_one_that_lists(
    saved: list[Path],
    near: Path,
    far: Path,
    watch: Watch,
    answers: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, CheckpointManager([near, far]) as manager:
        patch.setattr("ckpt.catalog.candidates.ANSWER_SECONDS", 0.2)
        report = manager.restore(blank())
        assert report is not None
        assert report.step == 3
        assert report.seconds < 14  # a tier that lists may take 15
        assert (
            f"the tier {far} cannot be listed: storage did not answer properly: '{far}'"
            in caplog.text
        )
    answers.set()
    watch(far, Rule(verb="folders", fault=Delay(4)))
    shutil.rmtree(next(near.glob("step-*3.*")))
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(blank())
        assert report is not None
        assert report.step == 3  # it answers, so it is worth a wait: it may hold something newer


# -- read-through ----------------------------------------------------------------------------------


def test_an_empty_near_tier_is_filled_and_the_next_restore_is_local(
    saved: list[Path], tmp_path: Path, far: Path, watch: Watch
) -> None:
    fresh = tmp_path / "fresh"
    target = blank()
    with CheckpointManager([fresh, far]) as manager:
        first = manager.restore(target)
    assert_is(target, 3)
    assert first is not None
    assert first.tier == str(far)
    assert first.cached_bytes == files(far, 3)["data"].stat().st_size
    assert first.repaired == ()
    assert whole(fresh) == [3]
    for kind, path in files(far, 3).items():
        assert files(fresh, 3)[kind].read_bytes() == path.read_bytes()
    store = watch(far)
    target = blank()
    with CheckpointManager([fresh, far]) as manager:
        second = manager.restore(target)
    assert_is(target, 3)
    assert second is not None
    assert (second.tier, second.cached_bytes) == (str(fresh), 0)
    assert [call.verb for call in store.calls if call.key != OWNER] == [
        "folders"
    ]  # it looks for a newer step


def test_it_can_be_switched_off(saved: list[Path], tmp_path: Path, far: Path) -> None:
    fresh = tmp_path / "fresh"
    target = blank()
    with CheckpointManager([fresh, far]) as manager:
        report = manager.restore(target, read_through=False)
    assert_is(target, 3)
    assert report is not None
    assert (report.tier, report.cached_bytes) == (str(far), 0)
    assert not fresh.exists()


def test_a_short_file_near_is_replaced(saved: list[Path], near: Path, far: Path) -> None:
    cut(files(near, 3)["data"])
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    (repair,) = report.repaired
    assert "it was cut" in repair.reason
    assert whole(near) == [1, 2, 3]


def test_a_partial_cache_is_used_and_pruned_in_the_end(
    saved: list[Path], tmp_path: Path, far: Path, watch: Watch
) -> None:
    """A fragment that is missing when it is to be copied leaves the data in a cache that does not
    list the step.
    """
    fresh = tmp_path / "fresh"
    watch(far, Rule(verb="read_into", key="rank-00000.json", fault=Raise(ObjectNotFound), nth=2))
    target = blank()
    with CheckpointManager([fresh, far]) as manager:
        manager.restore(target)
        assert_is(target, 3)
        cache = open_backend(str(fresh))
        (ref,) = step_refs(cache)
        assert not is_committed(cache, ref)
        store = watch(far)
        with CheckpointManager([fresh, far]) as other:
            assert other.restore(target) is not None
        assert not any("safetensors" in key for key in reads(store))
    prune(cache, Retention(keep_last=1), PruneContext(grace_seconds=-1))
    assert step_refs(cache) == []


@pytest.mark.parametrize("error", [OutOfSpace, AccessDenied, StorageError])
@pytest.mark.parametrize("verb", ["upload", "write", "finish", "put"])
def test_a_cache_that_does_not_take_it_costs_a_warning(
    saved: list[Path],
    tmp_path: Path,
    far: Path,
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
    verb: Any,
    error: type[StorageError],
) -> None:
    fresh = tmp_path / "fresh"
    watch(fresh, Rule(verb=verb, fault=Raise(error)))
    target = blank()
    with CheckpointManager([fresh, far]) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert (report.tier, report.repaired, report.step) == (str(far), (), 3)
    (line,) = warnings(caplog)
    assert str(fresh) in line
    if verb in ("upload", "write"):  # nothing is left on a disk that is full
        assert list(fresh.rglob("*.*")) == []


def test_the_next_folder_takes_what_the_nearest_does_not(
    saved: list[Path], tmp_path: Path, far: Path, watch: Watch
) -> None:
    full, roomy = tmp_path / "full", tmp_path / "roomy"
    watch(full, Rule(verb="upload", fault=Raise(OutOfSpace)))
    target = blank()
    with CheckpointManager([full, roomy, far]) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert report.cached_bytes
    assert whole(roomy) == [3]


def test_a_disk_too_small_is_left_as_it_was(
    saved: list[Path], tmp_path: Path, far: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "t", str(small)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED, mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    try:
        target = blank()
        with CheckpointManager([small, far]) as manager:
            report = manager.restore(target)
        assert_is(target, 3)
        assert report is not None
        assert report.tier == str(far)
        assert len(warnings(caplog)) == 1
        assert os.listdir(small) == []
        subprocess.run(["mount", "-o", "remount,ro,size=1m", str(small)], check=True)
        with CheckpointManager([small, far]) as manager:
            assert manager.restore(target) is not None
        assert len(warnings(caplog)) == 2
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_damage_far_is_never_cached_as_a_step(saved: list[Path], tmp_path: Path, far: Path) -> None:
    fresh = tmp_path / "fresh"
    flip(files(far, 3)["data"])
    target = blank()
    with CheckpointManager([fresh, far]) as manager:
        report = manager.restore(target)
    assert_is(target, 2)
    assert report is not None
    assert [step for step, _ in report.skipped] == [3]
    assert whole(fresh) == [2]


def test_what_is_in_memory_is_not_fetched_from_far(tmp_path: Path, far: Path, watch: Watch) -> None:
    """It is nearer than the folder, and whole, so nothing has to be fetched."""
    fresh = tmp_path / "fresh"
    tiers = [Tier(f"shm://test-nearest-{os.getpid()}"), Tier(str(fresh), every=10), Tier(str(far))]
    try:
        with CheckpointManager(tiers) as manager:
            manager.save(state_of(3))
            store = watch(far)
            target = blank()
            with CheckpointManager(tiers) as other:
                report = other.restore(target)
            assert report is not None
            assert report.tier.startswith("shm://")
            assert not any("safetensors" in key for key in reads(store))
            assert not fresh.exists()
    finally:
        backend = open_backend(tiers[0].url)
        for info in list(backend.list("")):
            backend.delete(info.key)
        backend.close()


def test_nothing_is_put_into_memory(saved: list[Path], far: Path) -> None:
    """The tier "memory" takes slots, not files, though its name looks like a folder's."""
    tiers = [Tier("memory"), Tier(str(far))]
    target = blank()
    with CheckpointManager(tiers) as manager:
        report = manager.restore(target)
        assert_is(target, 3)
        assert report is not None
        assert (report.tier, report.cached_bytes) == (str(far), 0)
        assert step_refs(manager._tiers[0].backend) == []


def test_a_near_tier_that_does_not_answer_is_asked_once_for_all_files(
    saved: list[Path],
    near: Path,
    far: Path,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quick = RetryPolicy(attempts=2, first_seconds=0.001, most_seconds=0.002)
    monkeypatch.setattr("ckpt.restore.restorer.RetryPolicy", lambda: quick)
    store = watch(
        near,
        *(
            Rule(verb=verb, key="safetensors", fault=Raise(TransientStorageError))
            for verb in ("head", "read_into", "upload")
        ),
    )  # type: ignore[arg-type]
    target = blank()
    with CheckpointManager([near, far]) as manager:
        report = manager.restore(target)
    assert_is(target, 3)
    assert report is not None
    assert report.tier == str(far)
    assert [(repair.tier, repair.key) for repair in report.repaired] == [(str(near), "")]
    assert (
        sum(
            call.verb in ("head", "read_into") and "safetensors" in call.key for call in store.calls
        )
        == 2
    )
    assert len(warnings(caplog)) == 1  # it does not answer, so nothing is put there


def test_a_save_after_a_read_through_is_as_ever(
    saved: list[Path], tmp_path: Path, far: Path
) -> None:
    fresh = tmp_path / "fresh"
    target = blank()
    with CheckpointManager([Tier(str(fresh), keep_last=1), Tier(str(far))]) as manager:
        manager.restore(target)
        manager.save(state_of(4))
    assert whole(fresh) == [4]
    assert whole(far) == [1, 2, 3, 4]
