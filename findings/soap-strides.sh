#!/bin/bash
# Guess: An optimizer whose state has equal values, shapes and dtypes goes on in the same way.
# Behaviour: SOAP keeps the bases that QR gives, which are column-major. If a copy of the state has
#   the same values in row-major tensors, as most file formats give them back, the weights are
#   others after some steps, since the product of matrices rounds by their strides.
# Source: pytorch_optimizer 4.1.0, pytorch_optimizer/optimizer/soap.py, the state Q; torch 2.13.0,
#   torch.linalg.qr and eigh.
# Affected: who saves the state of SOAP or of a like optimizer in a format without strides
#   (safetensors, NumPy, a table of bytes), and compares a resumed run with the one that went on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps pytorch_optimizer==4.1.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import copy
import sys
from importlib.metadata import version

import torch
from pytorch_optimizer import SOAP
from torch import nn

SIZES = ((24, 48, 5), (30, 50, 7), (17, 33, 9), (21, 45, 3), (26, 52, 5))


def build(sizes):
    torch.manual_seed(0)
    first, middle, last = sizes
    model = nn.Sequential(nn.Linear(first, middle), nn.Tanh(), nn.Linear(middle, last))
    return model, SOAP(model.parameters(), lr=0.003, precondition_frequency=3)


def train(model, optimizer, steps):
    for step in steps:
        source = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        batch = torch.randn(16, model[0].in_features, generator=source)
        model(batch).square().mean().backward()
        optimizer.step()


def row_major(value):
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: row_major(item) for key, item in value.items()}
    return [row_major(item) for item in value] if isinstance(value, list) else value


def difference(sizes, copied):
    model, optimizer = build(sizes)
    train(model, optimizer, range(7))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(7, 40))
    other, another = build(sizes)
    other.load_state_dict(weights)
    another.load_state_dict({**state, "state": copied(state["state"])})
    train(other, another, range(7, 40))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


print("torch", torch.__version__, "pytorch_optimizer", version("pytorch_optimizer"))
exact = [difference(sizes, copy.deepcopy) for sizes in SIZES]
turned = [difference(sizes, row_major) for sizes in SIZES]
print("largest difference of the weights, a copy with its strides:", exact)
print("largest difference of the weights, the same values row-major:", turned)
if any(exact) or not any(turned):
    sys.exit("the behaviour has changed: strides do not matter, or more than strides matters")
print("equal values in other strides lead to other weights")
PYTHON
