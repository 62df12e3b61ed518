#!/bin/bash
# Guess: What StatefulDataLoader.state_dict() returns, copied at once, is the position of the loop.
#   A sampler may therefore return its own lists in its state_dict(), as the state without workers
#   shows.
# Behaviour: With workers, the loader asks the sampler for its state when it sends indices ahead,
#   and keeps the answer without a copy until the batch arrives. The numbers in it are those of the
#   batch, and the lists are those of the batches that are read ahead. The state fits no position:
#   samples are left out or repeated after a resume.
# Source: torchdata 0.11.0, torchdata/stateful_dataloader/stateful_dataloader.py,
#   _StatefulMultiProcessingDataLoaderIter._try_put_index, with torch 2.13.0.
# Affected: samplers with a shuffle buffer, or with buckets by length, whose state_dict() does not
#   copy them. It works until the loader gets workers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps torchdata==0.11.0
cat > "$folder/resume.py" <<'PYTHON'
import copy
import random
import sys
from importlib.metadata import version

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = 60


class BufferedSampler:
    """Gives the indices in the order of a shuffle buffer."""

    def __init__(self, copies):
        self.copies, self.next_index, self.buffer, self.random = copies, 0, [], random.Random(1)

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        while self.next_index < SAMPLES or self.buffer:
            while len(self.buffer) < 8 and self.next_index < SAMPLES:
                self.buffer.append(self.next_index)
                self.next_index += 1
            yield self.buffer.pop(self.random.randrange(len(self.buffer)))

    def state_dict(self):
        buffer = list(self.buffer) if self.copies else self.buffer
        return {"next": self.next_index, "buffer": buffer, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.next_index, self.buffer = state["next"], list(state["buffer"])
        self.random.setstate(state["random"])


def loader(copies, workers):
    return StatefulDataLoader(
        range(SAMPLES), 2, sampler=BufferedSampler(copies), num_workers=workers
    )


def rest_after_five_batches(copies, workers):
    first = loader(copies, workers)
    batches = iter(first)
    taken = [sample for _ in range(5) for sample in next(batches).tolist()]
    state = copy.deepcopy(first.state_dict())
    second = loader(copies, workers)
    second.load_state_dict(state)
    taken += [sample for batch in second for sample in batch.tolist()]
    missing = sorted(set(range(SAMPLES)) - set(taken))
    return missing, sorted({sample for sample in taken if taken.count(sample) > 1})


if __name__ == "__main__":
    print("torch", torch.__version__, "torchdata", version("torchdata"))
    outcomes = []
    for copies, workers in ((False, 0), (False, 2), (True, 2)):
        missing, repeated = rest_after_five_batches(copies, workers)
        outcomes.append(not missing and not repeated)
        kind = "a copy" if copies else "its own list"
        print(f"{workers} workers, the sampler returns {kind}:")
        print(f"  after a resume, samples left out: {missing}, repeated: {repeated}")
    if outcomes != [True, False, True]:
        sys.exit("the behaviour has changed: see the lines above")
    print("with workers, the state has the list of a later position")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/resume.py"
