#!/bin/bash
# Guess: A folder of torch.distributed.checkpoint has no version, so a release of torch reads what
#   another one of the same year has written, or says that the folder is too new.
# Behaviour: torch 2.13 cannot load a folder that torch 2.15 has written. The error is a ValueError
#   about five values, and then one about a file of a rank that is missing.
# Source: torch 2.15.0, torch/distributed/checkpoint/metadata.py: TensorProperties.__getstate__ adds
#   the strides to a tuple; torch 2.13.0, the same file: __setstate__ unpacks five values.
# Affected: who goes back to an older image of a job, or opens its checkpoints in another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 2.15.0 2.13.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q "torch==$version" numpy
done
cat >"$folder/act.py" <<'PYTHON'
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
act, folder = sys.argv[1:]
print(act, "with torch", torch.__version__)
state = {"weight": torch.arange(6.0) if act == "save" else torch.zeros(6)}
if act == "save":
    dcp.save(state, checkpoint_id=folder, no_dist=True)
else:
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    print("loaded:", state)
PYTHON
"$folder/2.15.0/bin/python" "$folder/act.py" save "$folder/new" 2>/dev/null
"$folder/2.13.0/bin/python" "$folder/act.py" save "$folder/old" 2>/dev/null
"$folder/2.15.0/bin/python" "$folder/act.py" load "$folder/old" 2>/dev/null
if "$folder/2.13.0/bin/python" "$folder/act.py" load "$folder/new" >"$folder/said" 2>&1; then
    cat "$folder/said"
    echo "the behaviour has changed: torch 2.13 loads a folder of torch 2.15"
    exit 1
fi
grep -m 1 "too many values to unpack" "$folder/said" ||
    { tail -n 5 "$folder/said"; echo "the behaviour has changed: the error is another one"; exit 1; }
echo "torch 2.15 loads the folder of torch 2.13, and not the other way round."
