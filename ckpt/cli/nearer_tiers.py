"""Find the tiers of a job that are nearer than a given root, by asking the agent of this node.

The ``attempt`` of a job is its id.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from ckpt.agent.client import known_jobs
from ckpt.agent.messages import JobStatus
from ckpt.cli import output
from ckpt.cli.watched_store import WatchedStore, open_watched
from ckpt.errors import CkptError
from ckpt.root.attempts import step_refs
from ckpt.root.owner import read_owner
from ckpt.storage.registry import stores_in_memory
from ckpt.storage.urls import is_folder, is_same_place, relation


def nearer_tiers(
    root: WatchedStore, destination: WatchedStore, timeout: float
) -> list[WatchedStore]:
    """Return the nearer tiers of the job of ``root`` that are on this machine, nearest first.

    These tiers are folders and stores in memory. The agent lists the jobs that have run on this
    machine, with their tiers. The function uses the newest job that meets two conditions:

    * The root names the job as its owner, or has a step of the job. The URL alone is not enough,
      because two object stores may have the same URL.
    * No other node has parts of the job's steps. Otherwise this machine would have only a part of
      each step.

    Another experiment may have taken a tier since. So a tier is left out if the last job on it (see
    ``_last_job``) neither owns the root nor has a step in the root. If any tier remains, a note on
    standard error names the tiers.

    Args:
        root: The root that the user has named.
        destination: The store that the step is copied to. The result does not include it.
        timeout: The value of ``--timeout``.

    Returns:
        The stores. The list is empty if there is no agent or no such job, or if one of the stores
        fails.
    """
    jobs = [job for job in known_jobs() if not job.in_parts and _index_of(root, job) > 0]
    if not jobs:
        return []
    with suppress(CkptError):
        root_jobs = root.call_in_time(partial(_jobs_of, root))
        for job in reversed(jobs):
            if job.attempt in root_jobs:
                stores = [
                    open_watched(url, None, timeout)
                    for url in job.tiers[: _index_of(root, job)]
                    if _is_here(url) and relation(url, destination.url) == "apart"
                ]
                stores = [
                    tier
                    for tier in stores
                    if tier.call_in_time(partial(_last_job, tier)) in root_jobs
                ]
                if stores:
                    urls = ", ".join(store.url for store in stores)
                    output.note(f"the agent knows nearer tiers of this job: {urls}")
                return stores
    return []


def _index_of(root: WatchedStore, job: JobStatus) -> int:
    """Return the index of the root among the tiers of a job; -1 if the job has no such tier."""
    indexes = (index for index, url in enumerate(job.tiers) if is_same_place(url, root.url))
    return next(indexes, -1)


def _jobs_of(root: WatchedStore) -> set[str]:
    """Return the ids of the jobs that own the root or have a step in the root."""
    owner = read_owner(root)
    return {ref.job for ref in step_refs(root)} | ({owner.attempt} if owner else set())


def _last_job(tier: WatchedStore) -> str | None:
    """Return the id of the job that owns a tier.

    If the tier has no owner, return the id of the job of its newest step; None if the tier has no
    step either.
    """
    if (owner := read_owner(tier)) is not None:
        return owner.attempt
    newest = next(iter(step_refs(tier)), None)
    return None if newest is None else newest.job


def _is_here(url: str) -> bool:
    """Return True if a tier is an existing folder or store in memory of this machine.

    The function does not open the tier, because opening it would create it.
    """
    return os.path.isdir(url) if is_folder(url) else url in stores_in_memory()
