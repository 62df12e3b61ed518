"""The node survey at the start of a restore: it finds out which steps and files each node has on
its local tiers. The nodes serve these files to each other until the restore ends.

An *attempt* is one incarnation of a job, and its *head* is its newest step. A *rollback* is the
record that a job goes on from an older step: it begins a *branch*, and the later steps are
*abandoned*. A *fragment* describes the data file of one rank in a step. The manifest of a step may
carry copies of its fragments, or only name them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from ckpt.catalog.candidates import Candidate, Finish
from ckpt.catalog.step_listing import (
    RootContents,
    is_committed,
    list_root,
    own_objects,
    read_packed,
)
from ckpt.config import Tier
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import Wait, gather
from ckpt.errors import CkptError, IntegrityError, StorageError
from ckpt.model.fill_manifest import carried_fragments, fill_manifest
from ckpt.model.keys import StepRef, parse_folder, rank_of
from ckpt.model.manifest import Manifest
from ckpt.model.readable import size
from ckpt.model.rollback import Rollback, heads_of, last_rollback
from ckpt.nodes.peer_store import AllNodesStore, NodeStore
from ckpt.nodes.server import NodeServer
from ckpt.nodes.wire import Peer, StepFiles
from ckpt.plan.copies_per_node import ranks_without_copy
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier

_MOST_STEPS: Final = 64
"""A node announces at most this many of its newest steps."""
_START_SECONDS: Final = 600.0
"""How many seconds may pass until all nodes have begun the same restore."""

_log = logging.getLogger("ckpt")
_peer_decoder: Final = msgspec.json.Decoder(Peer)


@dataclass(frozen=True, slots=True)
class Sources:
    """The stores from which a rank reads a step.

    Attributes:
        tiers: The stores, nearest first. The local tiers of the other nodes come right after the
            last local tier of this node, and before the farther tiers. If other nodes have several
            copies of a file, there is a store for each copy.
        partial: The positions in ``tiers`` of the stores that have only some nodes' files. If such
            a store lacks a file, this is no damage.
        distance: By rank, for each rank whose file a node has announced: 0 if this node has the
            file, and 1 if only another node has it. Empty if every tier has the files of all ranks.
    """

    tiers: tuple[OpenTier, ...]
    partial: frozenset[int] = frozenset()
    distance: Mapping[int, int] = field(default_factory=dict[int, int])


class NodeSurvey:
    """The node survey of one restore, if a tier is local to the nodes. All ranks enter it as a
    context manager.

    On entry, the lowest rank of each node posts which steps its node has. If there are several
    nodes, it also starts a server. The leader reads the posted records. On exit, the servers are
    closed.

    ``_own_tiers`` are the local tiers for which this rank speaks, since it is the lowest rank of
    its node. The other ranks post nothing, and have no server. A ``Peer`` is the record that a node
    posts.

    Args:
        tiers: The tiers of the job, nearest first.
        coordinator: The connection to the other ranks.
        subject: The subject of the messages, which no other restore uses.
        step: The only step that may be restored; None for any step.

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
        # The lowest rank of a node announces the steps of the node.
        self._own_tiers = [
            tier for tier in tiers if tier.is_node_local and rank in _lowest_ranks(tier)
        ]
        self._all_peers: list[Peer] | None = None
        self._server: NodeServer | None = None

    def __enter__(self) -> Self:
        if node_tiers := [tier.nodes for tier in self._own_tiers if tier.nodes]:
            self._server = NodeServer(
                {tier.index: tier.backend for tier in self._own_tiers},
                encryption=node_tiers[0].encryption,
            )
        try:
            if self._own_tiers:
                self._coordinator.post(self._subject, msgspec.json.encode(self._own_record()))
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

    def _own_record(self) -> Peer:
        """Return the record that this node posts: the address of its server, its steps, the
        rollback that counts on its tiers, and the heads.
        """
        server = self._server
        listings = {tier.index: _list_or_nothing(tier.backend) for tier in self._own_tiers}
        rollback = last_rollback(listing.rollback for listing in listings.values())
        refs = {ref for listing in listings.values() for ref in listing.refs}
        return Peer(
            rank=self._coordinator.rank,
            addresses=server.addresses if server else (),
            port=server.port if server else 0,
            token=server.token.hex() if server else "",
            tiers={
                tier.index: self._step_records(tier.backend, listings[tier.index])
                for tier in self._own_tiers
            },
            rollback=rollback,
            heads=tuple(ref.folder for ref in heads_of(refs)),
        )

    def _step_records(self, backend: StorageBackend, listing: RootContents) -> dict[str, StepFiles]:
        """Return the newest steps on a tier of this node, by the names of their folders. Return an
        empty dict if the tier does not answer.
        """
        try:
            refs = [ref for ref in listing.refs if self._step in (None, ref.step)]
            # No abandoned step takes the place of a step of the current branch.
            branch = set(listing.on_branch)
            refs.sort(key=lambda ref: ref not in branch)
            return {ref.folder: _step_record(backend, ref) for ref in refs[:_MOST_STEPS]}
        except CkptError as error:
            _log.warning("ckpt: the contents of %s cannot be listed: %s", backend.url, error)
            return {}

    # -- the leader's part -------------------------------------------------------------------------

    def stores(self) -> list[StorageBackend]:
        """Return a store for each tier, in the order of the tiers. The store of a tier that is
        local to several nodes has the files of all nodes.

        Raises:
            CommitTimeout: A node has not posted its steps in time.
        """
        return [
            AllNodesStore(tier.backend, self._store(tier, self._peers()))
            if tier.nodes
            else tier.backend
            for tier in self._tiers
        ]

    def rollback(self) -> Rollback | None:
        """Return the rollback that counts on the local tiers of all nodes, or None."""
        return last_rollback(peer.rollback for peer in self._peers())

    def heads(self) -> list[StepRef]:
        """Return the newest step of each attempt on the local tiers of all nodes."""
        refs = (parse_folder(folder) for peer in self._peers() for folder in peer.heads)
        return heads_of(ref for ref in refs if ref is not None)

    def on_shared_tiers(self, finish: Finish) -> Finish:
        """Return a function that calls ``finish`` and returns its result. For the store of a tier
        that is local to several nodes, the function returns False without calling ``finish``, since
        no rank sees all files of a step there.
        """
        return lambda store, ref, rollback: (
            not isinstance(store, AllNodesStore) and finish(store, ref, rollback)
        )

    def fault(self, candidate: Candidate, stores: Sequence[StorageBackend]) -> str:
        """Return why a step cannot be restored from the nodes of the job. The text is empty if the
        step can be restored, if a shared tier has it, or if its manifest cannot be read.

        Args:
            candidate: The step.
            stores: The stores that the method ``stores`` has returned.
        """
        if not self._tiers[candidate.nearest].is_node_local or self._is_on_shared_tier(
            candidate, stores
        ):
            return ""
        try:
            manifest, _ = read_packed(stores[candidate.nearest], candidate.ref)
            if fragments := carried_fragments(manifest, key=candidate.ref.manifest):
                manifest = fill_manifest(manifest, fragments, key=candidate.ref.manifest)
        except (IntegrityError, StorageError):
            return ""  # All ranks meet this error when they read the step, and report it
        ranks_on_nodes = self._ranks_on_nodes(manifest, candidate.ref)
        if fragments:  # Other files may have equal chunks, so a missing file need not be a loss
            lost_ranks = ranks_without_copy(manifest, ranks_on_nodes)
        else:
            # A node that has a data file has its fragment, too.
            lost_ranks = [file.rank for file in manifest.files if file.rank not in ranks_on_nodes]
        text = ", ".join(map(str, lost_ranks[:16])) + (" ..." if len(lost_ranks) > 16 else "")
        return (
            f"the files of rank(s) {text} were on nodes that are gone, and no other tier has them"
            if lost_ranks
            else ""
        )

    def peers(self, ref: StepRef) -> tuple[Peer, ...]:
        """Return the records of all nodes, reduced to the step ``ref``. The leader sends them to
        all ranks, which need them for ``sources``.
        """
        return tuple(
            msgspec.structs.replace(
                peer,
                tiers={
                    index: {ref.folder: steps[ref.folder]}
                    for index, steps in peer.tiers.items()
                    if ref.folder in steps
                },
                rollback=None,
                heads=(),
            )
            for peer in self._peers()
        )

    def _peers(self) -> list[Peer]:
        """Return the records of all nodes. The first call waits for them."""
        if self._all_peers is None:
            self._all_peers = self._gather()
        return self._all_peers

    def _gather(self) -> list[Peer]:
        ranks = {rank for tier in self._tiers if tier.is_node_local for rank in _lowest_ranks(tier)}
        wait = Wait(_START_SECONDS, "what its node has")
        messages = gather(self._coordinator, self._subject, wait, ranks=ranks)
        return [_peer_decoder.decode(message) for message in messages.values()]

    def _is_on_shared_tier(self, candidate: Candidate, stores: Sequence[StorageBackend]) -> bool:
        """Return True if a shared tier has the step as a checkpoint. ``candidate.reachable`` has
        the positions of the tiers that have not failed so far.
        """
        for position in candidate.reachable:
            if not self._tiers[position].is_node_local:
                with suppress(StorageError):
                    if is_committed(stores[position], candidate.ref):
                        return True
        return False

    def _ranks_on_nodes(self, manifest: Manifest, ref: StepRef) -> Collection[int]:
        """Return the ranks whose data files some node has announced."""
        names = {  # Without their suffixes, which differ if a codec was used
            name.partition(".")[0]
            for peer in self._peers()
            for steps in peer.tiers.values()
            if ref.folder in steps
            for name in steps[ref.folder].files
        }
        return {file.rank for file in manifest.files if file.name.partition(".")[0] in names}

    # -- every rank's part -------------------------------------------------------------------------

    def sources(self, tiers: Sequence[OpenTier], ref: StepRef, peers: Sequence[Peer]) -> Sources:
        """Return the stores from which this rank reads the step ``ref``, and allow other nodes to
        read this node's files of the step.

        Args:
            tiers: The tiers from which to read, nearest first.
            ref: The step that is restored.
            peers: The records that the method ``peers`` has returned on the leader.
        """
        if self._server is not None:
            self._server.allow(ref)
        node_tiers = [tier for tier in tiers if tier.nodes]
        if not node_tiers:
            return Sources(tuple(tiers))
        position = tiers.index(node_tiers[-1]) + 1
        other_tiers = tuple(
            OpenTier(tier.index, Tier("nodes://"), store)
            for tier in node_tiers
            for store in self._store(tier, peers).copies(copy_count(peers, tier.index))
        )
        # These stores have only some nodes' files: the tiers that are local, and the other nodes.
        partial_positions = {index for index, tier in enumerate(tiers) if tier.nodes}
        partial_positions |= set(range(position, position + len(other_tiers)))
        return Sources(
            (*tiers[:position], *other_tiers, *tiers[position:]),
            frozenset(partial_positions),
            self._distance(node_tiers, ref, peers),
        )

    def _distance(
        self, node_tiers: Sequence[OpenTier], ref: StepRef, peers: Sequence[Peer]
    ) -> Mapping[int, int]:
        """Return, for each rank whose file of the step ``ref`` a node has announced, 0 if this node
        has the file, and 1 if only another node has it. ``node_tiers`` are the local tiers.
        """
        distances: dict[int, int] = {}
        for tier in node_tiers:
            other_peers = self._other_peers(tier, peers)
            for peer in peers:
                step = peer.tiers.get(tier.index, {}).get(ref.folder)
                for name in step.files if step else ():
                    rank = rank_of(name)
                    distance = 1 if peer in other_peers else 0
                    distances[rank] = min(distances.get(rank, 1), distance)
        return distances

    def _store(self, tier: OpenTier, peers: Sequence[Peer]) -> NodeStore:
        """Return a store for the files of ``tier`` on the other nodes."""
        encryption = tier.nodes.encryption if tier.nodes else None
        return NodeStore(tier.index, tier.url, self._other_peers(tier, peers), encryption)

    def _other_peers(self, tier: OpenTier, peers: Sequence[Peer]) -> list[Peer]:
        """Return the records in ``peers`` of the other nodes. Two ranks may share a node on one
        tier and not on another, so the result depends on ``tier``.
        """
        node_by_rank = tier.nodes.of if tier.nodes else (0,) * self._coordinator.world_size
        return [
            peer
            for peer in peers
            if node_by_rank[peer.rank] != node_by_rank[self._coordinator.rank]
        ]


