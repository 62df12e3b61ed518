"""The plugin of vLLM. Each process of vLLM loads it at its start, also if it does not use ckpt.

So it imports neither the loaders of vLLM nor what ckpt needs for its own. The loader becomes known
when vLLM imports its loaders, and the engine is imported when vLLM makes one.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Final

NAME: Final = "ckpt"
"""The value of ``load_format``, and of ``backend`` of a ``WeightTransferConfig``."""
_LOADERS_MODULE: Final = "vllm.model_executor.model_loader"
_ENGINES_MODULE: Final = "vllm.distributed.weight_transfer"
_OWN_PACKAGE: Final = "ckpt.integrations.vllm"
_log = logging.getLogger("ckpt")


@cache
def register() -> None:
    """Make the loader and the engine known to vLLM, if this release has what they need.

    vLLM does not start if a plugin raises an error, so this one raises none.
    """
    _try_to_register("backend='ckpt'", _register_engine)
    if _LOADERS_MODULE in sys.modules:
        _try_to_register("load_format='ckpt'", _register_loader)
    else:
        sys.meta_path.insert(0, _LoadersFinder())


def _try_to_register(option: str, work: Callable[[], None]) -> None:
    """Call ``work``, and log its error if it fails, since vLLM goes on without the option."""
    try:
        work()
    except ImportError as error:
        _log.info("ckpt: %s is not there in this release of vLLM: %s", option, error)
    except Exception as error:  # noqa: BLE001 - of a release whose classes are others
        _log.warning(
            "ckpt: %s is not there in this release of vLLM: %r. Set VLLM_PLUGINS to the other "
            "plugins if ckpt is not used",
            option,
            error,
        )


def _register_engine() -> None:
    factory = import_module(_ENGINES_MODULE).WeightTransferEngineFactory
    factory.register_engine(NAME, f"{_OWN_PACKAGE}.updates", "CkptWeightTransferEngine")


def _register_loader() -> None:
    loader = import_module(f"{_OWN_PACKAGE}.loader").CkptModelLoader
    import_module(_LOADERS_MODULE).register_model_loader(NAME)(loader)


class _LoadersFinder(MetaPathFinder):
    """Registers the loader as soon as vLLM has imported its own, and then removes itself.

    A search for the module, or an import of it that fails, changes nothing.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of vLLM's loaders with a loader that registers ours after its own; None
        for any other module.
        """
        del path, target
        if fullname != _LOADERS_MODULE or getattr(self._thread, "is_searching", False):
            return None
        self._thread.is_searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._thread.is_searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _try_to_register("load_format='ckpt'", _register_loader)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
