#!/usr/bin/env bash
# Guess: A server that cannot store a file since its disk is full answers 452 or 552, the codes of
#   RFC 959 for that.
# Behaviour: pyftpdlib closes the data connection in the middle of the transfer and answers
#   "426 ...; transfer aborted.", as after a broken network. The short file keeps its final name.
# Source: pyftpdlib 2.2.0, `DTPHandler.handle_error` and `handle_close` (pyftpdlib/handlers.py); RFC
#   959, section 4.2.
# Affected: whoever tells a full disk from a broken connection by the code, to free space or to retry.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
server=
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check pyftpdlib==2.2.0
cat >"$work/server.py" <<'PY'
import os, sys
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer

users = DummyAuthorizer()
users.add_user("user", "any", "/", perm="elradfmwMT")
FTPHandler.authorizer = users
server = FTPServer(("127.0.0.1", 0), FTPHandler)
with open(sys.argv[1] + "/port.new", "w") as file:
    file.write(str(server.socket.getsockname()[1]))
os.rename(sys.argv[1] + "/port.new", sys.argv[1] + "/port")
server.serve_forever()
PY
"$work/venv/bin/python" "$work/server.py" "$work" 2>/dev/null &
server=$!
cat >"$work/client.py" <<'PY'
import ftplib, os, sys, time
from importlib.metadata import version

work = sys.argv[1]
end = time.monotonic() + 60
while not os.path.exists(work + "/port"):
    if time.monotonic() > end:
        sys.exit("the server did not start")
    time.sleep(0.05)
client = ftplib.FTP()
client.connect("127.0.0.1", int(open(work + "/port").read()), timeout=30)
client.login("user", "any")
client.voidcmd("TYPE I")
with client.transfercmd("STOR /dev/full") as transfer:  # a device that is always full
    try:
        transfer.sendall(bytes(1 << 20))
    except OSError as error:
        print("while the bytes are sent:", repr(error))
try:
    reply = client.voidresp()
except ftplib.Error as error:
    reply = str(error)
print("pyftpdlib", version("pyftpdlib"), "Python", sys.version.split()[0])
print("the answer after the bytes:", reply)
if not reply.startswith("426"):
    sys.exit("the behaviour has changed: the answer to a full disk is no longer 426")
print("A full disk is told as an aborted transfer.")
PY
"$work/venv/bin/python" "$work/client.py" "$work"
