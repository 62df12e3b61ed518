"""The little that ranks must tell each other: a word per rank on a subject, and one verdict per subject.

No call is a collective: a rank may be dead and the others still get an answer, or a time-out, within a bound they chose.
"""

from __future__ import annotations

from typing import Protocol


class Coordinator(Protocol):
    """Threads: any. Subjects are short ASCII names, used once within an attempt."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def attempt(self) -> str:
        """Id of this incarnation of the job, the same on all ranks: lower-case letters and digits."""
        ...

    def post(self, subject: str, message: bytes) -> None:
        """This rank's word on ``subject``."""
        ...

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        """Words that have come from any of ``ranks``; waits up to ``timeout`` seconds for at least one."""
        ...

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        """Set the verdict on ``subject`` if there is none yet; returns the one that stands."""
        ...

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        """The verdict, waiting up to ``timeout`` seconds for it; None if there is none yet."""
        ...

    def forget(self, subject: str) -> None:
        """This rank's word on ``subject`` is no longer needed. Never raises."""
        ...

    def clone(self) -> Coordinator:
        """The same, for another thread: a wait there holds up nobody here."""
        ...

    def close(self) -> None: ...
