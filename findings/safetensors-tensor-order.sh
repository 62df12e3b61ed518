#!/usr/bin/env bash
# Guess: A safetensors file keeps its tensors in the order of the dict that was saved.
# Behaviour: The tensors are sorted by the size of their elements and then by name, in the header and
#   in the file, so a model's own order is lost and "layer.10" comes before "layer.2".
# Source: safetensors 0.8.0, `prepare` in safetensors/src/tensor.rs.
# Affected: Whoever pairs the numbers in an optimizer's state_dict() with the tensors of
#   model.safetensors by order, as a folder of the Trainer or of accelerate invites to do.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder/x.safetensors" <<'PYTHON'
import json
import sys

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

print("safetensors", safetensors.__version__)
path = sys.argv[1]
names = ["layer.2", "layer.10", "head", "half"]
tensors = {name: np.full(4, index, np.float32) for index, name in enumerate(names)}
tensors["half"] = tensors["half"].astype(np.float16)
save_file(tensors, path)
with open(path, "rb") as file:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
places = sorted(header, key=lambda name: header[name]["data_offsets"])
loaded = list(load_file(path))
print("saved  ", names)
print("in file", places)
print("loaded ", loaded)
if places == names or loaded == names:
    print("The behaviour has changed: the order of the dict is kept.")
    sys.exit(1)
if places != ["head", "layer.10", "layer.2", "half"]:
    print("The behaviour has changed: the tensors have yet another order.")
    sys.exit(1)
print("The order of the dict is lost: wide elements come first, and then names in alphabetical order.")
PYTHON
