"""Put a folder of Hugging Face into a store.

A store cannot rename a folder, so the order of the files keeps any half of it from being loaded.
The weights come first, the index and ``config.json`` come last, and these are removed first. A file
of weights that ckpt writes is removed here as soon as it is in the store, so only one needs room.
Until the weights are complete, the folder has a *marker*: a file that tells other exports that this
one is under way. A ``with errors_of(...)`` block adds the URL of the store to the errors that leave
it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Final

from ckpt.errors import CkptError, ConfigError, StorageError, errors_of
from ckpt.exchange.exports.safetensors_writer import INDEX
from ckpt.exchange.scratch import scratch_folder
from ckpt.pipeline.image_writer import ImageWrite, write_image
from ckpt.pipeline.retry import RetryPolicy, ask
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend, scheme_of

CONFIG: Final = "config.json"
_LAST_FILES: Final = (INDEX, CONFIG)
_HUB_PREFIX: Final = ".git"
_MARKER_PREFIX: Final = ".ckpt-export-"


def open_store(url: str) -> StorageBackend:
    """Return the backend of a store for folders of Hugging Face.

    The Hub is no tier, since ckpt was never run on it, but such folders are made for it.
    """
    return open_backend(url, {"untested": True} if scheme_of(url) == "hf" else {})


@contextmanager
def stored_output(url: str) -> Generator[tuple[str, Callable[[str], None]]]:
    """Return a context manager that yields a temporary folder, and a function that puts a file of
    it into the store. The files that the block leaves in the folder are put at its end.

    After an error, what is in the store already is removed again. Two exports at once see each
    other's markers, so one of them, or both, are refused.

    Raises:
        ConfigError: The store has objects there.
        StorageError: The store has failed, or another program writes to the folder too.
    """
    with (
        closing(open_store(url)) as store,
        Workers("hf-store", max(1, store.capabilities.max_concurrency)) as workers,
        errors_of(store.url),
        scratch_folder(tempfile.gettempdir(), "ckpt-hf-") as scratch_path,
    ):
        if _sizes(store):
            raise ConfigError(f"{store.url} is there already: remove it, or name another place")
        folder, files = os.path.join(scratch_path, "out"), _Files(store, workers)
        os.mkdir(folder)
        try:
            files.put_marker()
            yield folder, files.put
            for name in sorted(os.listdir(folder), key=_put_order):
                if name in _LAST_FILES:
                    files.check_no_others()
                if name == CONFIG:
                    files.remove_marker()
                files.put(os.path.join(folder, name))
        except BaseException:
            with suppress(CkptError):
                remove(store, "", files.sizes.keys() & _sizes(store).keys())
            raise


def remove(store: StorageBackend, prefix: str, names: Iterable[str]) -> None:
    """Remove files of a folder, those first without which nothing loads it.

    Raises:
        StorageError: The store has failed. What can be loaded is whole.
    """
    for name in sorted(names, key=_put_order, reverse=True):
        ask(store, partial(store.delete, prefix + name))


def _put_order(name: str) -> int:
    """Return a sort key: the files without which nothing loads the folder are put last."""
    return _LAST_FILES.index(name) + 1 if name in _LAST_FILES else 0


def _sizes(store: StorageBackend) -> dict[str, int]:
    infos = ask(store, lambda: list(store.list("")))
    return {info.key: info.size for info in infos if not info.key.startswith(_HUB_PREFIX)}


class _Files:
    """The files of one folder that are in the store.

    Attributes:
        sizes: Their sizes in bytes, by name. A file whose put has failed counts too.
    """

    def __init__(self, store: StorageBackend, workers: Workers) -> None:
        self._store, self._workers = store, workers
        self._marker = f"{_MARKER_PREFIX}{secrets.token_hex(8)}"
        self.sizes: dict[str, int] = {}

    def put_marker(self) -> None:
        """Put a file with a name of its own, and check that no other export does so too."""
        content = b"An export writes to this folder, or was killed.\n"
        self.sizes[self._marker] = len(content)
        ask(self._store, lambda: self._store.put(self._marker, [content]))
        self.check_no_others()

    def remove_marker(self) -> None:
        """Remove the marker. Who begins now sees the other files."""
        ask(self._store, lambda: self._store.delete(self._marker))
        del self.sizes[self._marker]

    def put(self, path: str) -> None:
        """Put a file into the store, and remove it here."""
        source, name = _MappedFile(path), os.path.basename(path)
        self.sizes[name] = source.size
        write = ImageWrite(
            source=source,
            chunks=(),
            key=name,
            workers=self._workers,
            retry=RetryPolicy(),
            on_bytes=lambda _: None,
        )
        write_image(write, self._store)
        os.remove(path)

    def check_no_others(self) -> None:
        """Raise unless the store has these files as they were put, and no others."""
        if differences := sorted(self.sizes.items() ^ _sizes(self._store).items()):
            raise StorageError(
                differences[0][0],
                f"another program writes to {self._store.url} too: wait for its end, and export "
                "again, or name another place",
            )


class _MappedFile:
    """A `Source` of the bytes of a file.

    Thread safety: any thread may call all methods.
    """

    path = None
    rereadable = True
    resident_bytes = 0

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.size = self.capacity = os.fstat(file.fileno()).st_size
            self._data = memoryview(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
            )

    def view(self, start: int, end: int) -> memoryview:
        return self._data[start:end]

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        return [self._data[start:end]]

    def note_written(self, start: int, end: int) -> None:
        """Do nothing: the memory is not used again. So do the methods below."""

    def note_hashed(self, start: int, end: int) -> None: ...

    def note_loss(self, error: CkptError) -> None: ...
