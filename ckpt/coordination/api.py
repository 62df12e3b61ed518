"""The contract of a coordinator, which carries messages between the ranks of a job.

A rank posts one message on a subject, and a subject has one verdict, which the first caller sets.
No call is a collective. If a rank is dead, the other ranks still get an answer or a timeout within
a bound that they choose.
"""

from __future__ import annotations

from typing import Final, Protocol

LEADER: Final = 0
"""The rank that decides for all, and proposes the outcome of a commit."""


class Coordinator(Protocol):
    """Carries messages between the ranks of a job.

    Subjects are short ASCII names, and each is used once within an attempt.

    Thread safety:
        All methods may be called from any thread.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def attempt(self) -> str:
        """The id of this incarnation of the job, the same on all ranks: lower-case letters and
        digits.
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
        """Set the verdict on ``subject`` if there is none yet, and return the verdict that
        stands.
        """
        ...

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        """Return the verdict on ``subject``, or None if there is none after ``timeout`` seconds."""
        ...

    def forget(self, subject: str) -> None:
        """Remove the message of this rank on ``subject``. The call never raises."""
        ...

    def clone(self) -> Coordinator:
        """Return a coordinator for the same rank and job with its own connection, so that a call
        that waits there does not delay calls on this one.
        """
        ...

    def close(self) -> None: ...
