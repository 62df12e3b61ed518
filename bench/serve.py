"""The loop of a worker process. Apart from the worker itself, so that the parent can name it without importing torch."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import Any


def serve(line: Connection[Any, Any]) -> None:
    """Answer ``(verb, arguments)`` with ``(result, error)`` until the other side hangs up."""
    from bench.worker import Worker

    worker = Worker()
    while True:
        try:
            verb, command = line.recv()
        except EOFError:
            return
        try:
            line.send((getattr(worker, verb)(**command), None))
        except Exception:
            line.send((None, traceback.format_exc()))
