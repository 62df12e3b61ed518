#!/bin/bash
# Guess: The state_dict() of an optimizer of a large library has all that a resumed run needs, since
#   the moments and the counts are in it.
# Behaviour: Adahessian draws its random vectors from a generator of its own, which begins at a fixed
#   seed and is not in the state dict. After a restart it draws the vectors of the first steps again,
#   so the weights are others than those of a run that went on. Restoring torch's own generators
#   does not help.
# Source: timm 1.0.31, timm/optim/adahessian.py, self.generator.
# Affected: who resumes Adahessian of timm from a checkpoint, with any library.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps timm==1.0.31
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import copy
import sys
import warnings
from importlib import util
from importlib.metadata import distribution, version

import torch
from torch import nn

warnings.simplefilter("ignore")
# The module is loaded from its file, since timm as a whole needs torchvision.
path = distribution("timm").locate_file("timm/optim/adahessian.py")
spec = util.spec_from_file_location("adahessian", path)
module = util.module_from_spec(spec)
spec.loader.exec_module(module)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, module.Adahessian(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    for step in steps:
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward(create_graph=True)
        optimizer.step()


def difference(with_generator):
    model, optimizer = build()
    train(model, optimizer, range(5))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    drawn, generators = optimizer.generator.get_state(), torch.get_rng_state()
    train(model, optimizer, range(5, 10))
    other, another = build()
    other.load_state_dict(weights)
    another.load_state_dict(state)
    torch.set_rng_state(generators)
    if with_generator:
        another.generator.set_state(drawn)
    train(other, another, range(5, 10))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


print("torch", torch.__version__, "timm", version("timm"))
own, helped = difference(False), difference(True)
print("largest difference after its own state_dict():", own)
print("largest difference if the state of its generator is set too:", helped)
if not own or helped:
    sys.exit("the behaviour has changed: the state dict has the generator, or lacks more than it")
print("the generator of the optimizer is not in its state dict")
PYTHON
