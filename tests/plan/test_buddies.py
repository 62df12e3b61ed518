"""The nodes that keep copies of a node's files."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.buddies import buddies

DOMAINS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=24)


@given(DOMAINS, st.integers(1, 4))
def test_no_node_is_its_own_buddy_or_has_one_in_its_domain(
    domains: list[str], replicas: int
) -> None:
    several = len(set(domains)) > 1
    for node, chosen in enumerate(buddies(domains, replicas)):
        there = [
            other
            for other in range(len(domains))
            if other != node and (not several or domains[other] != domains[node])
        ]
        assert set(chosen) <= set(there)
        assert len(set(chosen)) == len(chosen) == min(replicas, len(there))


@given(DOMAINS, st.integers(1, 4))
def test_buddies_are_in_as_many_domains_as_there_are(domains: list[str], replicas: int) -> None:
    for node, chosen in enumerate(buddies(domains, replicas)):
        others = set(domains) - {domains[node]}
        if others:
            assert len({domains[other] for other in chosen}) == min(len(others), replicas)


@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 3), st.randoms())
def test_domains_of_one_size_give_each_node_as_many_copies(
    size: int, count: int, replicas: int, random: object
) -> None:
    domains = [f"rack {number % count}" for number in range(size * count)]
    random.shuffle(domains)  # type: ignore[attr-defined]
    if replicas > (count - 1 or size - 1):
        return
    kept = Counter(other for chosen in buddies(domains, replicas) for other in chosen)
    assert set(kept.values()) == {replicas}


@pytest.mark.parametrize(
    ("domains", "replicas", "expected"),
    [
        ([""], 1, ((),)),
        (["", ""], 1, ((1,), (0,))),
        (["", "", ""], 1, ((1,), (2,), (0,))),
        (["a", "a", "b", "b"], 1, ((2,), (3,), (1,), (0,))),
        (["a", "a", "a", "b"], 1, ((3,), (3,), (3,), (1,))),
    ],
)
def test_of_a_few_nodes(
    domains: list[str], replicas: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert buddies(domains, replicas) == expected
