"""Where the folders of Hugging Face of a running job are: one folder for each step.

A *ref* names a step and the attempt at it. A ``with errors_of(...)`` block adds the URL of the
store to the errors that leave it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Final, Protocol

from ckpt.errors import errors_of
from ckpt.exchange.exports.hf_store import CONFIG, open_store, remove
from ckpt.exchange.scratch import remove_leftovers, scratch_folder
from ckpt.model.keys import StepRef
from ckpt.pipeline.retry import ask
from ckpt.storage.api import KeepsUnfinishedWrites, ObjectInfo, StorageBackend
from ckpt.storage.urls import is_folder, is_object_store, local_path

_LEFTOVER_PREFIX: Final = ".step-"
_LOCAL_NAME: Final = re.compile(r"step-[0-9]{9,18}")
_STORE_FILE: Final = re.compile(r"(step-[0-9]{9,18}-[a-z]{6,32})/([^/]+)")
_ABANDONED_SECONDS: Final = 24 * 3600.0


class OutputFolders(Protocol):
    """The folders of all steps, under one path or URL."""

    def prepare_folder(self, ref: StepRef) -> str:
        """Return the path or the URL of the folder of a step. A folder of an abandoned step with
        this number is removed, and so is what a process that was killed has left of this folder.
        """
        ...

    def prune(self, keep_last: int) -> None:
        """Remove all folders but those that were made last: after the run has gone back, their
        numbers may be lower than those of others. No half of a folder can be loaded meanwhile.
        """
        ...


def output_folders(out: str) -> OutputFolders:
    """Return the folders under ``out``, a path or a URL.

    Raises:
        ConfigError: No backend serves the URL.
    """
    return (
        _LocalFolders(os.path.abspath(local_path(out))) if is_folder(out) else _StoredFolders(out)
    )


class _LocalFolders:
    """Folders that appear and disappear as a whole, since they are renamed."""

    def __init__(self, out: str) -> None:
        self._out = out

    def prepare_folder(self, ref: StepRef) -> str:
        folder = os.path.join(self._out, f"step-{ref.step:09d}")
        if os.path.exists(folder):
            _remove(folder)
        os.makedirs(self._out, exist_ok=True)
        remove_leftovers(self._out, _LEFTOVER_PREFIX)
        return folder

    def prune(self, keep_last: int) -> None:
        names = filter(_LOCAL_NAME.fullmatch, os.listdir(self._out))
        places = [os.path.join(self._out, name) for name in names]
        places.sort(key=lambda place: os.stat(place).st_mtime_ns)
        for place in places[:-keep_last]:
            _remove(place)


def _remove(place: str) -> None:
    folder, name = os.path.split(place)
    with scratch_folder(folder, f".{name}.") as scratch_path:
        os.rename(place, os.path.join(scratch_path, name))
        with suppress(OSError):
            shutil.rmtree(os.path.join(scratch_path, name))


class _StoredFolders:
    """Folders in a store.

    The attempt is a part of their names: the process that exports for a trainer that was killed may
    still put files, and must not meet those of the next trainer.
    """

    def __init__(self, url: str) -> None:
        self._url, self._last_folder = url, ""
        open_store(url).close()

    def prepare_folder(self, ref: StepRef) -> str:
        prefix = f"step-{ref.step:09d}-"
        with closing(open_store(self._url)) as store, errors_of(store.url):
            for folder, files in _files_by_folder(store, prefix).items():
                remove(store, f"{folder}/", files)
        root, question_mark, query = (
            self._url.partition("?") if is_object_store(self._url) else (self._url, "", "")
        )
        self._last_folder = prefix + ref.attempt
        return f"{root.rstrip('/')}/{self._last_folder}{question_mark}{query}"

    def prune(self, keep_last: int) -> None:
        with closing(open_store(self._url)) as store, errors_of(store.url):
            folders = _files_by_folder(store, "step-")
            complete_folders = [folder for folder, files in folders.items() if CONFIG in files]
            # The Hub lists no times. Then the folder that was made last is known, and the numbers.
            complete_folders.sort(
                key=lambda name: (
                    name == self._last_folder,
                    folders[name][CONFIG].modified or 0.0,
                    name,
                )
            )
            abandoned_folders = [folder for folder in folders if _is_abandoned(folders[folder])]
            for folder in complete_folders[:-keep_last] + abandoned_folders:
                remove(store, f"{folder}/", folders[folder])
            if isinstance(store, KeepsUnfinishedWrites):
                for write in store.unfinished_writes(""):
                    if write.abandoned and _STORE_FILE.fullmatch(write.key):
                        store.discard(write)


def _files_by_folder(store: StorageBackend, prefix: str) -> dict[str, dict[str, ObjectInfo]]:
    """Return the files of each folder whose name begins with ``prefix``, by their names."""
    folders: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for info in ask(store, lambda: list(store.list(prefix))):
        if match := _STORE_FILE.fullmatch(info.key):
            folders[match[1]][match[2]] = info
    return folders


def _is_abandoned(files: Mapping[str, ObjectInfo]) -> bool:
    """Return True if a process that was killed a day ago or longer has left these files."""
    limit = time.time() - _ABANDONED_SECONDS
    return CONFIG not in files and all(
        info.modified is not None and info.modified < limit for info in files.values()
    )
