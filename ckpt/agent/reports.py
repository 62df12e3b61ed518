"""What a worker reports to its agent, as frames on its standard output."""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["done", "superseded", "failed"]


class Copying(msgspec.Struct, frozen=True, tag="copying"):
    """So many bytes of a step are on the tier ``to``."""

    step: int
    to: str
    done_bytes: int
    total_bytes: int


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """A step is a checkpoint on the tier ``to`` now."""

    step: int
    to: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last report.

    ``outcome`` is "done" if nothing is left to do, "superseded" if another job has taken the roots,
    and "failed" if another try is needed.
    """

    outcome: Outcome
    error: str = ""


Report = Copying | Copied | Ended
