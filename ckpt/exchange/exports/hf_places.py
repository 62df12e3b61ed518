"""Where the folders of Hugging Face of a running job are: one folder for each step."""

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
from ckpt.storage.places import is_folder, is_object_store, local_path

_LEFTOVER_PREFIX: Final = ".step-"
_LOCAL_NAME: Final = re.compile(r"step-[0-9]{9,18}")
_STORE_FILE: Final = re.compile(r"(step-[0-9]{9,18}-[a-z]{6,32})/([^/]+)")
_ABANDONED_SECONDS: Final = 24 * 3600.0


class Places(Protocol):
    """The place of the folders of all steps."""

    def prepare(self, ref: StepRef) -> str:
        """Return the path or the URL of the folder of a step. A folder of an abandoned step with
        this number is removed, and so is what a process that was killed has left of this folder.
        """
        ...

    def prune(self, keep_last: int) -> None:
        """Remove all folders but those that were made last: after the run has gone back, their
        numbers may be lower than those of others. No half of a folder can be loaded meanwhile.
        """
        ...


def places_of(out: str) -> Places:
    """Return the place ``out``, a path or a URL. Raises ``ConfigError`` if no backend serves it."""
    return _LocalPlaces(os.path.abspath(local_path(out))) if is_folder(out) else _StoredPlaces(out)


class _LocalPlaces:
    """Folders that appear and disappear as a whole, since they are renamed."""

    def __init__(self, out: str) -> None:
        self._out = out

    def prepare(self, ref: StepRef) -> str:
        place = os.path.join(self._out, f"step-{ref.step:09d}")
        if os.path.exists(place):
            _remove(place)
        os.makedirs(self._out, exist_ok=True)
        remove_leftovers(self._out, _LEFTOVER_PREFIX)
        return place

    def prune(self, keep_last: int) -> None:
        names = filter(_LOCAL_NAME.fullmatch, os.listdir(self._out))
        places = [os.path.join(self._out, name) for name in names]
        places.sort(key=lambda place: os.stat(place).st_mtime_ns)
        for place in places[:-keep_last]:
            _remove(place)


def _remove(place: str) -> None:
    folder, name = os.path.split(place)
    with scratch_folder(folder, f".{name}.") as room:
        os.rename(place, os.path.join(room, name))
        with suppress(OSError):
            shutil.rmtree(os.path.join(room, name))


class _StoredPlaces:
    """Folders in a store.

    The attempt is a part of their names: the process that exports for a trainer that was killed may
    still put files, and must not meet those of the next trainer.
    """

    def __init__(self, url: str) -> None:
        self._url, self._last = url, ""
        open_store(url).close()

    def prepare(self, ref: StepRef) -> str:
        prefix = f"step-{ref.step:09d}-"
        with closing(open_store(self._url)) as store, errors_of(store.url):
            for folder, infos in _folders(store, prefix).items():
                remove(store, f"{folder}/", infos)
        root, question_mark, query = (
            self._url.partition("?") if is_object_store(self._url) else (self._url, "", "")
        )
        self._last = prefix + ref.attempt
        return f"{root.rstrip('/')}/{self._last}{question_mark}{query}"

    def prune(self, keep_last: int) -> None:
        with closing(open_store(self._url)) as store, errors_of(store.url):
            folders = _folders(store, "step-")
            complete_folders = [folder for folder, infos in folders.items() if CONFIG in infos]
            # The Hub lists no times. Then the folder that was made last is known, and the numbers.
            complete_folders.sort(
                key=lambda name: (name == self._last, folders[name][CONFIG].modified or 0.0, name)
            )
            abandoned_folders = [folder for folder in folders if _is_abandoned(folders[folder])]
            for folder in complete_folders[:-keep_last] + abandoned_folders:
                remove(store, f"{folder}/", folders[folder])
            if isinstance(store, KeepsUnfinishedWrites):
                for write in store.unfinished_writes(""):
                    if write.abandoned and _STORE_FILE.fullmatch(write.key):
                        store.discard(write)


def _folders(store: StorageBackend, prefix: str) -> dict[str, dict[str, ObjectInfo]]:
    """Return the files of each folder whose name begins with ``prefix``, by their names."""
    folders: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for info in ask(store, lambda: list(store.list(prefix))):
        if match := _STORE_FILE.fullmatch(info.key):
            folders[match[1]][match[2]] = info
    return folders


def _is_abandoned(infos: Mapping[str, ObjectInfo]) -> bool:
    """Return True if a process that was killed a day ago or longer has left these files."""
    limit = time.time() - _ABANDONED_SECONDS
    return CONFIG not in infos and all(
        info.modified is not None and info.modified < limit for info in infos.values()
    )
