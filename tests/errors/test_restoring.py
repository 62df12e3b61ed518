from __future__ import annotations

import time

from ckpt.errors import EntryMissing


def test_a_missing_name_is_answered_with_the_names_that_are_like_it():
    names = ["model/weight", "model/bias", "optimizer/step"]
    error = EntryMissing(["model/weights"], 5, present=names)
    assert error.near[0] == "model/weight"
    assert "step 5 has no 'model/weights'; it has 'model/weight'" in str(error)
    other = EntryMissing(["zzz"], 5, present=[*names, "rng"])
    assert other.near == ()
    assert "it has 'model/bias', 'model/weight', 'optimizer/step' and 1 more: " in str(other)
    assert "; it has" not in str(EntryMissing(["zzz"], 5))


def test_a_checkpoint_of_a_million_names_is_compared_in_part():
    names = [f"model/layers.{number}.weight" for number in range(1_000_000)]
    began = time.thread_time()
    assert "it has " in str(EntryMissing(["model/layers.7.weights"], 5, present=names))
    assert time.thread_time() - began < 10
