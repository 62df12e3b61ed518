"""The commit protocol: when is a save a checkpoint? Pure: events in, one action out, for every rank.

Each rank, once its file and its fragment are durable, tells ``Durable``; one that cannot tells ``Failed``. Then the verdict comes in two stages, each a compare-and-set in the job's
store, so that whoever proposes, one thing stands:

1. the *intent*: ``Go`` (all are durable, their fragments merge, this is the manifest's checksum) or ``Refused``. From then on nobody does the other thing.
2. the *outcome*: ``Committed``, ``Refused`` or ``Unknown``, which all ranks hear.

The leader proposes. When it is not heard of, the others look, lowest rank first, and do what is left to do: same words, same bytes. After ``Go`` only its proposer may put the manifest, until another
rank has *taken* the turn; a proposer whose put has failed for certain may *withdraw* as long as nobody has. Both go by one compare-and-set. Nothing here is a collective, and every wait ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ckpt.coordination.abort_reason import Aborted, abort_reason
from ckpt.errors import CommitTimeout, PeerFailed
from ckpt.model.manifest import FragmentRef

LEADER: Final = 0
_FEW: Final = 8
"""Ranks below it look by themselves what is to do when the leader is late."""


class Durable(msgspec.Struct, frozen=True, tag="durable"):
    """This rank's file and fragment are on the tier."""

    fragment: FragmentRef


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This rank has no part to give."""

    reason: str


class Go(msgspec.Struct, frozen=True, tag="go"):
    """There will be a manifest, with this checksum. ``by`` may put it."""

    by: int
    checksum: str


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """Any rank may put the manifest, and none may withdraw: ``by`` did not wait any longer."""

    by: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The manifest is there; ``checksum`` of its bytes."""

    checksum: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """What became of the manifest cannot be seen, or it may come yet. Nobody may remove anything."""

    reason: str


Vote = Durable | Failed
Intent = Go | Aborted
Turn = Taken | Aborted
Verdict = Committed | Aborted | Unknown

_vote: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Vote)
_intent: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Intent)
_turn: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Turn)
_verdict: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Verdict)


def encode(message: Vote | Intent | Turn | Verdict) -> bytes:
    return msgspec.json.encode(message)


def decode_vote(data: bytes) -> Vote:
    vote: Vote = _vote.decode(data)
    return vote


def decode_intent(data: bytes) -> Intent:
    intent: Intent = _intent.decode(data)
    return intent


def decode_turn(data: bytes) -> Turn:
    turn: Turn = _turn.decode(data)
    return turn


def decode_verdict(data: bytes) -> Verdict:
    verdict: Verdict = _verdict.decode(data)
    return verdict


# -- actions: what a rank does next -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the outcome, at most until then. Gives `Outcome`."""

    until: float


