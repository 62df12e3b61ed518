"""The commit protocol as a pure state machine: each event gives one action, on every rank.

A rank votes ``Durable`` once its file and its fragment are durable, and ``Failure`` if its part of
the save has failed. The ranks then agree in two stages. Each stage is a compare-and-set in the
job's store: several ranks may propose a value, and the first value is the one that all ranks use.

1. The *intent* is ``Go`` with the checksum of the manifest, or ``Abort``. ``Go`` means that all
   parts are durable and that the fragments merge. No rank acts against the intent.
2. The *outcome* is ``Committed``, ``Abort`` or ``Unknown``. All ranks receive it.

The leader proposes both values. If the leader is silent, the other ranks step in, lowest rank
first, and complete the commit from the same votes and the same fragments.

At first, only the rank that proposed ``Go`` may put the manifest. To take over from a silent
proposer, another rank *takes the turn*: from then on, all ranks may put the manifest. A proposer
whose put has certainly failed *withdraws* the intent instead. One compare-and-set decides whether
the turn is taken or the intent is withdrawn. No action is a collective, and every wait ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ckpt.coordination.abort_reason import Abort, abort_reason
from ckpt.coordination.coordinator import LEADER
from ckpt.errors import CommitTimeout, PeerFailed
from ckpt.model.manifest import FragmentRef

_FIRST_RANKS: Final = 8
"""If the leader is late, ranks below this number and ranks that are powers of two step in."""


class Durable(msgspec.Struct, frozen=True, tag="durable"):
    """The vote that this rank's file and fragment are on the tier."""

    fragment: FragmentRef


