from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.model.key_order import KeyOrder, in_order

KEYS = st.lists(st.sampled_from("abcde"), unique=True, min_size=1).map(tuple)
ORDERS = st.dictionaries(st.sampled_from("uvwxyz"), KEYS, max_size=6)


def found(order: KeyOrder, path: str, keys: tuple[str, ...]) -> list[str]:
    return in_order(sorted(keys), order.of_parameter(path), str)


@given(ORDERS)
def test_each_parameter_gets_its_keys_in_their_order(orders: dict[str, tuple[str, ...]]) -> None:
    order = KeyOrder.from_node(KeyOrder.of(orders).node())
    for path, keys in orders.items():
        assert found(order, path, keys) == list(keys)


@given(ORDERS, ORDERS)
def test_two_ranks_keep_the_orders_of_both(
    one: dict[str, tuple[str, ...]], two: dict[str, tuple[str, ...]]
) -> None:
    added = two.keys() - one.keys()
    order = KeyOrder.of(one).union(KeyOrder.of(two), added)
    for path, keys in {**two, **one}.items():
        assert found(order, path, keys) == list(keys)


def test_parameters_with_the_usual_keys_share_one_list() -> None:
    usual, more = ("step", "exp_avg", "exp_avg_sq"), ("step", "exp_avg", "exp_avg_sq", "max")
    order = KeyOrder.of({"a": usual, "b": more, "c": ("buffer",), "d": ()})
    assert order.node() == {"keys": ["step", "exp_avg", "exp_avg_sq", "max", "buffer"]}


def test_keys_without_a_place_come_last() -> None:
    assert in_order(["x", "b", "a"], ("a", "b"), str) == ["a", "b", "x"]
