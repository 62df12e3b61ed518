from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt.coordination.commit import (
    CommitMachine,
    Committed,
    Durable,
    Failed,
    Heard,
    Merge,
    Refuse,
    Refused,
    TimedOut,
    decode_verdict,
    decode_word,
    encode,
)
from ckpt.model.layout import fragment_name
from ckpt.model.manifest import FragmentRef


def part(rank: int, checksum: str = "0" * 32) -> FragmentRef:
    return FragmentRef(fragment_name(rank), rank, 100, checksum)


class LeaderOfAnyWorld(RuleBasedStateMachine):
    """Words come in any order, twice, late, from nobody; the machine is told nothing that it may rely on."""

    @initialize(size=st.integers(1, 5))
    def start(self, size: int) -> None:
        self.size = size
        self.machine = CommitMachine(range(size))
        self.first: dict[int, Durable | Failed] = {}
        self.actions: list[Merge | Refuse] = []
        self.timed_out = False

    def tell(self, event: Heard | TimedOut) -> None:
        over = bool(self.actions)
        action = self.machine.handle(event)
        if over:
            assert action is None, "a second action"
        if isinstance(event, Heard) and not over and event.rank < self.size:
            self.first.setdefault(event.rank, event.word)
        self.timed_out |= isinstance(event, TimedOut) and not over
        if action is not None:
            self.actions.append(action)

    @rule(rank=st.integers(0, 6), mark=st.integers(0, 2))
    def a_rank_is_durable(self, rank: int, mark: int) -> None:
        self.tell(Heard(rank, Durable(part(rank, str(mark) * 32))))

    @rule(rank=st.integers(0, 6))
    def a_rank_has_failed(self, rank: int) -> None:
        self.tell(Heard(rank, Failed(f"reason {rank}")))

    @rule()
    def all_that_are_missing_are_durable(self) -> None:
        for rank in sorted(self.machine.missing, reverse=True):
            self.tell(Heard(rank, Durable(part(rank))))

    @precondition(lambda self: self.first)
    @rule()
    def the_bound_has_passed(self) -> None:
        self.tell(TimedOut())

    @invariant()
    def the_action_follows_from_the_first_words(self) -> None:
        if not hasattr(self, "machine"):
            return
        failed = {rank: word.reason for rank, word in self.first.items() if isinstance(word, Failed)}
        silent = set(range(self.size)) - set(self.first)
        assert self.machine.done == bool(self.actions) == bool(failed or not silent or self.timed_out)
        match self.actions:
            case [Merge(fragments)]:
                assert not failed
                assert not silent
                assert fragments == tuple(self.first[rank].fragment for rank in range(self.size))
            case [Refuse(failures, missing)]:
                assert failures == failed
                assert len(failures) <= 1
                assert set(missing) == silent
                assert failed or silent
            case []:
                assert self.machine.missing == silent


TestLeaderOfAnyWorld = LeaderOfAnyWorld.TestCase
TestLeaderOfAnyWorld.settings = settings(max_examples=150, stateful_step_count=15, deadline=None)


def test_the_first_word_of_a_rank_counts():
    machine = CommitMachine(range(2))
    assert machine.handle(Heard(0, Durable(part(0, "a" * 32)))) is None
    assert machine.handle(Heard(0, Durable(part(0, "b" * 32)))) is None
    assert machine.handle(Heard(0, Failed("too late"))) is None
    assert machine.handle(Heard(1, Durable(part(1)))) == Merge((part(0, "a" * 32), part(1)))


def test_a_time_out_names_those_not_heard_of():
    machine = CommitMachine(range(4))
    machine.handle(Heard(2, Durable(part(2))))
    assert machine.handle(TimedOut()) == Refuse({}, (0, 1, 3))


# -- on the wire ------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=("Cs",)))


@given(
    st.builds(Failed, texts)
    | st.builds(Durable, st.builds(FragmentRef, texts, st.integers(0, 9), st.integers(0, 2**60), texts))
)
def test_words_come_as_they_were_sent(word):
    assert decode_word(encode(word)) == word


@given(
    st.builds(Committed, texts)
    | st.builds(
        Refused,
        texts,
        st.dictionaries(st.integers(0, 99), texts),
        texts,
        st.lists(texts).map(tuple),
        st.lists(st.integers(0, 9)).map(tuple),
    )
)
def test_verdicts_come_as_they_were_sent(verdict):
    assert decode_verdict(encode(verdict)) == verdict


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"type":"committed"}', b'{"type":"other"}'])
def test_what_is_no_word_is_not_taken_for_one(data):
    with pytest.raises(msgspec.MsgspecError):
        decode_word(data)
    with pytest.raises(msgspec.MsgspecError):
        decode_verdict(data)
