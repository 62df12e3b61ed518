#!/usr/bin/env bash
# Guess: Reserving the space of a file with fallocate changes nothing but where its bytes lie.
# Behaviour: btrfs mounted with compress=zstd writes the bytes of reserved space uncompressed. 64 MiB
#   of zeros take 64 MiB with fallocate, and next to nothing without.
# Source: Linux 6.18, fs/btrfs/inode.c (btrfs_run_delalloc_range: preallocated extents are written as
#   those without copy on write). btrfs-progs 6.2 (Debian 12).
# Affected: Programs that reserve space before they write, such as databases, download programs,
#   virtual machine images and checkpoints, on a disk that is mounted with compression.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "This needs root, to mount an image."; exit 2; }
[ "${1:-}" = inside ] || exec unshare --mount bash "$0" inside
work=$(mktemp -d)
trap 'umount -l "$work/disk" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
mkdir packages root disk
(
    cd packages
    apt-get -q -o APT::Sandbox::User=root download 'btrfs-progs=6.2-1+deb12u2' >/dev/null
    dpkg-deb -x ./*.deb ../root
)
truncate -s 400M image
PATH="$work/root/sbin:$work/root/usr/sbin:$work/root/bin:$PATH"
mkfs.btrfs -q image
mount -o loop,compress=zstd image disk
echo "Linux $(uname -r), $(mkfs.btrfs --version)"

taken() { # the MiB that 64 MiB of zeros take, after the command "$@"
    local before after
    sync -f disk
    before=$(df --output=used -k disk | tail -1)
    "$@"
    dd if=/dev/zero of="disk/file" bs=1M count=64 conv=notrunc,fsync status=none
    sync -f disk
    after=$(df --output=used -k disk | tail -1)
    rm disk/file
    echo $(((after - before) / 1024))
}
plain=$(taken true)
reserved=$(taken fallocate -l 64M disk/file)
echo "64 MiB of zeros take $plain MiB, and $reserved MiB after fallocate."
if [ "$plain" -lt 8 ] && [ "$reserved" -gt 56 ]; then
    echo "As described: reserved space is not compressed."
else
    echo "CHANGED: both are compressed, or neither is."
    exit 1
fi
