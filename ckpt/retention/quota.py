"""Make room on a tier with a capacity, by removing old steps before a save that would exceed it.

The size of a save is known before its first byte is written, except for the effect of a codec. Each
rank posts the size of its image, and the leader makes room for the sum. With a codec, the leader
scales the sum by the ratio of encoded to raw bytes of the newest encoded step on the tier. If this
estimate was too small, the leader removes steps after the commit. If the disk is full before the
capacity is reached, the rank whose write fails makes room.

The *image* of a rank is its part of the step, before any codec. Ranks exchange messages about a
*subject*, which here names the step and the tier. The *verdict* on a subject is the value that the
leader sets once and all ranks get. The *claim* of a job decides which steps of a root it may
remove.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ckpt.codec.registry import NO_CODEC
from ckpt.coordination.abort_reason import Abort, abort_reason, rebuild
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.exchanges import Wait, arrivals, encode_json
from ckpt.errors import CkptError, CommitTimeout
from ckpt.model.keys import StepRef
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import StepGuard
from ckpt.root.claim import Claim
from ckpt.storage.tiers import OpenTier

_OK: Final = b"ok"
"""The answer of the leader: there is room for the step."""
_OK_WITH_AMPLE_ROOM: Final = b"ample"
"""The answer of the leader: there is room, and the capacity is that of ``_AMPLE_STEPS`` steps."""
_AMPLE_STEPS: Final = 4
"""The least capacity of a tier whose steps refer to older ones, in whole steps."""
_MESSAGE_NAME: Final = "the size"
_GRACE_SECONDS: Final = 30.0
"""How much longer than the leader the other ranks wait, so that they get the leader's error."""


class Quota:
    """Keeps one tier within its capacity. All ranks that share the store of the tier take part.

    Args:
        tier: A tier with a capacity.
        coordinator: The connection to the ranks that share the store of the tier.
        claim: The claim of the job on the root.
        guard: The steps that must stay.
        timeout: How many seconds the leader waits for the sizes of the other ranks.

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
        self,
        ref: StepRef,
        trial: int,
        nbytes: int,
        *,
        restored_ref: StepRef | None,
        evicts: bool = True,
    ) -> bool:
        """Wait until the leader has made room for the images of all ranks. All ranks call this.

        Return True if the capacity is that of four such steps. Then the step may refer to an older
        one, and there is room for the next step beside the two, which stay until then.

        Args:
            ref: The step to save.
            trial: The number of the try at the step.
            nbytes: The size of this rank's image.
            restored_ref: The step that the job continues from; None if it continues from none.
                Until the job has a newer step, this step is removed only if another durable tier
                has it too.
            evicts: On the leader, whether to make room. It is False for a save that the leader will
                abort in any case.

        Raises:
            OutOfSpace: There is no room.
            CommitTimeout: A rank did not post its size, or the leader did not answer.
            CkptError: No room could be made for another reason. All ranks raise the error of the
                leader. If that is not a `CkptError`, the other ranks raise a `CommitError`.
        """
        subject = self._subject(ref, trial)
        self._coordinator.post(subject, msgspec.json.encode(nbytes))
        if self._coordinator.rank == LEADER:
            answer = _OK
            try:
                if evicts and (total := self._total_bytes(ref, subject)) is not None:
                    self._evictor.evict_to_capacity(ref, total, restored_ref=restored_ref)
                    if _AMPLE_STEPS * total <= (self._tier.tier.capacity_bytes or 0):
                        answer = _OK_WITH_AMPLE_ROOM
            except BaseException as error:
                answer = encode_json(_abort_of(error))
                raise
            finally:
                self._coordinator.set_once(subject, answer)
                self._coordinator.forget(subject)
            return answer == _OK_WITH_AMPLE_ROOM
        wait_seconds = self._timeout + _GRACE_SECONDS
        verdict = self._coordinator.verdict(subject, timeout=wait_seconds)
        self._coordinator.forget(subject)
        if verdict is None:
            raise CommitTimeout(ref.step, [LEADER], wait_seconds, "room on the tier")
        if verdict not in (_OK, _OK_WITH_AMPLE_ROOM):
            reason = msgspec.json.decode(verdict, type=Abort)
            # The error of the leader
            raise rebuild(reason, ref.step, message_name=_MESSAGE_NAME)
        return verdict == _OK_WITH_AMPLE_ROOM

    def give_up(self, ref: StepRef, trial: int) -> None:
        """Post that this rank has given the save up, so that the leader does not wait for its size.

        On the leader, also answer the other ranks, so that they do not wait for room.
        """
        subject = self._subject(ref, trial)
        self._coordinator.post(subject, msgspec.json.encode(None))
        if self._coordinator.rank == LEADER:
            self._coordinator.set_once(subject, _OK)

    def evict(self, ref: StepRef, nbytes: int, *, restored_ref: StepRef | None) -> bool:
        """Free at least ``nbytes`` for the step ``ref``, if possible, in a store that is full.

        Return True if any bytes were freed.
        """
        return self._evictor.evict(ref, nbytes, restored_ref=restored_ref)

    def fit_to_capacity(self, ref: StepRef, *, restored_ref: StepRef | None) -> None:
        """Remove steps until the tier is within its capacity, now that ``ref`` is committed and its
        encoded size is known.

        This has an effect only on the leader, and only if the tier has a codec.
        """
        if self._coordinator.rank == LEADER and self._tier.tier.codec != NO_CODEC:
            self._evictor.fit_to_capacity(ref, restored_ref=restored_ref)

    def _subject(self, ref: StepRef, trial: int) -> str:
        return f"room/{self._tier.index}/{trial}/{ref.folder}"

    def _total_bytes(self, ref: StepRef, subject: str) -> int | None:
        """Wait for the sizes of the images of all ranks, and return their sum. Return None as soon
        as a rank has given the save up.
        """
        total, wait = 0, Wait(self._timeout, _MESSAGE_NAME, ref.step)
        ranks = range(self._coordinator.world_size)
        for _, message in arrivals(self._coordinator, subject, ranks, wait):
            if (nbytes := msgspec.json.decode(message, type=int | None)) is None:
                return None
            total += nbytes
        return total


def _abort_of(error: BaseException) -> Abort:
    return abort_reason(error) if isinstance(error, CkptError) else Abort(repr(error), {})
