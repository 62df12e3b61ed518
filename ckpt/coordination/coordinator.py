"""The contract of a coordinator, which carries messages between the ranks of a job.

A subject is the name of one exchange. On a subject, each rank may post one message, and the first
caller of ``set_once`` sets the one verdict. No call is a collective. If a rank is dead, the other
ranks still get an answer or a timeout within a bound that they choose.
"""

from __future__ import annotations

from typing import Final, Protocol

LEADER: Final = 0
"""The rank that decides for all ranks, and proposes the outcome of a commit."""


class Coordinator(Protocol):
    """Carries messages between the ranks of a job.

    Subjects are short ASCII names, and each is used once within an attempt. If the job's store is
    gone, ``post``, ``collect``, ``set_once`` and ``verdict`` raise ``CommitError``.

    Thread safety:
        All methods may be called from any thread.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def attempt(self) -> str:
        """The id of this incarnation of the job, which is the same on all ranks. It consists of
        lower-case letters and digits.
        """
        ...

    def post(self, subject: str, message: bytes) -> None:
        """Post the message of this rank on ``subject``."""
        ...

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        """Return the messages of ``ranks`` that have arrived, by rank.

        The call waits up to ``timeout`` seconds for at least one message. It returns an empty dict
        if none arrives.
        """
        ...

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        """Set the verdict on ``subject`` unless it has one already. Return the verdict that the
        subject has after the call.
        """
        ...

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        """Return the verdict on ``subject``, or None if there is none after ``timeout`` seconds."""
        ...

    def forget(self, subject: str) -> None:
        """Remove the message of this rank on ``subject``. The call never raises."""
        ...

    def clone(self) -> Coordinator:
        """Return a coordinator for the same rank and job with a connection of its own.

        A call that waits on the clone does not delay calls on this coordinator.
        """
        ...

    def close(self) -> None: ...
