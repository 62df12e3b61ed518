"""The tiers of a job or of a command: the settings of each tier, and the backend that reaches its
store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from ckpt.codec.registry import NO_CODEC
from ckpt.config import (
    CONFIG_NAME,
    MEMORY,
    ROOT_VARIABLE,
    Tier,
    load_config,
    root_of_environment,
)
from ckpt.errors import ConfigError
from ckpt.model.checksum import checksum
from ckpt.storage.api import AdoptsFiles, StorageBackend
from ckpt.storage.registry import open_backend, scheme_of
from ckpt.storage.urls import (
    canonical,
    is_folder,
    is_object_store,
    is_spelling_of,
    path_between,
    relation,
    user_of,
    without_query,
)

if TYPE_CHECKING:  # At run time, commands that list tiers must not import ssl, which is slow
    from ckpt.tls import Encryption

_log = logging.getLogger("ckpt")
Tiers = str | os.PathLike[str] | Tier | Sequence[str | os.PathLike[str] | Tier]
"""The forms in which tiers can be given: a folder or URL, a `Tier`, or several of these, nearest
first.
"""
_ENDPOINT_VARIABLES: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "gcs": ("STORAGE_EMULATOR_HOST",),
    "abfs": ("AZURE_STORAGE_ACCOUNT_NAME",),
    "abfss": ("AZURE_STORAGE_ACCOUNT_NAME",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME",),
}
"""For each scheme, the environment variables that may name the server of the store. The client
libraries use the first variable that is set.
"""

_SERVER_OPTIONS: Final = ("account_host", "account_name", "base_url")
"""The options of Azure and WebDAV that name the server."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The assignment of the ranks of a job to nodes, for a tier that is local to each node.

    Attributes:
        of: The number of each rank's node, indexed by rank. Nodes are numbered from 0 in the order
            of their lowest ranks.
        encryption: The encryption of the connections between the nodes; None if they are not
            encrypted.
    """

    of: tuple[int, ...]
    encryption: Encryption | None = field(default=None, compare=False, repr=False)

    @property
    def lowest_ranks(self) -> tuple[int, ...]:
        """The lowest rank of each node, indexed by node. This rank does the work that is done once
        for each node.
        """
        return tuple(self.of.index(node) for node in range(max(self.of) + 1))

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the node of ``rank``, in ascending order, including ``rank``."""
        return tuple(mate for mate, node in enumerate(self.of) if node == self.of[rank])


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier and the backend that reaches its store.

    Attributes:
        index: The position of the tier, counted from 0 for the nearest tier.
        tier: The settings that the user gave.
        backend: The backend that reads and writes the store of the tier.
        nodes: The nodes of the job if the tier is local and the job runs on several nodes; else
            None.
        url: The URL of the tier for display, without credentials.
        in_memory: True if the tier keeps images in the memory in which they are staged.
        is_node_local: True if a node may see only its own part of each step, because the tier is
            local to the node.
    """

    index: int
    tier: Tier
    backend: StorageBackend
    nodes: Nodes | None = None
    url: str = field(init=False)
    in_memory: bool = field(init=False)
    is_node_local: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.backend.url)
        object.__setattr__(self, "in_memory", isinstance(self.backend, AdoptsFiles))
        is_node_local = self.nodes is not None or self.tier.local is True
        object.__setattr__(self, "is_node_local", is_node_local)

    @property
    def required(self) -> bool:
        """True if a save fails when it does not reach this tier."""
        return not self.in_memory if self.tier.required is None else self.tier.required

    @property
    def local(self) -> bool:
        """True if each node has a store of its own for this tier."""
        return self.in_memory or self.tier.local is True

    def takes(self, step: int) -> bool:
        """Return True if this tier gets ``step``, which is so for multiples of ``Tier.every``."""
        return step % self.tier.every == 0


def as_tiers(
    tiers: Tiers,
) -> tuple[Tier, ...]:
    """Return the tiers that ``tiers`` describes, nearest first.

    Raises:
        ConfigError: A value is not a folder, a URL or a ``Tier``.
    """
    items: list[object] = (
        list(tiers)
        if isinstance(tiers, Sequence) and not isinstance(tiers, str | bytes)
        else [tiers]
    )
    return tuple(_as_tier(item) for item in items)


def _as_tier(item: object) -> Tier:
    """Return the tier that a folder, a URL or a `Tier` stands for. Raises ``ConfigError``."""
    if isinstance(item, str | os.PathLike):
        return Tier(os.fspath(item))
    if isinstance(item, Tier):
        return item
    # The error names only the type of the value, since a dict may hold secrets.
    raise ConfigError(
        f"a {type(item).__name__} is not a place for checkpoints: give a folder, a URL, a Tier, "
        "or a list of these"
    )


def resolve_tier(flag: str | None, config: str | None = None) -> Tier:
    """Return the tier that a command works on.

    The result is the tier at the URL ``flag``, else at the URL in the variable ``CKPT_ROOT``, else
    the first tier in ``./ckpt.toml`` that is not in memory. If there is no such tier, the result is
    the first tier of the form ``shm://NAME``, which at least outlives a process. If the flag or the
    variable names a tier of ``ckpt.toml``, the result has the settings of that tier.

    Args:
        flag: The URL that the user gave to the command, if any.
        config: The path of another ``ckpt.toml``. If it is given, the variable is not used.

    Raises:
        ConfigError: The flag, the variable and the file name no tier, the URL is "memory", or the
            file is invalid.
    """
    tiers = load_config(config).tiers
    if root := flag or ("" if config else root_of_environment()):
        if root == MEMORY:
            raise ConfigError(
                '"memory" names a tier only within a job: give the URL of the tier, shm://..., '
                "which `ckpt ls --root memory`, the log and a restore report print"
            )
        return tier_at(root, tiers)
    candidates = [tier for tier in tiers if tier.url != MEMORY and scheme_of(tier.url) != "memory"]
    if candidates:
        return next((tier for tier in candidates if scheme_of(tier.url) != "shm"), candidates[0])
    raise ConfigError(
        "where are the checkpoints? Give the folder or URL as an argument or by --root, set "
        f'{ROOT_VARIABLE}, or write root = "..." into ./{CONFIG_NAME}'
    )


def resolve_tiers(flags: Sequence[str] | None, config: str | None = None) -> tuple[Tier, ...]:
    """Return the tiers that a command works on, nearest first.

    Each of ``flags`` is resolved as by ``resolve_tier``. Without flags, the result is the one tier
    at the URL in the variable ``CKPT_ROOT``. If the variable is not set either, the result is all
    tiers of ``./ckpt.toml`` that outlive a process.

    Args:
        flags: The URLs that the user gave to the command, if any.
        config: The path of another ``ckpt.toml``. If it is given, the variable is not used.

    Raises:
        ConfigError: No tier is named, the URL of a flag or of the variable is "memory", or the file
            is invalid.
    """
    if flags:
        return tuple(resolve_tier(flag, config) for flag in flags)
    durable_tiers = tuple(
        tier for tier in load_config(config).tiers if scheme_of(tier.url) != "memory"
    )
    has_root = root_of_environment() and not config
    return (
        durable_tiers if len(durable_tiers) > 1 and not has_root else (resolve_tier(None, config),)
    )


def tier_at(url: str, tiers: Sequence[Tier]) -> Tier:
    """Return the first of ``tiers`` that has the URL ``url``, in any spelling; else a new tier
    without settings.

    If no tier has this URL, the symbolic links in ``url`` are resolved, and the folders among
    ``tiers`` are compared again. ``url`` may lack the query of an object store's URL, since no
    command prints the query.
    """
    tiers = [tier for tier in tiers if MEMORY not in (url, tier.url)]
    with_query = (tier for tier in tiers if is_spelling_of(url, tier.url))
    without_options = (tier for tier in tiers if is_spelling_of(url, without_query(tier.url)))
    via_link = (
        tier
        for tier in tiers
        if is_folder(tier.url) and is_spelling_of(url, tier.url, follows_links=True)
    )
    return next(chain(with_query, without_options, via_link), None) or Tier(url)


def open_tiers(tiers: Sequence[Tier]) -> tuple[OpenTier, ...]:
    """Open all tiers and return them in the same order. On an error, close those already open.

    Raises:
        ConfigError: ``tiers`` is empty, two tiers have the same URL, the root of one tier is inside
            of the root of another, a tier in memory comes after a tier that is not in memory, the
            tier "memory" is the last one, or the settings of a tier contradict its kind of store.
            The errors of ``open_backend`` are also of this class.
    """
    if not tiers:
        raise ConfigError("a manager needs at least one tier: a folder or a URL")
    if [tier.url for tier in tiers].count(MEMORY) > 1:
        raise ConfigError('the tier "memory" is named twice: this machine has one')
    hierarchy: list[OpenTier] = []
    with closed_on_error(hierarchy):
        for index, (tier, url) in enumerate(zip(tiers, urls_of(tiers), strict=True)):
            hierarchy.append(OpenTier(index, tier, open_backend(url, tier.options)))
            for nearer_tier in hierarchy[:-1]:
                _check_apart(nearer_tier, hierarchy[-1])
            if hierarchy[-1].in_memory:
                _check_memory(hierarchy[-1], hierarchy[:-1])
            elif hierarchy[-1].local and is_object_store(url):
                raise ConfigError(f"{hierarchy[-1].url} is seen by all nodes: leave local out")
            if tier.base is not None:
                path_to_base(hierarchy[-1])  # Raises an error if the base cannot be reached
    return tuple(hierarchy)


def path_to_base(tier: OpenTier) -> str:
    """Return the path from the root of ``tier`` to its ``Tier.base``. That is the root of another
    run, whose files the steps of ``tier`` may share.

    Raises:
        ConfigError: Each node has a store of its own, or the base is on another store or is the
            root itself.
    """
    url, base = tier.tier.url, tier.tier.base
    assert base is not None
    if tier.local:
        raise ConfigError(f"each node has its own {tier.url}, with whole files: leave base out")
    if "?" in base and server_of(Tier(base)) != server_of(tier.tier):
        raise ConfigError(
            f"{without_query(base)} is on another server than {tier.url}: name a root on the same "
            "one, or copy the step there with `ckpt copy`"
        )
    return path_between(url, base)


def warn_of_unconditional_puts(tier: OpenTier) -> None:
    """Log a warning if ``tier``, the nearest durable one, is a store in which two puts *if absent*
    of one key may both succeed, unless its options say so.
    """
    is_conditional = tier.backend.capabilities.put_if_absent
    if not is_conditional and "put_if_absent" not in tier.tier.options:
        _log.warning(
            "ckpt: %s is the nearest durable tier, and two jobs that save one step there could "
            "both commit it: name a local folder or an object store before it (docs/stores.md)",
            tier.url,
        )


@contextmanager
def closed_on_error(tiers: Sequence[OpenTier]) -> Generator[None]:
    """Close the backends of ``tiers`` if the block raises."""
    try:
        yield
    except BaseException:
        for tier in tiers:
            tier.backend.close()
        raise


def urls_of(tiers: Sequence[Tier]) -> list[str]:
    """Return the URL of each tier, with "memory" replaced by the URL of the store that it means."""
    return [
        _memory_url(tiers[index + 1 :]) if tier.url == MEMORY else tier.url
        for index, tier in enumerate(tiers)
    ]


def _memory_url(farther_tiers: Sequence[Tier]) -> str:
    """Return the URL of the store that the tier "memory" stands for. ``farther_tiers`` has the
    tiers after this tier.

    The name of the store is derived from the canonical URL and the server of the next tier, and
    from the user of a file server, who may have folders of their own. A restarted job with the same
    next tier therefore finds the same store, and a job with another next tier does not.

    Raises:
        ConfigError: There is no next tier.
    """
    if not farther_tiers:
        raise ConfigError(
            'the tier "memory" belongs to the tier after it: name one, or give the memory a name '
            'of its own, "shm://NAME"'
        )
    tier = farther_tiers[0]
    place = canonical(tier.url).removesuffix("/")
    place = " on ".join(filter(None, (place, server_of(tier), user_of(tier.url))))
    # The name of a folder may have bytes that are no text.
    return f"shm://{checksum(place.encode(errors='surrogateescape'))[:16]}"


def _check_memory(memory: OpenTier, nearer: Sequence[OpenTier]) -> None:
    """Raise ``ConfigError`` if a tier in memory has settings that do not apply to memory, or comes
    after a tier that is not in memory.
    """
    for name in ("keep_last", "capacity"):
        if getattr(memory.tier, name) is not None:
            raise ConfigError(f"{memory.url} keeps what its slots hold: leave {name} out")
    if memory.tier.local is False:
        raise ConfigError(f"{memory.url} is each node's own: leave local out")
    if memory.tier.codec != NO_CODEC:
        raise ConfigError(f"{memory.url} keeps images where they are staged: leave codec out")
    if any(not tier.in_memory for tier in nearer):
        raise ConfigError(f"{memory.url} is memory: put it before the tiers that are farther away")


def _check_apart(tier: OpenTier, other_tier: OpenTier) -> None:
    """Raise ``ConfigError`` if two tiers have the same URL, or one root is inside of the other.
    Otherwise each tier would treat the files of the other tier as its own.
    """
    position = relation(tier.url, other_tier.url)
    is_one_server = server_of(tier.tier) == server_of(other_tier.tier)
    if position == "same" and not is_one_server:
        raise same_url_error(other_tier.url)
    if position == "same":
        note = f", once as {tier.url}" if tier.url != other_tier.url else ""
        raise ConfigError(f"the tier {other_tier.url} is named twice{note}")
    if position != "apart" and is_one_server:
        inner, outer = (tier, other_tier) if position == "inside" else (other_tier, tier)
        raise ConfigError(
            f"the tier {inner.url} is inside of the tier {outer.url}: give each a root of its "
            "own, such as two folders side by side"
        )


def same_url_error(url: str) -> ConfigError:
    """Return the error for two tiers that have the same ``url`` on different servers.

    Such tiers are refused because the handle of a save, the journal and the output of commands
    identify a tier by its URL.
    """
    return ConfigError(
        f"two tiers have the URL {url} on different servers, and the URL identifies a tier: give "
        "one of them another prefix"
    )


def server_of(tier: Tier) -> str:
    """Return the server of an object store, in the same spelling for each spelling of its URL.

    The server is taken from ``endpoint_url`` in the options, else in the query of the URL, else in
    the ``client_kwargs`` of the options, else from an environment variable that the client
    libraries read. For Azure, the options ``account_host`` and ``account_name`` stand for it, and
    for WebDAV the option ``base_url``. The result is '' if none of these names a server, or if the
    tier is a folder.
    """
    if is_folder(tier.url):
        return ""
    settings = {**dict(parse_qsl(tier.url.partition("?")[2])), **tier.options}
    client = settings.get("client_kwargs")
    endpoint = settings.get("endpoint_url") or (
        client.get("endpoint_url") if isinstance(client, Mapping) else None
    )
    endpoint = endpoint or next(filter(None, map(settings.get, _SERVER_OPTIONS)), None)
    if not endpoint:
        names = _ENDPOINT_VARIABLES.get(scheme_of(tier.url), ())
        endpoint = next((os.environ[name] for name in names if os.environ.get(name)), "")  # noqa: TID251
    text = str(endpoint)
    try:
        server = urlsplit(text)
        port = server.port or {"http": 80, "https": 443}.get(server.scheme, 0)
    except ValueError:  # The backend refuses this URL
        return text
    return f"{server.hostname}:{port}{server.path.rstrip('/')}" if server.hostname else text
