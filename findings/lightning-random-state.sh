#!/bin/bash
# Guess: trainer.fit(ckpt_path=...) goes on as if the run had not stopped, since the file has the
#   loops, the optimizers, the schedulers and the callbacks.
# Behaviour: The file has no state of a random generator. A script that calls seed_everything() at its
#   start draws the dropout masks of the first epoch again after a restart, so the weights are others
#   than those of a run that went on. Without dropout both are equal to the bit.
# Source: lightning 2.6.6, lightning/pytorch/trainer/connectors/checkpoint_connector.py,
#   dump_checkpoint.
# Affected: runs with dropout, augmentation or sampling that are stopped and resumed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy lightning==2.6.6
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import logging
import sys
import warnings
from importlib.metadata import version

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, dropout):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fitted(dropout, epochs, path=None):
    lightning.seed_everything(0, verbose=False)
    module = Module(dropout)
    data = DataLoader(torch.linspace(-1, 1, 32).view(8, 4), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=path)
    trainer.save_checkpoint("last.ckpt")
    return [value.detach().clone() for value in module.parameters()]


def difference(dropout):
    whole = fitted(dropout, 4)
    fitted(dropout, 2)
    resumed = fitted(dropout, 4, "last.ckpt")
    return max((one - two).abs().max().item() for one, two in zip(whole, resumed, strict=True))


print("torch", torch.__version__, "lightning", version("lightning"))
plain, random = difference(0.0), difference(0.5)
keys = sorted(torch.load("last.ckpt", weights_only=True))
print("the file has", ", ".join(keys))
print("largest difference of a resumed run, without dropout:", plain)
print("largest difference of a resumed run, with dropout:", random)
if plain or not random or any("rng" in key or "random" in key for key in keys):
    sys.exit("the behaviour has changed: random generators are restored, or other state is not")
print("a resumed run draws other random numbers than one that goes on")
PYTHON
