"""Several tiers: a step goes to the nearest first, and to each at its own pace."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.cli.main import main
from ckpt.errors import (
    AccessDenied,
    CkptError,
    ConfigError,
    OutOfSpace,
    StepsMissing,
    StorageError,
    TierBehind,
)
from ckpt.events import Event, SaveFailed
from ckpt.storage.testing import Raise, Rule
from tests.kit.states import state
from tests.kit.stores import faulty, whole


def test_a_far_tier_that_hangs_holds_up_neither_the_near_one_nor_the_caller(tmp_path, gated):
    with CheckpointManager([tmp_path / "near", tmp_path / "far"], slots=1, backlog=10) as manager:
        saves = []
        for step in range(1, 6):
            began = time.perf_counter()
            saves.append(manager.save_async(state(step), step))
            saves[-1].result(10, tier=str(tmp_path / "near"))
            assert time.perf_counter() - began < 5
            assert not saves[-1].done()
        assert whole(tmp_path / "near") == [1, 2, 3, 4, 5]
        with pytest.raises(TimeoutError):
            saves[0].result(0.05)
        with pytest.raises(TimeoutError):
            saves[0].result(0.05, tier=str(tmp_path / "far"))
        with pytest.raises(ConfigError, match="does not go to"):
            saves[0].result(tier="elsewhere")
        gated.open.set()
        for save in saves:
            save.result(10)
    assert whole(tmp_path / "far") == [1, 2, 3, 4, 5]
    assert [key.split(".")[0] for key in gated.began] == [
        f"step-00000000{n}" for n in (1, 5, 4, 3, 2)
    ]  # newest first


def test_a_tier_too_far_behind_gives_up_the_oldest_and_says_so(tmp_path, gated, caplog):
    with CheckpointManager([tmp_path / "near", tmp_path / "far"], backlog=2) as manager:
        saves = []
        for step in range(1, 7):
            saves.append(manager.save_async(state(step), step))
            saves[-1].result(10, tier=str(tmp_path / "near"))
            while not gated.began:
                time.sleep(0.01)
        gated.open.set()
        outcomes = {save.step: type(save.exception(10)) for save in saves}
    assert outcomes == dict.fromkeys((1, 4, 5, 6), type(None)) | dict.fromkeys((2, 3), TierBehind)
    assert (whole(tmp_path / "near"), whole(tmp_path / "far")) == ([1, 2, 3, 4, 5, 6], [1, 4, 5, 6])
    assert "a tier that is behind" in caplog.text


def test_what_a_far_tier_waits_for_is_not_pruned_from_the_near_one(tmp_path, gated):
    with CheckpointManager(
        [Tier(str(tmp_path / "near"), keep_last=1), tmp_path / "far"], backlog=9
    ) as manager:
        saves = []
        for step in range(1, 5):
            saves.append(manager.save_async(state(step), step))
            saves[-1].result(10, tier=str(tmp_path / "near"))
        gated.open.set()
        for save in saves:
            save.result(10)
        manager.save(state(5), 5)
    assert (whole(tmp_path / "near"), whole(tmp_path / "far")) == ([5], [1, 2, 3, 4, 5])


def test_what_a_near_tier_kept_for_a_far_one_goes_when_the_manager_closes(tmp_path, gated):
    manager = CheckpointManager(
        [Tier(str(tmp_path / "near"), keep_last=1), tmp_path / "far"], backlog=9
    )
    saves = []
    for step in range(1, 5):
        saves.append(manager.save_async(state(step), step))
        saves[-1].result(10, tier=str(tmp_path / "near"))
    gated.open.set()
    manager.close()
    assert (whole(tmp_path / "near"), whole(tmp_path / "far")) == ([4], [1, 2, 3, 4])


def test_a_step_that_only_a_far_tier_takes_holds_its_slot_and_no_near_tier(tmp_path, gated):
    """One of two slots waits with step 3, and all other steps pass through the other one."""
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    with CheckpointManager([Tier(near, every=2), Tier(far)], slots=2, backlog=9) as manager:
        saves = {2: manager.save_async(state(2), 2)}
        while not gated.began:
            time.sleep(0.01)
        saves[3] = manager.save_async(state(3), 3)
        for step in (4, 6, 8):
            saves[step] = manager.save_async(state(step), step)
            saves[step].result(10, tier=near)
        saves[9] = manager.save_async(state(9), 9)
        gated.open.set()
        for save in saves.values():
            save.result(20)
        manager.save(state(12), 12)
    assert (whole(tmp_path / "near"), whole(tmp_path / "far")) == (
        [2, 4, 6, 8, 12],
        [2, 3, 4, 6, 8, 9, 12],
    )
    assert [int(key[5:14]) for key in gated.began] == [2, 3, 9, 8, 6, 4, 12]


def test_a_far_tier_that_fails_is_told_and_the_near_one_stands(tmp_path, monkeypatch):
    faulty(
        monkeypatch,
        tmp_path / "far",
        [Rule(verb="write", key="safetensors", nth=1, fault=Raise(OutOfSpace("k", "full")))],
    )
    with CheckpointManager([tmp_path / "near", tmp_path / "far"]) as manager:
        save = manager.save_async(state(1), 1)
        assert save.result(10, tier=str(tmp_path / "near")) is save
        with pytest.raises(OutOfSpace):
            save.result(10)
        manager.save(state(2), 2)
    assert (whole(tmp_path / "near"), whole(tmp_path / "far")) == ([1, 2], [2])


def test_a_near_tier_that_fails_fails_the_save_everywhere_at_once(tmp_path, monkeypatch):
    faulty(
        monkeypatch,
        tmp_path / "near",
        [Rule(verb="write", key="safetensors", nth=1, fault=Raise(OutOfSpace("k", "full")))],
    )
    with CheckpointManager([tmp_path / "near", tmp_path / "far"]) as manager:
        save = manager.save_async(state(1), 1)
        for tier in (None, str(tmp_path / "near"), str(tmp_path / "far")):
            with pytest.raises(OutOfSpace):
                save.result(10, tier=tier)
    assert not (tmp_path / "far").exists()


def test_a_tier_that_is_not_required_fails_nothing(tmp_path, monkeypatch, caplog):
    faulty(
        monkeypatch,
        tmp_path / "far",
        [Rule(verb="upload", key="", nth=None, fault=Raise(StorageError("k", "down")))],
    )
    with CheckpointManager(
        [Tier(str(tmp_path / "near")), Tier(str(tmp_path / "far"), required=False)]
    ) as manager:
        save = manager.save(state(1), 1)
        with pytest.raises(StorageError):
            save.result(tier=str(tmp_path / "far"))
    assert whole(tmp_path / "near") == [1]
    assert "far" in caplog.text


def test_damage_on_the_near_tier_before_the_far_one_has_it_goes_no_farther(tmp_path, gated):
    from ckpt.errors import IntegrityError

    with CheckpointManager([tmp_path / "near", tmp_path / "far"]) as manager:
        save = manager.save_async(state(1), 1)
        save.result(10, tier=str(tmp_path / "near"))
        (image,) = (tmp_path / "near").rglob("*.safetensors")
        data = bytearray(image.read_bytes())
        data[-9] ^= 4
        image.write_bytes(data)
        gated.open.set()
        with pytest.raises(IntegrityError, match="checksum mismatch"):
            save.result(10)
    assert whole(tmp_path / "far") == []


def test_tiers_that_skip_steps_drain_from_the_nearest_that_has_them(tmp_path):
    tiers = [
        Tier(str(tmp_path / "a"), every=2),
        Tier(str(tmp_path / "b"), every=3),
        Tier(str(tmp_path / "c")),
    ]
    with CheckpointManager(tiers) as manager:
        for step in range(1, 7):
            manager.save(state(step), step)
    assert [whole(tmp_path / name) for name in "abc"] == [[2, 4, 6], [3, 6], [1, 2, 3, 4, 5, 6]]


def test_where_the_nearest_tier_is_not_required_the_next_takes_its_place(tmp_path, monkeypatch):
    faulty(
        monkeypatch,
        tmp_path / "near",
        [Rule(verb="upload", key="", nth=None, fault=Raise(StorageError("k", "broken")))],
    )
    tiers = [
        Tier(str(tmp_path / "near"), required=False),
        Tier(str(tmp_path / "next")),
        Tier(str(tmp_path / "far")),
    ]
    with CheckpointManager(tiers) as manager:
        manager.save(state(1), 1)
    assert [whole(tmp_path / name) for name in ("near", "next", "far")] == [[], [1], [1]]


def test_a_tier_that_is_near_for_one_step_and_far_for_another_mixes_nothing(tmp_path):
    tiers = [Tier(str(tmp_path / "a"), every=3), Tier(str(tmp_path / "b"), every=2)]
    with CheckpointManager(tiers, slots=2) as manager:
        saves = [manager.save_async(state(step), step) for step in (6, 8, 9, 10, 12, 14)]
        for save in saves:
            save.result(20)
    assert [whole(tmp_path / name) for name in "ab"] == [[6, 9, 12], [6, 8, 10, 12, 14]]
    for name, steps in (("a", [6, 9, 12]), ("b", [6, 8, 10, 12, 14])):
        with CheckpointManager(tmp_path / name) as manager:
            for step in steps:
                found = state(0)
                manager.restore(found, step)
                assert found["x"].unique().tolist() == [step]


def test_tiers_answer_to_the_names_they_were_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CheckpointManager([Tier("memory"), Tier("near")]) as manager:
        save = manager.save(state(1), 1)
        for name in ("memory", "near", str(tmp_path / "near")):
            assert save.result(tier=name) is save
        with pytest.raises(ConfigError, match="it goes to memory, near"):
            save.result(tier="s3://typo/never")


def test_memory_comes_first(tmp_path):
    with pytest.raises(ConfigError, match="put it before"):
        CheckpointManager([Tier(str(tmp_path)), Tier(f"shm://test-behind-{os.getpid()}")])


def test_a_last_step_that_no_tier_takes_is_told_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.ones(2)}
    with CheckpointManager(Tier(str(tmp_path), every=20)) as manager:
        manager.save_async(state, 20)
        assert "skipped" in repr(manager.save_async(state, 29))
    assert "step 29" in caplog.text
    caplog.clear()
    with CheckpointManager(Tier(str(tmp_path / "other"), every=20)) as manager:
        manager.save_async(state, 29)
        manager.save_async(state, 40)
    assert "was not" not in caplog.text


@pytest.mark.parametrize("verb", ["put", "upload", "head"])
def test_a_far_tier_that_refuses_everything_costs_no_near_step(tmp_path, monkeypatch, verb):
    faulty(
        monkeypatch,
        tmp_path / "far",
        [Rule(verb=verb, key="", nth=None, fault=Raise(AccessDenied("k", "read-only")))],
    )
    heard = []
    ended = queue.Queue[Event]()
    manager = CheckpointManager(
        [tmp_path / "near", tmp_path / "far"],
        observers=[lambda event: ended.put(event) if isinstance(event, SaveFailed) else None],
    )
    for step in range(1, 41):
        try:
            manager.save_async(state(step), step)
        except CkptError as error:
            heard.append(error)
        ended.get(timeout=10)
    with pytest.raises(CkptError):
        manager.close()
    assert whole(tmp_path / "near") == list(range(1, 41))
    assert heard
    assert all(isinstance(error, AccessDenied) for error in heard)


def test_close_says_what_it_waits_for_and_gives_up_when_it_is_told_to(
    tmp_path, gated, caplog, monkeypatch
):
    monkeypatch.setattr("ckpt.pending._SILENT_SECONDS", 0.1, raising=False)
    near, far = tmp_path / "near", tmp_path / "far"
    manager = CheckpointManager([near, far])
    saves = [manager.save_async(state(step), step) for step in (100, 110, 120)]
    for save in saves:
        save.result(30, tier=str(near))
    with pytest.raises(StepsMissing) as reported:
        manager.close(timeout=0.5)
    assert f"waiting for {far}: 3 steps, newest 120" in caplog.text
    assert reported.value.missing == {str(far): (100, 110, 120)}
    assert str(reported.value).startswith(
        f"{far} lacks steps 100, 110, 120 (not finished within 0.5 s)"
    )
    assert "nearer tiers have them" in str(reported.value)
    assert len(traceback.extract_tb(reported.value.__traceback__)) < 4
    assert isinstance(saves[0].exception(), StepsMissing)
    manager.close()
    assert whole(near) == [100, 110, 120]


def test_close_tells_of_all_steps_that_a_tier_lacks_at_once(tmp_path, monkeypatch):
    faulty(
        monkeypatch,
        tmp_path / "far",
        [
            Rule(
                verb="put",
                key="writer",
                nth=None,
                fault=Raise(AccessDenied("writer.json", "read-only")),
            )
        ],
    )
    manager = CheckpointManager([tmp_path / "near", tmp_path / "far"])
    pending = manager.save_async(state(1), 1)
    pending.result(30, tier=str(tmp_path / "near"))
    with contextlib.suppress(AccessDenied):
        manager.save_async(state(2), 2)
    with pytest.raises(
        StepsMissing, match=r"far lacks steps? .*2 \(access denied \(read-only\)\): nearer"
    ) as reported:
        manager.close()
    assert reported.value.__cause__ is None
    assert "writer.json" not in str(reported.value)


def test_close_with_nothing_under_way_says_nothing(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    manager.save(state(1), 1)
    manager.close(timeout=30)
    assert "waiting" not in caplog.text
    with pytest.raises(ConfigError, match="timeout='soon': give seconds"):
        CheckpointManager(tmp_path).close(timeout="soon")  # type: ignore[arg-type]


def test_a_close_names_the_tiers_that_lack_the_last_step(tmp_path, caplog, monkeypatch):
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    for steps in ((4, 5), (10,)):
        caplog.clear()
        with CheckpointManager([Tier(near), Tier(far, every=5)]) as manager:
            manager.restore({"x": torch.zeros(2)})
            for step in steps:
                manager.save({"x": torch.ones(2)}, step)
        assert "the last of this job" not in caplog.text
    with CheckpointManager([Tier(near), Tier(far, every=5)]) as manager:
        manager.restore({"x": torch.zeros(2)})
        manager.save({"x": torch.ones(2)}, 15)
        manager.save({"x": torch.ones(2)}, 17)
    [line] = [line for line in caplog.messages if "the last of this job" in line]
    assert f"step 17, the last of this job, is not on {far}: it is no multiple of every=5" in line
    command = line.split("to have this one there: ckpt ")[1].split()
    monkeypatch.setattr(sys, "argv", ["ckpt", *command])
    assert main() == 0
    assert CheckpointManager(far).latest_step() == 17


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_the_final_save_goes_to_every_tier(tmp_path, caplog, call):
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    with CheckpointManager([Tier(near), Tier(far, every=5)]) as manager:
        for step in (5, 6):
            manager.save({"x": torch.ones(2)}, step)
        getattr(manager, call)({"x": torch.ones(2)}, 7, final=True)
    assert CheckpointManager(near).steps() == [5, 6, 7]
    assert CheckpointManager(far).steps() == [5, 7]
    assert "the last of this job" not in caplog.text


def test_a_planned_stop_has_its_last_step_on_all_tiers_and_no_warning(tmp_path, caplog):
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    with CheckpointManager([Tier(near), Tier(far, every=5)]) as manager:
        stop = manager.on_stop_request()
        manager.request_stop()
        step = 6
        while not stop.requested(step):
            step += 1
        manager.save({"x": torch.ones(2)}, step)
    assert CheckpointManager(far).latest_step() == step
    assert "the last of this job" not in caplog.text


@pytest.mark.parametrize("call", ["result", "next"])
def test_the_traceback_of_a_store_that_refuses_is_that_of_the_call(tmp_path, monkeypatch, call):
    rule = Rule(verb="put", key="", nth=None, fault=Raise(AccessDenied("k", "wrong key")))
    faulty(monkeypatch, tmp_path, [rule])

    def save_twice() -> None:
        with CheckpointManager(str(tmp_path)) as manager:
            pending = manager.save_async(state(1), 1)
            if call == "result":
                pending.result(20)
            pending.wait()
            manager.save_async(state(2), 2)

    with pytest.raises(AccessDenied) as caught:
        save_twice()
    frames = traceback.extract_tb(caught.value.__traceback__)
    files = {Path(frame.filename).name for frame in frames}
    of_the_call = {"test_tiers.py", "manager.py", "manager_calls.py", "ledger.py", "pending.py"}
    assert files <= of_the_call
