"""The ``ckpt://`` paths that Lightning sees: ``ckpt://`` + the quoted folder + ``#`` + the step.

Lightning looks for them, compares their dates and, in ``load_from_checkpoint``, opens them.
"""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any, Final, Self
from urllib.parse import quote, unquote

import fsspec
import torch
from fsspec import AbstractFileSystem

from ckpt.adapters.match.tree import MakeTensor, StateTree
from ckpt.catalog.tiered_reader import Found
from ckpt.errors import ConfigError
from ckpt.integrations.lightning_strategy import MODULE, SCHEME
from ckpt.integrations.stored import built, opened_step
from ckpt.storage.tiers import as_tiers

NEWEST, BEST = "newest", "best"
_READ: Final = ("model", "model/*", "lightning", "lightning/*")


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
        state = _stored(unquote(root), int(step) if step.isdigit() else None)
        carried = state["lightning"]  # Of each rank
        first = carried[0] if isinstance(carried, list) else carried
        file = io.BytesIO()
        torch.save({**first, MODULE: state["model"]}, file)
        file.seek(0)
        return file


def _stored(root: str, step: int | None) -> dict[str, Any]:
    """Return the module and Lightning's part of a step, with the tensors on the CPU."""
    with opened_step(as_tiers(root), step) as reader:

        def build(outline: Found) -> dict[str, Any]:
            def tree(make: MakeTensor) -> dict[str, Any]:
                return StateTree(outline.manifest, make, _READ, by_name=False).build()

            return built(reader, outline, tree)

        return reader.whole(build)


fsspec.register_implementation(SCHEME, _Places, clobber=True)
