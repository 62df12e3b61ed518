"""Room on a tier that has a capacity: the oldest steps go before a save that would exceed it.

How much a save will write is known before its first byte, but for what a codec makes of it: each rank says the size of its image, and the leader makes room for the sum, or for the part of
it that the newest step there took. What was reckoned too small goes off after the commit. A disk that is full although the capacity is not reached is treated alike, by the rank that meets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from ckpt.config import NO_CODEC
from ckpt.coordination.api import Coordinator
from ckpt.coordination.commit import LEADER
from ckpt.coordination.exchange import Wait, arrivals
from ckpt.errors import CkptError, CommitTimeout, OutOfSpace
from ckpt.model.keys import StepRef
from ckpt.retention.claim import Claim
from ckpt.retention.evictor import Evictor
from ckpt.storage.tiers import OpenTier

_OK: Final = b"ok"
_GRACE_SECONDS: Final = 30.0
"""How much longer than the leader the others wait: its own time-out must reach them."""


class Quota:
    """Threads: the one that serves the tier.

    Args:
        claim: The job's hold on the root.
        waiting: Steps that a farther tier still reads from here.
        elsewhere: Whether another durable tier has a step. Asked only where nothing else can go.
    """

    def __init__(
        self,
        tier: OpenTier,
        coordinator: Coordinator,
        claim: Claim,
        *,
        timeout: float,
        waiting: Callable[[], frozenset[StepRef]],
        elsewhere: Callable[[StepRef], bool],
    ) -> None:
        self._tier, self._coordinator, self._timeout = tier, coordinator, timeout
        self._evictor = Evictor(tier, claim, waiting=waiting, elsewhere=elsewhere)

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
        self._coordinator.post(subject, msgspec.json.encode(nbytes))
        if self._coordinator.rank == LEADER:
            answer = _OK
            try:
                if asked and (needed := self._sum(ref, subject)) is not None:
                    self._evictor.make_room(ref, needed, restored=restored)
            except OutOfSpace as full:
                answer = full.detail.encode()
                raise
            except CkptError as error:
                answer = str(error).encode()
                raise
            finally:
                self._coordinator.set_once(subject, answer)
                self._coordinator.forget(subject)
        else:
            wait = self._timeout + _GRACE_SECONDS
            heard = self._coordinator.verdict(subject, timeout=wait)
            self._coordinator.forget(subject)
            if heard is None:
                raise CommitTimeout(ref.step, [LEADER], wait, "room on the tier")
            if heard != _OK:
                raise OutOfSpace(ref.folder, heard.decode())

    def give_up(self, ref: StepRef, trial: int) -> None:
        """This rank has no part in a save: nobody need wait for its size, nor for the leader's answer if this is the leader."""
        subject = self._subject(ref, trial)
        self._coordinator.post(subject, msgspec.json.encode(None))
        if self._coordinator.rank == LEADER:
            self._coordinator.set_once(subject, _OK)

    def evict(self, ref: StepRef, nbytes: int, *, restored: int | None) -> bool:
        """The store was full: free ``nbytes`` or more. Returns whether something went."""
        return self._evictor.free(ref, nbytes, restored=restored)

    def settle(self, ref: StepRef, *, restored: int | None) -> None:
        """After a commit: how large it is behind a codec is known only now. By the leader; for the others nothing."""
        if self._coordinator.rank == LEADER and self._tier.tier.codec != NO_CODEC:
            self._evictor.settle(ref, restored=restored)

    def _subject(self, ref: StepRef, trial: int) -> str:
        return f"room/{self._tier.index}/{trial}/{ref.folder}"

    def _sum(self, ref: StepRef, subject: str) -> int | None:
        """Of all ranks; None if one has given up."""
        total, wait = 0, Wait(self._timeout, "the size", ref.step)
        ranks = range(self._coordinator.world_size)
        for _, message in arrivals(self._coordinator, subject, ranks, wait):
            if (nbytes := msgspec.json.decode(message, type=int | None)) is None:
                return None
            total += nbytes
        return total
