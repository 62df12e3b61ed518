"""A check of the argument ``tag`` of ``engine.load_checkpoint``.

DeepSpeed itself looks for the files of the tag by their names before it calls its checkpoint
engine. If it finds no files, it raises an ``AssertionError`` without text.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import distributed as dist

from ckpt.errors import NoCheckpoint
from ckpt.errors.base import few
from ckpt.integrations.all_ranks import of_all

Tags = Callable[[], list[str]]


def check_loads(engine: Any, folder: str, checkpoints: Any, tags: Tags) -> None:
    """Replace ``engine.load_checkpoint`` by a function that checks its argument ``tag`` first.

    The new function raises ``NoCheckpoint`` on all ranks if the folder of the tag is missing on any
    rank. It checks the tag only while ``checkpoints`` is the checkpoint engine of ``engine``.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        folder: The absolute path of the folder that ``checkpoints`` was given.
        checkpoints: The checkpoint engine.
        tags: A function that returns the tags that can be loaded, the newest first.
    """
    load = engine.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        if engine.checkpoint_engine is checkpoints and tag is not None:
            _check_tag(os.fspath(load_dir), str(tag), folder, tags)
        return load(load_dir, tag, *args, **options)

    engine.load_checkpoint = load_checkpoint


def _check_tag(load_dir: str, tag: str, folder: str, tags: Tags) -> None:
    """Raise ``NoCheckpoint`` on all ranks if the folder of the tag is missing on any rank."""

    def wrong() -> str:
        if os.path.isdir(os.path.join(load_dir, tag)):
            return ""
        if os.path.abspath(load_dir) != folder:
            return f"no step has the tag {tag!r} there, and CkptEngine has the folder {folder}"
        others = f"the tags are {few(found)}" if (found := tags()) else "and there is no other tag"
        return f"no step has the tag {tag!r}, {others}"

    missing = {
        rank: each for rank, each in enumerate(of_all("cannot look for the tag", wrong)) if each
    }
    if missing:
        rank, other = min(missing.items())
        raise NoCheckpoint(load_dir, missing.get(dist.get_rank()) or f"{other} (on rank {rank})")
