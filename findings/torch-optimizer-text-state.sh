#!/bin/bash
# Guess: Optimizer.load_state_dict() gives each value of a parameter's state back as it was, since
#   torch.save and torch.load keep numbers, strings and named tuples.
# Behaviour: A string comes back as the text of a generator object, silently. A named tuple raises
#   a TypeError, so the whole optimizer cannot be loaded. Numbers, dicts, lists and tuples survive.
# Source: torch 2.13.0, torch/optim/optimizer.py, the function _cast in load_state_dict: it rebuilds
#   every Iterable that is no dict from a generator of its items.
# Affected: optimizers of one's own that keep a mode, a name or a named tuple for a parameter.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import io
import sys
from collections import namedtuple

import torch

Range = namedtuple("Range", "low high")


def loaded(value):
    source, target = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in "ab")
    source.state[source.param_groups[0]["params"][0]] = {"mode": value}
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=False))
    return next(iter(target.state.values()))["mode"]


print("torch", torch.__version__)
for value in (3, [1, 2], (1, 2), {"a": 1}):
    assert loaded(value) == value, value
text = loaded("warmup")
print("a string 'warmup' is loaded as", repr(text))
try:
    print("a named tuple is loaded as", loaded(Range(0, 1)))
    refused = False
except TypeError as error:
    print("a named tuple raises TypeError:", error)
    refused = True
if text == "warmup" or not refused:
    sys.exit("the behaviour has changed: strings or named tuples are loaded as they were saved")
print("strings become the text of a generator, and named tuples cannot be loaded")
PYTHON
