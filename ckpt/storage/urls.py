"""Examine the location that a URL names, without opening a backend."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from typing import Final, Literal
from urllib.parse import quote, unquote, urlsplit

from ckpt.errors import ConfigError, StorageError
from ckpt.storage.registry import scheme_of

OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "cos"}
)
"""The URL schemes of object stores. Some of them are served only through fsspec."""
_PORTS: Final = {"sftp": 22, "ftp": 21, "smb": 445}
"""The default ports of file servers, by the URL scheme."""
_ACCOUNT: Final = re.compile(r"^(abfs://[^/@]*)@[^/]*")
"""The begin of the canonical URL of a container of Azure that names its account."""
_NO_TEXT: Final = re.compile("[\ud800-\udfff]")
"""What stands for a byte that is no text in the name of a folder. No record can hold it."""
_ALIASES: Final = {"gcs": "gs", "s3a": "s3", "abfss": "abfs", "az": "abfs", "ssh": "sftp"}

Relation = Literal["apart", "same", "inside", "around"]


def is_folder(url: str) -> bool:
    """Return True if ``url`` is a plain path or a ``file://`` URL."""
    return scheme_of(url) == "file"


def is_missing(url: str) -> bool:
    """Return True if ``url`` is a plain path or a ``file://`` URL, and the path does not exist."""
    return is_folder(url) and not os.path.exists(local_path(url))


def is_file(url: str) -> bool:
    """Return True if ``url`` is a plain path or a ``file://`` URL of an ordinary file."""
    return is_folder(url) and os.path.isfile(local_path(url))


def is_object_store(url: str) -> bool:
    """Return True if ``url`` names an object store, whose objects all nodes see alike."""
    return scheme_of(url) in OBJECT_STORES


def without_query(url: str) -> str:
    """Return ``url`` without its query if it names an object store. The query holds options, and
    the backend leaves it out of the URL that it displays.
    """
    return url.partition("?")[0] if is_object_store(url) else url


def relation(url: str, base: str) -> Relation:
    """Return how the locations of two URLs relate, regardless of how the URLs are spelled.

    Returns:
        "same" if both URLs name one location, "inside" if ``url`` is inside of ``base``, "around"
        if ``base`` is inside of ``url``, else "apart".
    """
    place, base_place = _comparable(_canonical(url), _canonical(base))
    if place == base_place:
        return "same"
    if place.startswith(base_place):
        return "inside"
    return "around" if base_place.startswith(place) else "apart"


def is_same_place(url: str, other_url: str) -> bool:
    """Return True if two URLs name one location, regardless of how they are spelled. Symbolic links
    in the paths of folders are resolved, and the queries of object stores' URLs are left out.
    """
    return url == other_url or relation(without_query(url), without_query(other_url)) == "same"


def canonical(url: str) -> str:
    """Return a spelling of ``url`` that is the same for all URLs of one location. Symbolic links in
    the path of a folder are resolved, and the query of an object store's URL is left out. A URL of
    Azure that leaves the account to the options has another spelling than one that names it.
    """
    return _canonical(without_query(url))


def place_of(url: str) -> str:
    """Return a text that is the same for all URLs that may name one location. Unlike ``canonical``,
    it leaves out the account of Azure.
    """
    return _ACCOUNT.sub(r"\1", canonical(url))


def is_spelling_of(url: str, target: str, *, follows_links: bool = False) -> bool:
    """Return True if two URLs name one location.

    Links in ``target`` are not followed, and those in ``url`` only with ``follows_links``. So the
    call does not wait if the file system of ``target`` does not answer.
    """
    absolute = os.path.realpath if follows_links else os.path.abspath
    place, target_place = _comparable(
        _canonical(url, absolute), _canonical(target, os.path.abspath)
    )
    return place == target_place


def _canonical(url: str, absolute: Callable[[str], str] = os.path.realpath) -> str:
    """Return a spelling of ``url`` that is the same for all URLs of one location.

    The result ends in a slash, so that 'runs/gpt2/' does not start with 'runs/gpt/'. ``absolute``
    returns the absolute path of a folder.
    """
    if is_folder(url):
        return os.path.join(absolute(local_path(url)), "")
    scheme, separator, path = url.partition("://")
    if not separator:
        return f"{url.rstrip('/')}/"
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    host, _, path = path.partition("/")
    return f"{scheme}://{f'{_canonical_host(scheme, host)}/{path}'.rstrip('/')}/"


