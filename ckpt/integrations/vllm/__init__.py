"""vLLM: start with the weights of a run, and take those of later steps while it serves.

    llm = LLM("gpt2/", load_format="ckpt", model_loader_extra_config={"root": "runs/gpt"})

Each process of vLLM makes the two classes known by the plugin in ``shared``. Importing this module
imports vLLM.
"""

from __future__ import annotations

from ckpt.integrations.vllm.loader import CkptModelLoader
from ckpt.integrations.vllm.updates import CkptWeightTransferEngine

__all__ = ["CkptModelLoader", "CkptWeightTransferEngine"]
