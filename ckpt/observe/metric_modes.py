"""Which values of a metric are the best, and how many best steps are kept, as a run says it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt.config import Best, Mode, Tier
from ckpt.model.metrics import modes_of
from ckpt.observe.history import history_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.storage.urls import is_folder


def modes_of_run(tiers: Iterable[Tier], urls: Iterable[str]) -> dict[str, Mode]:
    """Return which values of a metric are the best, by its name: as ``keep_best`` of ``tiers`` or
    the journals beside ``urls`` say.
    """
    modes: dict[str, Mode] = {}
    for url in urls:
        modes |= {rule.metric: rule.mode for rule in best_rules_at(url)}
    return modes | modes_of(tiers)


def best_rules_at(url: str) -> Sequence[Best]:
    """Return the rules by which the job keeps the best steps, one for a metric, as the journal
    beside ``url`` says. There are none if it is no folder, or has no journal.
    """
    return history_of(JournalReader(url).read()).best_rules if is_folder(url) else ()
