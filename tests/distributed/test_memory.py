"""The ranks of a node share its memory."""

from __future__ import annotations

from pathlib import Path

from tests.kit.worlds import world

RANKS = 4
WORKER = Path(__file__).with_name("workers") / "memory.py"


def test_ranks_that_come_one_after_the_other_get_equal_shares(tmp_path: Path) -> None:
    """Each rank has a ring of 192 MiB of its own before the next one asks for its share."""
    lines = [line for line in world(RANKS, WORKER, tmp_path).splitlines() if "share:" in line]
    assert len(lines) == RANKS
    assert len(set(lines)) == 1, lines
