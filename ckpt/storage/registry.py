"""The registry of backends, which finds the backend for the scheme of a URL.

``BUILT_IN`` lists the backends that come with ckpt. Entry points of the group ``ckpt.backends`` add
backends of other distributions. The backend over fsspec serves all other schemes that fsspec
supports.

A backend is registered by its factory, which has the signature
``open(url: str, options: Mapping[str, object]) -> StorageBackend``. A factory is imported on first
use, so a job that writes to a folder does not import ``s3fs``. See `ckpt.storage.api` for how to
write a backend.

The *origin* of a backend is the URL and the options that it was opened with. From them, this module
opens the backends of other roots on the same store, the *neighbors* of the backend.
"""

from __future__ import annotations

import pkgutil
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, cast

from ckpt.errors import ConfigError, UnknownScheme
from ckpt.model.keys import parse_folder
from ckpt.storage.api import StorageBackend

BackendFactory = Callable[[str, Mapping[str, object]], StorageBackend]

BUILT_IN: Final[Mapping[str, str]] = {
    "file": "ckpt_backends.folder.posix:open_posix",
    "memory": "ckpt_backends.memory:open_memory",
    "shm": "ckpt_backends.folder.shm:open_shm",
    "s3": "ckpt_backends.s3.backend:open_s3",
    "s3a": "ckpt_backends.s3.backend:open_s3",
    "gs": "ckpt_backends.gcs.backend:open_gcs",
    "gcs": "ckpt_backends.gcs.backend:open_gcs",
    "abfs": "ckpt_backends.azure:open_azure",
    "abfss": "ckpt_backends.azure:open_azure",
    "az": "ckpt_backends.azure:open_azure",
    "sftp": "ckpt_backends.file_server.backend:open_file_server",
    "ssh": "ckpt_backends.file_server.backend:open_file_server",
    "smb": "ckpt_backends.file_server.backend:open_file_server",
    "ftp": "ckpt_backends.file_server.backend:open_file_server",
    "webdav": "ckpt_backends.file_server.backend:open_file_server",
}
FALLBACK: Final = "ckpt_backends.fsspec_bridge:open_fsspec"
_ENTRY_POINT_GROUP: Final = "ckpt.backends"
_SCHEME: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case: 'file' for a plain path, and 'fsspec' for a
    chained fsspec URL such as 'simplecache::s3://b'.
    """
    if "::" in url:
        return "fsspec"
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else "file"


def open_backend(url: str, options: Mapping[str, object] | None = None) -> StorageBackend:
    """Return a new backend whose root is ``url``.

    Most backends contact the store, and create the root, only at a later call.

    Args:
        url: The URL or the path of the root.
        options: The options of the backend; None for no options.

    Raises:
        UnknownScheme: No backend serves the scheme.
        MissingExtra: The package of the backend is not installed.
        ConfigError: ``url`` names the folder of a step instead of a root, or the backend refuses
            the URL or the options.
    """
    _check_root(url)
    scheme = scheme_of(url)
    backend = _factory(url, scheme)(url, dict(options or {}))
    # The path of a folder may be relative, and the process may go to another folder.
    origin = _Origin(backend.url if scheme == "file" else url, dict(options or {}))
    with suppress(TypeError):  # The class of another distribution may allow no weak reference
        _origins[backend] = origin
    return backend


class _Origin:
    """The URL and the options of a backend, and the backends of other roots of its store."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url, self.options = url, options
        self.neighbors: dict[str, StorageBackend] = {}
        self.lock = threading.Lock()


_origins: Final = weakref.WeakKeyDictionary[StorageBackend, _Origin]()


def share_neighbors(wrapper: StorageBackend, backend: StorageBackend) -> None:
    """Let ``wrapper``, which wraps ``backend``, have the neighbors of ``backend``."""
    with suppress(KeyError, TypeError):
        _origins[wrapper] = _origins[backend]


def neighbor(backend: StorageBackend, join: Callable[[str], str]) -> StorageBackend:
    """Return the backend of another root of the store of ``backend``, with the same options.

    The same root has one backend as long as ``backend`` lives.

    Args:
        backend: A backend of ``open_backend``, or one that shares the neighbors of such a backend.
            One that was made in another way has no options.
        join: Returns the URL of the other root for the URL of ``backend``.

    Raises:
        StorageError: ``join`` has raised it.
    """
    origin = _Origin(backend.url, {})
    with suppress(TypeError):
        origin = _origins.get(backend, origin)
    url = join(origin.url)
    with origin.lock:
        if url not in origin.neighbors:
            origin.neighbors[url] = store = open_backend(url, origin.options)
            # At the exit of the interpreter, the connections end with it.
            weakref.finalize(backend, store.close).atexit = False
        return origin.neighbors[url]


def _check_root(url: str) -> None:
    """Raise ``ConfigError`` if ``url`` names the folder of a step, which is inside of a root."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if (ref := parse_folder(name)) is not None:
        raise ConfigError(
            f"{url} is the folder of step {ref.step}, and not a root: give {parent or '.'}, and "
            f"the step as {ref.step}"
        )


def stores_in_memory() -> list[str]:
    """Return the URLs (``shm://NAME``) of the stores in this machine's memory that jobs of this
    user have made, also of jobs that have ended.
    """
    return cast(
        "Callable[[], list[str]]", pkgutil.resolve_name("ckpt_backends.folder.shm:stores")
    )()


def _factory(url: str, scheme: str) -> BackendFactory:
    """Return the factory for a scheme: that of ckpt, of another distribution, or that of fsspec."""
    if target := BUILT_IN.get(scheme):
        return cast(BackendFactory, pkgutil.resolve_name(target))
    from importlib.metadata import entry_points  # here, since the import takes 50 ms

    for entry in entry_points(group=_ENTRY_POINT_GROUP, name=scheme):  # The first of them serves
        return cast(BackendFactory, entry.load())
    if scheme == "fsspec" or _fsspec_knows(scheme):
        return cast(BackendFactory, pkgutil.resolve_name(FALLBACK))
    raise UnknownScheme(
        url, sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=_ENTRY_POINT_GROUP))})
    )


def _fsspec_knows(scheme: str) -> bool:
    # The import is slow, so it is done only for schemes that no registered backend serves.
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry
