#!/usr/bin/env bash
# Guess: A file system of fsspec stores a file under the name that it is given, since a path of fsspec
#   is no URL.
# Behaviour: on WebDAV, a percent sign and two hex digits in a name are decoded: "run%41" and "runA"
#   are one file, and the second put replaces the first without a word.
# Source: webdav4 0.11.0, `join_url` puts the path into a URL without quoting it (webdav4/urls.py).
# Affected: names that hold quoted parts, such as those that pandas, Hive and Spark give to partitions
#   ("date=2026%2F11"), and names of models with a "%".
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
fs = fsspec.filesystem("webdav", base_url=f"http://127.0.0.1:{port}")
fs.pipe_file("run%41", b"first")
fs.pipe_file("runA", b"second")
names, content = sorted(os.listdir(served)), fs.cat_file("runA")
print(*(f"{name} {version(name)}" for name in ("fsspec", "webdav4", "wsgidav")))
print("put under 'run%41' and 'runA'; the server has:", names)
print("the content of 'runA':", content)
if names != ["runA"] or content != b"second":
    sys.exit("the behaviour has changed: the two names are two files")
print("Two names are one file on WebDAV.")
PY
"$work/venv/bin/python" "$work/client.py" "$port" "$work/served"
