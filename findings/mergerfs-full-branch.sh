#!/usr/bin/env bash
# Guess: A union of folders fails with ENOSPC when the disks below it are full.
# Behaviour: mergerfs fails with ENOSPC while df shows free space: by default, a branch with less than
#   4 GiB free (minfreespace) takes no new file.
# Source: mergerfs 2.33.5 (Debian 12), option minfreespace in its manual, src/policy.
# Affected: Users of small disks or small quotas below mergerfs. A job that makes room when the disk is
#   full removes files again and again, and never gets above the bound.
set -euo pipefail
[ "${1:-}" = inside ] || exec unshare --user --map-root-user --mount bash "$0" inside
work=$(mktemp -d)
trap 'umount -l "$work"/{union,branch} 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
mkdir packages root branch union
(
    cd packages
    apt-get -q -o APT::Sandbox::User=root download mergerfs=2.33.5-1 fuse3=3.14.0-4 >/dev/null
    for package in *.deb; do dpkg-deb -x "$package" ../root; done
)
export PATH="$work/root/usr/bin:$PATH"
mount -t tmpfs -o size=1g none branch
echo "$(mergerfs -V 2>&1 | sed -n 1p), Linux $(uname -r)"

attempt() { # what happens to a new file of one byte in a union with these options
    mergerfs -o "$1" branch union
    df -h --output=avail union | tail -1 | sed "s/^ */free with $1: /" >&2
    if printf x 2>/dev/null >union/file; then echo written; else echo refused; fi
    umount -l union
    rm -f branch/file
}
default=$(attempt category.create=mfs)
low=$(attempt category.create=mfs,minfreespace=1M)
echo "A file of one byte: $default by default, $low with minfreespace=1M."
if [ "$default" = refused ] && [ "$low" = written ]; then
    echo "As described: the union counts as full with a GiB free."
else
    echo "CHANGED: a branch with less than 4 GiB free takes new files, or none does."
    exit 1
fi
