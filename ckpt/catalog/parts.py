"""The fragments that a restore needs of a manifest by reference: each is read once, and only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ckpt.catalog.fragments import filled
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest
from ckpt.model.reference import ranks_of
from ckpt.plan.leaf import Leaf

Read = Callable[[Manifest, FragmentRef, File | None], Fragment]
"""Gives a fragment of a manifest. Threads: any."""


class Parts:
    """Threads: the owner's.

    Attributes:
        manifest: As it was read.
        ranks: Whose fragments were filled in.
    """

    def __init__(self, manifest: Manifest, read: Read) -> None:
        self.manifest, self.ranks = manifest, set[int]()
        self._read = read
        self._known: dict[int, Fragment] = {}

    @property
    def outline(self) -> Manifest:
        """The manifest, with the ``PerRank`` values of every rank within reach."""
        return (
            replace(self.manifest, per_rank=_PerRank(self)) if self.manifest.by_reference else self.manifest
        )

    def filled(self, wanted: Sequence[Leaf] | None, *, key: str) -> Manifest:
        """The manifest with the fragments that hold some of ``wanted``, or with all (None), filled in."""
        if wanted is None:
            self.ranks = set(range(self.manifest.world_size))
        else:
            self.ranks = ranks_of(self.manifest, [(leaf.name, leaf.boxes) for leaf in wanted])
        return filled(self.manifest, self._load, self.ranks, key=key)

    def of(self, rank: int) -> Fragment:
        """The fragment of one rank."""
        named = next(each for each in self.manifest.fragments if each.rank == rank)
        return self._load(named, self.manifest.file_map().get(rank))

    def _load(self, named: FragmentRef, file: File | None) -> Fragment:
        if named.rank not in self._known:
            self._known[named.rank] = self._read(self.manifest, named, file)
        return self._known[named.rank]


class _PerRank(Mapping[str, msgspec.Raw]):
    """Reads what is asked for: a rank needs its own alone."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __getitem__(self, rank: str) -> msgspec.Raw:
        return self._parts.of(int(rank)).per_rank

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self._parts.manifest.world_size))

    def __len__(self) -> int:
        return self._parts.manifest.world_size
