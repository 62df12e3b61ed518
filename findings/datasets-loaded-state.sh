#!/bin/bash
# Guess: After IterableDataset.load_state_dict(state), the dataset is where the state was: it is
#   read on from there, state_dict() gives this position, and the next epoch is whole.
# Behaviour: The call only stores the state, and every later loop compares the epoch in it with that
#   of set_epoch(). In another epoch the state is ignored, and the loop begins at the first sample.
#   In the same epoch, each later loop begins at the loaded position too, so that all epochs lack
#   their first samples. And state_dict() before the first sample gives the beginning, so that a job
#   that saves right after its resume loses its position. There is no warning.
# Source: datasets 5.0.1, datasets/iterable_dataset.py, IterableDataset.load_state_dict and
#   _prepare_ex_iterable_for_iteration.
# Affected: who resumes a streamed dataset without set_epoch(), in any epoch but the first, or loads
#   a state and saves it again. A StatefulDataLoader without workers does the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.0.1
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version
from itertools import islice

from datasets import Dataset


def dataset(state=None):
    data = Dataset.from_dict({"n": list(range(8))}).to_iterable_dataset(num_shards=2)
    if state is not None:
        data.load_state_dict(state)
    return data


def samples(data, epoch=None):
    if epoch is not None:
        data.set_epoch(epoch)
    return [sample["n"] for sample in data]


def state_after_five(epoch):
    data = dataset()
    data.set_epoch(epoch)
    for _ in islice(data, 5):
        state = data.state_dict()
    return state


whole, rest = list(range(8)), [5, 6, 7]
in_epoch_2 = samples(dataset(state_after_five(2)))
with_epoch_2 = samples(dataset(state_after_five(2)), 2)
data = dataset(state_after_five(0))
without_epochs = [samples(data), samples(data)]
data = dataset(state_after_five(0))
with_epochs = [samples(data, 0), samples(data, 1)]
saved_again = samples(dataset(dataset(state_after_five(0)).state_dict()))

print("datasets", version("datasets"))
print("saved after 5 of 8 samples of epoch 2, resumed:", in_epoch_2)
print("  with set_epoch(2):", with_epoch_2)
print("saved after 5 of 8 samples of epoch 0, resumed, and the next loop:", without_epochs)
print("  with set_epoch() of each:", with_epochs)
print("loaded, saved again before the first sample, and resumed:", saved_again)
if with_epoch_2 != rest or with_epochs != [rest, whole]:
    sys.exit("the behaviour has changed: set_epoch() does not help")
if in_epoch_2 != whole:
    sys.exit("the behaviour has changed: the epoch of the state counts")
if without_epochs != [rest, rest]:
    sys.exit("the behaviour has changed: a later loop is whole")
if saved_again != whole:
    sys.exit("the behaviour has changed: state_dict() gives the loaded position")
print("a loaded state counts for the loops of its epoch, for all of them, and for nothing else")
PYTHON
