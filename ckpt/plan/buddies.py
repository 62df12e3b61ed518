"""Choose the buddies of each node, which keep copies of its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest


def buddies(domains: Sequence[str], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return for each node the numbers of its buddies, in order of preference.

    The nodes form a ring in which neighbours belong to different failure domains as far as
    possible. The buddies of a node are the next nodes of the ring that are outside its domain. A
    node gets a second buddy from the same domain only after it has one from each other domain. If
    all domains have the same size, each node is a buddy of equally many nodes.

    Args:
        domains: The failure domain of each node, such as a rack. If all nodes are in one domain,
            the buddies of a node are the next nodes of the ring.
        replicas: The number of buddies of each node. A node gets fewer if there are not enough
            nodes outside its domain.
    """
    ring = _ring(domains)
    has_domains = len(set(domains)) > 1
    buddies_of: list[tuple[int, ...]] = [()] * len(ring)
    for position, node in enumerate(ring):
        picked_domains = {domains[node]} if has_domains else set[str]()
        first_choices: list[int] = []
        second_choices: list[int] = []
        for candidate in (*ring[position + 1 :], *ring[:position]):
            if len(first_choices) == replicas:
                break
            if has_domains and domains[candidate] == domains[node]:
                continue
            if domains[candidate] in picked_domains and has_domains:
                second_choices.append(candidate)
                continue
            picked_domains.add(domains[candidate])
            first_choices.append(candidate)
        buddies_of[node] = tuple((first_choices + second_choices)[:replicas])
    return tuple(buddies_of)


def missing_copies(
    holders: Mapping[int, Collection[int]],
    homes: Mapping[int, int],
    domains: Sequence[str],
    replicas: int,
) -> dict[int, tuple[int, ...]]:
    """Return for each file the nodes that must get a copy, so that ``1 + replicas`` nodes have the
    file, or fewer if the file's node does not have enough buddies.

    A file is named by the rank that has written it. Files that no node has are left out of the
    result, and files that need no copy have an empty tuple. The function considers the node of the
    file's rank first, and then the buddies of that node. It prefers nodes in domains that have no
    copy of the file yet.

    Args:
        holders: The nodes that have each file.
        homes: The node of each file's rank.
        domains: The failure domain of each node.
        replicas: The number of copies that a file needs in addition to the file itself.
    """
    # Up to ``replicas`` of these candidates may already have the file, so more are needed.
    buddies_of = buddies(domains, 2 * replicas + 1)
    targets: dict[int, tuple[int, ...]] = {}
    for file, nodes in holders.items():
        if not nodes:
            continue
        domains_with_copy = {domains[node] for node in nodes}
        candidates = [node for node in (homes[file], *buddies_of[homes[file]]) if node not in nodes]
        picks: list[int] = []
        while candidates and len(nodes) + len(picks) <= replicas:
            new_domain_nodes = (
                node for node in candidates if domains[node] not in domains_with_copy
            )
            node = next(new_domain_nodes, candidates[0])
            candidates.remove(node)
            picks.append(node)
            domains_with_copy.add(domains[node])
        targets[file] = tuple(picks)
    return targets


def _ring(domains: Sequence[str]) -> list[int]:
    """Return the nodes in the order of the ring: the first node of each domain, then the second
    node of each domain, and so on.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for node, domain in enumerate(domains):
        members[domain].append(node)
    turns = zip_longest(*members.values())
    return [node for turn in turns for node in turn if node is not None]
