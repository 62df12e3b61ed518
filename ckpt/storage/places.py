"""Examine the location that a URL names, without opening a backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from ckpt.storage.registry import scheme_of

OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "cos"}
)
"""The URL schemes of object stores. Some of them are served only through fsspec."""
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
    place, base_place = _canonical(url), _canonical(base)
    if place == base_place:
        return "same"
    if place.startswith(base_place):
        return "inside"
    return "around" if base_place.startswith(place) else "apart"


def canonical(url: str) -> str:
    """Return a spelling of ``url`` that is the same for all URLs of one location. Symbolic links in
    the path of a folder are resolved, and the query of an object store's URL is left out.
    """
    return _canonical(without_query(url))


def is_spelling_of(url: str, target: str, *, follows_links: bool = False) -> bool:
    """Return True if two URLs name one location.

    Links in ``target`` are not followed, and those in ``url`` only with ``follows_links``. So the
    call does not wait if the file system of ``target`` does not answer.
    """
    absolute = os.path.realpath if follows_links else os.path.abspath
    return _canonical(url, absolute) == _canonical(target, os.path.abspath)


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
    return f"{_ALIASES.get(scheme.lower(), scheme.lower())}://{path.rstrip('/')}/"


def local_path(url: str) -> str:
    """Return the path that a ``file://`` URL names, or ``url`` itself if it is a plain path. ``~``
    is expanded.
    """
    if url.lower().startswith("file://"):
        url = unquote(urlsplit(url, allow_fragments=False).path)
    return os.path.expanduser(url)
