"""Which rank reads what for which others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.plan.shared_reads import Keys, Shares, share
from tests.kit.examples import examples

LIMITS = {"worth_bytes": 30, "parcel_bytes": 25}


def shares_of(sizes: dict[int, int], wanted: list[set[int]]) -> list[Shares]:
    """Return what each rank finds."""
    tables: list[Keys] = [np.array(sorted(keys), dtype=np.int64) for keys in wanted]
    return [share({key: sizes[key] for key in keys}, tables, **LIMITS) for keys in wanted]


@settings(max_examples=examples(150))
@given(st.data())
def test_every_rank_gets_all_it_wants_once_and_all_agree(data: st.DataObject) -> None:
    sizes = data.draw(st.dictionaries(st.integers(0, 1 << 40), st.integers(0, 40), max_size=40))
    ranks = data.draw(st.integers(1, 5))
    subsets = st.sets(st.sampled_from(sorted(sizes))) if sizes else st.just(set())
    wanted = data.draw(
        st.lists(st.one_of(subsets, st.just(set(sizes))), min_size=ranks, max_size=ranks)
    )
    found = shares_of(sizes, wanted)
    for rank, (mine, keys) in enumerate(zip(found, wanted, strict=True)):
        got = [
            key
            for g in mine.groups
            for round_ in g.rounds
            for parcel in round_
            for key in parcel.keys
        ]
        assert sorted([*got, *mine.own_keys]) == sorted(keys)
        for group in mine.groups:
            assert rank in group.ranks
            # the same group, in the same order among those that both have
            for other in group.ranks:
                assert group in found[other].groups
            for round_ in group.rounds:
                readers = [parcel.reader for parcel in round_]
                assert len(set(readers)) == len(readers)
                assert set(readers) <= set(group.ranks)
                for parcel in round_:
                    assert (
                        len(parcel.keys) == 1
                        or sum(sizes[k] for k in parcel.keys) <= LIMITS["parcel_bytes"]
                    )
        assert [g.ranks for g in mine.groups] == sorted(g.ranks for g in mine.groups)


def test_what_all_want_is_read_in_even_parts_and_in_the_order_of_the_files() -> None:
    sizes = dict.fromkeys(range(400), 10)
    [mine, *_] = shares_of(sizes, [set(sizes)] * 4)
    [group] = mine.groups
    read: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for round_ in group.rounds:
        for parcel in round_:
            read[parcel.reader] += parcel.keys
    assert read == {rank: list(range(100 * rank, 100 * rank + 100)) for rank in range(4)}
    assert len(group.rounds) == 50


def test_little_is_not_worth_it() -> None:
    [mine, _] = shares_of({1: 10, 2: 15}, [{1, 2}, {1, 2}])
    assert mine == Shares(frozenset({1, 2}), ())
    assert mine.rounds == 0
