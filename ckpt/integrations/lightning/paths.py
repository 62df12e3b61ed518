"""The ``ckpt://`` paths that stand for steps in Lightning, and their file system for fsspec.

A path consists of ``ckpt://``, the quoted folder, ``#``, and the number of a step, "newest" or
"best". Lightning asks the file system whether a path exists and when it was modified.
``load_from_checkpoint`` also opens the path.
"""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any, Final, Self
from urllib.parse import quote, unquote

import fsspec
import torch
from fsspec import AbstractFileSystem

from ckpt.catalog.tiered_reader import SourceManifest
from ckpt.errors import ConfigError
from ckpt.integrations.lightning.strategy import MODULE, SCHEME
from ckpt.integrations.shared.step_readers import build_and_fill, opened_step
from ckpt.state.match.manifest_tree import MakeTensor, StateTree
from ckpt.storage.tiers import as_tiers

NEWEST, BEST = "newest", "best"
_READ_PATTERNS: Final = ("model", "model/*", "lightning", "lightning/*")


def path_of(root: str, step: int | str) -> str:
    return f"{SCHEME}://{quote(root)}#{step}"


def step_of(path: str, text: str) -> int | str:
    """Return the step that ``text``, the part of ``path`` after ``#``, means.

    Returns:
        The number of the step, "newest" or "best". An empty text means "newest".

    Raises:
        ConfigError: ``text`` is neither a number nor one of these words.
    """
    if text.isdecimal():
        return int(text)
    if text not in ("", NEWEST, BEST):
        raise ConfigError(
            f"{path!r} names no step: end it with # and the number of a step, or with "
            f"#{NEWEST} or #{BEST}"
        )
    return text or NEWEST


class Candidate(str):
    """A path that Lightning may choose for ``ckpt_path="last"``.

    ``saved_at`` is the time when the step of the path was saved, in seconds since 1970.
    """

    __slots__ = ("saved_at",)

    def __new__(cls, path: str, saved_at: float) -> Self:
        candidate = super().__new__(cls, path)
        candidate.saved_at = saved_at
        return candidate

    saved_at: float


class _CkptFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The file system of ``ckpt://`` paths.

    It says that every path exists. Only a restore finds out whether the step of the path exists.
    """

    protocol = SCHEME

    def exists(self, path: str, **options: Any) -> bool:
        del path, options
        return True

    def modified(self, path: str) -> datetime:
        """Return the time when the step of ``path`` was saved.

        Lightning chooses the path with the latest time.
        """
        assert isinstance(path, Candidate)
        return datetime.fromtimestamp(path.saved_at, UTC)

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        """Return a file with the weights, and with the entry ``lightning`` of rank 0, such as the
        hyper-parameters. ``load_from_checkpoint`` reads the file.

        The file has no optimizer state, so a trainer cannot resume from it without
        ``CkptCheckpoint``.
        """
        del args, options
        root, _, step = path.partition("#")
        if mode != "rb":
            raise ConfigError(f"{SCHEME}://{path} is a step of ckpt: it can only be read")
        if (target := step_of(f"{SCHEME}://{path}", step)) == BEST:
            raise ConfigError(
                f"{SCHEME}://{path} names no step, since this process has saved none: give "
                "ckpt_path='best' to validate, test or predict of a trainer with the callback, or "
                "export a step with `ckpt export`"
            )
        state = _read_step(unquote(root), target if isinstance(target, int) else None)
        content = state["lightning"]  # If this is a list, it has one item for each rank
        content_of_rank_0 = content[0] if isinstance(content, list) else content
        file = io.BytesIO()
        torch.save({**content_of_rank_0, MODULE: state["model"]}, file)
        file.seek(0)
        return file


def _read_step(root: str, step: int | None) -> dict[str, Any]:
    """Return the entries ``model`` and ``lightning`` of a step, with the tensors on the CPU."""
    with opened_step(as_tiers(root), step) as reader:
        # The outline is the manifest of the step, which describes its tensors.
        def read_state(outline: SourceManifest) -> dict[str, Any]:
            def build_state(make_tensor: MakeTensor) -> dict[str, Any]:
                tree = StateTree(outline.manifest, make_tensor, _READ_PATTERNS, by_name=False)
                return tree.build()

            return build_and_fill(reader, outline, build_state)

        return reader.try_manifests(read_state)


fsspec.register_implementation(SCHEME, _CkptFileSystem, clobber=True)
