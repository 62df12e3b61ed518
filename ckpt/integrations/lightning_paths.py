"""The ``ckpt://`` paths that Lightning sees: ``ckpt://`` + the quoted folder + ``#`` + the step.

Lightning looks for them, compares their dates and, in ``load_from_checkpoint``, opens them.
"""

from __future__ import annotations

import io
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self
from urllib.parse import quote, unquote

import fsspec
import torch
from fsspec import AbstractFileSystem

from ckpt.adapters.match.tree import StateTree
from ckpt.catalog.index import find, read_manifest
from ckpt.catalog.reading import StepReader, Wanted
from ckpt.errors import ConfigError
from ckpt.integrations.lightning_strategy import MODULE, SCHEME
from ckpt.model.box import Box
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend

NEWEST, BEST = "newest", "best"
_READ: Final = ("model", "model/*", "lightning", "lightning/*")
_MOST_THREADS: Final = 8


def path_of(root: str, step: int | str) -> str:
    return f"{SCHEME}://{quote(root)}#{step}"


class Candidate(str):
    """A path that ``ckpt_path="last"`` may mean, and when its step was saved."""

    __slots__ = ("saved_at",)

    def __new__(cls, path: str, saved_at: float) -> Self:
        made = super().__new__(cls, path)
        made.saved_at = saved_at
        return made

    saved_at: float


class _Places(AbstractFileSystem):  # type: ignore[misc]
    """Lets Lightning look for ``ckpt://`` paths. Which step one means is decided by the restore."""

    protocol = SCHEME

    def exists(self, path: str, **how: Any) -> bool:
        del path, how
        return True

    def modified(self, path: str) -> datetime:
        """Return when the step was saved: Lightning takes the youngest of its candidates."""
        assert isinstance(path, Candidate)
        return datetime.fromtimestamp(path.saved_at, UTC)

    def _open(self, path: str, mode: str = "rb", *more: Any, **how: Any) -> Any:
        """Return a file with the weights and the hyper-parameters, for ``load_from_checkpoint``.

        It holds no optimizer, so a trainer resumes with ``CkptCheckpoint``.
        """
        del more, how
        root, _, step = path.partition("#")
        if mode != "rb":
            raise ConfigError(f"{SCHEME}://{path} is a step of ckpt: it can only be read")
        if step == BEST:
            raise ConfigError(
                f"{SCHEME}://{path} names no step, since this process has saved none: give "
                "ckpt_path='best' to validate, test or predict of a trainer with the callback, or "
                "export a step with `ckpt export`"
            )
        built = _built(unquote(root), int(step) if step.isdigit() else None)
        carried = built["lightning"]  # Of each rank
        first = carried[0] if isinstance(carried, list) else carried
        file = io.BytesIO()
        torch.save({**first, MODULE: built["model"]}, file)
        file.seek(0)
        return file


def _built(root: str, step: int | None) -> dict[str, Any]:
    """Return the module and Lightning's part of a step, with the tensors on the CPU."""
    backend = open_backend(root)
    threads = max(1, min(backend.capabilities.max_concurrency, _MOST_THREADS))
    try:
        ref = find(backend, step)[0]
        manifest = read_manifest(backend, ref)
        with Workers("load", threads) as workers:
            reader = StepReader(backend, ref, manifest, workers)
            tree = StateTree(manifest, partial(_tensor, reader), _READ, by_name=False)
            return tree.build()
    finally:
        backend.close()


def _tensor(reader: StepReader, name: str) -> torch.Tensor:
    stored = reader.tensor(name)
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    memory = torch.empty(stored.nbytes, dtype=torch.uint8)
    reader.read([Wanted(name, Box.whole(stored.shape), memoryview(memory.numpy()))])  # type: ignore[arg-type]
    return memory.view(dtype).view(stored.shape)


fsspec.register_implementation(SCHEME, _Places, clobber=True)
