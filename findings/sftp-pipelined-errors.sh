#!/usr/bin/env bash
# Guess: After `SFTPFile.set_pipelined(True)`, `close()` raises the error of a write that the server
#   refused, since it is documented to wait for the answers.
# Behaviour: `close()` drops the answers that were not read yet, up to about 100 of them. A file that
#   a full disk cut short is closed without an error.
# Source: paramiko 5.1.0, `SFTPFile._write` registers its requests under `type(None)`, and
#   `SFTPFile._close` waits only for requests registered under the file (paramiko/sftp_file.py).
# Affected: whoever writes by SFTP with pipelining, since without it each 32 KiB wait for an answer.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
server=
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check paramiko==5.1.0 asyncssh==2.24.1
cat >"$work/server.py" <<'PY'
import asyncio, sys
import asyncssh


class Login(asyncssh.SSHServer):
    def begin_auth(self, username):
        return False


async def main():
    listener = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=Login,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=True,
    )
    with open(sys.argv[1] + "/port.new", "w") as file:
        file.write(str(listener.get_port()))
    import os

    os.rename(sys.argv[1] + "/port.new", sys.argv[1] + "/port")
    await asyncio.Event().wait()


asyncio.run(main())
PY
"$work/venv/bin/python" "$work/server.py" "$work" &
server=$!
cat >"$work/client.py" <<'PY'
import os, sys, time
from importlib.metadata import version
import paramiko

work = sys.argv[1]
end = time.monotonic() + 60
while not os.path.exists(work + "/port"):
    if time.monotonic() > end:
        sys.exit("the server did not start")
    time.sleep(0.05)
client = paramiko.SSHClient()
client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
client.connect(
    "127.0.0.1", int(open(work + "/port").read()), username="user", password="any",
    look_for_keys=False, allow_agent=False,
)
sftp = client.open_sftp()


def written(pipelined):
    """Write 1 MiB to a device that is always full."""
    try:
        with sftp.open("/dev/full", "wb") as file:
            file.set_pipelined(pipelined)
            file.write(bytes(1 << 20))
    except OSError as error:
        return f"OSError({error})"
    return "no error"


print("paramiko", version("paramiko"), "asyncssh", version("asyncssh"))
plain, pipelined = written(False), written(True)
print("1 MiB to a full disk, one request after the other:", plain)
print("1 MiB to a full disk, pipelined:                  ", pipelined)
client.close()
if plain == "no error" or pipelined != "no error":
    sys.exit("the behaviour has changed: a pipelined write tells of a full disk as a plain one does")
print("A pipelined file is closed without the error of its writes.")
PY
"$work/venv/bin/python" "$work/client.py" "$work"
