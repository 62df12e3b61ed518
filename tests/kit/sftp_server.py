"""Serve a folder by SFTP over asyncssh: ``python sftp_server.py PORT FOLDER PASSWORD``.

While there is a file ``FOLDER.broken``, the disk fails to keep files: ``fsync`` raises an error.
"""

import asyncio
import errno
import os
import sys

import asyncssh


class Login(asyncssh.SSHServer):
    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return password == sys.argv[3]


class Disk(asyncssh.SFTPServer):
    def fsync(self, file_obj: object) -> None:
        if os.path.exists(f"{sys.argv[2]}.broken"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(file_obj)


async def main() -> None:
    folder = sys.argv[2].encode()
    await asyncssh.listen(
        "127.0.0.1",
        int(sys.argv[1]),
        server_factory=Login,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=lambda channel: Disk(channel, chroot=folder),
    )
    await asyncio.Event().wait()


asyncio.run(main())
