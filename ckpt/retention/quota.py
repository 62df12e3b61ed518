"""Room on a tier that has a capacity: the oldest steps go before a save that would exceed it.

The size of a save is known before its first byte, except for the effect of a codec. Each rank posts
the size of its image. The leader makes room for the sum, or, with a codec, for the part of it that
the newest step on the tier took. If the estimate was too small, the leader removes the excess after
the commit. A disk that is full below the capacity is treated alike, by the rank that finds it full.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ckpt.codec.registry import NO_CODEC
from ckpt.coordination.api import LEADER, Coordinator
from ckpt.coordination.gather import Wait, arrivals
from ckpt.errors import CkptError, CommitTimeout, OutOfSpace
from ckpt.model.keys import StepRef
from ckpt.retention.claim import Claim
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import StepGuard
from ckpt.storage.tiers import OpenTier

_OK: Final = b"ok"
_GRACE_SECONDS: Final = 30.0
"""How much longer than the leader the others wait, so that its time-out still reaches them."""


class Quota:
    """The capacity of one tier, which the ranks that share it use together.

    Args:
        tier: A tier with a capacity.
        coordinator: The ranks that share the store of the tier.
        claim: The job's hold on the root.
        guard: The steps that must stay.
        timeout: How many seconds to wait for the sizes of the other ranks.

    Thread safety: only the thread that serves the tier may call the methods.
    """

    def __init__(
        self,
        tier: OpenTier,
        coordinator: Coordinator,
        claim: Claim,
        guard: StepGuard,
        *,
        timeout: float,
    ) -> None:
        self._tier, self._coordinator, self._timeout = tier, coordinator, timeout
        self._evictor = Evictor(tier, claim, guard)

    def agree(
        self, ref: StepRef, trial: int, nbytes: int, *, restored: int | None, asked: bool = True
    ) -> None:
        """Return when there is room for the images of all ranks.

        Args:
            ref: The step to save.
            trial: Which try at the step this is.
            nbytes: The size of this rank's image.
            restored: The step that the job continues from. It stays until the job has a newer one.
            asked: On the leader: whether to make room. False for a save that will be refused
                anyway.

        Raises:
            OutOfSpace: There is no room. All ranks raise it.
            CommitTimeout: Some rank, or the leader, did not answer.
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
            given = self._coordinator.verdict(subject, timeout=wait)
            self._coordinator.forget(subject)
            if given is None:
                raise CommitTimeout(ref.step, [LEADER], wait, "room on the tier")
            if given != _OK:
                raise OutOfSpace(ref.folder, given.decode())

    def give_up(self, ref: StepRef, trial: int) -> None:
        """Post that this rank has no part in a save, so that no rank waits for its size.

        On the leader, this also answers the other ranks.
        """
        subject = self._subject(ref, trial)
        self._coordinator.post(subject, msgspec.json.encode(None))
        if self._coordinator.rank == LEADER:
            self._coordinator.set_once(subject, _OK)

    def evict(self, ref: StepRef, nbytes: int, *, restored: int | None) -> bool:
        """Free ``nbytes`` or more in a store that was full.

        Returns whether something was removed.
        """
        return self._evictor.free(ref, nbytes, restored=restored)

    def settle(self, ref: StepRef, *, restored: int | None) -> None:
        """Remove what exceeds the capacity, now that the size behind the codec is known.

        Only the leader does so. On other ranks this has no effect.
        """
        if self._coordinator.rank == LEADER and self._tier.tier.codec != NO_CODEC:
            self._evictor.settle(ref, restored=restored)

    def _subject(self, ref: StepRef, trial: int) -> str:
        return f"room/{self._tier.index}/{trial}/{ref.folder}"

    def _sum(self, ref: StepRef, subject: str) -> int | None:
        """Return the size of the images of all ranks; None if a rank has given up."""
        total, wait = 0, Wait(self._timeout, "the size", ref.step)
        ranks = range(self._coordinator.world_size)
        for _, message in arrivals(self._coordinator, subject, ranks, wait):
            if (nbytes := msgspec.json.decode(message, type=int | None)) is None:
                return None
            total += nbytes
        return total
