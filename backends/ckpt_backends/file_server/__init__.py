"""File servers: SFTP, SMB, FTP and WebDAV, each protocol with a module of its own."""
