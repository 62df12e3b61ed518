"""The nodes that keep copies of a node's files."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.buddies import buddies, missing_copies

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


@st.composite
def lost(draw: st.DrawFn) -> tuple[dict[int, set[int]], dict[int, int], list[str], int]:
    """Return the nodes that have each file, its home, the domains, and the number of replicas."""
    domains = draw(DOMAINS)
    nodes = st.integers(0, len(domains) - 1)
    holders = draw(st.lists(st.sets(nodes, max_size=4), max_size=12))
    homes = [draw(nodes) for _ in holders]
    return dict(enumerate(holders)), dict(enumerate(homes)), domains, draw(st.integers(1, 4))


@given(lost())
def test_every_file_that_is_left_gets_back_its_copies(
    found: tuple[dict[int, set[int]], dict[int, int], list[str], int],
) -> None:
    holders, homes, domains, replicas = found
    added = missing_copies(holders, homes, domains, replicas)
    assert added.keys() == {file for file, having in holders.items() if having}
    for file, nodes in added.items():
        having = holders[file]
        assert len(set(nodes)) == len(nodes)
        assert not having & set(nodes)
        wanted = min(1 + replicas, len(domains)) if len(set(domains)) == 1 else 1 + replicas
        if len(having) >= wanted:
            assert nodes == ()
        elif len(set(domains)) == 1:
            assert len(having) + len(nodes) == wanted


@given(st.integers(2, 8), st.integers(1, 3), st.data())
def test_a_node_that_comes_back_empty_gets_what_it_had(
    nodes: int, replicas: int, data: st.DataObject
) -> None:
    domains = ["rack"] * nodes
    chosen = buddies(domains, replicas)
    gone = data.draw(st.integers(0, nodes - 1))
    before = {node: {node, *chosen[node]} for node in range(nodes)}
    after = {node: having - {gone} for node, having in before.items()}
    added = missing_copies(after, {node: node for node in before}, domains, replicas)
    assert all(after[node] | set(added[node]) == before[node] for node in before if after[node])


def test_a_copy_goes_to_another_rack_than_that_of_the_node_that_has_the_file() -> None:
    racks = ["a", "a", "b", "b"]
    assert missing_copies({7: [1]}, {7: 0}, racks, 1) == {7: (2,)}
