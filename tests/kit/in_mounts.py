"""Run a script in a mount namespace of its own.

in_mounts.py MOUNT SCRIPT ARGUMENTS: run the shell command MOUNT there, and then SCRIPT in this
process.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys

_CLONE_NEWNS = 0x20000  # Python has os.unshare from version 3.12 on


def main() -> None:
    mount, script = sys.argv[1:3]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # otherwise the mounts come into the namespace of the parent too
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["sh", "-c", mount], check=True)
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
