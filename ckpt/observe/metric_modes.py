"""Which values of a metric are the best, as a run says it."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.config import Mode, Tier
from ckpt.model.metrics import modes_of
from ckpt.observe.history import history_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.storage.places import is_folder


def modes_of_run(tiers: Iterable[Tier], urls: Iterable[str]) -> dict[str, Mode]:
    """Return which values of a metric are the best, by its name: as ``keep_best`` of ``tiers`` or
    the journals beside ``urls`` say.
    """
    modes: dict[str, Mode] = {}
    for url in filter(is_folder, urls):
        modes |= history_of(JournalReader(url).read()).modes
    return modes | modes_of(tiers)
