from __future__ import annotations

import re

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.coordination.leaving import own_coordinator
from ckpt.coordination.single import SingleCoordinator, new_attempt
from ckpt.errors import CommitError


def test_attempts_are_new_each_time_and_fit_a_folder():
    attempts = {new_attempt() for _ in range(100)}
    assert len(attempts) == 100
    assert all(re.fullmatch(r"[0-9a-z]{6,32}", attempt) for attempt in attempts)
    assert SingleCoordinator().attempt != SingleCoordinator().attempt


def test_it_hears_its_own_word():
    alone = SingleCoordinator()
    assert (alone.rank, alone.world_size) == (0, 1)
    assert alone.collect("s", {0}, timeout=0) == {}
    alone.post("s", b"word")
    assert alone.collect("s", {0}, timeout=0) == {0: b"word"}
    assert alone.collect("s", {1}, timeout=0) == {}
    assert alone.collect("other", {0}, timeout=0) == {}


def test_the_first_verdict_stands():
    alone = SingleCoordinator()
    assert alone.verdict("s", timeout=0) is None
    assert alone.set_once("s", b"one") == b"one"
    assert alone.set_once("s", b"two") == b"one"
    assert alone.verdict("s", timeout=0) == b"one"


def test_what_is_forgotten_takes_its_verdicts_along(tmp_path):
    tiers = [tmp_path / "near", Tier(str(tmp_path / "far"), capacity="1GB")]
    with CheckpointManager(tiers) as manager:
        alone = manager._coordinator
        assert isinstance(alone, SingleCoordinator)
        for step in range(3):
            manager.save({"x": torch.zeros(3)}, step)
        assert alone.set_once("step", b"stays") == b"stays"
        alone.forget("ste")
        assert list(alone._verdicts) == ["step"]


def test_who_leaves_says_nothing_more_and_leaves_the_object_of_others_alone():
    shared = SingleCoordinator()
    own = own_coordinator(shared)
    assert own.attempt == shared.attempt
    own.post("s", b"word")
    own.leave("interrupted")
    with pytest.raises(CommitError, match="has left"):
        own.post("s", b"word")
    with pytest.raises(CommitError, match="has left"):
        own.clone().set_once("s", b"word")
    shared.post("s", b"word")
    assert shared.set_once("s", b"word") == b"word"
