"""Checks around ``engine.load_checkpoint``: the argument ``tag``, and errors on some ranks only.

DeepSpeed itself looks for the files of the tag by their names before it calls its checkpoint
engine. If it finds no files, it raises an ``AssertionError`` without text. A rank that fails in
code of DeepSpeed makes no further load, for which the other ranks would wait.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed as dist

from ckpt.errors import NoCheckpoint, RestoreError
from ckpt.errors.base import few
from ckpt.integrations.shared.all_ranks import all_results

Tags = Callable[[], list[str]]


def check_loads(engine: Any, folder: str, checkpoint_engine: Any, tags: Tags) -> None:
    """Replace ``engine.load_checkpoint`` by a function that checks its argument ``tag`` first.

    The new function raises ``NoCheckpoint`` on all ranks if the folder of the tag is missing on any
    rank. If the load fails on a rank, all ranks raise an error, and none waits for another one. The
    checks are made only while ``checkpoint_engine`` is the checkpoint engine of ``engine``.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        folder: The absolute path of the folder that ``checkpoint_engine`` was given.
        checkpoint_engine: The `CkptEngine`. Its ``has_shared_error`` says whether a load has
            failed on all ranks alike.
        tags: A function that returns the tags that can be loaded, the newest first.
    """
    load = engine.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        if engine.checkpoint_engine is not checkpoint_engine:
            return load(load_dir, tag, *args, **options)
        if tag is not None:
            _check_tag(os.fspath(load_dir), str(tag), folder, tags)
        checkpoint_engine.has_shared_error = False
        failure: Exception | None = None
        result: Any = None
        try:
            result = load(load_dir, tag, *args, **options)
        except Exception as error:
            if (
                checkpoint_engine.has_shared_error
            ):  # The other ranks have it, and have ended the load
                raise
            failure = error

        def has_loaded_path() -> bool:
            if failure is not None:
                raise failure
            return result[0] is not None  # DeepSpeed returns the path and the client state

        check_same_files(all_results("cannot load the checkpoint", has_loaded_path))
        return result

    engine.load_checkpoint = load_checkpoint


def check_same_files(results: Sequence[object]) -> None:
    """Raise ``RestoreError`` if some ranks have ended their load, and others load a file.

    Args:
        results: For each rank whether its load has found a checkpoint, or what it has read of a
            file.
    """
    load_results = [result if isinstance(result, bool) else None for result in results]
    odd_rank = next(
        (rank for rank, result in enumerate(load_results) if result is not load_results[0]), None
    )
    if odd_rank is not None:
        raise RestoreError(
            f"rank {odd_rank} loads other files than rank 0, or finds no checkpoint: give all "
            "ranks "
            "the same folder, with the same file 'latest'"
        )


def _check_tag(load_dir: str, tag: str, folder: str, tags: Tags) -> None:
    """Raise ``NoCheckpoint`` on all ranks if the folder of the tag is missing on any rank."""

    def tag_fault() -> str:
        if os.path.isdir(os.path.join(load_dir, tag)):
            return ""
        if os.path.abspath(load_dir) != folder:
            return f"no step has the tag {tag!r} there, and CkptEngine has the folder {folder}"
        text = f"the tags are {few(names)}" if (names := tags()) else "and there is no other tag"
        return f"no step has the tag {tag!r}, {text}"

    missing = {
        rank: fault
        for rank, fault in enumerate(all_results("cannot look for the tag", tag_fault))
        if fault
    }
    if missing:
        rank, reason = min(missing.items())
        raise NoCheckpoint(load_dir, missing.get(dist.get_rank()) or f"{reason} (on rank {rank})")
