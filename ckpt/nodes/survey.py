"""The survey of nodes at the start of a restore: what each node has on its local tiers.

Nodes serve these files to each other until the restore ends.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from ckpt.catalog.candidates import Candidate, Finish
from ckpt.catalog.index import attempts, is_committed, own_objects, read_packed
from ckpt.config import Tier
from ckpt.coordination.api import Coordinator
from ckpt.coordination.gather import Wait, gather
from ckpt.errors import CkptError, IntegrityError, StorageError
from ckpt.model.fill import carried_fragments, fill
from ckpt.model.keys import StepRef, rank_of
from ckpt.model.manifest import Manifest
from ckpt.model.readable import size
from ckpt.nodes.server import NodeServer
from ckpt.nodes.store import NodeStore, Union
from ckpt.nodes.wire import Peer, Step
from ckpt.plan.copies_per_node import without_copy
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier

_STEPS: Final = 64
"""How many of its newest steps a node announces."""
_START_SECONDS: Final = 600.0
"""How long ranks may take to come to the same restore."""

_log = logging.getLogger("ckpt")
_decoder: Final = msgspec.json.Decoder(Peer)


@dataclass(frozen=True, slots=True)
class Sources:
    """The stores that a rank reads from, nearest first: its own tiers, then those of other nodes.

    Attributes:
        partial: Positions of stores that hold only a part of the step by their nature. A missing
            file there is no damage.
        distance: For the file of each announced rank: 0 on this node, 1 on another. Empty if all of
            the step is in one place.
    """

    tiers: tuple[OpenTier, ...]
    partial: frozenset[int]
    distance: Mapping[int, int]


class NodeSurvey:
    """The survey of one restore.

    Args:
        subject: Distinguishes this restore from others.
        step: The only step that is asked for.

    Thread safety:
        The owner's thread.
    """

    def __init__(
        self, tiers: Sequence[OpenTier], coordinator: Coordinator, *, subject: str, step: int | None
    ) -> None:
        self._tiers, self._coordinator, self._subject, self._step = (
            tiers,
            coordinator,
            subject,
            step,
        )
        rank = coordinator.rank
        # The lowest rank of a node answers for the whole node.
        self._mine = [tier for tier in tiers if _is_part(tier) and rank in _firsts(tier)]
        self._heard: list[Peer] | None = None
        self._server: NodeServer | None = None

    def __enter__(self) -> Self:
        if spanning := [tier.nodes for tier in self._mine if tier.nodes]:
            self._server = NodeServer(
                {tier.index: tier.backend for tier in self._mine},
                encryption=spanning[0].encryption,
            )
        try:
            if self._mine:
                self._coordinator.post(self._subject, msgspec.json.encode(self._peer()))
        except BaseException:
            self._stop_serving()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_serving()
        self._coordinator.forget(self._subject)

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()
            if self._server.served_bytes:
                _log.info("ckpt: %s were given to other nodes", size(self._server.served_bytes))

    def _peer(self) -> Peer:
        server = self._server
        return Peer(
            rank=self._coordinator.rank,
            addresses=server.addresses if server else (),
            port=server.port if server else 0,
            token=server.token.hex() if server else "",
            tiers={tier.index: self._steps(tier.backend) for tier in self._mine},
        )

    def _steps(self, backend: StorageBackend) -> dict[str, Step]:
        try:
            refs = [ref for ref in attempts(backend) if self._step in (None, ref.step)]
            return {ref.folder: _step(backend, ref) for ref in refs[:_STEPS]}
        except CkptError as error:
            _log.warning("ckpt: the contents of %s cannot be listed: %s", backend.url, error)
            return {}

    # -- the leader's part -------------------------------------------------------------------------

    def stores(self) -> list[StorageBackend]:
        """Return each tier as the whole job has it.

        Raises:
            CommitTimeout: Some node has not posted what it has.
        """
        return [
            Union(tier.backend, self._store(tier, self._peers())) if tier.nodes else tier.backend
            for tier in self._tiers
        ]

    def unless_apart(self, finish: Finish) -> Finish:
        """Return ``finish`` for stores that one rank sees all of. For others it does nothing."""
        return lambda store, ref: not isinstance(store, Union) and finish(store, ref)

    def fault(self, found: Candidate, stores: Sequence[StorageBackend]) -> str:
        """Return why a step cannot be restored from the nodes that are left. The text is empty if
        it can be, or if this does not matter.
        """
        if not _is_part(self._tiers[found.nearest]) or self._elsewhere(found, stores):
            return ""
        try:
            manifest, _ = read_packed(stores[found.nearest], found.ref)
            if carried := carried_fragments(manifest, key=found.ref.manifest):
                manifest = fill(manifest, carried, key=found.ref.manifest)
        except (IntegrityError, StorageError):
            return ""  # Every rank meets this error itself
        there = self._there(manifest, found.ref)
        if carried:
            gone = without_copy(manifest, there)
        else:
            # The fragment of a file is where the file is.
            gone = [file.rank for file in manifest.files if file.rank not in there]
        text = ", ".join(map(str, gone[:16])) + (" ..." if len(gone) > 16 else "")
        return (
            f"the files of rank(s) {text} were on nodes that are gone, and no other tier has them"
            if gone
            else ""
        )

    def peers(self, ref: StepRef) -> tuple[Peer, ...]:
        """Return what all ranks must know to read ``ref``."""
        if not any(map(_is_part, self._tiers)):
            return ()
        return tuple(
            msgspec.structs.replace(
                peer,
                tiers={
                    index: {ref.folder: steps[ref.folder]}
                    for index, steps in peer.tiers.items()
                    if ref.folder in steps
                },
            )
            for peer in self._peers()
        )

    def _peers(self) -> list[Peer]:
        if self._heard is None:
            self._heard = self._gather()
        return self._heard

    def _gather(self) -> list[Peer]:
        ranks = {first for tier in self._tiers if _is_part(tier) for first in _firsts(tier)}
        wait = Wait(_START_SECONDS, "what its node has")
        messages = gather(self._coordinator, self._subject, wait, ranks=ranks)
        return [_decoder.decode(message) for message in messages.values()]

    def _elsewhere(self, found: Candidate, stores: Sequence[StorageBackend]) -> bool:
        for position in found.answering:
            if not _is_part(self._tiers[position]):
                with suppress(StorageError):
                    if is_committed(stores[position], found.ref):
                        return True
        return False

    def _there(self, manifest: Manifest, ref: StepRef) -> Collection[int]:
        """Return the ranks whose file some node has."""
        names = {
            name.partition(".")[0]
            for peer in self._peers()
            for steps in peer.tiers.values()
            if ref.folder in steps
            for name in steps[ref.folder].files
        }
        return {file.rank for file in manifest.files if file.name.partition(".")[0] in names}

    # -- every rank's part -------------------------------------------------------------------------

    def sources(self, tiers: Sequence[OpenTier], ref: StepRef, peers: Sequence[Peer]) -> Sources:
        """Return ``tiers`` and those of the other nodes for a step that was chosen, and open this
        node's files of it to the others.
        """
        if self._server is not None:
            self._server.allow(ref)
        spanning = [tier for tier in tiers if tier.nodes]
        if not spanning:
            return Sources(tuple(tiers), frozenset(), {})
        after = tiers.index(spanning[-1]) + 1
        others = tuple(
            OpenTier(tier.index, Tier("nodes://"), self._store(tier, peers)) for tier in spanning
        )
        partial = {place for place, tier in enumerate(tiers) if tier.nodes}
        partial |= set(range(after, after + len(others)))
        return Sources(
            (*tiers[:after], *others, *tiers[after:]),
            frozenset(partial),
            self._distance(spanning, ref, peers),
        )

    def _distance(
        self, spanning: Sequence[OpenTier], ref: StepRef, peers: Sequence[Peer]
    ) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for tier in spanning:
            others = self._others(tier, peers)
            for peer in peers:
                step = peer.tiers.get(tier.index, {}).get(ref.folder)
                for name in step.files if step else ():
                    rank = rank_of(name)
                    found[rank] = min(found.get(rank, 1), int(peer in others))
        return found

    def _store(self, tier: OpenTier, peers: Sequence[Peer]) -> NodeStore:
        encryption = tier.nodes.encryption if tier.nodes else None
        return NodeStore(tier.index, tier.url, self._others(tier, peers), encryption)

    def _others(self, tier: OpenTier, peers: Sequence[Peer]) -> list[Peer]:
        """Return those of ``peers`` that are other nodes than this one, as ``tier`` numbers
        them.
        """
        of = tier.nodes.of if tier.nodes else (0,) * self._coordinator.world_size
        return [peer for peer in peers if of[peer.rank] != of[self._coordinator.rank]]


def _is_part(tier: OpenTier) -> bool:
    """Return True if parts of a step that is listed there may be on other nodes."""
    return tier.nodes is not None or tier.tier.local is True


def _firsts(tier: OpenTier) -> tuple[int, ...]:
    return tier.nodes.firsts if tier.nodes else (0,)


def _step(backend: StorageBackend, ref: StepRef) -> Step:
    data = {
        name: info.size
        for info in own_objects(backend, ref)
        if (name := info.key.rpartition("/")[2]).endswith((".safetensors", ".encoded"))
    }
    return Step(is_committed(backend, ref), data)
