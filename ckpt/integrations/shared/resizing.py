"""Rules of ``PerRank(on_resize=...)`` for values that frameworks keep on each rank.

A restore calls a rule if the number of ranks has changed since the save. The rule returns the rank
of the save whose value the calling rank takes.
"""

from __future__ import annotations

from ckpt.errors import ConfigError
from ckpt.state.tensors.per_rank import OnResize


def same_or_first(rank: int, _world_size: int, saved_world_size: int) -> int:
    """Return ``rank`` if the save had such a rank, and otherwise 0."""
    return rank if rank < saved_world_size else 0


def refusing_resize(name: str, way: str) -> OnResize:
    """Return a rule that always raises ``ConfigError``, for a value that no other number of ranks
    can use.

    Args:
        name: The name of the value, for the error.
        way: The advice in the error for users who cannot resume with as many ranks as before.
    """

    def refuse(_rank: int, world_size: int, saved_world_size: int) -> int:
        raise ConfigError(
            f"{name} was saved by {saved_world_size} rank(s), and this world has {world_size}: "
            f"resume with as many ranks, or {way}"
        )

    return refuse
