#!/bin/bash
# A real NFS client and server in one user-mode Linux, and ckpt on them: tests/faults/nfs.py. Not part of `make test` or `make torture`.
#
#   apt-get install --no-install-recommends user-mode-linux kmod rpcbind nfs-common nfs-kernel-server
#   PYTHON=.venv/bin/python tests/faults/nfs.sh
#
# MODULE=tests.stores.uml measures the mounts for docs/stores.md instead, and one of SMB by the kernel if Samba is installed.
#
# Boots with the host's root as its own, so it writes below /mnt and /run only, which are its own tmpfs. Prints what nfs.py has said.
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ "${1:-}" != inside ]; then
    init=$(mktemp /tmp/ckpt-nfs.XXXXXX)
    printf '#!/bin/bash\nexec bash %q inside %q %q\n' "$HERE/nfs.sh" "${PYTHON:-$HERE/../../.venv/bin/python}" "${MODULE:-tests.faults.nfs}" >"$init"
    chmod +x "$init"
    said=$(TMPDIR=/dev/shm timeout "${LIMIT:-600}" linux.uml mem=2G root=none rootfstype=hostfs rootflags=/ rw init="$init" con=null con0=fd:0,fd:1 quiet </dev/null 2>&1)
    rm -f "$init"
    echo "$said"
    [[ "$said" == *"ALL WELL"* ]]
    exit
fi
exec >/dev/console 2>&1
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs run /run; mount -t tmpfs mnt /mnt
mkdir -p /run/modules/lib/modules /mnt/export /mnt/hard /mnt/soft
mount -t tmpfs shm /dev/shm
ln -s "/usr/lib/uml/modules/$(uname -r)" "/run/modules/lib/modules/$(uname -r)"
for module in loop nfs nfsv3 nfsv4 nfsd hmac cmac cbc ecb ctr ccm gcm ghash-generic sha512_generic cifs; do modprobe -d /run/modules "$module" || echo "no module $module"; done
ip link set lo up
truncate -s 160M /mnt/disk; mkfs.ext4 -q -F /mnt/disk; mount -o loop /mnt/disk /mnt/export
mount -t tmpfs state /var/lib/nfs; mkdir -p /var/lib/nfs/{rpc_pipefs,sm,v4recovery}; touch /var/lib/nfs/{etab,rmtab}
mount -t rpc_pipefs sunrpc /var/lib/nfs/rpc_pipefs; mount -t nfsd nfsd /proc/fs/nfsd
rpcbind; rpc.statd --no-notify
exportfs -o rw,no_root_squash,insecure,fsid=0,no_subtree_check,sync 127.0.0.1:/mnt/export
rpc.nfsd -G 10 -L 10 4; rpc.mountd
mount -t nfs -o vers=4.2,proto=tcp 127.0.0.1:/ /mnt/hard && echo "hard mount of NFS 4.2"
mount -t nfs -o vers=3,proto=tcp,soft,timeo=20,retrans=1 127.0.0.1:/mnt/export /mnt/soft && echo "soft mount of NFS 3"
if command -v smbd >/dev/null; then
    mkdir -p /mnt/share /mnt/smb /run/samba
    mount -t tmpfs -o size=48M share /mnt/share
    {
        printf '[global]\nsmb ports = 445\ninterfaces = 127.0.0.1\nbind interfaces only = yes\n'
        printf '%s = /run/samba\n' 'lock directory' 'state directory' 'cache directory' 'pid directory' 'private dir' 'ncalrpc dir'
        printf 'log file = /run/samba/log\nload printers = no\ndisable spoolss = yes\n'
        printf '[share]\npath = /mnt/share\nread only = no\nvalid users = root\n'
    } >/run/smb.conf
    printf '%s\n' secret secret | smbpasswd -c /run/smb.conf -a -s root
    smbd --daemon -s /run/smb.conf
    for _ in $(seq 50); do (: </dev/tcp/127.0.0.1/445) 2>/dev/null && break; sleep 0.1; done
    # Without the helper of cifs-utils, the kernel itself takes the path of the share and the address.
    mount -i -t cifs -o 'unc=\\127.0.0.1\share,ip=127.0.0.1,username=root,password=secret' //127.0.0.1/share /mnt/smb && echo "mount of SMB"
fi
cd "$HERE/../.." && PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$PWD:$PWD/backends" OMP_NUM_THREADS=1 "$2" -W ignore -m "$3" /mnt/hard /mnt/soft /mnt/smb
halt -f
