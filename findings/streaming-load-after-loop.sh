#!/bin/bash
# Guess: StreamingDataLoader.load_state_dict() brings the loader to the saved position, in a fresh
#   process as in one that goes back after a loss spike.
# Behaviour: Once the dataset has begun an epoch, a state of this epoch or of an earlier one counts
#   as stale: the call succeeds, and the next loop gives the next epoch from its first sample. The
#   loop alone decides this, by comparing the epoch of the state with a counter that only grows. A
#   new dataset over the same files takes the state.
# Source: mosaicml-streaming 0.13.0, streaming/base/dataset.py, StreamingDataset._resume.
# Affected: trainings that go back to an earlier step without a new process, and tools that read
#   some batches before they load the state.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 "numpy<2.2" boto3 Brotli \
    "catalogue<3" Pillow python-snappy "transformers<5" "xxhash<4" zstd
"$folder/venv/bin/pip" install -q --no-deps mosaicml-streaming==0.13.0
cat > "$folder/resume.py" <<'PYTHON'
import importlib.machinery
import sys
import tempfile
import types
from importlib.metadata import version

# streaming imports torchvision for its datasets of pictures, which are not used here. The wheel of
# PyPI does not load beside a torch for CPUs, so empty modules take its place.
for name, members in {
    "torchvision": {},
    "torchvision.datasets": {"VisionDataset": object},
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {"to_tensor": None},
}.items():
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(members)
    sys.modules[name] = module

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

SAMPLES = 8


def loader(folder):
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=folder, shuffle=False, batch_size=1)
    return StreamingDataLoader(dataset, batch_size=1)


def take(batches, number):
    return [int(next(batches)["number"]) for _ in range(number)]


def whole(batches):
    return [int(batch["number"]) for batch in batches]


if __name__ == "__main__":
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    with MDSWriter(out=folder, columns={"number": "int"}) as writer:
        for number in range(SAMPLES):
            writer.write({"number": number})
    first = loader(folder)
    batches = iter(first)
    take(batches, 3)
    state = first.state_dict()
    take(batches, 2)
    del batches
    first.load_state_dict(state)
    same, position = whole(first), first.state_dict()
    fresh = loader(folder)
    fresh.load_state_dict(state)
    print("mosaicml-streaming", version("mosaicml-streaming"))
    print("the state:", {key: state[key] for key in ("epoch", "sample_in_epoch")})
    print("loaded into a new loader, it gives", resumed := whole(fresh))
    print("loaded into the loader that has read on, it gives", same, "of epoch", position["epoch"])
    rest, epoch = list(range(3, SAMPLES)), list(range(SAMPLES))
    if (resumed, same, position["epoch"]) != (rest, epoch, 1):
        sys.exit("the behaviour has changed: see the lines above")
    print("the loader that has read on ignores the state")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/resume.py" "$folder"
