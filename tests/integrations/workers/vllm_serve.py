"""A rollout with vLLM on the CPU: the weights of a run at the start, and those of later steps.

The arguments are an empty folder, the number of workers, and whether updates fail between. Prints
JSON: what the engine generates after each event, and the errors that it gives.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if sys.argv[2] != "1" else "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from ckpt import CheckpointManager
from tests.kit.damage import files, flip

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
PROMPT = [1, 2, 3, 4]
LENGTH = 8
CONFIG = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="float32")


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(CONFIG).eval()


def expected(seed: int) -> list[int]:
    with torch.no_grad():
        tokens = model(seed).generate(
            torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None
        )
    return tokens[0, len(PROMPT) :].tolist()


class Engine:
    def __init__(self, config: Path, workers: int, **options: Any) -> None:
        self.llm = LLM(
            str(config),
            load_format="ckpt",
            model_loader_extra_config=options,
            weight_transfer_config=WeightTransferConfig(backend="ckpt"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=32,
            kv_cache_memory_bytes=16 << 20,
            tensor_parallel_size=workers,
        )

    def follow(self, **options: Any) -> None:
        self.llm.init_weight_transfer_engine({"init_info": {"timeout_seconds": 2.0, **options}})

    def fetch(self, step: int) -> str:
        """Begin an update to ``step``. Return the error, or nothing."""
        self.llm.start_weight_update()
        try:
            self.llm.update_weights({"update_info": {"step": step}})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def finish(self) -> str:
        try:
            self.llm.finish_weight_update()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self.llm.reset_prefix_cache()
        return ""

    def tokens(self) -> list[int]:
        sampling = SamplingParams(
            temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False
        )
        (answer,) = self.llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)


def main(folder: Path, workers: int, *, fails: bool) -> None:
    root, config = folder / "run", folder / "config"
    CONFIG.save_pretrained(config)
    facts: dict[str, Any] = {"expected": {seed: expected(seed) for seed in (1, 2, 3)}}
    with CheckpointManager(root) as manager:
        for seed in (1, 2):
            manager.save({"model": model(seed)}, step=seed)
        engine = Engine(config, workers, root=str(root), step=1)
        facts["start"] = engine.tokens()
        if fails:
            facts["no root"] = engine.fetch(2)
        engine.follow(root=str(root))
        facts["fetch"] = engine.fetch(2), engine.tokens()
        facts["finish"] = engine.finish(), engine.tokens()
        if fails:
            facts["missing"] = engine.fetch(9), engine.tokens()
            manager.save({"model": model(3)}, step=3)
            data = files(root, 3)["data"]
            flip(data, data.stat().st_size // 2)
            facts["damaged"] = engine.fetch(3), engine.tokens()
        weights = {f"net.{name}": value for name, value in model(3).state_dict().items()}
        manager.save({"actor": weights}, step=4)
        names: dict[str, str | None] = {name: name.removeprefix("net.") for name in weights}
        if fails:
            for event, name in (("incomplete", None), ("strange", "lm_heads.weight")):
                others = names | {"net.lm_head.weight": name}
                engine.follow(root=str(root), name="actor", names=others)
                facts[event] = engine.fetch(4), engine.tokens()
        engine.follow(root=str(root), name="actor", names=names)
        facts["names"] = engine.fetch(4), engine.finish(), engine.tokens()
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), fails=sys.argv[3] == "fails")
