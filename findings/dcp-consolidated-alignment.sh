#!/bin/bash
# Guess: the tensors of a safetensors file begin at a multiple of 8 bytes, as those that the library
#        of Hugging Face writes do, so a program that maps the file can use them in place.
# Behaviour: the file that DCP consolidates from the parts of the ranks has a header without padding,
#        so its tensors begin at any byte, and a float32 in the mapped file may be at an odd address.
# Source: torch 2.13.0, torch/distributed/checkpoint/_consolidate_hf_safetensors.py, _write_metadata;
#        safetensors 0.8.0, which pads the header with blanks.
# Affected: programs that map a model without a copy, and direct reads of its tensors.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 safetensors==0.8.0

"$folder/venv/bin/python" - "$folder/out" <<'PY'
import glob
import os
import sys
import warnings

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

warnings.simplefilter("ignore")
out = sys.argv[1]
print("torch", torch.__version__, "safetensors", safetensors.__version__)


def first_tensor(path: str) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


starts = {"consolidated": [], "library": []}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for length in range(1, 9):
    state = {"w" * length: torch.ones(4)}
    folder = f"{out}-{length}"
    writer = HuggingFaceStorageWriter(
        path=folder, fqn_to_index_mapping=dict.fromkeys(state, 1), save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(state, storage_writer=writer)
    [path] = glob.glob(os.path.join(folder, "model-*.safetensors"))
    starts["consolidated"].append(first_tensor(path))
    save_file(state, f"{folder}.safetensors")
    starts["library"].append(first_tensor(f"{folder}.safetensors"))
dist.destroy_process_group()
print("where the first tensor begins, for names of 1 to 8 letters:")
for name, places in starts.items():
    print(f"  {name}: {places}, modulo 8: {[place % 8 for place in places]}")
if any(place % 8 for place in starts["library"]):
    sys.exit("the behaviour has changed: the library does not pad the header")
if not any(place % 8 for place in starts["consolidated"]):
    sys.exit("the behaviour has changed: the consolidated file pads the header")
print("The library pads the header to 8 bytes. The consolidated file does not.")
PY
