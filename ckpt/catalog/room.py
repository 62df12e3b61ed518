"""Room on a tier that has a capacity: the oldest steps go before a save that would exceed it.

How much a save will write is known before its first byte: each rank says the size of its image, and the leader makes room for the sum. A disk that is full although
the capacity is not reached is treated alike, by the rank that meets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from ckpt.catalog.holdings import Held, Holdings
from ckpt.catalog.prune import judge, remove
from ckpt.coordination.api import Coordinator
from ckpt.coordination.committer import LEADER, VERDICT_GRACE_SECONDS
from ckpt.errors import CkptError, CommitTimeout, OutOfSpace, StorageError
from ckpt.model.layout import StepRef
from ckpt.plan.retention import Retention, first_to_go, newest
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")
_OK: Final = b"ok"


class Room:
    """Threads: the one that serves the tier.

    Args:
        waiting: Steps that a farther tier still reads from here.
        elsewhere: Whether another durable tier has a step. Asked only where nothing else can go.
    """

    def __init__(
        self,
        tier: OpenTier,
        coordinator: Coordinator,
        *,
        timeout: float,
        waiting: Callable[[], frozenset[StepRef]],
        elsewhere: Callable[[StepRef], bool],
    ) -> None:
        self._tier, self._coordinator, self._timeout = tier, coordinator, timeout
        self._waiting, self._elsewhere = waiting, elsewhere
        self._holdings = Holdings(tier.backend, part=tier.tier.local is True)
        self._rule = Retention.of(tier.tier)

    def agree(
        self, ref: StepRef, trial: int, nbytes: int, *, restored: int | None, asked: bool = True
    ) -> None:
        """Return when there is room for the images of all ranks, of which this one's has ``nbytes``.

        Args:
            restored: What the job goes on from; stays until there is a newer step of its own.
            asked: On the leader, whether anybody shall make room: not for a save that will be refused anyway.

        Raises:
            OutOfSpace: There will be none, as all ranks are told.
            CommitTimeout: Some rank, or the leader, was not heard of.
        """
        subject = self._subject(ref, trial)
        self._coordinator.tell(subject, msgspec.json.encode(nbytes))
        if self._coordinator.rank == LEADER:
            answer = _OK
            try:
                if asked and (needed := self._sum(ref, subject)) is not None:
                    self._make_room(ref, needed, restored)
            except OutOfSpace as full:
                answer = full.detail.encode()
                raise
            except CkptError as error:
                answer = str(error).encode()
                raise
            finally:
                self._coordinator.decide(subject, answer)
                self._coordinator.forget(subject)
        else:
            wait = self._timeout + VERDICT_GRACE_SECONDS
            heard = self._coordinator.verdict(subject, timeout=wait)
            self._coordinator.forget(subject)
            if heard is None:
                raise CommitTimeout(ref.step, [LEADER], wait, "room on the tier")
            if heard != _OK:
                raise OutOfSpace(ref.folder, heard.decode())

    def give_up(self, ref: StepRef, trial: int) -> None:
        """This rank has no part in a save: nobody need wait for its size, nor for the leader's answer if this is the leader."""
        subject = self._subject(ref, trial)
        self._coordinator.tell(subject, msgspec.json.encode(None))
        if self._coordinator.rank == LEADER:
            self._coordinator.decide(subject, _OK)

    def evict(self, ref: StepRef, nbytes: int, *, restored: int | None) -> bool:
        """The store was full: free ``nbytes`` or more. Returns whether something went."""
        found = self._holdings.look()
        going = list(self._going(found, ref, nbytes, restored))
        self._remove(going, "the store is full")
        return bool(going)

    def _subject(self, ref: StepRef, trial: int) -> str:
        return f"room/{self._tier.index}/{trial}/{ref.folder}"

    def _sum(self, ref: StepRef, subject: str) -> int | None:
        """Of all ranks; None if one has given up."""
        missing = set(range(self._coordinator.world_size))
        deadline = time.monotonic() + self._timeout
        total = 0
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommitTimeout(ref.step, sorted(missing), self._timeout, "the size")
            for rank, word in self._coordinator.hear(subject, missing, timeout=left).items():
                if (nbytes := msgspec.json.decode(word, type=int | None)) is None:
                    return None
                total += nbytes
                missing.discard(rank)
        return total

    def _make_room(self, ref: StepRef, needed: int, restored: int | None) -> None:
        capacity = self._tier.tier.capacity_bytes or 0
        if needed > capacity:
            raise OutOfSpace(
                ref.folder,
                f"this checkpoint of {_size(needed)} (reckoned as it is staged, before any codec) is larger than the capacity of {_size(capacity)}: raise it, or take the tier out",
            )
        try:
            found = self._holdings.look()
        except StorageError as error:  # whether the store takes the save is the save's to find out
            _log.warning("ckpt: what lies on %s cannot be seen: %s", self._tier.url, error)
            return
        over = sum(held.nbytes for held in found) + needed - capacity
        going = list(self._going(found, ref, over, restored)) if over > 0 else []
        if sum(held.nbytes for held in going) < over:
            raise OutOfSpace(ref.folder, self._why(found, needed, capacity))
        self._remove(going, "its capacity is reached")

    def _going(self, found: list[Held], ref: StepRef, over: int, restored: int | None) -> Iterator[Held]:
        """What goes to free ``over`` bytes: remains, then steps as the rule ranks them, the newest last and only if it lies elsewhere too."""
        own = self._coordinator.attempt
        whole = {held.ref: held for held in found if held.state == "whole"}
        metrics = {other: held.metrics for other, held in whole.items()}
        last = newest([other for other in whole if self._counts(other, restored)] or whole, own=own)
        waiting = self._waiting()
        order = [
            one.held
            for one in judge(found, self._rule, own=own)
            if not one.kept and one.held.ref not in whole
        ]
        order += [whole[other] for other in first_to_go(whole, self._rule, metrics, own=own) if other != last]
        # another job's can never be committed any more: this one has taken the root over
        order += [
            h for h in found if h.state == "begun" and not h.ref.attempt.startswith(own) and h not in order
        ]
        order += [whole[last]] if last is not None else []
        for held in order:
            if over <= 0:
                return
            if (
                held.ref not in waiting
                and held.ref != ref
                and (held.ref != last or self._elsewhere(held.ref))
            ):
                over -= held.nbytes
                yield held

    def _counts(self, ref: StepRef, restored: int | None) -> bool:
        """Whether a restarted job may want it: of what others have saved, nothing after the step that was restored."""
        return restored is None or ref.step <= restored or ref.attempt.startswith(self._coordinator.attempt)

    def _remove(self, going: list[Held], why: str) -> None:
        for held in going:
            try:
                remove(self._tier.backend, held)
            except CkptError as error:
                _log.warning("ckpt: step %d on %s was not evicted: %s", held.ref.step, self._tier.url, error)
            else:
                _log.info("ckpt: step %d was evicted from %s: %s", held.ref.step, self._tier.url, why)

    def _why(self, found: list[Held], needed: int, capacity: int) -> str:
        waiting = self._waiting() & {held.ref for held in found}
        held = ", ".join(str(ref.step) for ref in sorted(waiting)) or "none"
        return (
            f"this checkpoint needs {_size(needed)} of the capacity of {_size(capacity)}, and what lies there cannot go: the newest has no other copy, farther tiers wait for "
            f"these steps: {held}. Give it room for two checkpoints, and one for each step that may wait (backlog)"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
