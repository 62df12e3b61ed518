#!/usr/bin/env bash
# Guess: `rm_file` of fsspec refuses a folder, as it does on a local disk, SFTP and FTP.
# Behaviour: on WebDAV, `rm_file` of a folder removes the folder with all that is in it.
# Source: webdav4 0.11.0, `WebdavFileSystem.rm_file` sends DELETE (webdav4/fsspec.py), which RFC 4918,
#   section 9.6.1, defines as recursive for a collection.
# Affected: whoever clears files by path through fsspec, and may have the path of a folder in hand.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
server=
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check webdav4==0.11.0 fsspec==2026.9.0 \
  wsgidav==4.4.0 cheroot==11.1.2
mkdir "$work/served"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$work/venv/bin/wsgidav" --host 127.0.0.1 --port "$port" --root "$work/served" --auth anonymous \
  --no-config >/dev/null 2>&1 &
server=$!
cat >"$work/client.py" <<'PY'
import os, socket, sys, time
from importlib.metadata import version
import fsspec

port, served = int(sys.argv[1]), sys.argv[2]
end = time.monotonic() + 60
while True:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        break
    except OSError:
        if time.monotonic() > end:
            sys.exit("the server did not start")
        time.sleep(0.05)


def left(fs, root):
    """Return the files that are left after ``rm_file`` of the folder of one file."""
    fs.makedirs(f"{root}/folder", exist_ok=True)
    fs.pipe_file(f"{root}/folder/file", b"content")
    try:
        fs.rm_file(f"{root}/folder")
    except OSError as error:
        print(f"  rm_file: {type(error).__name__}")
    return fs.exists(f"{root}/folder/file")


print(*(f"{name} {version(name)}" for name in ("fsspec", "webdav4", "wsgidav")))
print("local disk:")
local = left(fsspec.filesystem("file"), served + "/local")
print("  the file in the folder is still there:", local)
print("WebDAV:")
remote = left(fsspec.filesystem("webdav", base_url=f"http://127.0.0.1:{port}"), "remote")
print("  the file in the folder is still there:", remote)
if not local or remote:
    sys.exit("the behaviour has changed: rm_file of a folder is the same on both")
print("rm_file of a folder removes the tree on WebDAV.")
PY
"$work/venv/bin/python" "$work/client.py" "$port" "$work/served"
