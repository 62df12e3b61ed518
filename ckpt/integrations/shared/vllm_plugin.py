"""The plugin of vLLM. Each process of vLLM loads it at its start, also if it does not use ckpt."""

from __future__ import annotations

import logging
from importlib import import_module

_log = logging.getLogger("ckpt")


def register() -> None:
    """Make the loader and the engine known to vLLM, if this release has what they need."""
    try:
        door = import_module("ckpt.integrations.vllm")
    except ImportError as error:
        _log.info("ckpt: load_format='ckpt' is not there in this release of vLLM: %s", error)
        return
    door.register()
