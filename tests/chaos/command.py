"""The command that ckpt-chaos runs: ask a fork server for a job, and end as the job ends."""

from __future__ import annotations

import json
import os
import socket
import sys


def main(path: str, out: str) -> int:
    """Return the exit status of the job."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = json.dumps([out, dict(os.environ)]).encode()
        socket.send_fds(connection, [request], [1, 2])
        answer = connection.recv(16)
    status = int(json.loads(answer))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
