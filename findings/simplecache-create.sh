#!/usr/bin/env bash
# Guess: A chained URL of fsspec adds a cache for reads, and a put through it does what the same put
#   does without it: with mode="create" it fails if the file exists.
# Behaviour: through "simplecache::", the put replaces the file and reports success, although the file
#   system behind it refuses, and "filecache::" passes the mode on.
# Source: fsspec 2026.9.0, `SimpleCacheFileSystem.pipe_file` takes the mode and drops it
#   (fsspec/implementations/cached.py).
# Affected: lock files, and everything else that only the first of several writers may create, behind a
#   URL to which someone adds a cache.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check fsspec==2026.9.0
cat >"$work/put.py" <<'PY'
import sys
from importlib.metadata import version
import fsspec

memory = fsspec.filesystem("memory")


def put(chain: str) -> tuple[str, bytes]:
    """Create a file that exists, and return what happened and the content afterwards."""
    memory.pipe_file("/run/lock", b"first")
    fs, path = fsspec.core.url_to_fs(f"{chain}memory://run/lock")
    try:
        fs.pipe_file(path, b"second", mode="create")
        reply = "success"
    except FileExistsError:
        reply = "FileExistsError"
    return reply, memory.cat_file("/run/lock")


seen = {chain: put(chain) for chain in ("", "filecache::", "simplecache::")}
print("fsspec", version("fsspec"))
for chain, (reply, content) in seen.items():
    print(f"create through {chain + 'memory://':24} {reply}, and the file is {content}")
refused = ("FileExistsError", b"first")
if seen != {"": refused, "filecache::": refused, "simplecache::": ("success", b"second")}:
    sys.exit("the behaviour has changed")
print("A put that may only create a file replaces it behind simplecache.")
PY
"$work/venv/bin/python" "$work/put.py"
