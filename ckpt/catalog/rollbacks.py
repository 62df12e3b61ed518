"""Read, put and remove the rollbacks of a tier.

A *rollback* is the record that a run goes on from an older step, so that the later steps are
abandoned. It is a small object below ``rollbacks/``. Its name is its number, and it is put if
absent, so two rollbacks never have the same number on one tier.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import Final

from ckpt.errors import (
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectExists,
    ObjectNotFound,
    errors_of,
)
from ckpt.model.keys import ROLLBACKS, rollback_key, rollback_number
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.rollback import Rollback
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend, read_record

_RETRY: Final = RetryPolicy()
_MOST_BYTES: Final = 16 << 20
_log = logging.getLogger("ckpt")


def all_rollbacks(backend: StorageBackend) -> list[Rollback]:
    """Return the rollbacks of a tier, oldest first. Records that are damaged are left out.

    Raises:
        StorageError: The store has failed.
        FormatUnsupported: This ckpt cannot read the format of a record.
    """
    rollbacks = (_read(backend, number) for number in _numbers(backend))
    return [rollback for rollback in rollbacks if rollback is not None]


def newest_rollback(backend: StorageBackend) -> Rollback | None:
    """Return the rollback of a tier that counts; None if there is none.

    A record that is damaged is left out, with a warning. Raises the errors of ``all_rollbacks``.
    """
    for number in reversed(_numbers(backend)):
        if (rollback := _read(backend, number)) is not None:
            return rollback
    return None


def put_rollback(backend: StorageBackend, rollback: Rollback) -> None:
    """Put ``rollback``, unless the tier has it. It is durable on return. It takes the place of a
    damaged record with its number.

    Raises:
        ObjectExists: The tier has another rollback with this number.
        StorageError: The store has failed.
    """
    put = partial(backend.put, rollback_key(rollback.number), [pack(rollback)])
    with errors_of(backend.url):
        try:
            _RETRY.call(partial(put, if_absent=True))
        except ObjectExists:
            present = _read(backend, rollback.number)
            if present is None:
                _RETRY.call(put)
            elif present != rollback:
                raise


def copy_rollbacks(source: StorageBackend, target: StorageBackend) -> bool:
    """Put the rollbacks of ``source`` on ``target``, which gets steps of its run. So no step that
    is abandoned is the newest there.

    Return False if ``target`` has rollbacks of another history. Nothing is put then.

    Raises:
        StorageError, FormatUnsupported: As for ``all_rollbacks``.
    """
    rollbacks = all_rollbacks(source)
    if not rollbacks:
        return True
    target_rollbacks = {rollback.number: rollback for rollback in all_rollbacks(target)}
    numbers = {rollback.number for rollback in rollbacks}
    is_alike = all(
        target_rollbacks.get(rollback.number, rollback) == rollback for rollback in rollbacks
    )
    if not is_alike or (target_rollbacks and numbers.isdisjoint(target_rollbacks)):
        return False
    for rollback in rollbacks:
        if rollback.number not in target_rollbacks:
            put_rollback(target, rollback)
    return True


def remove_rollbacks(backend: StorageBackend) -> None:
    """Remove all rollbacks of a tier whose run is removed, newest first. Other files stay."""
    for number in reversed(_numbers(backend)):
        with errors_of(backend.url):
            _RETRY.call(partial(backend.delete, rollback_key(number)))


def _numbers(backend: StorageBackend) -> list[int]:
    """Return the numbers of the rollbacks of a tier, in ascending order."""
    with errors_of(backend.url):
        keys = _RETRY.call(lambda: [info.key for info in backend.list(f"{ROLLBACKS}/")])
    return sorted(number for key in keys if (number := rollback_number(key)) is not None)


def _read(backend: StorageBackend, number: int) -> Rollback | None:
    """Return a rollback; None if it is damaged or gone."""
    key = rollback_key(number)

    def decode(data: bytes) -> Rollback:
        rollback = unpack(data, Rollback, key=key)
        if rollback.number != number:
            raise ManifestCorrupt(key, f"it is rollback {rollback.number}")
        return rollback

    with errors_of(backend.url), suppress(ObjectNotFound):
        try:
            return _RETRY.call(partial(read_record, backend, key, decode, limit=_MOST_BYTES))
        except (IntegrityError, LinkRefused) as error:
            _log.warning("ckpt: a rollback on %s is not read: %s", backend.url, error)
    return None
