"""The loop of a worker process.

Apart from the worker itself, so that the parent can name it without importing torch.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection
from typing import Any


def serve(line: Connection[Any, Any], log: str) -> None:
    """Answer ``(verb, arguments)`` with ``(result, error)`` until the other side hangs up.

    What libraries print goes to ``log``.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
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
