"""Choose the nodes that keep copies of other nodes' files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest


def buddies(domains: Sequence[str], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return for each node the nodes that keep copies of its files.

    The nodes form a ring in which neighbours belong to different failure domains as far as
    possible. The buddies of a node are the next nodes of the ring outside of its domain, each in a
    domain of its own while there are such. So domains of the same size give each node the same
    number of copies to keep.

    Args:
        domains: The failure domain of each node, such as a rack. If all are equal, they count for
            nothing.
        replicas: How many buddies each node gets, if there are as many.
    """
    ring = _ring(domains)
    matter = len(set(domains)) > 1
    found: list[tuple[int, ...]] = [()] * len(ring)
    for place, node in enumerate(ring):
        used = {domains[node]} if matter else set[str]()
        chosen: list[int] = []
        second: list[int] = []
        for other in (*ring[place + 1 :], *ring[:place]):
            if len(chosen) == replicas:
                break
            if matter and domains[other] == domains[node]:
                continue
            if domains[other] in used and matter:
                second.append(other)
                continue
            used.add(domains[other])
            chosen.append(other)
        found[node] = tuple((chosen + second)[:replicas])
    return tuple(found)


def missing_copies(
    holders: Mapping[int, Collection[int]],
    homes: Mapping[int, int],
    domains: Sequence[str],
    replicas: int,
) -> dict[int, tuple[int, ...]]:
    """Return for each file the nodes that need a copy of it, so that ``1 + replicas`` nodes have
    it.

    The node of the file's own rank comes first, and then the buddies of that node. Those in a
    domain that has no copy yet are preferred.

    Args:
        holders: For each file the nodes that have it. A file that no node has gets no copy.
        homes: For each file the node of its rank.
        domains: The failure domain of each node.
        replicas: How many copies of a file there are beside the first.
    """
    # As many of them as may already have the file, and those that need it.
    order = buddies(domains, 2 * replicas + 1)
    found: dict[int, tuple[int, ...]] = {}
    for file, having in holders.items():
        if not having:
            continue
        used = {domains[node] for node in having}
        free = [node for node in (homes[file], *order[homes[file]]) if node not in having]
        chosen: list[int] = []
        while free and len(having) + len(chosen) <= replicas:
            node = next((node for node in free if domains[node] not in used), free[0])
            free.remove(node)
            chosen.append(node)
            used.add(domains[node])
        found[file] = tuple(chosen)
    return found


def _ring(domains: Sequence[str]) -> list[int]:
    """Return the nodes in turns: the first of each domain, then the second of each."""
    members: dict[str, list[int]] = defaultdict(list)
    for node, domain in enumerate(domains):
        members[domain].append(node)
    turns = zip_longest(*members.values())
    return [node for turn in turns for node in turn if node is not None]
