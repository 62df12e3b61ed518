"""vLLM: start with the weights of a run, and take those of later steps while it serves.

    llm = LLM("gpt2/", load_format="ckpt", model_loader_extra_config={"root": "runs/gpt"})

Each process of vLLM calls `register` by the plugin in ``shared``. Importing this module imports
vLLM.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader import (  # pyright: ignore[reportMissingImports]
    register_model_loader,
)

from ckpt.integrations.vllm.loader import CkptModelLoader
from ckpt.integrations.vllm.updates import CkptWeightTransferEngine

__all__ = ["CkptModelLoader", "CkptWeightTransferEngine", "register"]

NAME: Final = "ckpt"
"""The value of ``load_format``, and of ``backend`` of a ``WeightTransferConfig``."""


@cache
def register() -> None:
    """Make the loader and the engine known to vLLM in this process."""
    register_model_loader(NAME)(CkptModelLoader)
    WeightTransferEngineFactory.register_engine(NAME, CkptWeightTransferEngine)
