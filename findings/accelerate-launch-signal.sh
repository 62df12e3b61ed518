#!/bin/bash
# Guess: A launcher passes SIGTERM on to the script that it started, as torchrun does, or takes the
#   script with it. So a scheduler that stops the launcher stops the training.
# Behaviour: accelerate launch with one process ends by the signal at once, and the script goes on:
#   it gets no signal, and its parent is another process then.
# Source: accelerate 1.15.0, accelerate/commands/launch.py, simple_launcher.
# Affected: trainings on one GPU or CPU that are to save when a scheduler stops them, and those that
#   are started again beside the script that lives.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy accelerate==1.15.0
cd "$folder"
cat > train.py <<'PYTHON'
import os
import signal
import sys
import time

signal.signal(signal.SIGTERM, lambda *_: sys.exit("the script gets SIGTERM"))
print(os.getpid(), flush=True)
time.sleep(60)
PYTHON
"$folder/venv/bin/python" - <<'PYTHON'
import os
import signal
import subprocess
import sys
from importlib.metadata import version

launcher = subprocess.Popen(
    [f"{sys.prefix}/bin/accelerate", "launch", "--cpu", "--num_processes", "1", "train.py"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
)
script = int(launcher.stdout.readline())
descriptor = os.pidfd_open(script)
launcher.send_signal(signal.SIGTERM)
launcher.wait()
with open(f"/proc/{script}/stat") as file:
    state, parent = file.read().rpartition(")")[2].split()[:2]
print("accelerate", version("accelerate"))
print("the launcher ended with", launcher.returncode)
print("the script is in state", state, "and its parent is", parent, "instead of", launcher.pid)
signal.pidfd_send_signal(descriptor, signal.SIGTERM)
message = launcher.stderr.read().splitlines()[-1]  # until the script has ended
print("after a SIGTERM of its own:", message)
if launcher.returncode != -signal.SIGTERM or state != "S" or "the script gets" not in message:
    sys.exit("the behaviour has changed: the launcher passes the signal on, or ends the script")
print("accelerate launch leaves its script alive")
PYTHON
