"""What several verbs share: their options, and the store and the threads they work with. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ckpt.pipeline.workers import Workers
    from ckpt.storage.api import StorageBackend

_MOST_THREADS = 16

RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="URL",
        help="Folder or URL of the checkpoints. Default: $CKPT_ROOT, then ./ckpt.toml.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")
]


def open_root(root: str | None) -> StorageBackend:
    """The store that ``--root``, the environment or ``ckpt.toml`` names."""
    from ckpt.config import resolve_tier
    from ckpt.storage.registry import open_backend

    tier = resolve_tier(root)
    return open_backend(tier.url, tier.options)


def workers_for(backend: StorageBackend) -> Workers:
    """As many threads as the store has use for."""
    from ckpt.pipeline.workers import Workers

    return Workers("cli", max(1, min(backend.capabilities.max_concurrency, _MOST_THREADS)))
