#!/bin/bash
# Guess: A state that torch.distributed.checkpoint saves can be converted to a file of torch.save by
#   its own converter, and an empty dict in a list is there again.
# Behaviour: DCP writes nothing for an empty dict, and the place of it is in no table. At the end of a
#   list with a tensor it disappears, so that the list is shorter. At the beginning of one, the
#   converter raises "Missing key in checkpoint state_dict". An empty list is kept.
# Source: torch 2.13.0, torch/distributed/checkpoint/_nested_dict.py and _traverse.py: a traversal
#   visits the values of a mapping, and an empty mapping has none.
# Affected: states with lists of settings, such as the callbacks or the stages of a schedule.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import shutil
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")


def converted(state):
    shutil.rmtree("saved", ignore_errors=True)
    dcp.save(state, checkpoint_id="saved", no_dist=True)
    try:
        dcp_to_torch_save("saved", "saved.pt")
    except BaseException as error:  # torch raises an error that is no Exception
        return (str(error).strip().splitlines() or [""])[-1]
    return torch.load("saved.pt", weights_only=True)


print("torch", torch.__version__)
one = torch.ones(1)
last, first, plain = (converted({"a": value}) for value in ([one, {}], [{}, one], []))
print("a list of a tensor and an empty dict becomes:", last)
print("a list of an empty dict and a tensor becomes:", first)
print("an empty list becomes:", plain)
if last != {"a": [one]} or "Missing key" not in str(first) or plain != {"a": []}:
    sys.exit("the behaviour has changed: empty dicts are written, or left out in another way")
print("an empty dict in a list is not written: the list is shorter, or cannot be converted")
PYTHON
