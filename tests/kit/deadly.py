"""A job that dies in the middle of a save."""

from __future__ import annotations

import os
import signal
from typing import Any

import ckpt.storage.tiers


def die_in_the_save_of(step: int) -> None:
    """Let each rank kill itself when it has written its file of ``step``, before the commit."""
    tiers: Any = ckpt.storage.tiers
    opened = tiers.open_backend
    tiers.open_backend = lambda *place: _Store(opened(*place), step)


def die_before_a_removal() -> None:
    """Let the process kill itself before it deletes the first object after its first upload."""
    tiers: Any = ckpt.storage.tiers
    opened = tiers.open_backend
    tiers.open_backend = lambda *place: _KeepingStore(opened(*place))


class _Wrapped:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _KeepingStore(_Wrapped):
    _has_uploaded = False

    def upload(self, *args: Any, **kwargs: Any) -> Any:
        self._has_uploaded = True
        return self._inner.upload(*args, **kwargs)

    def delete(self, key: str) -> None:
        if self._has_uploaded:
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.delete(key)


class _Store(_Wrapped):
    def __init__(self, inner: Any, step: int) -> None:
        super().__init__(inner)
        self._step = step

    def upload(self, key: str, *args: Any, **kwargs: Any) -> Any:
        begun = self._inner.upload(key, *args, **kwargs)
        return _LastUpload(begun) if f"{self._step:09d}" in key else begun


class _LastUpload(_Wrapped):
    def finish(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
