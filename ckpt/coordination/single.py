"""A world of one."""

from __future__ import annotations

import secrets


def new_attempt() -> str:
    """A fresh attempt id: 12 hex digits."""
    return secrets.token_hex(6)


class SingleCoordinator:
    """What a lone process tells itself."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.attempt = new_attempt()
        self._words: dict[str, bytes] = {}
        self._verdicts: dict[str, bytes] = {}

    def tell(self, subject: str, word: bytes) -> None:
        self._words[subject] = word

    def hear(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:  # noqa: ARG002 - nobody to wait for
        return {0: self._words[subject]} if 0 in ranks and subject in self._words else {}

    def decide(self, subject: str, verdict: bytes) -> bytes:
        return self._verdicts.setdefault(subject, verdict)

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:  # noqa: ARG002 - nobody to wait for
        return self._verdicts.get(subject)

    def forget(self, subject: str) -> None:
        self._words.pop(subject, None)

    def clone(self) -> SingleCoordinator:
        return self

    def close(self) -> None:
        self._words.clear()
        self._verdicts.clear()
