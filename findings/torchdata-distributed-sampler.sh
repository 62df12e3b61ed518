#!/bin/bash
# Guess: A state that is saved behind the last batch of an epoch goes on with the next epoch, with
#   StatefulDistributedSampler as with every other sampler of StatefulDataLoader.
# Behaviour: Without workers, the next epoch after the resume has no batch, and no message says so.
#   The sampler keeps the end of the epoch as the number of samples to leave out, and the loop over
#   the next epoch is the first to ask for it. With workers, the next epoch is whole. A shuffling
#   loader without this sampler also gives the whole epoch.
# Source: torchdata 0.11.0, torchdata/stateful_dataloader/sampler.py,
#   StatefulDistributedSampler.__iter__ and load_state_dict, with torch 2.13.0.
# Affected: distributed trainings with num_workers=0 that save at the end of each epoch: a restart
#   trains one epoch less.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps torchdata==0.11.0
cat > "$folder/resume.py" <<'PYTHON'
import copy
import sys
from importlib.metadata import version

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

DATA = range(16)


def batches_by_epoch(distributed, workers, epochs, state=None):
    """Train some epochs, and return the number of batches of each, and the state at the end."""
    if distributed:
        sampler = StatefulDistributedSampler(DATA, num_replicas=2, rank=0, seed=1)
    else:
        sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(1))
    loader = StatefulDataLoader(DATA, 2, sampler=sampler, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    numbers = []
    for epoch in epochs:
        if distributed:
            sampler.set_epoch(epoch)
        numbers.append(sum(1 for _ in loader))
    return numbers, copy.deepcopy(loader.state_dict())


if __name__ == "__main__":
    print("torch", torch.__version__, "torchdata", version("torchdata"))
    outcomes = []
    for distributed, workers in ((True, 0), (True, 1), (False, 0)):
        whole, _ = batches_by_epoch(distributed, workers, range(3))
        _, state = batches_by_epoch(distributed, workers, range(1))
        resumed, _ = batches_by_epoch(distributed, workers, range(1, 3), state)
        outcomes.append(resumed == whole[1:])
        name = "StatefulDistributedSampler" if distributed else "RandomSampler"
        print(f"{name}, {workers} workers: batches of the epochs 1 and 2 are {whole[1:]},")
        print(f"  and after a resume behind epoch 0 they are {resumed}")
    if outcomes != [False, True, True]:
        sys.exit("the behaviour has changed: see the lines above")
    print("without workers, the resumed job gets no batch of its first epoch")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/resume.py"
