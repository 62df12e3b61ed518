"""What a rank waits for, and hands over, when it leaves its unfinished steps to the agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Final

from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.exchanges import Wait, gather
from ckpt.errors import CkptError
from ckpt.pipeline.workers import Workers
from ckpt.save.tier_writer import TierWriter

_log = logging.getLogger("ckpt")
_STORE_SECONDS: Final = 2.0
"""How long a detach waits for removals under way, and for stores to change their owner records."""
_SUBJECT: Final = "save/detach"
_RANKS_SECONDS: Final = 5.0
"""How long the leader waits for the other ranks to detach."""


def await_removals(writers: Sequence[TierWriter]) -> None:
    """Wait some seconds until ``writers`` have removed what they are removing."""
    deadline = time.monotonic() + _STORE_SECONDS
    for writer in writers:
        writer.await_discards(max(0.0, deadline - time.monotonic()))


def await_detaches(coordinator: Coordinator) -> None:
    """Post that this rank has detached. On the leader, wait some seconds until all ranks have
    posted the same.

    A `CkptError` is logged and not raised, since the ranks may lose their connection when the
    leader ends.
    """
    try:
        coordinator.post(_SUBJECT, b"1")
        if coordinator.rank == LEADER:
            gather(coordinator, _SUBJECT, Wait(_RANKS_SECONDS, "the detach"))
    except CkptError as error:
        _log.info("ckpt: the job is left to the agent without some ranks: %s", error)


def leave_roots(writers: Sequence[TierWriter]) -> None:
    """Hand the roots that this rank has claimed over to the agent: their owner records then name no
    process.

    If a store does not answer soon, its record stays as it is until the agent removes it.
    """
    workers = Workers("detach", len(writers))
    futures = [workers.submit(writer.detach) for writer in writers]
    late_futures = wait(futures, _STORE_SECONDS).not_done
    for writer, future in zip(writers, futures, strict=True):
        if future in late_futures or future.exception() is not None:
            _log.info("ckpt: %s does not answer: its record is left to the agent", writer.url)
    if not late_futures:
        workers.close()
