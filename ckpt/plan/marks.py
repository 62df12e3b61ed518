"""Digests of replicas: ranks that hold the same boxes must hold the same bytes.

A rank reports a digest of each tensor that other ranks hold too. Thousands of ranks report millions
of digests, and nearly all are right. So they are compared as two numbers each, and one by one only
if some differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ckpt.errors import ReplicasDiverged
from ckpt.model.packed import replicas_of
from ckpt.model.runs import Ints

Marks = Iterable[tuple[int, Mapping[str, str]]]
"""Ranks, ascending, and what each tells: name -> ``boxes=digest``."""


def check_frames(frames: Sequence[tuple[int, bytes]]) -> None:
    """Raises ``ReplicasDiverged`` as ``check_replicas`` does. ``frames``: ranks, ascending, and what fragments of large worlds have in ``replicas``; of equal ones only the first."""
    told = [_hashed(replicas_of(raw, key="replicas")) for _, raw in frames]
    what, digest = np.concatenate(told, axis=1) if told else np.zeros((2, 0), np.int64)
    order = np.argsort(what)
    what, digest = what[order], digest[order]
    if ((what[1:] == what[:-1]) & (digest[1:] != digest[:-1])).any():
        check_replicas((rank, replicas_of(raw, key="replicas")) for rank, raw in frames)


def _hashed(replicas: Mapping[str, str]) -> Ints:
    """Return each digest with the tensor and boxes that it belongs to."""
    parts = [mark.partition("=") for mark in replicas.values()]
    what = zip(replicas, [boxes for boxes, _, _ in parts], strict=True)
    digest = [digest for _, _, digest in parts]
    return np.stack([np.fromiter(map(hash, each), np.int64, len(parts)) for each in (what, digest)])


def check_replicas(marks: Marks) -> None:
    """Each rank's digest of what it holds but did not write whole: equal boxes must have equal digests. Raises ``ReplicasDiverged``."""
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for mine, replicas in marks:
        for name, mark in replicas.items():
            boxes, _, digest = mark.partition("=")
            rank, known = seen.setdefault((name, boxes), (mine, digest))
            if known != digest:
                raise ReplicasDiverged(name, [rank, mine])
