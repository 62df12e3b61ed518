#!/bin/bash
# Guess: An adapter that is loaded over the same base weights gives the same model, as for all other
#   starts of a LoRA.
# Behaviour: With init_lora_weights="pissa_niter_4" each load gives another model, right after
#   save_pretrained() and with no warning. Where the adapter is put in place, its first values are
#   subtracted from the frozen weights. torch.svd_lowrank gives them, and draws from the global
#   generator. The checkpoint has the adapter and not these frozen weights. "pissa" takes the exact
#   decomposition, and is equal here.
# Source: peft 0.21.2, peft/tuners/lora/layer.py, LoraLayer.pissa_init, with torch 2.13.0.
# Affected: PiSSA with the fast decomposition, which is the one for large models: a resume trains on
#   with another model, and an adapter that is served is another model on each server.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy peft==0.21.2
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

SAMPLE = torch.ones(1, 32)


def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def differences(start):
    """Return how far the outputs of two loads are from those of the model that was saved."""
    with tempfile.TemporaryDirectory() as folder:
        config = LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=start)
        model = get_peft_model(base(), config)
        model.save_pretrained(folder)
        expected, found = model(SAMPLE), []
        for seed in (1, 2):
            weights = base()
            torch.manual_seed(seed)
            output = PeftModel.from_pretrained(weights, folder)(SAMPLE)
            found.append((output - expected).abs().max().item())
    return found


print("torch", torch.__version__, "peft", version("peft"))
outcomes = {start: differences(start) for start in (True, "pissa", "pissa_niter_4")}
for start, pair in outcomes.items():
    print(f"init_lora_weights={start!r}: the outputs of two loads differ by", pair)
equal = [max(pair) < 1e-4 for pair in outcomes.values()]
if equal != [True, True, False]:
    sys.exit("the behaviour has changed: see the lines above")
print("with the fast decomposition, the loaded model is another one each time")
PYTHON
