"""Where a URL points: the facts about schemes that do not need a backend."""

from __future__ import annotations

import os
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from ckpt.storage.registry import scheme_of

_OBJECT_STORES: Final = frozenset({"s3", "gs", "gcs"})
_ALIASES: Final = {"gcs": "gs"}

Relation = Literal["apart", "same", "inside", "around"]


def is_folder(url: str) -> bool:
    """Return whether ``url`` is a folder of this machine."""
    return scheme_of(url) == "file"


def is_missing(url: str) -> bool:
    """Return whether ``url`` is a folder of this machine that does not exist."""
    return is_folder(url) and not os.path.exists(_path_of(url))


def is_object_store(url: str) -> bool:
    """Return whether ``url`` is a bucket, which all nodes see alike."""
    return scheme_of(url) in _OBJECT_STORES


def relation(one: str, two: str) -> Relation:
    """Return how two places stand to each other, however their URLs are spelled.

    Returns:
        "same" place, "inside" if ``one`` is inside ``two``, "around" if it is the other way round,
        else "apart".
    """
    here, there = _canonical(one), _canonical(two)
    if here == there:
        return "same"
    if here.startswith(there):
        return "inside"
    return "around" if there.startswith(here) else "apart"


def _canonical(url: str) -> str:
    """Return the one spelling of a place. It ends in a slash, so that 'runs/gpt2' is not inside
    'runs/gpt'.
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
