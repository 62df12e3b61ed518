"""Interrupt a call as Ctrl-C does."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_call(files: tuple[str, ...], turn: int, *, event: str = "call") -> Generator[None]:
    """Raise ``KeyboardInterrupt`` in this thread at the ``turn``-th ``event`` in ``files``.

    The events are ``call``, as a function of ``files`` begins, and ``c_return``, as a function
    that is written in C returns to one of ``files``. Python runs signal handlers at both.
    """
    reached = 0

    def on_event(frame: FrameType, happened: str, _: object) -> None:
        nonlocal reached
        if happened == event and frame.f_code.co_filename.endswith(files):
            reached += 1
            if reached == turn:
                raise KeyboardInterrupt

    before = sys.gettrace(), sys.getprofile()
    if event == "call":
        sys.settrace(on_event)
    else:
        sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