@dataclass(frozen=True, slots=True)
class Look:
    """See whether there is an intent. Gives `Intended`."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for words of ``ranks``, at most until then. Gives `Heard`, or `Outcome` where others were faster."""

    ranks: frozenset[int]
    until: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Make the manifest, and see that the root is still the job's. Gives `Merged` or `Spoiled`."""

    fragments: tuple[FragmentRef, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """Set the intent, if there is none. Gives `Intended`."""

    intent: Intent


@dataclass(frozen=True, slots=True)
class Put:
    """Put the merged manifest if absent. Gives `PutEnded`."""


@dataclass(frozen=True, slots=True)
class Turning:
    """Take the turn, or withdraw, if nobody has. Gives `Turned`."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Conclude:
    """Set the outcome, if there is none. Gives `Outcome`."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Done:
    """All ranks that come to an end come to this one."""

    verdict: Verdict


Action = Await | Look | Gather | Merge | Propose | Put | Turning | Conclude | Done

# -- events: what came of it ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome that stands; None if there is none yet."""

    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class Intended:
    """The intent that stands; None if there is none yet."""

    intent: Intent | None


@dataclass(frozen=True, slots=True)
class VotesArrived:
    """Words by rank. May come twice; the first counts."""

    votes: Mapping[int, Vote]


@dataclass(frozen=True, slots=True)
class Merged:
    """The manifest is made."""

    checksum: str


@dataclass(frozen=True, slots=True)
class Spoiled:
    """No manifest can be made here. ``certain``: nor by any other rank."""

    abort_reason: Aborted
    certain: bool


@dataclass(frozen=True, slots=True)
class Turned:
    """Whose turn it is."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class PutEnded:
    """``reason`` is empty if the manifest is there. ``refusal`` if it is not, and what this rank has sent will never be."""

    reason: str = ""
    abort_reason: Aborted | None = None


Event = Outcome | Intended | VotesArrived | Merged | Spoiled | Turned | PutEnded


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds.

    Attributes:
        timeout: From a rank's own part being durable until it refuses the save, naming those not heard of.
        takeover: After which rank 1 looks whether the leader has left something to do; rank *r* after as many times that as *r* has bits, so that few do the same at once.
    """

    timeout: float
    takeover: float

    def stagger(self, rank: int) -> float:
        return min(self.takeover, self.timeout) * rank.bit_length()


class CommitMachine:
    """One rank's view of one save on one tier. Each event is the answer to the last action; time is told with it.

    A rank waits at most ``timeout + stagger`` until there is an intent, and as much again for an outcome that it cannot bring about itself.
    """

    def __init__(self, step: int, rank: int, world_size: int, bounds: Bounds, now: float) -> None:
        self._step, self._rank, self._bounds = step, rank, bounds
        self._stagger = bounds.stagger(rank)
        self._last = now + bounds.timeout + self._stagger
        self._pause = self._shortest = max(self._stagger, min(bounds.takeover, bounds.timeout))
        self._missing = frozenset(range(world_size))
        self._durable: dict[int, FragmentRef] = {}
        self._go: Go | None = None
        self._checksum: str | None = None
        self._spoiled: Aborted | None = None
        self._exclusive = False

    def begin(self, now: float, abort: Aborted | None = None) -> Action:
        """The first action. ``veto``: the leader's reason to refuse whatever the words are."""
        if abort is not None:
            return Propose(abort)
        return Gather(self._missing, self._last) if self._rank == LEADER else Await(now + self._stagger)

    def handle(self, event: Event, now: float) -> Action:
        """The action that follows."""
        match event:
            case Outcome(verdict):
                return Look() if verdict is None else Done(verdict)
            case VotesArrived(votes):
                return self._hear(votes, now)
            case Intended(intent):
                return self._intended(intent, now)
            case Merged(checksum):
                return self._merged(checksum, now)
            case Spoiled(refused, certain):
                self._spoiled = refused
                decides = self._go is None and (certain or self._rank == LEADER)
                return Propose(refused) if decides else self._follow(now)
            case Turned(turn):
                return self._turned(turn, now)
            case PutEnded(reason, refused):
                return self._put_ended(reason, refused, now)

    def _hear(self, votes: Mapping[int, Vote], now: float) -> Action:
        for rank in sorted(self._missing & votes.keys()):
            match votes[rank]:
                case Failed(reason):
                    return Propose(abort_reason(PeerFailed(self._step, {rank: reason})))
                case Durable(fragment):
                    self._durable[rank] = fragment
        self._missing -= self._durable.keys()
        if not self._missing:
            return self._all_there(now)
        if self._rank == LEADER and self._go is None and now < self._last:
            return Gather(self._missing, self._last)
        return self._follow(now)

    def _intended(self, intent: Intent | None, now: float) -> Action:
        match intent:
            case None:
                return self._step_in(now)
            case Aborted():
                return Conclude(intent)
            case Go(by) if by == self._rank and self._checksum is not None and self._go is None:
                self._go, self._exclusive = intent, True
                return Put()
            case Go() if self._go is None:  # give its proposer time to carry it out
                self._go = intent
                self._last = now + self._bounds.timeout + self._stagger
                self._pause = self._shortest
                return self._follow(now)
            case Go():
                return self._step_in(now)

    def _step_in(self, now: float) -> Action:
        """The leader is late, or dead: see whether there is something to do in its place. That takes the words of all ranks: were all to ask for them, a rank that is late would cost their
        square. So the first few do, and one of each power of two, on nodes far apart; the others when time is up.
        """
        if self._rank >= _FEW and self._rank & (self._rank - 1) and now < self._last:
            return self._follow(now)
        return Gather(self._missing, now) if self._missing else self._all_there(now)

    def _all_there(self, now: float) -> Action:
        if self._spoiled is not None:
            return self._follow(now)
        if self._checksum is not None:
            return self._merged(self._checksum, now)
        return Merge(tuple(self._durable[rank] for rank in sorted(self._durable)))

    def _merged(self, checksum: str, now: float) -> Action:
        self._checksum = checksum
        if self._go is None:
            return Propose(Go(self._rank, checksum))
        if self._go.checksum == checksum:
            return Turning(Taken(self._rank))
        self._spoiled = Aborted(f"ranks {self._go.by} and {self._rank} read different fragments", {})
        return self._follow(now)

    def _turned(self, turn: Turn, now: float) -> Action:
        if isinstance(turn, Aborted):
            return Conclude(turn)
        if turn.by == self._rank:
            return Put()
        self._exclusive = False
        return self._follow(now) if self._spoiled else Put()  # all put the same

    def _put_ended(self, reason: str, refused: Aborted | None, now: float) -> Action:
        if not reason:
            assert self._go is not None
            return Conclude(Committed(self._go.checksum))
        self._spoiled = refused or Aborted(reason, {})
        if not self._exclusive:
            return self._follow(now)  # another may be luckier
        return Turning(refused) if refused is not None else Conclude(Unknown(reason))

    def _follow(self, now: float) -> Action:
        """Wait for what others do, as long as there is time."""
        if now < self._last:
            until, self._pause = min(now + self._pause, self._last), self._pause * 2
            return Await(until)
        if self._go is not None:
            why = f": {self._spoiled.told}" if self._spoiled is not None else ""
            return Conclude(Unknown(f"rank {self._go.by} was to put the manifest, and was not heard of{why}"))
        if self._spoiled is not None:
            return Propose(self._spoiled)
        missing = tuple(sorted(self._missing))
        return Propose(abort_reason(CommitTimeout(self._step, missing, self._bounds.timeout, "the part")))
