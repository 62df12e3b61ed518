#!/bin/bash
# Guess: Reading the state of an optimizer that has not stepped yet, for a checkpoint of step 0 or to
#   learn the names, leaves the optimizer as it is.
# Behaviour: get_optimizer_state_dict() steps such an optimizer once with zero gradients and a
#   learning rate of 0. The counters and moments of that step stay, so the training goes on otherwise:
#   Rprop hardly moves at all, ASGD does not move in its first step, SGD with dampening and RAdam
#   take half of it, AdamW three quarters.
# Source: torch 2.13.0, torch/distributed/checkpoint/state_dict.py, _init_optim_state.
# Affected: who saves before the first step with torch.distributed.checkpoint or a library that is
#   built on it, and compares the training with one that did not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/train.py" <<'PYTHON'
import sys
import warnings
from functools import partial

import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

warnings.simplefilter("ignore")
KINDS = {
    "SGD": partial(optim.SGD, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "SGD with dampening": partial(optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "ASGD": partial(optim.ASGD, lr=0.01),
    "Rprop": partial(optim.Rprop, lr=0.01),
}
SAME = {"SGD", "RMSprop", "Adagrad"}
STEPS = 20


def moves(kind, is_read):
    """Return how far the weights have moved after one step, and after all steps."""
    torch.manual_seed(0)
    model, data = nn.Linear(8, 8), torch.randn(STEPS, 16, 8)
    begin = model.weight.detach().clone()
    optimizer = kind(model.parameters())
    if is_read:
        get_optimizer_state_dict(model, optimizer)
    distances = []
    for batch in data:
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        distances.append(float((model.weight.detach() - begin).norm()))
    return distances[0], distances[-1]


print("torch", torch.__version__)
changed = []
for name, kind in KINDS.items():
    plain, read = moves(kind, False), moves(kind, True)
    ratios = [after / before for before, after in zip(plain, read)]
    print(f"{name}: {ratios[0]:.4f} of the first step, {ratios[1]:.4f} of the way in {STEPS} steps")
    if (name in SAME) is not (plain == read):
        changed.append(name)
if changed:
    sys.exit(f"the behaviour has changed: {', '.join(changed)}")
print("an optimizer trains otherwise if its state was read before its first step")
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" "$folder/train.py"
