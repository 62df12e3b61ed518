"""A job that dies in the middle of a save."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.kit.stores import Wrapped, wrap_stores


def die_in_the_save_of(step: int) -> None:
    """Let each rank kill itself when it has written its file of ``step``, before the commit."""
    wrap_stores(pytest.MonkeyPatch(), lambda url, store: _Store(store, step))


def die_before_a_removal() -> None:
    """Let the process kill itself before it deletes the first object after its first upload."""
    wrap_stores(pytest.MonkeyPatch(), lambda url, store: _KeepingStore(store))


class _KeepingStore(Wrapped):
    _has_uploaded = False

    def upload(self, *args: Any, **kwargs: Any) -> Any:
        self._has_uploaded = True
        return self.inner.upload(*args, **kwargs)

    def delete(self, key: str) -> None:
        if self._has_uploaded:
            os.kill(os.getpid(), signal.SIGKILL)
        self.inner.delete(key)


class _Store(Wrapped):
    def __init__(self, inner: Any, step: int) -> None:
        super().__init__(inner)
        self._step = step

    def upload(self, key: str, *args: Any, **kwargs: Any) -> Any:
        begun = self.inner.upload(key, *args, **kwargs)
        return _LastUpload(begun) if f"{self._step:09d}" in key else begun


class _LastUpload(Wrapped):
    def finish(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
