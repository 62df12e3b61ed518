from __future__ import annotations

import pytest

from ckpt.errors import HostMemoryExhausted
from ckpt.staging.budget import Room, decide, measure

MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory", "shared", "slots", "is_shared"),
    [
        (1000, 1000, 2, True),
        (200, 200, 2, True),
        (199, 199, 1, True),
        (1000, 150, 1, True),
        (1000, 99, 2, False),
        (100, 0, 1, False),
    ],
)
def test_as_many_slots_as_fit_and_shared_if_one_does(memory, shared, slots, is_shared):
    budget = decide(100 * MIB, wanted=2, room=Room(memory=memory * MIB, shared=shared * MIB, ranks=1))
    assert (budget.slots, budget.shared, budget.nbytes) == (slots, is_shared, 100 * MIB)
    assert f"{slots} slot(s) of 100 MiB" in budget.sentence
    assert ("lost with the process" in budget.sentence) != is_shared
    assert ("2 were wanted" in budget.sentence) == (slots < 2)


def test_when_not_even_one_fits_the_numbers_are_told():
    with pytest.raises(
        HostMemoryExhausted, match=r"100 MiB: 99 MiB may be used by each of the 8 rank"
    ) as caught:
        decide(100 * MIB, wanted=2, room=Room(memory=99 * MIB, shared=500 * MIB, ranks=8))
    assert caught.value.needed == 100 * MIB


def test_the_ranks_of_a_node_share_what_is_there(tmp_path):
    one, eight = measure(str(tmp_path), ranks=1), measure(str(tmp_path), ranks=8)
    assert one.memory > 0
    assert eight.memory == pytest.approx(one.memory / 8, rel=0.2)
    assert 0 < eight.shared <= eight.memory


def test_a_shared_memory_that_is_not_there_has_no_room(tmp_path):
    assert measure(str(tmp_path / "missing"), ranks=1).shared == 0
