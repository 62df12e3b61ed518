"""A limit for the files that this process may have open."""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def few_open_files(more: int = 50) -> Generator[None]:
    """Let this process open only some more files than it has open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
