#!/bin/bash
# Guess: A StatefulDataLoader that shuffles by generator= goes on with the batches of a run without
#   a restart: those of this epoch and of all later ones.
# Behaviour: Without workers, only the rest of the epoch is the same. The next epochs have another
#   order. An epoch draws its order and then a seed from the generator. Loading the state draws the
#   order again, and not the seed, so the generator stays one number behind. With workers, without
#   generator=, or with a sampler that has a generator of its own, all epochs are the same. To set
#   the state of the generator before or after the load does not help.
# Source: torchdata 0.11.0, torchdata/stateful_dataloader/stateful_dataloader.py,
#   _StatefulSingleProcessDataLoaderIter.load_state_dict, and sampler.py, with torch 2.13.0.
# Affected: who resumes a StatefulDataLoader with num_workers=0 and generator=, with any library.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps torchdata==0.11.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import copy
import sys
from importlib.metadata import version

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

DATA, PER_EPOCH = list(range(40)), 10


def generator(seed):
    return torch.Generator().manual_seed(seed)


def without_workers(seed):
    return StatefulDataLoader(DATA, 4, shuffle=True, generator=generator(seed))


def with_workers(seed):
    return StatefulDataLoader(DATA, 4, shuffle=True, generator=generator(seed), num_workers=1)


def with_two_generators(seed):
    sampler = RandomSampler(DATA, generator=generator(seed + 1))
    return StatefulDataLoader(DATA, 4, sampler=sampler, generator=generator(seed))


def take(loader, batches, iterator=None):
    taken, iterator = [], iterator or iter(loader)
    while len(taken) < batches:
        for batch in iterator:
            taken.append(batch.tolist())
            if len(taken) == batches:
                break
        else:
            iterator = iter(loader)
    return taken, iterator


def equal(make):
    loader = make(1)
    _, iterator = take(loader, 6)
    state = copy.deepcopy(loader.state_dict())
    whole, _ = take(loader, 4 + 2 * PER_EPOCH, iterator)
    loader = make(2)
    loader.load_state_dict(state)
    resumed, _ = take(loader, 4 + 2 * PER_EPOCH)
    return whole[:4] == resumed[:4], whole[4:] == resumed[4:]


if __name__ == "__main__":
    print("torch", torch.__version__, "torchdata", version("torchdata"))
    outcomes = [equal(make) for make in (without_workers, with_workers, with_two_generators)]
    print("rest of the epoch and later epochs are equal:")
    for way, pair in zip(("no workers", "one worker", "two generators"), outcomes, strict=True):
        print(f"  {way}: {pair}")
    if outcomes != [(True, False), (True, True), (True, True)]:
        sys.exit("the behaviour has changed: see the lines above")
    print("without workers, the later epochs have another order after a resume")
PYTHON
