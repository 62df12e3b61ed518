"""Open the tiers of a job in a process of the agent."""

from __future__ import annotations

from ckpt.agent.messages import Job
from ckpt.errors import RootLost, errors_of
from ckpt.storage.api import HoldsRoot
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import OpenTier


def open_tier(job: Job, index: int) -> OpenTier:
    """Open the tier ``index`` of a job, with the root that the trainer had.

    The path of a root names another folder if its disk was unmounted since. The agent then works
    nowhere, and it never makes a root: steps in an empty mount point vanish when the disk is
    mounted again.

    Raises:
        ConfigError: The settings of the tier are not valid.
        RootLost: The root of a folder is gone, or another folder has taken its place.
    """
    settings = job.tier_settings()[index]
    backend = open_backend(settings.url, settings.options)
    if isinstance(backend, HoldsRoot):
        # The mark recognizes the root that the trainer had. Another one counts as replaced.
        backend.hold(job.marks[index] if job.marks else "")
        if backend.is_replaced():
            with errors_of(backend.url):
                raise RootLost("")
    return OpenTier(index, settings, backend)
