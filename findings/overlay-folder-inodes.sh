#!/usr/bin/env bash
# Guess: A folder keeps its inode number while it exists, so device and inode identify a folder.
# Behaviour: On an overlay whose layers are on two file systems, a folder gets another inode number
#   after the kernel has evicted it from its cache. The number of a file stays.
# Source: Linux 6.18, fs/overlayfs/inode.c (ovl_map_dev_ino), and "Inode properties" in
#   Documentation/filesystems/overlayfs.rst.
# Affected: Programs in a container that watch for a replaced folder, or find equal folders, by
#   st_dev and st_ino: file watchers, backup programs, locks by folder.
set -euo pipefail
# A mount namespace of its own, in which a user without rights may mount. It ends with the script.
[ "${1:-}" = inside ] || exec unshare --user --map-root-user --mount bash "$0" inside
work=$(mktemp -d)
trap 'umount -l "$work"; rmdir "$work"' EXIT
mount -t tmpfs lower "$work"
cd "$work"
mkdir lower upper-disk overlay
mount -t tmpfs upper upper-disk
mkdir lower/folder upper-disk/upper upper-disk/work
mount -t overlay -o lowerdir=lower,upperdir=upper-disk/upper,workdir=upper-disk/work none overlay
touch overlay/file
echo "Linux $(uname -r), $(mount --version)"

numbers() { stat -c '%n device %d inode %i' overlay/folder overlay/file; }
before=$(numbers)
mount -o remount overlay # The kernel forgets the folders of this mount that nobody has open
mkdir overlay/other
after=$(numbers)
printf 'before the eviction:\n%s\nafter it:\n%s\n' "$before" "$after"
cut_to() { grep "$1" <<<"$2"; }
if [ "$(cut_to folder "$before")" != "$(cut_to folder "$after")" ] &&
    [ "$(cut_to file "$before")" = "$(cut_to file "$after")" ]; then
    echo "As described: the folder has another inode number, and the file has the same."
else
    echo "CHANGED: the numbers of the folder stay, or those of the file change."
    exit 1
fi
