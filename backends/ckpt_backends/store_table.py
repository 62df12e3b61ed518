"""The stores that ckpt has been run on, by URL scheme.

The table says for each store which tier it can be, and what was run. ``docs/stores.md`` shows it. A
URL of fsspec whose scheme is not in the table is refused, unless the option ``untested`` asks for
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ckpt.errors import ConfigError

UNTESTED: Final = "untested"
"""The name of the option that opens a store which is not in the table."""

Role = Literal["any tier", "near tier", "farther tier", "tests only", "no tier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What was measured about the stores of some URL schemes.

    Attributes:
        schemes: The URL schemes, the usual one first.
        role: Which tier such a store can be. "any tier" includes the only one. A "near tier" needs
            a tier after it, and a "farther tier" one before it.
        reason: Why the store cannot be every tier; '' if it can.
        atomic_create: True if exactly one of several concurrent puts *if absent* succeeds.
        full_disk: What a full disk is told as: a class of ``ckpt.errors``; '' if that was not seen.
        extra: The optional dependency of ckpt-stream that installs the client; '' if none is
            needed.
        run_on: The servers and clients with which the conformance tests were run.
    """

    schemes: tuple[str, ...]
    role: Role
    reason: str = ""
    atomic_create: bool
    full_disk: str
    extra: str = ""
    run_on: str


STORES: Final = (
    Store(
        schemes=("file", "local"),
        role="any tier",
        atomic_create=True,
        full_disk="OutOfSpace",
        run_on="see the table of file systems",
    ),
    Store(
        schemes=("shm",),
        role="near tier",
        reason="the memory of one machine",
        atomic_create=True,
        full_disk="OutOfSpace",
        run_on="Linux 6.18",
    ),
    Store(
        schemes=("memory",),
        role="tests only",
        reason="the memory of one process",
        atomic_create=True,
        full_disk="",
        run_on="Python 3.11",
    ),
    Store(
        schemes=("s3", "s3a"),
        role="any tier",
        atomic_create=True,
        full_disk="OutOfSpace",
        extra="s3",
        run_on="moto 5.2.5 and rclone 1.75.2, by s3fs 2026.9.0 and obstore 0.12.1",
    ),
    Store(
        schemes=("gs", "gcs"),
        role="any tier",
        atomic_create=True,
        full_disk="",
        extra="gcs",
        run_on="fake-gcs-server (its Python wrapper 0.1.1), by gcsfs 2026.10.1",
    ),
    Store(
        schemes=("abfs", "abfss", "az"),
        role="any tier",
        atomic_create=True,
        full_disk="",
        extra="azure",
        run_on="Azurite 3.37.0, by adlfs 2026.8.0",
    ),
    Store(
        schemes=("sftp", "ssh"),
        role="farther tier",
        reason="two puts of one key can both succeed",
        atomic_create=False,
        full_disk="OutOfSpace",
        extra="sftp",
        run_on="OpenSSH 9.2 and asyncssh 2.24.1, by paramiko 5.1.0",
    ),
    Store(
        schemes=("smb",),
        role="farther tier",
        reason="two puts of one key can both succeed",
        atomic_create=False,
        full_disk="OutOfSpace",
        extra="smb",
        run_on="Samba 4.17.12, by smbprotocol 1.17.0",
    ),
    Store(
        schemes=("ftp",),
        role="farther tier",
        reason="two puts of one key can both succeed, and the server forces nothing to its disk",
        atomic_create=False,
        full_disk="OutOfSpace",
        run_on="pyftpdlib 2.2.0, by ftplib of Python 3.11",
    ),
    Store(
        schemes=("webdav",),
        role="farther tier",
        reason="a file is missing for a moment while it is replaced",
        atomic_create=False,
        full_disk="OutOfSpace",
        extra="webdav",
        run_on="WsgiDAV 4.4.0, by webdav4 0.11.0",
    ),
)
"""The rows of the table."""

# ``dir::`` only adds a folder to each path, so the store behind it decides.
_TRANSPARENT: Final = "dir"


def store_of(scheme: str) -> Store | None:
    """Return the row of a URL scheme; None if ckpt was not run on such a store."""
    return next((store for store in STORES if scheme in store.schemes), None)


def check_tested(shown: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return ``options`` without the option ``untested``, after a check that the table has the
    store.

    Args:
        shown: The URL of the store, without credentials. It may be a chained one.
        options: The options of the tier.

    Raises:
        ConfigError: A part of the URL names a store that is not in the table, and the option
            ``untested`` is not true; or the option is neither true nor false.
    """
    rest = {name: value for name, value in options.items() if name != UNTESTED}
    untested = options.get(UNTESTED, False)
    if not isinstance(untested, bool):
        raise ConfigError(f"{shown!r}: the option {UNTESTED} takes true or false")
    for scheme in schemes_of(shown):
        if not untested and (scheme != _TRANSPARENT and store_of(scheme) is None):
            raise ConfigError(
                f"{shown!r}: ckpt was never run on a store of the kind {scheme!r}, which may lose "
                f"or damage checkpoints. Use a store of docs/stores.md, or give the tier the "
                f"option {UNTESTED}=true to try this one, as in "
                f'Tier({shown!r}, options={{"{UNTESTED}": True}})'
            )
    return rest


def schemes_of(url: str) -> list[str]:
    """Return the scheme of each part of a chained URL in lower case: "simplecache" and "s3" for
    ``simplecache::s3://b``.
    """
    return [link.partition("://")[0].lower() for link in url.split("::")]
