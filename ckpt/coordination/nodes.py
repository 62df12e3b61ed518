"""Several nodes, each with local tiers of its own: who shares one with whom, and how a save is committed where no rank sees all of it.

Nobody declares nodes. Each rank tells, once, what its local tiers are (machine, device and inode of the root); ranks that tell the same share them. If two that share one are told apart
all the same, as processes of two containers may be, the same is done twice and nothing is wrong.

On a local tier each rank writes its file and its fragment on its own node. The fragments travel to the committer as words, and the manifest, the same bytes, from there to the other nodes, where the
node's lowest rank puts it. The first manifest that is put makes the checkpoint: it names what is durable on every node. The save has succeeded when all nodes have put it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec

from ckpt.coordination.api import Coordinator
from ckpt.coordination.committer import LEADER
from ckpt.coordination.owner import Owner
from ckpt.coordination.parcel import drop, receive, send
from ckpt.errors import CkptError, CommitError, CommitTimeout, ManifestCorrupt
from ckpt.model.checksum import checksum
from ckpt.model.layout import StepRef
from ckpt.model.manifest import FragmentRef
from ckpt.storage.api import Rooted, StorageBackend, read_object
from ckpt.storage.tiers import Nodes, OpenTier

_START_SECONDS: Final = 300.0
"""How long ranks may take to come to the same point of their start."""
_PUT_SECONDS: Final = 20.0
"""How long the other nodes may take to put a manifest. Less than the others' grace in waiting for the verdict."""
_LOOK_SECONDS: Final = 1.0


def agree(tiers: Sequence[OpenTier], coordinator: Coordinator) -> tuple[OpenTier, ...]:
    """``tiers``, each local one with the nodes of the job if there are several. All ranks call it alike, once.

    Raises:
        CommitTimeout: Some rank did not come, or not the leader's answer.
    """
    local = [tier for tier in tiers if tier.local]
    if coordinator.world_size == 1 or not local:
        return tuple(tiers)
    coordinator.tell("nodes", msgspec.json.encode([_identity(tier.backend) for tier in local]))
    if coordinator.rank == LEADER:
        told = _hear_all(coordinator, len(local))
        coordinator.decide("nodes", msgspec.json.encode(told))
    else:
        wait = _START_SECONDS + 30
        heard = coordinator.verdict("nodes", timeout=wait)
        if heard is None:
            raise CommitTimeout(-1, [LEADER], wait, "who shares a node")
        told = msgspec.json.decode(heard, type=list[tuple[int, ...]])
    coordinator.forget("nodes")
    found = {tier.index: Nodes(of) if max(of) else None for tier, of in zip(local, told, strict=True)}
    return tuple(replace(tier, nodes=found.get(tier.index)) for tier in tiers)


def _hear_all(coordinator: Coordinator, count: int) -> list[tuple[int, ...]]:
    missing = set(range(coordinator.world_size))
    deadline = time.monotonic() + _START_SECONDS
    names: dict[int, list[str]] = {}
    while missing:
        words = coordinator.hear("nodes", missing, timeout=max(0.0, deadline - time.monotonic()))
        if not words:
            raise CommitTimeout(-1, sorted(missing), _START_SECONDS, "the manager")
        for rank, word in words.items():
            names[rank] = msgspec.json.decode(word, type=list[str])
            if len(names[rank]) != count:
                raise CommitError(
                    f"rank {rank} was given other tiers than rank {LEADER}: give all ranks the same"
                )
        missing -= words.keys()
    found: list[tuple[int, ...]] = []
    for index in range(count):
        numbers: dict[str, int] = {}
        found.append(tuple(numbers.setdefault(names[rank][index], len(numbers)) for rank in sorted(names)))
    return found


def _identity(backend: StorageBackend) -> str:
    root = backend.url
    if isinstance(backend, Rooted):
        with suppress(CkptError):  # what is wrong with it is the first save's to say
            root = backend.identity()
    here = Owner.here("")
    return checksum(f"{here.host} {here.machine} {root}".encode())[:16]


def on_node(coordinator: Coordinator, nodes: Nodes | None) -> Coordinator:
    """The ranks of this node as a world of their own, counted from 0; the whole job where a tier is not told apart by nodes."""
    return coordinator if nodes is None else _OnNode(coordinator, nodes)


