#!/usr/bin/env bash
# Guess: with plan caching, the metadata of a checkpoint describe the tensors that were saved.
# Behaviour: they describe those of the first save. After a model was converted from bfloat16 to
#   float32, the files hold float32, the metadata say bfloat16, and dcp_to_torch_save() rounds each
#   weight to bfloat16 without a word. A load into float32 tensors is right.
# Source: torch 2.13.0, distributed/checkpoint/default_planner.py (_compare_save_plans compares
#   indices and sizes, not dtypes; the cached metadata are used again).
# Affected: who changes the dtype of a model in one process (bf16 pretraining, float32 export) and
#   saves with DefaultSavePlanner(enable_plan_caching=True), as async recipes advise for speed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def save(tensor, name):
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"weight": tensor}, storage_writer=FileSystemWriter(name), planner=planner)


value = 1.0009765625  # float32 has it, bfloat16 has 1.0
save(torch.ones(4, dtype=torch.bfloat16), "first")
save(torch.full((4,), value), "second")

stated = FileSystemReader("second").read_metadata().state_dict_metadata["weight"].properties.dtype
loaded = {"weight": torch.zeros(4)}
dcp.load(loaded, checkpoint_id="second")
dcp_to_torch_save("second", "converted.pt")
converted = torch.load("converted.pt")["weight"]
dist.destroy_process_group()

print("torch", torch.__version__)
print("saved second:     float32", value)
print("metadata say:    ", stated)
print("dcp.load gives:  ", loaded["weight"].dtype, loaded["weight"][0].item())
print("converted file:  ", converted.dtype, converted[0].item())
as_described = (
    stated == torch.bfloat16
    and loaded["weight"][0].item() == value
    and converted.dtype == torch.bfloat16
    and converted[0].item() == 1.0
)
if not as_described:
    sys.exit("the behaviour has changed")
print("The cached plan of the first save describes the second one, and a conversion loses bits.")
PYTHON
