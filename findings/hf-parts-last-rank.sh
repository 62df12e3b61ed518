#!/bin/bash
# Guess: A tool that joins the files of all ranks fails if the file of the last rank is missing, as a
#   folder of shards with an index does, since each file says what the whole is.
# Behaviour: The header of a part has only the offsets of its tensors. The shape of the whole tensor
#   and the number of ranks are in no file. Without the last file, the consolidation of torch
#   succeeds and writes a shorter tensor.
# Source: torch 2.13.0, torch/distributed/checkpoint/hf_storage.py (DCP_SHARDING_INFO) and
#   _consolidate_hf_safetensors.py, which computes the shape from the files that are there.
# Affected: who copies, downloads or prunes the folder of HuggingFaceStorageWriter(
#   save_distributed=True), and joins it later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy safetensors==0.8.0
cat >"$folder/ranks.py" <<'PYTHON'
import json
import os
import sys
import warnings
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3,))
whole = torch.arange(12.0).view(6, 2)
writer = HuggingFaceStorageWriter("parts", save_distributed=True)
dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=writer)
dist.barrier()
rank = dist.get_rank()
dist.destroy_process_group()
if rank:
    sys.exit()
print("torch", torch.__version__, "safetensors", version("safetensors"))
files = sorted(name for name in os.listdir("parts") if name.endswith(".safetensors"))
headers = ""
for name in files:
    with safe_open(f"parts/{name}", "pt") as part:
        headers += json.dumps(part.metadata())
        print(name, part.metadata()["DCP_SHARDING_INFO"])
os.remove(f"parts/{files[-1]}")
print("removed", files[-1], "of", len(files))
os.mkdir("joined")
try:
    consolidate_safetensors_files("parts", "joined", {"w": 1})
    (name,) = (each for each in os.listdir("joined") if each.endswith(".safetensors"))
    shape = list(load_file(f"joined/{name}")["w"].shape)
except Exception as error:
    print("the consolidation raises", repr(error)[:200])
    shape = None
print("consolidated without an error:", shape, "of", list(whole.shape))
if shape != [4, 2] or "[6, 2]" in headers:
    print("the behaviour has changed: a missing part is found, or a header has the whole shape")
    sys.exit(1)
print("no header has the shape of the whole tensor, and a missing last part is not noticed")
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone \
    --nproc-per-node=3 ranks.py
