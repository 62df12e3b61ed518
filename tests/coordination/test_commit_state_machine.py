from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.coordination.abort_reason import Abort, abort_reason
from ckpt.coordination.commit_state_machine import (
    Await,
    Bounds,
    CommitMachine,
    Committed,
    Conclude,
    Durable,
    Failure,
    Finish,
    Gather,
    Go,
    IntentAnswer,
    Look,
    Merge,
    MergeResult,
    Outcome,
    Propose,
    ProposeTurn,
    Put,
    PutResult,
    TurnAnswer,
    TurnTaken,
    Unknown,
    Votes,
    decode_intent,
    decode_turn,
    decode_verdict,
    decode_vote,
)
from ckpt.coordination.exchanges import encode_json
from ckpt.errors import OutOfSpace
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import FragmentRef


def part(rank: int, checksum: str = "0" * 32) -> FragmentRef:
    return FragmentRef(fragment_name(rank), rank, 100, checksum)


BOUNDS = Bounds(timeout=100.0, takeover=10.0)
WORDS = {rank: Durable(part(rank)) for rank in range(3)}


def machine(rank: int, size: int = 3) -> CommitMachine:
    return CommitMachine(5, rank, size, BOUNDS, 0.0)


def test_the_leader_commits_what_all_have_told():
    leader = machine(0)
    assert leader.begin(0.0) == Gather(frozenset({0, 1, 2}), 100.0)
    assert leader.handle(Votes({0: WORDS[0], 2: WORDS[2]}), 1.0) == Gather(frozenset({1}), 100.0)
    assert leader.handle(Votes({1: WORDS[1]}), 2.0) == Merge((part(0), part(1), part(2)))
    go = Go(0, "c")
    assert leader.handle(MergeResult("c"), 3.0) == Propose(go)
    assert leader.handle(IntentAnswer(go), 3.0) == Put()
    assert leader.handle(PutResult(), 4.0) == Conclude(Committed("c"))
    assert leader.handle(Outcome(Committed("c")), 4.0) == Finish(Committed("c"))


def test_the_first_word_of_a_rank_counts():
    leader = machine(0, 2)
    leader.begin(0.0)
    leader.handle(Votes({0: Durable(part(0, "a" * 32))}), 0.0)
    leader.handle(Votes({0: Failure("too late")}), 0.0)
    assert leader.handle(Votes({1: WORDS[1]}), 0.0) == Merge((part(0, "a" * 32), part(1)))


def test_a_time_out_names_those_not_heard_of():
    leader = machine(0, 4)
    leader.begin(0.0)
    leader.handle(Votes({2: WORDS[2]}), 1.0)
    action = leader.handle(Votes({}), 100.0)
    assert isinstance(action, Propose)
    assert isinstance(action.intent, Abort)
    assert action.intent.ranks == (0, 1, 3)


def test_a_survivor_takes_the_place_of_a_leader_that_says_nothing():
    second = machine(1)
    assert second.begin(0.0) == Await(10.0)
    assert second.handle(Outcome(None), 10.0) == Look()
    assert second.handle(IntentAnswer(None), 10.0) == Gather(frozenset({0, 1, 2}), 10.0)
    assert second.handle(Votes(WORDS), 10.0) == Merge((part(0), part(1), part(2)))
    assert second.handle(MergeResult("c"), 10.0) == Propose(Go(1, "c"))


def test_a_survivor_gives_the_proposer_time_and_then_carries_it_out():
    third, go = machine(2), Go(0, "c")
    assert third.begin(0.0) == Await(20.0)
    third.handle(Outcome(None), 20.0)
    assert third.handle(IntentAnswer(go), 20.0) == Await(40.0)
    assert third.handle(Outcome(None), 40.0) == Look()
    assert third.handle(IntentAnswer(go), 40.0) == Gather(frozenset({0, 1, 2}), 40.0)
    third.handle(Votes(WORDS), 40.0)
    assert third.handle(MergeResult("c"), 41.0) == ProposeTurn(TurnTaken(2))
    assert third.handle(TurnAnswer(TurnTaken(2)), 41.0) == Put()


def test_only_the_proposer_withdraws_and_only_while_nobody_has_taken_its_turn():
    for turn, then in ((abort_reason(OutOfSpace("k")), Conclude), (TurnTaken(1), Await)):
        leader, go = machine(0), Go(0, "c")
        leader.begin(0.0)
        leader.handle(Votes(WORDS), 0.0)
        leader.handle(MergeResult("c"), 0.0)
        leader.handle(IntentAnswer(go), 0.0)
        wish = abort_reason(OutOfSpace("k"))
        assert leader.handle(PutResult("full", wish), 1.0) == ProposeTurn(wish)
        assert isinstance(leader.handle(TurnAnswer(turn), 1.0), then)


