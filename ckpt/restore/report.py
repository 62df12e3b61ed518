"""The report that a restore returns, and the texts of its errors about several steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from ckpt.catalog.tiered_reader import Repair
from ckpt.errors.sanitize import clean
from ckpt.model.readable import duration, rate, size
from ckpt.model.selector import Selector

_REMARKS: Final = (
    "skipped",
    "repaired",
    "finished",
    "missing",
    "left_alone",
    "unexpected",
    "renamed",
    "converted",
    "uninitialised",
)
"""The fields that say what was not as usual."""
OVERWRITE_NOTE: Final = (
    ". Tensors of the state may have been overwritten in part: do not train on with it"
)
_MOST_ITEMS: Final = 50
"""The most items of a field that a notebook lists."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RestoreReport:
    """The result of a restore: what was loaded, from where, and how long it took.

    Attributes:
        step: The step that was restored.
        attempt: The attempt (the run of the job) that saved it.
        saved_world_size: How many ranks saved it.
        tier: The URL of the tier from which most bytes of this rank came. Data that this restore
            has first stored in a nearer folder (read-through) counts for the tier from which it was
            fetched.
        nbytes: Bytes that were loaded into this rank's state.
        read_bytes: Bytes that this rank read from stores for its state. Encoded chunks count with
            their encoded size.
        received_bytes: Raw bytes that other ranks read and sent to this rank
            (``broadcast=True``).
        seconds: Duration of the whole restore: finding, matching, reading, verifying, and waiting
            for other ranks.
        skipped: Pairs (step, reason) of the steps that were passed over before this one, because
            they were damaged or not complete any more.
        repaired: The files that nearer tiers should have had intact, and that this rank read from
            farther tiers instead. If a file was rewritten on the nearer tier, its entry is
            ``mended``.
        cached_bytes: Bytes of the files that this rank wrote into a nearer tier, for the next
            restore.
        missing: With ``strict=False``: names in the state that the checkpoint lacks, without those
            of ``left_alone``. Their values were not changed.
        left_alone: Names in the state that the checkpoint lacks because its save left them out
            (``save_async(only=..., exclude=...)``, ``ckpt.trainable``). Their values were not
            changed.
        unexpected: With ``strict=False``: names in the checkpoint that the state of no rank has.
        renamed: Pairs (name in the state, name in the checkpoint), for this rank.
        converted: Triples (name in the state, dtype in the checkpoint, dtype in the state), for
            this rank.
        uninitialised: Tensors of modules that are still on the meta device, because nothing was
            read for them: buffers that are not saved (``persistent=False``), and names that the
            caller did not select.
        finished: Pairs (step, tier) of saves whose leader died when only the manifest was missing,
            and whose commit this restore finished.
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
    left_alone: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    converted: tuple[tuple[str, str, str], ...] = ()
    uninitialised: tuple[str, ...] = ()
    finished: tuple[tuple[int, str], ...] = ()

    @property
    def gigabytes_per_second(self) -> float:
        """Return the loaded bytes of this rank, in units of 10^9, per second of the restore."""
        return self.nbytes / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        return (
            f"step {self.step} from {self.tier}: {size(self.nbytes)} in {duration(self.seconds)}, "
            f"{rate(self.nbytes, self.seconds)}, checksums verified"
            + "".join(f"; {len(values)} {word}" for word, values in self._remarks())
        )

    def __repr__(self) -> str:
        return f"<RestoreReport: {self}>"

    def _repr_html_(self) -> str:
        """Return the report for a notebook: one line, and below it what was not as usual."""
        line = (
            f"restored <b>step {self.step}</b> from {_escape(self.tier)}: {size(self.nbytes)} in "
            f"{duration(self.seconds)} ({rate(self.nbytes, self.seconds)}), checksums verified"
        )
        details = "".join(
            f"<details><summary>{len(values)} {word}</summary><ul>{_html_list(values)}</ul>"
            "</details>"
            for word, values in self._remarks()
        )
        return f"<div>{line}{details}</div>"

    def _remarks(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield each field that says what was not as usual, in words, with its items."""
        for name in _REMARKS:
            if values := getattr(self, name):
                yield name.replace("_", " "), values


def _html_list(values: Sequence[Any]) -> str:
    items = [f"<li>{_escape(_item_text(value))}</li>" for value in values[:_MOST_ITEMS]]
    if len(values) > _MOST_ITEMS:
        items.append(f"<li>and {len(values) - _MOST_ITEMS} more</li>")
    return "".join(items)


def _item_text(value: Any) -> str:
    if isinstance(value, Repair):
        end = "written again there" if value.mended else "read from a farther tier"
        return f"{value.tier}: {value.key or 'all files'}: {value.reason}; {end}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _escape(text: str) -> str:
    return escape(clean(text))


def why_none(step: Selector | None, skips: Sequence[tuple[int, str]], is_overwritten: bool) -> str:
    """Return the text of the error which says that no step could be restored.

    ``skips`` are pairs of a step that was tried and the reason against it. ``is_overwritten`` says
    whether the state may have been changed.
    """
    if not skips:
        return f"step {step} is not there"
    outcome = OVERWRITE_NOTE if is_overwritten else "; nothing in the state was changed"
    subject = f"step {step} is not intact" if isinstance(step, int) else "no step is intact"
    return f"{subject} ({reasons_of(skips)}){outcome}"


def reasons_of(skips: Sequence[tuple[int, str]]) -> str:
    """Return the text that says why the first of ``skips`` were passed over. These are pairs of a
    step and the reason.
    """
    numbers_by_reason = defaultdict[str, list[int]](list)
    for number, reason in skips[:5]:
        numbers_by_reason[reason].append(number)
    return "; ".join(
        f"step{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {reason}"
        for reason, numbers in numbers_by_reason.items()
    )
