#!/bin/bash
# Guess: An optimizer that pip has installed with all that it requires takes milliseconds for a step
#   of one small matrix.
# Behaviour: Kron of pytorch_optimizer contracts its two factors and the gradient in one
#   torch.einsum. torch has the package opt_einsum choose the order, if it is installed. Neither
#   torch nor pytorch_optimizer requires it. Without it torch contracts from left to right, and the
#   two factors of a matrix of n rows and columns make an outer product of n^4 elements. Nothing
#   warns. The kinds of kron of timm 1.0.31 do the same.
# Source: torch 2.13.0, torch/functional.py einsum and torch.backends.opt_einsum; pytorch_optimizer
#   4.1.0, pytorch_optimizer/optimizer/psgd.py.
# Affected: who trains with a PSGD optimizer, or compares how long optimizers take, or gives each of
#   many optimizers a limit of time. A resumed job on another machine, where the package is not
#   installed, is as slow, and its weights may differ in the last bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 pytorch_optimizer==4.1.0
cat > "$folder/step.py" <<'PYTHON'
import time
from importlib.metadata import version

import torch
from pytorch_optimizer import Kron
from torch import nn

SIZE = 80


def seconds_of_a_step():
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE, bias=False)
    optimizer = Kron(model.parameters(), lr=0.001)
    times = []
    for _ in range(4):
        model(torch.randn(8, SIZE)).square().mean().backward()
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        optimizer.zero_grad()
    return min(times[1:])


print("torch", torch.__version__, "pytorch_optimizer", version("pytorch_optimizer"))
print("torch.backends.opt_einsum.is_available():", torch.backends.opt_einsum.is_available())
seconds = seconds_of_a_step()
print(f"fastest step of one matrix of {SIZE} x {SIZE}: {1000 * seconds:.1f} ms")
print(seconds)
PYTHON
export OMP_NUM_THREADS=1
without=$("$folder/venv/bin/python" -W ignore "$folder/step.py" | tee /dev/stderr | tail -n 1)
"$folder/venv/bin/pip" install -q opt_einsum==3.4.0
with=$("$folder/venv/bin/python" -W ignore "$folder/step.py" | tee /dev/stderr | tail -n 1)
python3 - "$without" "$with" <<'PYTHON'
import sys

ratio = float(sys.argv[1]) / float(sys.argv[2])
print(f"without opt_einsum, a step takes {ratio:.0f} times as long")
if ratio < 10:
    sys.exit("the behaviour has changed: a step takes about as long without opt_einsum")
PYTHON
