"""The tokens that vLLM generates with a model of transformers, from the checkpoint of its module.

The arguments are an empty folder and the kind of the model. Prints JSON: the tokens of vLLM, and
those of transformers, for the step that it starts with and for one that it gets later.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from ckpt import CheckpointManager

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=128, n_embd=128, n_layer=2, n_head=2, n_positions=64
    ),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=64
    ),
}
PROMPT = [1, 2, 3, 4]
LENGTH = 8


def main(folder: Path, kind: str) -> None:
    config = CONFIGS[kind]()
    config.dtype = "float32"
    expected: list[list[int]] = []
    with CheckpointManager(folder / "run") as manager:
        for step in (1, 2):
            torch.manual_seed(step)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            manager.save({"model": model}, step)
            with torch.no_grad():
                tokens = model.generate(
                    torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False,
                    eos_token_id=None,
                )  # fmt: skip
            expected.append(tokens[0, len(PROMPT) :].tolist())
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder / "config")
    llm = LLM(
        str(folder / "config"),
        load_format="ckpt",
        model_loader_extra_config={"root": str(folder / "run"), "step": 1},
        weight_transfer_config=WeightTransferConfig(backend="ckpt"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=32,
        kv_cache_memory_bytes=16 << 20,
    )
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    generated: list[list[int]] = []
    for step in (1, 2):
        if step == 2:
            llm.init_weight_transfer_engine({"init_info": {"root": str(folder / "run")}})
            llm.start_weight_update()
            llm.update_weights({"update_info": {"step": step}})
            llm.finish_weight_update()
            llm.reset_prefix_cache()
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        generated.append(list(answer.outputs[0].token_ids))
    print("FACTS", json.dumps([generated, expected]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
