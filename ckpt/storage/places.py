"""Examine the location that a URL names, without opening a backend."""

from __future__ import annotations

import os
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from ckpt.storage.registry import scheme_of

OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "cos"}
)
"""The URL schemes of object stores. Some of them are served only through fsspec."""
_ALIASES: Final = {"gcs": "gs"}

Relation = Literal["apart", "same", "inside", "around"]


def is_folder(url: str) -> bool:
    """Return True if ``url`` is a plain path or a ``file://`` URL."""
    return scheme_of(url) == "file"


def is_missing(url: str) -> bool:
    """Return True if ``url`` is a plain path or a ``file://`` URL, and the path does not exist."""
    return is_folder(url) and not os.path.exists(_path_of(url))


def is_object_store(url: str) -> bool:
    """Return True if ``url`` names an object store, whose objects all nodes see alike."""
    return scheme_of(url) in OBJECT_STORES


def without_query(url: str) -> str:
    """Return ``url`` without its query if it names an object store. The query holds options, and
    the backend leaves it out of the URL that it displays.
    """
    return url.partition("?")[0] if is_object_store(url) else url


def relation(one: str, two: str) -> Relation:
    """Return how the locations of two URLs relate, regardless of how the URLs are spelled.

    Returns:
        "same" if both URLs name one location, "inside" if ``one`` is inside of ``two``, "around"
        if ``two`` is inside of ``one``, else "apart".
    """
    here, there = _canonical(one), _canonical(two)
    if here == there:
        return "same"
    if here.startswith(there):
        return "inside"
    return "around" if there.startswith(here) else "apart"


def _canonical(url: str) -> str:
    """Return a spelling of ``url`` that is the same for all URLs of one location.

    The result ends in a slash, so that 'runs/gpt2/' does not start with 'runs/gpt/'.
    """
    if is_folder(url):
        return os.path.join(os.path.realpath(_path_of(url)), "")
    scheme, mark, path = url.partition("://")
    if not mark:
        return f"{url.rstrip('/')}/"
    return f"{_ALIASES.get(scheme.lower(), scheme.lower())}://{path.rstrip('/')}/"


def _path_of(url: str) -> str:
    if url.lower().startswith("file://"):
        url = unquote(urlsplit(url, allow_fragments=False).path)
    return os.path.expanduser(url)