def test_a_put_of_unknown_fate_is_never_a_refusal():
    leader = machine(0)
    leader.begin(0.0)
    leader.handle(Votes(WORDS), 0.0)
    leader.handle(MergeResult("c"), 0.0)
    leader.handle(IntentAnswer(Go(0, "c")), 0.0)
    assert leader.handle(PutResult("no answer"), 1.0) == Conclude(Unknown("no answer"))


def test_a_leader_that_was_stopped_follows_what_was_decided_meanwhile():
    for stands, then in ((Go(1, "c"), Await), (Abort("late", {}), Conclude)):
        leader = machine(0)
        leader.begin(0.0)
        leader.handle(Votes(WORDS), 0.0)
        assert leader.handle(MergeResult("c"), 500.0) == Propose(Go(0, "c"))
        assert isinstance(leader.handle(IntentAnswer(stands), 500.0), then)


@pytest.mark.parametrize("rank", [1, 2, 3, 100, 16383])
def test_few_ranks_take_over_at_once_and_none_waits_long(rank):
    assert BOUNDS.stagger(rank) <= 10.0 * 14
    assert sum(BOUNDS.stagger(other) == BOUNDS.stagger(rank) for other in range(rank)) <= rank // 2


# -- on the wire -----------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(Failure, texts)
    | st.builds(
        Durable, st.builds(FragmentRef, texts, st.integers(0, 9), st.integers(0, 2**60), texts)
    )
)
def test_words_come_as_they_were_sent(vote):
    assert decode_vote(encode_json(vote)) == vote


@given(
    st.builds(Committed, texts)
    | st.builds(
        Abort,
        texts,
        st.dictionaries(st.integers(0, 99), texts),
        texts,
        st.lists(texts).map(tuple),
        st.lists(st.integers(0, 9)).map(tuple),
    )
)
def test_verdicts_come_as_they_were_sent(verdict):
    assert decode_verdict(encode_json(verdict)) == verdict


@given(st.builds(Go, st.integers(0, 99), texts))
def test_intents_and_turns_come_as_they_were_sent(go):
    assert decode_intent(encode_json(go)) == go
    assert decode_turn(encode_json(TurnTaken(go.rank))) == TurnTaken(go.rank)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"type":"committed"}', b'{"type":"other"}'])
def test_what_is_no_word_is_not_taken_for_one(data):
    with pytest.raises(msgspec.MsgspecError):
        decode_vote(data)
    with pytest.raises(msgspec.MsgspecError):
        decode_verdict(data)
    with pytest.raises(msgspec.MsgspecError):
        decode_intent(data)
    with pytest.raises(msgspec.MsgspecError):
        decode_turn(data)


def words_asked_for(size: int, dead: int) -> int:
    """Count the requests of all ranks together, until the leader's time is up."""
    asked = 0
    for rank in set(range(size)) - {dead}:
        one, now = CommitMachine(5, rank, size, BOUNDS, 0.0), 0.0
        action = one.begin(now)
        event: Outcome | IntentAnswer | Votes
        while now < BOUNDS.timeout:
            match action:
                case Await(until):
                    now, event = until, Outcome(None)
                case Look():
                    event = IntentAnswer(None)
                case Gather(ranks, until):
                    heard = {other: Durable(part(other)) for other in ranks - {dead}}
                    now, event = now if heard else until, Votes(heard)
                    asked += len(heard)
                case _:
                    raise AssertionError(action)
            action = one.handle(event, now)
    return asked


def test_a_rank_that_is_late_does_not_cost_the_square_of_the_world():
    assert words_asked_for(1024, 1023) < 20 * 1024


@given(st.integers(1, 2000))
def test_any_rank_alone_tells_in_the_end_who_is_missing(rank):
    one, now = CommitMachine(5, rank, 2001, BOUNDS, 0.0), 0.0
    action = one.begin(now)
    while not isinstance(action, Propose):
        match action:
            case Await(until):
                action, now = one.handle(Outcome(None), until), until
            case Look():
                action = one.handle(IntentAnswer(None), now)
            case Gather(ranks):
                there = {other: Durable(part(other)) for other in ranks if other > 1}
                action = one.handle(Votes(there), now)
            case _:
                raise AssertionError(action)
        assert now <= BOUNDS.timeout + BOUNDS.stagger(rank)
    assert isinstance(action.intent, Abort)
    assert action.intent.ranks == (0, 1)