class Failure(msgspec.Struct, frozen=True, tag="failed"):
    """The vote that this rank's part of the save has failed, with the reason."""

    reason: str


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The intent that the save gets a manifest with this checksum. Rank ``rank`` may put it."""

    rank: int
    checksum: str


class TurnTaken(msgspec.Struct, frozen=True, tag="taken"):
    """Rank ``rank`` has taken the turn. Now any rank may put the manifest, and the proposer may no
    longer withdraw the intent.
    """

    rank: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The outcome that the manifest exists, and that its bytes have this checksum."""

    checksum: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The outcome if the ranks cannot find out whether the manifest exists.

    No rank may remove its files then.
    """

    reason: str


Vote = Durable | Failure
Intent = Go | Abort
Turn = TurnTaken | Abort
Verdict = Committed | Abort | Unknown

decode_vote: Final[Callable[[bytes], Vote]] = msgspec.json.Decoder[Any](Vote).decode
decode_intent: Final[Callable[[bytes], Intent]] = msgspec.json.Decoder[Any](Intent).decode
decode_turn: Final[Callable[[bytes], Turn]] = msgspec.json.Decoder[Any](Turn).decode
decode_verdict: Final[Callable[[bytes], Verdict]] = msgspec.json.Decoder[Any](Verdict).decode


# -- actions: what a rank does next ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the outcome until the time ``deadline``. The resulting event is `Outcome`."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Look:
    """Read the intent. The resulting event is `IntentAnswer`."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for votes of ``ranks`` until the time ``deadline``.

    The resulting event is `Votes`, or `Outcome` if other ranks have already set the outcome.
    """

    ranks: frozenset[int]
    deadline: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge ``fragments`` into the manifest, and confirm that the job owns the root.

    The resulting event is `MergeResult` or `MergeFailure`.
    """

    fragments: tuple[FragmentRef, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """Set the intent unless it is set already. The resulting event is `IntentAnswer`."""

    intent: Intent


@dataclass(frozen=True, slots=True)
class Put:
    """Put the merged manifest on the tier if absent. The resulting event is `PutResult`."""


@dataclass(frozen=True, slots=True)
class ProposeTurn:
    """Take the turn if ``turn`` is `TurnTaken`, or withdraw the intent if it is `Abort`.

    This has no effect if a rank has done either already. The resulting event is `TurnAnswer`.
    """

    turn: Turn


@dataclass(frozen=True, slots=True)
class Conclude:
    """Set the outcome unless it is set already. The resulting event is `Outcome`."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Finish:
    """End the commit on this rank. ``verdict`` is the same on all ranks that end the commit."""

    verdict: Verdict


Action = Await | Look | Gather | Merge | Propose | Put | ProposeTurn | Conclude | Finish

# -- events: the results of actions ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome in the job's store; None if no rank has set one yet."""

    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class IntentAnswer:
    """The intent in the job's store; None if no rank has set one yet."""

    intent: Intent | None


@dataclass(frozen=True, slots=True)
class Votes:
    """The votes that have arrived, by rank. Only the first vote of a rank counts."""

    votes: Mapping[int, Vote]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The manifest was made, and its bytes have this checksum."""

    checksum: str


@dataclass(frozen=True, slots=True)
class MergeFailure:
    """This rank cannot make the manifest. If ``certain`` is True, no other rank can either."""

    abort: Abort
    certain: bool


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The turn in the job's store: `TurnTaken`, or `Abort` after a withdrawal of the intent."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class PutResult:
    """The put has ended.

    Attributes:
        reason: Why the put failed; empty if the manifest exists.
        abort: The reason as an `Abort` if the put failed and can never make the manifest appear
            later; else None.
    """

    reason: str = ""
    abort: Abort | None = None


Event = Outcome | IntentAnswer | Votes | MergeResult | MergeFailure | TurnAnswer | PutResult


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a commit in seconds.

    Attributes:
        timeout: How long a rank waits, once its own part is durable, before it aborts the save and
            names the silent ranks.
        takeover: After how many seconds rank 1 checks whether the leader is silent. Rank *r* checks
            after this time multiplied by the number of bits of *r*, so that few ranks step in at
            once. If ``takeover`` is larger than ``timeout``, it counts as ``timeout``.
    """

    timeout: float
    takeover: float = 10.0

    def stagger(self, rank: int) -> float:
        """Return after how many seconds ``rank`` checks whether the leader is silent."""
        return min(self.takeover, self.timeout) * rank.bit_length()


class CommitMachine:
    """The commit of one save on one tier, as a state machine of one rank.

    ``begin`` returns the first action. ``handle`` takes the result of the last action as an event,
    with the current time, and returns the next action. Times are those of ``time.monotonic``. After
    ``stagger`` seconds, a rank checks whether the leader is silent. A rank waits for an intent for
    at most ``timeout + stagger`` seconds. It then waits at most as long again for the outcome, if
    it cannot complete the commit itself.

    ``_missing_ranks`` have not voted yet, and ``_fragments`` are those of the ranks that have
    voted. ``_go_intent`` is the intent once this rank knows that it is `Go`, and
    ``_merged_checksum`` is the checksum of the manifest that this rank has made. ``_fault`` is the
    reason why this rank cannot complete the commit. After ``_deadline``, the rank waits for no
    other rank. Until then, ``_follow`` waits ``_first_pause`` seconds, then twice as long, and so
    on. ``_is_only_putter`` is True as long as no other rank may put the manifest.
    """

    def __init__(
        self, step: int, rank: int, world_size: int, bounds: Bounds, current_time: float
    ) -> None:
        self._step, self._rank, self._bounds = step, rank, bounds
        self._stagger = bounds.stagger(rank)
        self._deadline = current_time + bounds.timeout + self._stagger
        self._next_pause = self._first_pause = max(
            self._stagger, min(bounds.takeover, bounds.timeout)
        )
        self._missing_ranks = frozenset(range(world_size))
        self._fragments: dict[int, FragmentRef] = {}
        self._go_intent: Go | None = None  # The intent, once this rank knows that it is ``Go``
        self._merged_checksum: str | None = None  # Of the manifest that this rank has made
        self._fault: Abort | None = None  # Why this rank cannot complete the commit
        self._is_only_putter = False  # Whether no other rank may put the manifest

    def begin(self, current_time: float, abort: Abort | None = None) -> Action:
        """Return the first action.

        Args:
            current_time: The current time.
            abort: A reason for which the leader aborts the save without regard to the votes; else
                None.
        """
        if abort is not None:
            return Propose(abort)
        return (
            Gather(self._missing_ranks, self._deadline)
            if self._rank == LEADER
            else Await(current_time + self._stagger)
        )

    def handle(self, event: Event, current_time: float) -> Action:
        """Return the next action after ``event``, at the time ``current_time``."""
        match event:
            case Outcome(verdict):
                return Look() if verdict is None else Finish(verdict)
            case Votes(votes):
                return self._on_votes(votes, current_time)
            case IntentAnswer(intent):
                return self._on_intent(intent, current_time)
            case MergeResult(checksum):
                return self._on_merge(checksum, current_time)
            case MergeFailure(abort, certain):
                self._fault = abort
                decides = self._go_intent is None and (certain or self._rank == LEADER)
                return Propose(abort) if decides else self._follow(current_time)
            case TurnAnswer(turn):
                return self._on_turn(turn, current_time)
            case PutResult(reason, abort):
                return self._on_put(reason, abort, current_time)

    def _on_votes(self, votes: Mapping[int, Vote], current_time: float) -> Action:
        """Count the votes. Abort on a failure, and go on once all ranks have voted."""
        for rank in sorted(self._missing_ranks & votes.keys()):
            match votes[rank]:
                case Failure(reason):
                    return Propose(abort_reason(PeerFailed(self._step, {rank: reason})))
                case Durable(fragment):
                    self._fragments[rank] = fragment
        self._missing_ranks -= self._fragments.keys()
        if not self._missing_ranks:
            return self._on_all_votes(current_time)
        if self._rank == LEADER and self._go_intent is None and current_time < self._deadline:
            return Gather(self._missing_ranks, self._deadline)
        return self._follow(current_time)

    def _on_intent(self, intent: Intent | None, current_time: float) -> Action:
        match intent:
            case None:  # The leader is late
                return self._step_in(current_time)
            case Abort():
                return Conclude(intent)
            case Go(rank) if (
                rank == self._rank and self._merged_checksum is not None and self._go_intent is None
            ):
                self._go_intent, self._is_only_putter = intent, True
                return Put()
            case Go() if self._go_intent is None:  # Give the proposer time to put the manifest
                self._go_intent = intent
                self._deadline = current_time + self._bounds.timeout + self._stagger
                self._next_pause = self._first_pause
                return self._follow(current_time)
            case Go():  # The proposer has had its time
                return self._step_in(current_time)

    def _step_in(self, current_time: float) -> Action:
        """Act in the place of a leader that is late or dead.

        For this, the rank needs the votes of all ranks. If all ranks asked for all votes, one late
        rank would cost as many requests as the square of the world size. So only the first few
        ranks, and ranks whose number is a power of two, ask at once. Powers of two are used because
        such ranks are on many different nodes. The other ranks ask when their timeout is over.
        """
        if (
            self._rank >= _FIRST_RANKS
            and self._rank & (self._rank - 1)  # It is no power of two
            and current_time < self._deadline
        ):
            return self._follow(current_time)
        return (
            Gather(self._missing_ranks, current_time)
            if self._missing_ranks
            else self._on_all_votes(current_time)
        )

    def _on_all_votes(self, current_time: float) -> Action:
        """Make the manifest, unless this rank has made it or cannot make it."""
        if self._fault is not None:
            return self._follow(current_time)
        if self._merged_checksum is not None:
            return self._on_merge(self._merged_checksum, current_time)
        return Merge(tuple(self._fragments[rank] for rank in sorted(self._fragments)))

    def _on_merge(self, checksum: str, current_time: float) -> Action:
        """Propose to put the manifest, or take the turn from the rank that had to put it."""
        self._merged_checksum = checksum
        if self._go_intent is None:
            return Propose(Go(self._rank, checksum))
        if self._go_intent.checksum == checksum:
            return ProposeTurn(TurnTaken(self._rank))
        self._fault = Abort(
            f"ranks {self._go_intent.rank} and {self._rank} read different fragments", {}
        )
        return self._follow(current_time)

    def _on_turn(self, turn: Turn, current_time: float) -> Action:
        if isinstance(turn, Abort):  # The proposer has withdrawn the intent
            return Conclude(turn)
        if turn.rank == self._rank:
            return Put()
        self._is_only_putter = False
        return self._follow(current_time) if self._fault else Put()  # All ranks put the same bytes

    def _on_put(self, reason: str, abort: Abort | None, current_time: float) -> Action:
        """Conclude the commit. After a failure, withdraw the intent if no other rank may put."""
        if not reason:
            assert self._go_intent is not None
            return Conclude(Committed(self._go_intent.checksum))
        self._fault = abort or Abort(reason, {})
        if not self._is_only_putter:
            return self._follow(current_time)  # Another rank may succeed
        return ProposeTurn(abort) if abort is not None else Conclude(Unknown(reason))

    def _follow(self, current_time: float) -> Action:
        """Wait for other ranks while time is left. After that, conclude `Unknown` if the intent is
        `Go`, and otherwise propose to abort the save.
        """
        if current_time < self._deadline:
            deadline = min(current_time + self._next_pause, self._deadline)
            self._next_pause *= 2
            return Await(deadline)
        if self._go_intent is not None:
            detail = f": {self._fault.sentence}" if self._fault is not None else ""
            rank = self._go_intent.rank
            return Conclude(
                Unknown(f"rank {rank} had to put the manifest, and did not answer{detail}")
            )
        if self._fault is not None:
            return Propose(self._fault)
        missing = tuple(sorted(self._missing_ranks))
        return Propose(
            abort_reason(CommitTimeout(self._step, missing, self._bounds.timeout, "the part"))
        )
