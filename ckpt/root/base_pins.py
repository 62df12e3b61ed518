"""Pins on steps of another root that the increments of a run refer to.

Such a pin is in the other root, which may belong to a running job. Its token follows from the path
from the other root to that of the run. So all ranks and all jobs of a run put the same object, and
one listing shows which steps a run needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from ckpt.errors import CkptError
from ckpt.errors.sanitize import clean
from ckpt.model.checksum import checksum
from ckpt.model.keys import BaseRef
from ckpt.root.pins import BASE_END, Pin, all_pins, put_shared_pin, remove_pin
from ckpt.storage.api import StorageBackend
from ckpt.storage.outside_files import root_at
from ckpt.storage.urls import path_between

_MOST_CHARACTERS: Final = 150


def pin_of(backend: StorageBackend, base: BaseRef) -> Pin:
    """Return the pin in another root that keeps ``base`` for the run at the root of ``backend``."""
    path = path_between(root_at(backend, base.root).url, backend.url)
    return Pin(base.ref, BASE_END, checksum(path.encode(errors="surrogateescape"))[-16:])


def put_base_pin(backend: StorageBackend, base: BaseRef) -> None:
    """Pin ``base``, which increments at the root of ``backend`` are to refer to. A pin that is
    there already stays as it is, also if the call raises an error, since other ranks and older
    steps need it. Raises the errors of ``put_pin``.
    """
    pin, url = pin_of(backend, base), clean(backend.url)
    shown_url = url if len(url) <= _MOST_CHARACTERS else f"...{url[-_MOST_CHARACTERS:]}"
    put_shared_pin(root_at(backend, base.root), pin, f"{shown_url} saves increments of it")


def remove_base_pins(backend: StorageBackend, bases: Iterable[BaseRef]) -> None:
    """Remove the pins on ``bases``, which no step at the root of ``backend`` refers to any more. An
    error is ignored, since ``ckpt unpin`` removes such a pin too.
    """
    for base in bases:
        with suppress(CkptError):
            remove_pin(root_at(backend, base.root), pin_of(backend, base))


def pinned_bases(backend: StorageBackend, root: str) -> list[BaseRef]:
    """Return the steps in another root, by its path, that pins keep for the run at the root of
    ``backend``, newest step first.
    """
    pins = all_pins(root_at(backend, root))
    bases = (BaseRef(root, pin.ref) for pin in pins if pin.until == BASE_END)
    return sorted({base for base in bases if pin_of(backend, base) in pins}, reverse=True)
