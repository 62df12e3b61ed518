#!/bin/bash
# Guess: A library that opens its files with O_DIRECT by default, and has a fallback where the file
#   system refuses that, saves on an ordinary disk.
# Behaviour: The file system takes the flag at open, so no fallback comes. It refuses the first
#   write, whose address and length are not those of whole blocks: a synchronous save on one process
#   fails with EINVAL, and its files are empty.
# Source: torch_checkpointing 0.1.1, storage/filesystem.py: WriteStream.write passes what torch.save
#   gives to a file object of Python, which does not align it.
# Affected: who calls CheckpointManager(Config.with_sync_save()) on ext4 or XFS, and who compares
#   its default with other libraries. LocalFileSystemStorageConfig(use_direct_io=False) saves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy torch_checkpointing==0.1.1
cat >"$folder/save.py" <<'PYTHON'
import os
import sys
from importlib.metadata import version

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

print("torch", torch.__version__, "torch_checkpointing", version("torch_checkpointing"))
state = {"model": torch.nn.Linear(8, 8).state_dict(), "step": 3}
try:
    os.close(os.open("probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    print("the file system opens a file with O_DIRECT")
except OSError as error:
    print("the file system refuses O_DIRECT at open, so this shows nothing here:", error)
    sys.exit(0)


def save(name, **options):
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(**options)
    manager = CheckpointManager(config)
    try:
        manager.save(os.path.abspath(name), state)
    except OSError as error:
        return error.errno
    return 0


default, buffered = save("default"), save("buffered", use_direct_io=False)
print("errno of the default:", default, "with use_direct_io=False:", buffered)
if (default, buffered) != (22, 0):
    print("the behaviour has changed: the default saves, or both fail")
    sys.exit(1)
print("the default of a synchronous save fails with EINVAL on a file system with O_DIRECT")
PYTHON
cd "$folder"
"$folder/venv/bin/python" save.py
