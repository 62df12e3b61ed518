"""NumPy arrays keep the order of their dimensions in memory, as tensors do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.state.saving import restored, saved

WHOLE = np.arange(24.0).reshape(2, 3, 4)
TURNED = {
    "column-major": np.asfortranarray(WHOLE),
    "turned": WHOLE.transpose(1, 2, 0).copy().transpose(2, 0, 1),
    "backwards": np.asfortranarray(WHOLE)[:, ::-1],
    "cut": np.asfortranarray(np.repeat(WHOLE, 2, axis=1))[:, ::2],
}


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_array_that_a_restore_makes_has_the_order_that_was_saved(
    name: str, is_frozen: bool
) -> None:
    array = TURNED[name].view()
    array.flags.writeable = not is_frozen
    target: dict[str, Any] = {"plain": None, "inner": {"a": None}}
    restored(saved({"plain": array, "inner": {"a": array}}), target)
    for made in (target["plain"], target["inner"]["a"]):
        assert np.array_equal(made, array)
        assert made.strides == array.copy(order="K").strides


def test_a_dense_array_is_filled_in_place_in_its_own_order() -> None:
    root = saved({"a": WHOLE})
    for order in ("C", "F"):
        target = {"a": np.zeros(WHOLE.shape, order=order)}
        kept, strides = target["a"], target["a"].strides
        restored(root, target)
        assert target["a"] is kept
        assert kept.strides == strides
        assert np.array_equal(kept, WHOLE)


@pytest.mark.parametrize(
    "target",
    [
        frozen(np.zeros((2, 3, 4), order="F")),
        np.zeros((2, 6, 4), order="F")[:, ::2],
        np.zeros((2, 3, 4), order="F")[::-1],
    ],
    ids=["read-only", "cut", "backwards"],
)
def test_an_array_that_cannot_be_filled_is_replaced_in_its_order(
    target: np.ndarray[Any, Any],
) -> None:
    state = {"a": target}
    restored(saved({"a": WHOLE}), state)
    assert state["a"] is not target
    assert np.array_equal(state["a"], WHOLE)
    assert state["a"].strides == np.zeros((2, 3, 4), order="F").strides
    assert not target.any()


def test_an_array_and_its_transpose_are_both_saved() -> None:
    array = np.arange(6.0).reshape(2, 3)
    target: dict[str, Any] = {"a": None, "b": None}
    restored(saved({"a": array, "b": array.T}), target)
    assert np.array_equal(target["a"], array)
    assert np.array_equal(target["b"], array.T)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 4), (4, 1)])
def test_arrays_of_no_order_keep_their_shape(shape: tuple[int, ...]) -> None:
    target: dict[str, Any] = {"made": None, "filled": np.zeros(shape)}
    restored(saved({"made": np.ones(shape), "filled": np.ones(shape)}), target)
    for array in target.values():
        assert array.shape == shape
        assert (array == 1).all()
