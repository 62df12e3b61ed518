#!/usr/bin/env bash
# Guess: After `save_pretrained` into a folder that holds an earlier model, `from_pretrained` loads
#   the model that was saved last.
# Behaviour: If the earlier model was one file and the later one is several, the file of the earlier
#   one stays, and `from_pretrained` loads it: the older weights, without an error or a warning.
# Source: transformers 5.23.0, `save_pretrained` in modeling_utils.py removes only files that are
#   named as parts; `from_pretrained` looks for the single file before the index.
# Affected: programs that save into the folder of the model that they have fine-tuned, or export again
#   with a smaller `max_shard_size`, and programs that choose the file by its name in this order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 torch==2.13.0 numpy==2.4.6
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import os
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__, "torch", torch.__version__)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
folder = sys.argv[1]
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
)
torch.manual_seed(0)
first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
first.save_pretrained(folder)
second.save_pretrained(folder, max_shard_size="20KB")
print("the folder has", *sorted(name for name in os.listdir(folder) if name.startswith("model")))
name = "model.embed_tokens.weight"
loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()[name]
if torch.equal(loaded, second.state_dict()[name]):
    print("The behaviour has changed: the model that was saved last is loaded.")
    sys.exit(1)
if not torch.equal(loaded, first.state_dict()[name]):
    print("The behaviour has changed: neither model is loaded.")
    sys.exit(1)
print("The model that was saved first is loaded.")
PYTHON