def _canonical_host(scheme: str, host: str) -> str:
    """Return the part of a URL up to the path without what may be left out: the user and the
    default port of a file server, and the domain of an account of Azure.
    """
    if scheme == "abfs":
        container, separator, account = host.partition("@")
        return f"{container}{separator}{account.partition('.')[0].lower()}"
    if scheme in _PORTS:
        return host.rpartition("@")[2].lower().removesuffix(f":{_PORTS[scheme]}")
    return host


def user_of(url: str) -> str:
    """Return the user in the URL of a file server, without the password; empty if it names none, or
    for another URL.
    """
    users, separator, _ = urlsplit(url).netloc.rpartition("@")
    scheme = _ALIASES.get(scheme_of(url), scheme_of(url))
    return users.partition(":")[0] if separator and scheme in _PORTS else ""


def _comparable(place: str, other_place: str) -> tuple[str, str]:
    """Return two canonical URLs so that they are equal if they may name one location. One of Azure
    may leave the account to the options.
    """
    if _ACCOUNT.match(place) and _ACCOUNT.match(other_place):
        return place, other_place
    return _ACCOUNT.sub(r"\1", place), _ACCOUNT.sub(r"\1", other_place)


def path_between(url: str, target: str) -> str:
    """Return the path from the root ``url`` to the root ``target``, such as "../base-run".

    Raises:
        ConfigError: The roots are on different stores, one is the other or inside of it, or no
            record can hold the path.
    """
    url, target = without_query(url), without_query(target)
    position = relation(url, target)
    if position != "apart":
        raise ConfigError(
            f"{target} and {url} are one root, or one is inside of the other: name the root of "
            "another run"
        )
    place, target_place = _comparable(_canonical(url), _canonical(target))
    if "::" in url + target or _store_of(place) != _store_of(target_place):
        raise ConfigError(
            f"{target} is not on the store of {url}: name a root of the same "
            f"{'machine' if is_folder(url) else 'bucket or server'}, or copy the step there with "
            "`ckpt copy`"
        )
    path = posixpath.relpath(target_place, place)
    if _NO_TEXT.search(path) or (not is_folder(url) and _has_url_syntax(path)):
        raise ConfigError(
            f"{target} has bytes that are no text, or a '?', in its path: give that root another "
            "name"
        )
    return path


def url_at(url: str, path: str) -> str:
    """Return the URL of the root at ``path``, which is relative to the root ``url``.

    Raises:
        StorageError: The path leads out of the store.
    """
    if not is_folder(url) and _has_url_syntax(path):
        raise StorageError(path, f"is no path on the store of {without_query(url)}")
    address, mark, query = url.partition("?") if is_object_store(url) else (url, "", "")
    place = os.path.realpath(local_path(url)) if is_folder(url) else address.rstrip("/")
    store = _store_of(place)
    names = [name for name in place[len(store) :].split("/") if name]
    for name in path.split("/"):
        if name != "..":
            names.append(name)
        elif names:
            names.pop()
        else:
            raise StorageError(path, f"leads out of the store of {without_query(url)}")
    return (
        f"file://{quote(os.fsencode(store + '/'.join(names)))}"
        if is_folder(url)
        else (f"{store}/{'/'.join(names)}{mark}{query}")
    )


def _has_url_syntax(path: str) -> bool:
    """Return True if a part of ``path`` would be taken for options, such as another server, or for
    another store, if ``path`` was in the URL of a store.
    """
    return "?" in path or "::" in path


def _store_of(place: str) -> str:
    """Return the part of a place that all roots of its store have: '/' for the path of a folder,
    and scheme and bucket or host of a URL.
    """
    scheme, separator, path = place.partition("://")
    return f"{scheme}://{path.partition('/')[0]}" if separator else "/"


def local_path(url: str) -> str:
    """Return the path that a ``file://`` URL names, or ``url`` itself if it is a plain path. ``~``
    is expanded.
    """
    if url.lower().startswith("file://"):
        # The name of a folder may have bytes that are no text.
        url = unquote(urlsplit(url, allow_fragments=False).path, errors="surrogateescape")
    return os.path.expanduser(url)