def copy_count(peers: Sequence[Peer], tier: int) -> int:
    """Return the largest number of copies that the nodes have of any file on a tier, between 1 and
    4. The result is the same on all ranks that have the same ``peers``.

    The limit is needed because hundreds of nodes may have a manifest, or a file that a restore has
    stored on them. Of a manifest, two copies count at most. All ranks need the same result, since
    they exchange positions in the list of stores (``Sources.tiers``).

    Args:
        peers: The records of all nodes.
        tier: The index of the tier.
    """
    files, manifests = Counter[tuple[str, str]](), Counter[str]()
    for peer in peers:
        for folder, step in peer.tiers.get(tier, {}).items():
            files.update((folder, name) for name in step.files)
            manifests[folder] += step.has_manifest
    return max(
        [
            1,
            *(min(count, 4) for count in files.values()),
            *(min(count, 2) for count in manifests.values()),
        ]
    )


def _list_or_nothing(backend: StorageBackend) -> RootContents:
    """Return what a tier of this node has; nothing if the tier cannot be listed."""
    try:
        return list_root(backend)
    except CkptError as error:
        _log.warning("ckpt: the contents of %s cannot be listed: %s", backend.url, error)
        return RootContents([])


def _lowest_ranks(tier: OpenTier) -> tuple[int, ...]:
    """Return the lowest rank of each node of a local tier."""
    return tier.nodes.lowest_ranks if tier.nodes else (0,)


def _step_record(backend: StorageBackend, ref: StepRef) -> StepFiles:
    """Return whether a step's folder on this node has the manifest, and the sizes of its data
    files.
    """
    data = {
        name: info.size
        for info in own_objects(backend, ref)
        if (name := info.name).endswith((".safetensors", ".encoded"))
    }
    return StepFiles(is_committed(backend, ref), data)
