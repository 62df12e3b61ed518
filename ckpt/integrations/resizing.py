"""Rules of ``PerRank(on_resize=...)`` for what frameworks keep on each rank."""

from __future__ import annotations

from ckpt.adapters.tensors.per_rank import OnResize
from ckpt.errors import ConfigError


def same_or_first(rank: int, _world_size: int, saved_world_size: int) -> int:
    """Give a rank the value it has saved, and a rank that is new the value of rank 0."""
    return rank if rank < saved_world_size else 0


def refusing_resize(what: str, way: str) -> OnResize:
    """Return the rule that refuses another number of ranks.

    Args:
        what: What the ranks keep, in the error.
        way: What to do about it, other than to resume with as many ranks.
    """

    def refuse(_rank: int, world_size: int, saved_world_size: int) -> int:
        raise ConfigError(
            f"{what} was saved by {saved_world_size} rank(s), and this world has {world_size}: "
            f"resume with as many ranks, or {way}"
        )

    return refuse
