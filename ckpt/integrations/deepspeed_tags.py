"""The tag that ``engine.load_checkpoint`` is given, checked before DeepSpeed looks for its files.

DeepSpeed looks for the files by their names, before it asks its checkpoint engine for anything. If
there are none, it raises an ``AssertionError`` without text.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import distributed as dist

from ckpt.errors import NoCheckpoint
from ckpt.errors.base import few

Tags = Callable[[], list[str]]


def check_loads(engine: Any, folder: str, checkpoints: Any, tags: Tags) -> None:
    """Let ``engine.load_checkpoint`` check its tag, while ``checkpoints`` is the engine's own.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        folder: The folder of ``checkpoints``.
        checkpoints: The checkpoint engine.
        tags: Returns the tags that can be loaded, the newest first.
    """
    load = engine.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        if engine.checkpoint_engine is checkpoints and tag is not None:
            _check_tag(os.fspath(load_dir), str(tag), folder, tags)
        return load(load_dir, tag, *args, **options)

    engine.load_checkpoint = load_checkpoint


def _check_tag(load_dir: str, tag: str, folder: str, tags: Tags) -> None:
    """Raise ``NoCheckpoint`` on all ranks if the folder of the tag is missing on any of them."""
    wrong = ""
    if not os.path.isdir(os.path.join(load_dir, tag)):
        wrong = f"no step has the tag {tag!r}"
        if os.path.abspath(load_dir) == folder:
            found = tags()
            wrong += f", the tags are {few(found)}" if found else ", and there is no other tag"
        else:
            wrong += f" there, and CkptEngine has the folder {folder}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, wrong)
    other = next(((rank, each) for rank, each in enumerate(told) if each), None)
    if other is not None:
        raise NoCheckpoint(load_dir, wrong or f"{other[1]} (on rank {other[0]})")
