#!/bin/bash
# Guess: The state of an optimizer that trains under FSDP2 is sharded as its parameters are, so that
#   torch.distributed.checkpoint can save it.
# Behaviour: Nero and SGDSaI keep a mean or a norm of a sharded gradient or parameter. That is a
#   DTensor with a partial placement: each rank holds a contribution, and no rank the value. They
#   train without a word, and the first save raises a CheckpointException that wraps a ValueError.
# Source: pytorch_optimizer 4.1.0, the states scale of Nero and gsnr of SGDSaI; torch 2.13.0,
#   torch/distributed/tensor/_api.py, _raise_if_contains_partial_placements.
# Affected: who trains under FSDP2 with an optimizer that keeps reduced values, and saves with
#   torch.distributed.checkpoint, torchtitan, or a library that is built on it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps pytorch_optimizer==4.1.0
cat > "$folder/train.py" <<'PYTHON'
import sys
import warnings
from importlib.metadata import version

import pytorch_optimizer
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")


def save_after_two_steps(name, folder):
    """Return the placements of the state, and the message of the error, or '' if it is saved."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    kind = getattr(pytorch_optimizer, name, None) or getattr(torch.optim, name)
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    placements = sorted(
        f"{key}: {value.placements[0]!r}"
        for state in optimizer.state.values()
        for key, value in state.items()
        if hasattr(value, "placements")
    )
    try:
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    except CheckpointException as error:
        return placements, str(next(iter(error.failures.values()))[0])
    return placements, ""


dist.init_process_group("gloo")
changed = []
for name, is_refused in (("RMSprop", False), ("Nero", True), ("SGDSaI", True)):
    placements, message = save_after_two_steps(name, f"{sys.argv[1]}/{name}")
    if ("partial placements" in message) is not is_refused:
        changed.append(name)
    if dist.get_rank() == 0:
        print(f"{name} ({', '.join(placements)}): {message or 'saved'}", flush=True)
if dist.get_rank() == 0:
    print("torch", torch.__version__, "pytorch_optimizer", version("pytorch_optimizer"))
    if changed:
        print("the behaviour has changed:", ", ".join(changed))
    else:
        print("what a rank keeps of a mean or a norm is partial, and DCP refuses it at the save")
dist.destroy_process_group()
sys.exit(bool(changed))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone \
  --nproc-per-node 2 "$folder/train.py" "$folder" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
