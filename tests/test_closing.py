"""The end of a manager's work, when a close was interrupted and is asked for again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from ckpt.closing import Shutdown
from ckpt.coordination.leaving import DepartingCoordinator
from ckpt.pipeline.workers import Workers


def test_a_rank_that_resumes_a_close_leaves_although_a_tier_does_not_answer() -> None:
    """A listing hangs, so each thread that waits for its end does, too."""
    answers, left = threading.Event(), threading.Event()
    listers = Workers("list", 1)
    listers.submit(answers.wait)
    closing = Shutdown(listers)
    coordinator: Any = SimpleNamespace(leave=lambda _: left.set(), look_seconds=0.0)
    try:
        for _ in range(2):  # Ctrl-C has interrupted the first call
            closing.begin(lambda: cast("None", left.wait()), detaches=False)
        closing.leave(cast("DepartingCoordinator", coordinator), "KeyboardInterrupt")
        assert left.is_set()
    finally:
        left.set()
        answers.set()
        closing.end()
