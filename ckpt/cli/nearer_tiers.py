"""The tiers that are nearer than a root, as the agent of this node knows them."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from ckpt.agent.client import known_jobs
from ckpt.agent.messages import JobStatus
from ckpt.catalog.index import attempts
from ckpt.cli import output
from ckpt.cli.store_timeout import Watched, open_watched
from ckpt.coordination.owner import read_owner
from ckpt.errors import CkptError
from ckpt.retention.claim import job_of
from ckpt.storage.places import is_folder, relation
from ckpt.storage.registry import stores_in_memory


def nearer_tiers(root: Watched, destination: Watched, timeout: float) -> list[Watched]:
    """Return the folders and the memory of this machine where the job of ``root`` has its steps,
    too, nearest first.

    The agent knows the tiers of the jobs that have run here. A job counts if the root names it as
    its owner, or has a step of it: two object stores may have the same URL. A job with tiers on
    several nodes does not count, since this machine has a part of its steps. A tier counts if the
    last job there is one of the root's, since another experiment may have taken the tier.

    Args:
        root: The root that the user has named.
        destination: Where the step is copied to, which is not read from.
        timeout: The value of ``--timeout``.
    """
    jobs = [job for job in known_jobs() if not job.in_parts and _place_of(root, job) > 0]
    if not jobs:
        return []
    with suppress(CkptError):
        names = root.ask(partial(_jobs_of, root))
        for job in reversed(jobs):
            if job.attempt in names:
                found = [
                    open_watched(url, None, timeout)
                    for url in job.tiers[: _place_of(root, job)]
                    if _is_here(url) and relation(url, destination.url) == "apart"
                ]
                found = [tier for tier in found if tier.ask(partial(_last_job, tier)) in names]
                if found:
                    places = ", ".join(store.url for store in found)
                    output.note(f"the agent knows nearer tiers of this job: {places}")
                return found
    return []


def _place_of(root: Watched, job: JobStatus) -> int:
    """Return the position of the root among the tiers of a job; -1 if it is none of them."""
    places = (at for at, url in enumerate(job.tiers) if relation(url, root.url) == "same")
    return next(places, -1)


def _jobs_of(root: Watched) -> set[str]:
    """Return the attempts of the jobs that have the root or a step there."""
    owner = read_owner(root)
    return {job_of(ref) for ref in attempts(root)} | ({owner.attempt} if owner else set())


def _last_job(tier: Watched) -> str | None:
    """Return the attempt of the job that has a tier, else that of its newest step."""
    if (owner := read_owner(tier)) is not None:
        return owner.attempt
    newest = next(iter(attempts(tier)), None)
    return None if newest is None else job_of(newest)


def _is_here(url: str) -> bool:
    """Return whether a tier is in this machine, and exists. To open it would make it."""
    return os.path.isdir(url) if is_folder(url) else url in stores_in_memory()
