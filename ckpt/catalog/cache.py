"""Read-through: what a restore needs from far is put into the nearest folder on the way, so that the next restore is local.

A folder that only this machine sees is filled by the machine's ranks together, one that all see by all of them: whoever takes a file first (the coordinator decides) fetches it, the others wait for its end. So no file is fetched twice into one folder, and
nobody needs to know who its neighbours are.

Nothing here can make a restore fail: what a folder does not take, or nobody could fetch, is read straight from where it is. A folder lists the step only if all of its files came together there; else they are a
partial cache, of which a later restore takes what it needs, and which prune clears away like the remains of a save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from ckpt.catalog.origin import Origin
from ckpt.catalog.transfer import commit_copy, copy_files, copy_fragments
from ckpt.catalog.verify import Meter
from ckpt.coordination.api import Coordinator
from ckpt.coordination.owner import Owner
from ckpt.errors import CkptError, IntegrityError, StorageError
from ckpt.model.checksum import checksum
from ckpt.model.layout import fragment_name
from ckpt.model.manifest import File, FragmentRef, Manifest
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import scheme_of
from ckpt.storage.tiers import OpenTier

_LOST: Final = b"lost"
_REFUSED: Final = b"refused"

_log = logging.getLogger("ckpt")


class ReadThrough:
    """One restore's use of its caches. Threads: the owner's.

    Args:
        tiers: The sources of ``origin``, as tiers.
        subject: Tells this restore from others.
        patience: Seconds to wait for another rank's fetch.
    """

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        origin: Origin,
        *,
        coordinator: Coordinator,
        subject: str,
        patience: float,
        workers: Workers,
        retry: RetryPolicy,
    ) -> None:
        self._tiers, self._origin, self._coordinator = tiers, origin, coordinator
        self._subject, self._patience, self._workers, self._retry = subject, patience, workers, retry
        self.fetched: dict[int, int] = {}
        """Position of the source that a file was fetched from, by this rank or another."""
        self.cached_bytes = 0
        """Of the data files that this rank has put into a cache."""

    @property
    def caches(self) -> list[int]:
        """Positions of the folders that something farther could be put into."""
        return [
            position for position, tier in enumerate(self._tiers[:-1]) if scheme_of(tier.tier.url) == "file"
        ]

    def missing(self, files: Iterable[File]) -> list[File]:
        """Those of ``files`` that neither the nearest cache nor a nearer tier has whole, as far as their sizes tell."""
        if not self.caches:
            return []
        near = range(self.caches[0] + 1)
        return [file for file in files if all(self._origin.fault(place, file) for place in near)]

    def fill(self, missing: Sequence[File], manifest: Manifest, packed: bytes, *, listed: int) -> None:
        """Put ``missing`` into the nearest cache that takes it. ``listed`` is the position of the nearest source with an intact manifest.

        Raises:
            CommitError: The other ranks cannot be reached.
        """
        for position in self.caches:
            if position > self.caches[0]:
                missing = [file for file in missing if self._origin.fault(position, file)]
            missing = self._fill(position, missing, manifest)
            if position < listed:
                self._list(position, manifest, packed)
            if not missing:
                return

    def _fill(self, position: int, files: Sequence[File], manifest: Manifest) -> list[File]:
        """Returns those that it does not take."""
        subject = partial("{}/{}/{}/{}".format, self._subject, position, self._scope(position))
        me = str(self._coordinator.rank).encode()
        mine: list[File] = []
        theirs: list[File] = []
        refused: list[File] = []
        count = max(1, len(manifest.files))
        for file in sorted(files, key=lambda file: (file.rank - self._coordinator.rank) % count):
            if refused:
                refused.append(file)
            elif self._coordinator.decide(subject(file.rank), me) != me:
                theirs.append(file)
            elif self._fetch(position, file, manifest, f"{subject(file.rank)}/end") == _REFUSED:
                self._withdraw(position, mine)
                refused += [*mine, file]
            else:
                mine.append(file)
        for file in theirs:
            word = self._coordinator.verdict(f"{subject(file.rank)}/end", timeout=self._patience)
            if word is None or not word.isdigit():
                refused += [file] if word == _REFUSED else []
            else:
                self.fetched[file.rank] = int(word)
        return refused

    def _fetch(self, position: int, file: File, manifest: Manifest, subject: str) -> bytes:
        """Returns, and tells on ``subject``, how it went."""
        cache, began = self._tiers[position], time.perf_counter()
        word = _LOST
        try:
            source = copy_files(
                self._origin, [file], cache.backend,
                workers=self._workers, retry=self._retry, meter=Meter(file.size, None),
            )  # fmt: skip
            self._origin.mended(position, file)
            self.fetched[file.rank], self.cached_bytes = source, self.cached_bytes + file.size
            word = str(source).encode()
            self._copy_fragment(position, file, manifest)
            seconds = time.perf_counter() - began
            _log.info(
                "ckpt: %s was put into %s from %s: %.2f GB in %.2f s",
                self._origin.ref.key(file.name), cache.url, self._tiers[source].url, file.size / 1e9, seconds,
            )  # fmt: skip
        except CkptError as error:
            if self._origin.ref.key(file.name) not in self._origin.lost:
                word = _REFUSED
                _log.warning(
                    "ckpt: %s does not take what was fetched from farther tiers, it is read straight from there: %s",
                    cache.url,
                    error,
                )
        finally:
            self._coordinator.decide(subject, word)
        return word

    def _copy_fragment(self, position: int, file: File, manifest: Manifest) -> None:
        """Without it the step is not listed there, and the remains have no age; the data serves all the same."""
        named = [fragment for fragment in manifest.fragments if fragment.rank == file.rank]
        with suppress(IntegrityError):
            copy_fragments(
                self._origin, manifest, named, self._tiers[position].backend,
                workers=self._workers, retry=self._retry,
            )  # fmt: skip

    def _withdraw(self, position: int, files: Sequence[File]) -> None:
        """Leave no room taken on a disk that is full: the next save needs it more."""
        for file in files:
            for name in (fragment_name(file.rank), file.name):  # whoever finds all fragments may commit them
                with suppress(StorageError):
                    self._tiers[position].backend.delete(self._origin.ref.key(name))
            self.cached_bytes -= file.size

    def _list(self, position: int, manifest: Manifest, packed: bytes) -> None:
        """The step is one of the cache's if, and only if, everything of it is there."""
        parts: list[File | FragmentRef] = [*manifest.fragments, *manifest.files]
        if any(self._origin.fault(position, part) for part in parts):
            return
        cache = self._tiers[position]
        try:
            commit_copy(cache.backend, self._origin.ref, packed, self._retry)
        except CkptError as error:
            _log.warning("ckpt: step %d is not listed on %s: %s", self._origin.ref.step, cache.url, error)

    def _scope(self, position: int) -> str:
        """Who sees the folder: all, or this machine."""
        if self._tiers[position].backend.capabilities.shared:
            return "all"
        place = f"{Owner.here(self._coordinator.attempt).machine} {self._tiers[position].url}"
        return checksum(place.encode())[:12]
