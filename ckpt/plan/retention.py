"""Which checkpoints of a tier may go?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ckpt.errors import ConfigError
from ckpt.model.layout import StepRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a tier keeps. Without either rule: everything.

    Attributes:
        keep_last: This many of the newest steps.
        keep_every: Beside them, every step that is a multiple of this.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(
                    f"{name}={value!r}: give a whole number from 1 on, or leave it out to keep all"
                )
        if self.keep_every is not None and self.keep_last is None:
            raise ConfigError(
                "keep_every adds to keep_last: say how many of the newest to keep, such as keep_last=3"
            )

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None


def doomed(committed: Collection[StepRef], rule: Retention, *, own: str = "") -> list[StepRef]:
    """Those of ``committed`` that the rule gives up, oldest first.

    Args:
        own: The running attempt. Its newest step stays whatever others there are: after a rollback the steps given up may have higher numbers.
    """
    if rule.keep_last is None or not committed:
        return []
    newest = sorted({ref.step for ref in committed}, reverse=True)
    kept = set(newest[: rule.keep_last])
    kept |= {step for step in newest if rule.keep_every and step % rule.keep_every == 0}
    kept |= (
        {max(mine)}
        if (mine := [ref.step for ref in committed if own and ref.attempt.startswith(own)])
        else set()
    )
    return sorted(ref for ref in committed if ref.step not in kept)
