"""What the tiers of a run have, for the commands that work on the whole run.

The journal of a run is beside one of its roots. A *beat* is the time at which a job was last alive.
A job that lives leaves one in the journal every few seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.catalog.rollbacks import all_rollbacks
from ckpt.cli import output
from ckpt.cli.options import ask_each, open_each
from ckpt.cli.prune import activity
from ckpt.cli.watched_store import WatchedStore
from ckpt.config import MEMORY, Tier, load_config
from ckpt.errors import CkptError, CommitError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback, last_rollback, on_branch
from ckpt.observe.history import History, history_of
from ckpt.observe.job_life import LIFE_MEANING, lives_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.registry import scheme_of, stores_in_memory
from ckpt.storage.tiers import resolve_tier, tier_at, urls_of
from ckpt.storage.urls import is_folder, is_spelling_of, local_path


class RunJournal(NamedTuple):
    """The history of a run, when each job was alive last, by its id, in seconds since 1970, and
    other paths to the root, through links, by which jobs have saved to it.
    """

    history: History
    beats: Mapping[str, float]
    links: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RunTier:
    """What a tier of the run has.

    Attributes:
        steps: All attempts at steps on the tier.
        owner: The owner of the root; None if it has none.
        rollback: The rollback that counts on the tier; None if there is none.
        journal: The history of the jobs that saved to the tier, and when each of them was alive
            last, from the journal beside the tier.
    """

    store: WatchedStore
    steps: Sequence[StoredStep]
    owner: Owner | None
    rollback: Rollback | None
    journal: RunJournal


def look_at_run(urls: Sequence[str], config: str | None, timeout: float) -> list[RunTier]:
    """Return what each tier of the run has, nearest first.

    Raises:
        CkptError: A tier cannot be opened or listed.
    """
    tiers = load_config(config).tiers
    is_in_config = (  # Then all tiers of the configuration are those of the run
        len(urls) < 2
        and MEMORY not in urls
        and resolve_tier(next(iter(urls), None), config) in tiers
    )
    stores = (
        open_each(None, config, timeout=timeout, all_tiers=True)
        if is_in_config
        else open_each(with_memory_of_run(urls, config) or None, config, timeout=timeout)
    )

    def look(store: WatchedStore) -> RunTier:
        # A tier that is local to each node may have only a part of each step
        is_part = scheme_of(store.url) == "shm" or tier_at(store.url, tiers).local is True
        inventory = Inventory(store, part=is_part)
        steps, owner = inventory.look(), read_owner(store)
        return RunTier(store, steps, owner, inventory.rollback, _journal_of(store))

    results = [result for _, result in ask_each(stores, look)]
    for result in results:
        if isinstance(result, CkptError):
            raise result
    return [result for result in results if isinstance(result, RunTier)]


def with_memory_of_run(urls: Sequence[str], config: str | None) -> list[str]:
    """Return ``urls`` with "memory" replaced by the store of the run whose next tier follows. It is
    left out if no job of this user has made it on this machine.

    Raises:
        ConfigError: No place follows "memory".
    """
    stores = stores_in_memory()
    # The name of a store in memory follows from the server of the next tier, and so from options.
    tiers = [Tier(url) if url == MEMORY else resolve_tier(url, config) for url in urls]
    pairs = zip(urls, urls_of(tiers), strict=True)
    return [store for url, store in pairs if url != MEMORY or store in stores]


def rollback_of(tiers: Sequence[RunTier]) -> Rollback | None:
    """Return the rollback of the run that counts; None if there is none."""
    return last_rollback(tier.rollback for tier in tiers)


def rollbacks_of(tiers: Sequence[RunTier]) -> list[Rollback]:
    """Return the rollbacks on all tiers of the run."""
    return [
        rollback
        for tier in tiers
        for rollback in tier.store.call_in_time(partial(all_rollbacks, tier.store))
    ]


def attempt_at(tiers: Sequence[RunTier], number: int) -> StepRef:
    """Return the attempt at the step ``number`` that counts: that of the current branch if it has
    one, or else the youngest.

    Raises:
        NoCheckpoint: No tier has the step as a checkpoint.
    """
    steps = [
        step
        for tier in tiers
        for step in tier.steps
        if step.ref.step == number and step.state == "committed"
    ]
    if not steps:
        urls = ", ".join(tier.store.url for tier in tiers)
        raise NoCheckpoint(urls, f"step {number} is no checkpoint there")
    branch = set(on_branch(rollback_of(tiers), (step.ref for step in steps)))
    return max(steps, key=lambda step: (step.ref in branch, step.created_at)).ref


def check_idle(tiers: Sequence[RunTier], *, consequence: str) -> None:
    """Check that no job and no agent may be at work. A job that has not saved yet owns no root, but
    the journal of the run says that it lives. A job that only evaluates does not count.

    Raises:
        CommitError: One may be. The message has ``consequence``, what it may do.
    """
    for tier in tiers:
        if tier.owner is not None and (text := activity(tier.owner)):
            raise CommitError(
                f"{tier.store.url}: the job that writes here {text} ({tier.owner}), and "
                f"{consequence}: end it first, or give --force"
            )
    for tier in tiers:
        history, beats, _links = tier.journal
        for life in lives_of(history, beats, time.time()).values():
            if life.is_alive:
                raise CommitError(
                    f"{tier.store.url}: {LIFE_MEANING[life.state]} ({life.host}, process "
                    f"{life.pid}), and {consequence}: end it first, or give --force if it only "
                    "evaluates (an evaluation that restores with rollback=False is not in the way)"
                )


def warn_of_other_tiers(tiers: Sequence[RunTier], *, consequence: str) -> None:
    """Print a warning if the last job of the run saved to a place that is not among ``tiers``. The
    warning has ``consequence``, what happens there. No file system of such a place is asked, and
    stores in memory that this machine does not have are left out.
    """
    for tier in tiers:
        saves = sorted(tier.journal.history.saves.values(), key=lambda save: save.at)
        places = {url for save in saves if save.job == saves[-1].job for url in save.tiers}
        urls = [
            url
            for url in sorted(places)
            if not any(_is_tier(other, url) for other in tiers)
            and (scheme_of(url) != "shm" or url in stores_in_memory())
        ]
        if urls:
            output.warn(
                f"the last job of {tier.store.url} also saved to {', '.join(urls)}, and "
                f"{consequence}: name all places of the run"
            )
            return


def _is_tier(tier: RunTier, saved_url: str) -> bool:
    """Return True if a tier is the place ``saved_url``. Its file system is not asked."""
    url = tier.store.url
    return (
        is_spelling_of(url, saved_url)
        or is_spelling_of(url, saved_url, follows_links=True)
        or any(is_spelling_of(saved_url, link) for link in tier.journal.links)
    )


def _journal_of(store: WatchedStore) -> RunJournal:
    """Read the journal beside a tier. The result is empty if it is the journal of another place."""
    if not is_folder(store.url):
        return RunJournal(History(), {})
    reader = JournalReader(store.url)
    with store.request():
        history, beats = history_of(reader.read()), reader.beats()
        root = os.path.realpath(local_path(store.url))
        is_own = history.is_of(root)  # False if the root was copied with its journal
    starts = [job.start for job in history.jobs.values()]
    # Other paths to the root, by which jobs have named it
    links = {start.named_root for start in starts if start.named_root and start.root == root}
    return RunJournal(history, beats, frozenset(links)) if is_own else RunJournal(History(), {})
