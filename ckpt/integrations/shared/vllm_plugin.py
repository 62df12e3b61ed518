"""The plugin of vLLM. Each process of vLLM loads it at its start, also if it does not use ckpt."""

from __future__ import annotations

import logging
from importlib import import_module

_log = logging.getLogger("ckpt")


def register() -> None:
    """Make the loader and the engine known to vLLM, if this release has what they need.

    vLLM does not start if a plugin raises an error, so this one raises none.
    """
    try:
        import_module("ckpt.integrations.vllm").register()
    except ImportError as error:
        _log.info("ckpt: load_format='ckpt' is not there in this release of vLLM: %s", error)
    except Exception as error:  # noqa: BLE001 - of a release whose classes are others
        _log.warning(
            "ckpt: load_format='ckpt' is not there in this release of vLLM: %r. Set VLLM_PLUGINS "
            "to the other plugins if ckpt is not used",
            error,
        )
