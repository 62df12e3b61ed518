#!/usr/bin/env bash
# Guess: A client of a network file system reads a replaced file as the old one or as the new one.
# Behaviour: After another client has renamed a longer file over it, a program that looks
#   whether the file exists and then reads it through sshfs gets the new bytes cut at the old length.
#   The second time it gets all of them.
# Source: sshfs 3.7.3 (Debian 12), sshfs.c: open sends no new size to the kernel, which cuts a read at
#   the size that it knows. libfuse 3.14.0.
# Affected: Programs that replace small state files by rename and read them through sshfs, such as
#   lock files, pid files and JSON state: the reader sees a file that cannot be parsed.
set -euo pipefail
[ "${1:-}" = inside ] || exec unshare --user --map-root-user --mount bash "$0" inside
work=$(mktemp -d)
trap 'umount -l "$work/seen" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
mkdir packages root source seen
(
    cd packages
    apt-get -q -o APT::Sandbox::User=root download sshfs=3.7.3-1.2~deb12u1 libfuse3-3=3.14.0-4 \
        fuse3=3.14.0-4 openssh-sftp-server libglib2.0-0 >/dev/null
    for package in *.deb; do dpkg-deb -x "$package" ../root; done
)
export PATH="$work/root/usr/bin:$PATH"
export LD_LIBRARY_PATH="$work/root/usr/lib/x86_64-linux-gnu:$work/root/lib/x86_64-linux-gnu"
# sshfs speaks SFTP to a server on this machine, without ssh between them.
printf '#!/bin/sh\nexec "%s"\n' "$work/root/usr/lib/openssh/sftp-server" >ssh
chmod +x ssh
sshfs -V 2>&1 | sed -n 1,2p
sshfs -o ssh_command="$work/ssh" "host:$work/source" seen

replace() { printf '%s' "$1" >source/new && mv source/new source/file; }
look() { # as a program that checks that the file is there, and reads it
    python3 -c 'import pathlib; file = pathlib.Path("seen/file"); print(file.exists() and file.read_text())'
}
replace "short"
echo "read before:  $(look)"
replace "much longer"
first=$(look)
second=$(look)
echo "first read after the replacement:  $first"
echo "second read:  $second"
if [ "$first" = "much " ] && [ "$second" = "much longer" ]; then
    echo "As described: the first read has the new bytes at the old length."
else
    echo "CHANGED: the first read is not cut."
    exit 1
fi