class _OnNode:
    def __init__(self, coordinator: Coordinator, nodes: Nodes) -> None:
        self._whole, self._nodes = coordinator, nodes
        self._mates = nodes.mates(coordinator.rank)
        self._prefix = f"node{nodes.of[coordinator.rank]}/"
        self.rank, self.world_size = self._mates.index(coordinator.rank), len(self._mates)
        self.attempt = coordinator.attempt

    def tell(self, subject: str, word: bytes) -> None:
        self._whole.tell(self._prefix + subject, word)

    def hear(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        words = self._whole.hear(
            self._prefix + subject, {self._mates[rank] for rank in ranks}, timeout=timeout
        )
        return {self._mates.index(rank): word for rank, word in words.items()}

    def decide(self, subject: str, verdict: bytes) -> bytes:
        return self._whole.decide(self._prefix + subject, verdict)

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        return self._whole.verdict(self._prefix + subject, timeout=timeout)

    def forget(self, subject: str) -> None:
        self._whole.forget(self._prefix + subject)

    def clone(self) -> _OnNode:
        return _OnNode(self._whole.clone(), self._nodes)

    def close(self) -> None:
        self._whole.close()


class _Merged(msgspec.Struct, frozen=True):
    """The manifest can be had from ``rank``."""

    rank: int
    size: int
    checksum: str


class Spread:
    """The commits of one local tier over all nodes. Threads: as ``Committer``.

    Args:
        put: Makes a manifest appear in this node's store, whoever else does the same.
        timeout: Seconds that a rank waits for what another has said is there.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        backend: StorageBackend,
        nodes: Nodes,
        *,
        put: Callable[[StepRef, bytes], Any],
        timeout: float,
    ) -> None:
        self._coordinator, self._backend, self._nodes = coordinator, backend, nodes
        self._put, self._timeout = put, timeout
        self._pieces = 0

    def offer(self, subject: str, ref: StepRef, named: FragmentRef) -> None:
        """Send this rank's fragment, before its word that it is durable."""
        data = read_object(self._backend, ref.key(named.name), limit=named.size)
        self._pieces = send(self._coordinator, f"{subject}/fragment", data)

    def fragment(self, subject: str, named: FragmentRef) -> bytes:
        """The fragment of a rank that has said it is durable. Raises ``CommitError``."""
        coordinator = self._coordinator
        return receive(
            coordinator, f"{subject}/fragment", named.rank, limit=named.size, timeout=self._timeout
        )

    def publish(self, subject: str, data: bytes) -> str:
        """Have the manifest, which was put on this node, put on all others. Returns what kept some from it, nothing if all have."""
        me, faults = self._coordinator.rank, dict[int, str]()
        missing = {first for first in self._nodes.firsts if self._nodes.of[first] != self._nodes.of[me]}
        pieces = send(self._coordinator, f"{subject}/manifest", data)
        merged = _Merged(me, len(data), checksum(data))
        self._coordinator.decide(f"{subject}/merged", msgspec.json.encode(merged))
        deadline = time.monotonic() + _PUT_SECONDS
        while missing:
            words = self._coordinator.hear(
                f"{subject}/put", missing, timeout=max(0.0, deadline - time.monotonic())
            )
            if not words:
                faults |= dict.fromkeys(missing, f"no answer within {_PUT_SECONDS:.0f} s")
                break
            faults |= {rank: word.decode() for rank, word in words.items() if word}
            missing -= words.keys()
        drop(self._coordinator, f"{subject}/manifest", pieces)
        return "; ".join(f"on the node of rank {rank}: {why}" for rank, why in sorted(faults.items()))

    def attend(self, subject: str, ref: StepRef, *, wait: float) -> None:
        """Do this node's part while others commit: on its lowest rank, put the manifest as soon as there is one. Returns when there is nothing left to do but to hear the verdict."""
        me = self._coordinator.rank
        deadline = time.monotonic() + wait
        while me in self._nodes.firsts and time.monotonic() < deadline:
            if (told := self._coordinator.verdict(f"{subject}/merged", timeout=_LOOK_SECONDS)) is not None:
                merged = msgspec.json.decode(told, type=_Merged)
                if self._nodes.of[merged.rank] != self._nodes.of[me]:
                    self._coordinator.tell(f"{subject}/put", self._put_here(subject, ref, merged).encode())
                return
            if self._coordinator.verdict(subject, timeout=0) is not None:
                return

    def _put_here(self, subject: str, ref: StepRef, merged: _Merged) -> str:
        try:
            data = receive(
                self._coordinator,
                f"{subject}/manifest",
                merged.rank,
                limit=merged.size,
                timeout=self._timeout,
            )
            if checksum(data) != merged.checksum:
                raise ManifestCorrupt(ref.manifest, f"it is not what rank {merged.rank} has merged")
            self._put(ref, data)
        except Exception as error:  # noqa: BLE001 - the committer waits for it
            return str(error) or repr(error)
        return ""

    def forget(self, subject: str) -> None:
        """The save is decided."""
        drop(self._coordinator, f"{subject}/fragment", self._pieces)
        self._coordinator.forget(f"{subject}/put")
        self._pieces = 0
