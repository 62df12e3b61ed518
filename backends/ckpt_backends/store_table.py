"""The stores that ckpt knows, by URL scheme, and whether each can be a tier.

The table says for each store which tier it can be. ``docs/stores.md`` shows it, with the runs that
have shown it. A URL of fsspec whose scheme is not in the table, or is "no tier" there, is refused,
unless the option ``untested`` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ckpt.errors import ConfigError

UNTESTED_OPTION: Final = "untested"
"""The name of the option that opens a store which would be refused."""

Role = Literal["any tier", "near tier", "farther tier", "tests only", "no tier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What was measured about the stores of some URL schemes.

    Attributes:
        schemes: The URL schemes, the usual one first.
        role: Which tier such a store can be. "any tier" includes the only one. A "near tier" needs
            a tier after it, and a "farther tier" one before it. "No tier" is refused.
        reason: Why the store cannot be every tier; '' if it can.
        atomic_create: True if exactly one of several concurrent puts *if absent* succeeds.
        full_disk: What a full disk is told as: a class of ``ckpt.errors``; '' if that was not seen.
        extra: The optional dependency of ckpt-stream that installs the client; '' if none is
            needed.
    """

    schemes: tuple[str, ...]
    role: Role
    reason: str = ""
    atomic_create: bool
    full_disk: str
    extra: str = ""


STORES: Final = (
    Store(
        schemes=("file", "local"),
        role="any tier",
        atomic_create=True,
        full_disk="OutOfSpace",
    ),
    Store(
        schemes=("shm",),
        role="near tier",
        reason="the memory of one machine",
        atomic_create=True,
        full_disk="OutOfSpace",
    ),
    Store(
        schemes=("memory",),
        role="tests only",
        reason="the memory of one process",
        atomic_create=True,
        full_disk="",
    ),
    Store(
        schemes=("s3", "s3a"),
        role="any tier",
        atomic_create=True,
        full_disk="",
        extra="s3",
    ),
    Store(
        schemes=("gs", "gcs"),
        role="any tier",
        atomic_create=True,
        full_disk="",
        extra="gcs",
    ),
    Store(
        schemes=("abfs", "abfss", "az"),
        role="any tier",
        atomic_create=True,
        full_disk="",
        extra="azure",
    ),
    Store(
        schemes=("sftp", "ssh"),
        role="farther tier",
        reason="two puts of one key can both succeed",
        atomic_create=False,
        full_disk="OutOfSpace",
        extra="sftp",
    ),
    Store(
        schemes=("smb",),
        role="farther tier",
        reason="two puts of one key can both succeed",
        atomic_create=False,
        full_disk="OutOfSpace",
        extra="smb",
    ),
    Store(
        schemes=("ftp",),
        role="farther tier",
        reason="two puts of one key can both succeed, and the server forces nothing to its disk",
        atomic_create=False,
        full_disk="OutOfSpace",
    ),
    Store(
        schemes=("webdav",),
        role="farther tier",
        reason="a file is missing for a moment while it is replaced",
        atomic_create=False,
        full_disk="OutOfSpace",
        extra="webdav",
    ),
    Store(
        schemes=("simplecache", "filecache"),
        role="no tier",
        reason="the cache gives an object as it was, after another client has replaced it",
        atomic_create=False,
        full_disk="",
    ),
    Store(
        schemes=("hf",),
        role="no tier",
        reason="ckpt was never run on the Hugging Face Hub",
        atomic_create=False,
        full_disk="",
    ),
)
"""The rows of the table."""

DIR_SCHEME: Final = "dir"
"""The scheme that only adds a folder to each path, so that the store behind it decides."""


def store_of(scheme: str) -> Store | None:
    """Return the row of a URL scheme; None if the table has none."""
    return next((store for store in STORES if scheme in store.schemes), None)


def check_tested(clean_url: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return ``options`` without the option ``untested``, after a check that the table allows the
    store.

    Args:
        clean_url: The URL of the store, without credentials. It may be a chained one.
        options: The options of the tier.

    Raises:
        ConfigError: A part of the URL names a store that is not in the table or is "no tier" there,
            and the option ``untested`` is not true; or the option is neither true nor false.
    """
    rest = {name: value for name, value in options.items() if name != UNTESTED_OPTION}
    allows_untested = options.get(UNTESTED_OPTION, False)
    if not isinstance(allows_untested, bool):
        raise ConfigError(f"{clean_url!r}: the option {UNTESTED_OPTION} takes true or false")
    for scheme in schemes_of(clean_url):
        if not allows_untested and (scheme != DIR_SCHEME and (reason := _refusal(scheme))):
            raise ConfigError(
                f"{clean_url!r}: {reason}. Use a store of docs/stores.md, or give the tier the "
                f"option {UNTESTED_OPTION}=true to try this one, as in "
                f'Tier({clean_url!r}, options={{"{UNTESTED_OPTION}": True}})'
            )
    return rest


def _refusal(scheme: str) -> str:
    """Return why a store of this scheme is refused; '' if it can be a tier."""
    if (store := store_of(scheme)) is None:
        return (
            f"ckpt was never run on a store of the kind {scheme!r}, which may lose or damage "
            "checkpoints"
        )
    if store.role != "no tier":
        return ""
    return f"{scheme!r} is no store for checkpoints: {store.reason}"


def schemes_of(url: str) -> list[str]:
    """Return the scheme of each part of a chained URL in lower case: "simplecache" and "s3" for
    ``simplecache::s3://b``.
    """
    return [part.partition("://")[0].lower() for part in url.split("::")]
