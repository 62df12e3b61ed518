"""Folders, on a local disk, in shared memory, or on NFS and Lustre."""
