"""The part of one node in the copies of one tier: whose files it keeps, and what it has copied."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ckpt.catalog.index import is_committed, own_objects, read_packed
from ckpt.coordination.api import LEADER
from ckpt.errors import CkptError
from ckpt.model.keys import MANIFEST, StepRef, whole_ranks
from ckpt.model.manifest import Manifest
from ckpt.nodes.replica_fetch import Copying, StepCopies, reading, remove
from ckpt.nodes.wire import Peer
from ckpt.plan.buddies import buddies, missing_copies
from ckpt.storage.tiers import Nodes, OpenTier

_MISSED: Final = 3
"""Steps in a row that a buddy does not get before a warning says so."""

_log = logging.getLogger("ckpt")


class Node(msgspec.Struct, frozen=True):
    """The lowest rank of a node: how it is reached, and its failure domain."""

    peer: Peer
    domain: str


class Held(msgspec.Struct, frozen=True):
    """What a node has of a step: whether it has the manifest, and the ranks of its files."""

    listed: bool
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Ring:
    """The part of one node in the copies of one tier. The thread that copies has it.

    Attributes:
        how: What copies are made with.
        here: The number of this node.
        peers: How the nodes are reached, by their number.
        domains: The failure domains of the nodes.
        sources: The numbers of the nodes whose files this node keeps.
        keepers: The lowest ranks of the nodes that keep this node's files.
        unheard: The lowest ranks of the nodes that are not known to have copied a step of this job.
            It is empty if the steps of earlier jobs may go.
        newest: The step to be copied next, if one waits, and how many restores came before it.
        copied: The newest step that was copied.
        outdate: Called once all nodes have the copies of a step of this job.
        posted: The subjects of messages about restored steps that other nodes may still need.
    """

    tier: OpenTier
    nodes: Nodes
    here: int
    peers: Sequence[Peer]
    domains: Sequence[str]
    sources: Sequence[int]
    keepers: Sequence[int]
    unheard: set[int]
    how: Copying
    newest: tuple[StepRef, int] | None = None
    copied: StepRef | None = None
    outdate: Callable[[], None] = lambda: None
    posted: list[str] = field(default_factory=list[str])
    _kept: dict[StepRef, list[str]] = field(default_factory=dict[StepRef, list[str]])
    _missed: int = 0
    _lacking: StepRef | None = None

    def copy(self, ref: StepRef) -> int | None:
        """Copy the other nodes' files of a committed step; return their size, or None if the step
        is not here any more.

        Raises:
            CkptError: A file cannot be read there or written here. What was copied is removed.
        """
        backend = self.tier.backend
        kept = self._kept.setdefault(ref, [])
        try:
            copies = self._copies(read_packed(backend, ref)[0], kept)
            nbytes = sum(
                copies.fetch(self.peers[node], self._ranks_of(copies.manifest, node))
                for node in self.sources
            )
        except BaseException:
            self._remove(ref)
            raise
        if not is_committed(backend, ref):  # The step was removed meanwhile
            self._remove(ref)
            return None
        self._missed, self._lacking = 0, None
        for other in [other for other in self._kept if other != ref]:
            if self.tier.in_memory:
                self._remove(other)
            self._kept.pop(other, None)  # The retention of a folder removes its copies
        return nbytes

    def copy_restored(self, ref: StepRef, held: Mapping[int, Held]) -> int:
        """Copy what this node is to have of a step that the job has restored, and return the size
        of the files. Nothing is copied of a step that the nodes do not have as a whole.

        Args:
            held: What each node has of the step.

        Raises:
            CkptError: A file cannot be read there or written here. What was copied is removed.
        """
        backend, listed = self.tier.backend, held[self.here].listed
        having = [node for node, has in held.items() if has.listed]
        if not having:
            return 0
        peer, pace = self.peers[having[0]], self.how.pace
        store = backend if listed else reading(self.tier, peer, ref, {}, pace)
        manifest, data = read_packed(store, ref)
        holders = {
            file.rank: [node for node, has in held.items() if file.rank in has.ranks]
            for file in manifest.files
        }
        if not all(holders.values()):
            return 0
        homes = {rank: self._home(rank) for rank in holders}
        wanted = missing_copies(holders, homes, self.domains, self.tier.tier.replicas)
        from_node: dict[int, set[int]] = defaultdict(set)
        for rank, nodes in wanted.items():
            if self.here in nodes:
                from_node[holders[rank][rank % len(holders[rank])]].add(rank)
        copies = self._copies(manifest, [])
        try:
            nbytes = sum(
                copies.fetch(self.peers[node], frozenset(ranks))
                for node, ranks in from_node.items()
            )
            if not listed:
                backend.put(ref.manifest, [data])
        except BaseException:
            copies.remove()
            raise
        if nbytes and not is_committed(backend, ref):  # The step was removed meanwhile
            copies.remove()
            return 0
        return nbytes

    def held(self, ref: StepRef) -> Held:
        """Return what this node has of a step. A file without its fragment does not count."""
        names = {info.key.rpartition("/")[2] for info in own_objects(self.tier.backend, ref)}
        return Held(MANIFEST in names, tuple(sorted(whole_ranks(names))))

    def _copies(self, manifest: Manifest, kept: list[str]) -> StepCopies:
        own = self._ranks_of(manifest, self.here)
        nbytes = sum(file.size for file in manifest.files if file.rank in own)
        return StepCopies(self.tier, manifest, nbytes, self.how, kept)

    def _ranks_of(self, manifest: Manifest, node: int) -> frozenset[int]:
        return frozenset(part.rank for part in manifest.fragments if self._home(part.rank) == node)

    def _home(self, rank: int) -> int:
        """Return the node of a rank. A restored step may have more ranks than the job."""
        return self.nodes.of[rank % len(self.nodes.of)]

    @property
    def fails(self) -> bool:
        """Whether the last steps were not copied."""
        return self._missed >= _MISSED

    def missed(self, ref: StepRef, error: Exception) -> None:
        """Note that a step was not copied."""
        self._missed, self._lacking = self._missed + 1, ref
        level = logging.WARNING if self._missed == _MISSED else logging.DEBUG
        _log.log(
            level,
            "ckpt: step %d on %s: the files of other nodes were not copied to this node, nor those "
            "of the %d steps before: %s. If saves come faster than copies, save less often or "
            "raise slots",
            ref.step,
            self.tier.url,
            self._missed - 1,
            error,
        )

    def end(self, *, warn: bool) -> None:
        """Remove the copies of steps that this node does not list any more.

        With ``warn``, log a warning if the last step was not copied.
        """
        for ref in list(self._kept):
            with suppress(CkptError):
                if not is_committed(self.tier.backend, ref):
                    self._remove(ref)
        if warn and self._lacking is not None:
            _log.warning(
                "ckpt: step %d on %s: the files of other nodes were not copied to this node",
                self._lacking.step,
                self.tier.url,
            )

    def _remove(self, ref: StepRef) -> None:
        remove(self.tier.backend, self._kept.pop(ref, []))


def ring_of(tier: OpenTier, known: Mapping[int, Node], rank: int, how: Copying) -> Ring:
    """Return the part of the node of ``rank`` in the copies of a tier."""
    nodes = tier.nodes
    assert nodes is not None
    lowest = nodes.firsts
    domains = [known[first].domain for first in lowest]
    chosen = buddies(domains, tier.tier.replicas)
    here = nodes.of[rank]
    most = max(Counter(node for keepers in chosen for node in keepers).values(), default=0)
    if most > tier.tier.replicas and rank == LEADER:
        _log.warning(
            "ckpt: the failure domains (CKPT_FAILURE_DOMAIN) are of different sizes: a node keeps "
            "the files of up to %d others on %s",
            most,
            tier.url,
        )
    return Ring(
        tier,
        nodes,
        here,
        peers=[known[first].peer for first in lowest],
        domains=domains,
        sources=[node for node, keepers in enumerate(chosen) if here in keepers],
        keepers=[lowest[node] for node in chosen[here]],
        unheard=set(lowest) if tier.in_memory else set(),
        how=how,
    )
