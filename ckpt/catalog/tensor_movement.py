"""How far a tensor has moved from one checkpoint to another, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Movement:
    """How far a tensor, or a group of tensors, has moved.

    Attributes:
        largest: The largest absolute difference between elements at the same position. It is inf if
            two elements at the same position differ, and at least one of them is infinite or NaN.
            Two NaNs count as equal.
        distance: The Euclidean norm of the difference.
        norm: The Euclidean norm of the elements of the first checkpoint that are finite.
    """

    largest: float = 0.0
    distance: float = 0.0
    norm: float = 0.0

    @property
    def ratio(self) -> float:
        """Return ``distance`` as a multiple of ``norm``; inf if only ``norm`` is 0."""
        if self.norm:
            return self.distance / self.norm
        return math.inf if self.distance else 0.0

    def __add__(self, addend: Movement) -> Movement:
        """Return the movement of the elements of both."""
        return Movement(
            max(self.largest, addend.largest),
            math.hypot(self.distance, addend.distance),
            math.hypot(self.norm, addend.norm),
        )
