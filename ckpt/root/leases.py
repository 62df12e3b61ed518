"""Leases: pins that a process renews as long as it needs their steps.

A *tier* is a store with the steps of a run. A *pin* is an object there that keeps a step from being
removed until a given time. So the leases of a killed process end by themselves.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Final

from ckpt.errors import CkptError, StorageError, TransientStorageError
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.root.pins import Pin, put_pin, remove_pin, renew_pin
from ckpt.storage.api import StorageBackend

LEASE_SECONDS: Final = 900.0
"""The duration in seconds of the pin of a lease, which renews the pin until its block has ended.

If the process is killed, the pin keeps the step for this time and ``pins.CLOCK_SKEW_SECONDS``.
"""
LEASE_REASON: Final = "the running job saves increments of it"

_JOB_LEASE_SECONDS: Final = 600.0
_log = logging.getLogger("ckpt")


@contextmanager
def lease(backend: StorageBackend, ref: StepRef, reason: str) -> Generator[None]:
    """Pin the step ``ref`` of a tier while the block runs.

    Raises:
        NoCheckpoint: The step was removed before, or is being removed.
        StorageError: The pin cannot be put.
        ThreadLimit: The system does not start the thread that renews the pin.
    """
    pin = put_pin(backend, ref, LEASE_SECONDS, reason)
    stop = threading.Event()

    def renew() -> None:
        nonlocal pin
        while not stop.wait(LEASE_SECONDS / 3):
            try:
                pin = renew_pin(backend, pin, LEASE_SECONDS, reason)
            except CkptError as error:  # The next try may succeed before the pin ends
                _log.warning("ckpt: the pin on step %d was not renewed: %s", ref.step, error)

    workers = Workers("watch", 1)
    try:
        renewal = workers.submit(renew)
        yield
    finally:
        stop.set()
        # When the interpreter exits, the thread has already ended. The pin then ends by itself.
        if not sys.is_finalizing():
            workers.close()
            remove_pin(backend, pin)
    if renewal.done():  # If the interpreter exits, ``renew`` has not returned
        renewal.result()


@contextmanager
def lease_if_allowed(backend: StorageBackend, ref: StepRef, reason: str) -> Generator[bool]:
    """Pin the step ``ref`` of a tier while the block runs, and yield True. If the tier takes no
    pin, since it may only be read, yield False.

    Raises:
        NoCheckpoint: The step was removed before, or is being removed.
        TransientStorageError: The tier does not answer.
        ThreadLimit: The system does not start the thread that renews the pin.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lease(backend, ref, reason))
        except TransientStorageError:
            raise
        except StorageError as error:
            _log.info("ckpt: step %d is read without a pin: %s", ref.step, error)
            yield False
        else:
            yield True


@contextmanager
def pins_on(backend: StorageBackend, refs: Iterable[StepRef]) -> Generator[None]:
    """Pin each of ``refs`` for some minutes, or until the block ends. Raises the errors of
    ``put_pin``.
    """
    leases = Leases(backend)
    try:
        leases.keep(refs)
        yield
    finally:
        leases.release()


class Leases:
    """Pins on the steps that the saves of a running job refer to.

    The pins are renewed as long as ``keep`` is called, and end by themselves if the job is killed.

    Args:
        backend: The store of the steps.

    Thread safety: one thread at a time.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._pins: dict[StepRef, Pin] = {}

    def keep(self, refs: Iterable[StepRef]) -> None:
        """Pin each of ``refs`` for some minutes. Raises the errors of ``put_pin``."""
        for ref in refs:
            pin = self._pins.get(ref)
            if pin is None:
                self._pins[ref] = put_pin(self._backend, ref, _JOB_LEASE_SECONDS, LEASE_REASON)
            elif pin.until - time.time() < _JOB_LEASE_SECONDS / 2:
                self._pins[ref] = renew_pin(self._backend, pin, _JOB_LEASE_SECONDS, LEASE_REASON)

    def release(self) -> None:
        """Remove the pins."""
        for pin in self._pins.values():
            remove_pin(self._backend, pin)
        self._pins.clear()
