"""Everyday code that changes a state during the copy: each way fails the save with the tensor's
name.
"""

from __future__ import annotations

import pytest

from ckpt import CheckpointManager
from ckpt.errors import TensorChanged
from tests.overlap.jobs import train
from tests.overlap.ways import WAYS, State, documented, model_and_average, seen_by
from tests.overlap.window import Window, assert_restores


@pytest.fixture
def state() -> State:
    made = model_and_average()
    made["step"] = 0
    train(made, 0)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_the_window_fails_the_save_by_name(
    way: str, state: State, root: str, window: Window
) -> None:
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state, 1)
        assert seen_by(state, WAYS[way]) == documented()[way][0]
        window.close()
        with pytest.raises(TensorChanged, match=r"'(model|optimizer)/"):
            pending.result(60)
        assert manager.steps() == []
        window.save(manager, state, 2)
        window.close()
    assert_restores(root, window.reference, {**model_and_average(), "step": 0}, 2)


def test_each_way_of_the_table_is_tried() -> None:
    assert list(documented()) == list(WAYS)
