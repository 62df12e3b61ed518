"""What a restore tells."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.catalog.found import Repair
from ckpt.model.units import duration, rate, size


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored and what it took.

    Attributes:
        step, attempt: What was restored.
        saved_world_size: How many ranks had saved it.
        tier: URL of the tier that it came from: with several, the one that most bytes of this rank came from. What was fetched into a cache on the way came from where it was fetched.
        nbytes: Bytes that landed in this rank's state; this rank has read ``read_bytes`` from stores for it.
        received_bytes: What other ranks read for this one (``replicas="broadcast"``), in memory.
        seconds: The whole call: finding, matching, reading, verifying, and the waiting for other ranks.
        skipped: Newer (step, reason) that were damaged.
        repaired: What nearer tiers should have had intact, and came from farther ones; of this rank. What could be written anew there is ``mended``.
        cached_bytes: Of the files that this rank has put into a near tier on the way, for the next restore.
        missing, unexpected: With ``strict=False``: names that kept what they had, and names that have no place in the state of any rank.
        renamed: (name in the state, name in the checkpoint), of this rank.
        converted: (name in the state, dtype in the checkpoint, dtype here), of this rank.
        uninitialised: Tensors of modules that were on the meta device and still are, because nothing was read for them: buffers that are not saved (``persistent=False``), and names that were not asked for.
        finished: (step, tier) of saves whose leader had died with only the manifest missing, and whose commit this restore has finished.
    """

    step: int
    attempt: str
    tier: str
    nbytes: int
    read_bytes: int
    seconds: float
    saved_world_size: int
    skipped: tuple[tuple[int, str], ...]
    repaired: tuple[Repair, ...] = ()
    cached_bytes: int = 0
    received_bytes: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    converted: tuple[tuple[str, str, str], ...] = ()
    uninitialised: tuple[str, ...] = ()
    finished: tuple[tuple[int, str], ...] = ()

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes that landed, per second of the whole call."""
        return self.nbytes / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        return (
            f"step {self.step} from {self.tier}: {size(self.nbytes)} in {duration(self.seconds)}, "
            f"{rate(self.nbytes, self.seconds)}, checksums verified"
            + "".join(
                f"; {len(found)} {what}"
                for what in (
                    "skipped",
                    "repaired",
                    "finished",
                    "missing",
                    "unexpected",
                    "renamed",
                    "converted",
                    "uninitialised",
                )
                if (found := getattr(self, what))
            )
        )
