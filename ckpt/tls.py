"""The encryption of connections between nodes: TLS 1.3, where both ends present a certificate."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from ckpt.config import Tls
from ckpt.errors import ConfigError

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _Contexts:
    """The TLS contexts for the connections that this node accepts and makes."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def of(cls, tls: Tls) -> Self:
        """Read the files of ``tls`` and return the TLS contexts for a server and for a client.

        A handshake in memory checks that the files fit each other.

        Raises:
            ConfigError: A file cannot be read, or the files do not fit each other.
        """
        for name, path in tls.paths.items():
            try:
                with open(path, "rb") as file:
                    file.read(1)
            except (OSError, ValueError) as error:  # ValueError: a null byte
                reason = getattr(error, "strerror", "") or error
                raise ConfigError(f"tls: the {name} {path} cannot be read: {reason}") from None
        contexts = cls(
            _context(ssl.PROTOCOL_TLS_SERVER, tls.paths),
            _context(ssl.PROTOCOL_TLS_CLIENT, tls.paths),
        )
        # No client resumes a session, so the server sends no session tickets.
        contexts.server.num_tickets = 0
        contexts.check(tls)
        return contexts

    def check(self, tls: Tls) -> None:
        """Raise ``ConfigError`` if nodes with these files would refuse each other."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client.wrap_bio(to_client, to_server)
        server = self.server.wrap_bio(to_server, to_client, server_side=True)
        try:
            # Each end goes on until it needs the answer of the other end.
            for end in (client, server, client, server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            paths = tls.paths
            raise ConfigError(
                f"tls: the certificate {paths['certificate']} cannot be used with the authority "
                f"{paths['authority']}: {_reason_text(error)}"
            ) from None


class Encryption:
    """Encrypts the connections between this process and other nodes.

    Certificates can be renewed while a job runs, since files that have changed are read again.

    Raises:
        ConfigError: A file cannot be read, or the files do not fit each other.

    Thread safety: any thread may call the methods. ``_lock`` guards all fields.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls, self._lock = tls, threading.Lock()
        self._used_files = _file_states(tls)  # The state of the files that were read last
        self._unfit_files = self._used_files  # The last state that was found not to be usable
        self._contexts = _Contexts.of(tls)
        self._logged_reasons: dict[str, set[str]] = {}  # By peer, see ``is_new``
        self._log_count = 0

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Wrap an accepted connection in TLS and return it. The caller does the handshake."""
        _disable_nagle(connection)
        context = self._current().server
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def connect(self, connection: socket.socket) -> ssl.SSLSocket:
        """Wrap a connection to another node in TLS, do the handshake and return the connection.

        The timeout of ``connection`` limits the handshake.

        Raises:
            ConnectionError: The handshake fails, for example because the other end has no
                certificate of the authority, or does not use TLS.
        """
        try:
            _disable_nagle(connection)
            return self._current().client.wrap_socket(connection)
        except (ssl.SSLEOFError, ConnectionResetError):
            raise ConnectionError("it has ended the handshake: does it use TLS, too?") from None
        except OSError as error:
            raise ConnectionError(reason_of(error)) from error

    def is_new(self, peer: str, reason: str, *, limit: int | None = None) -> bool:
        """Return True if the caller should log that ``peer`` is not connected for this ``reason``.

        The pair of ``peer`` and ``reason`` then counts as logged. Return False if the pair was
        logged since the last call of ``note_connection`` for that peer, or if ``limit`` pairs were
        logged since this object was made.
        """
        with self._lock:
            if reason in self._logged_reasons.get(peer, ()) or (
                limit is not None and self._log_count >= limit
            ):
                return False
            self._logged_reasons.setdefault(peer, set()).add(reason)
            self._log_count += 1
            return True

    def note_connection(self, peer: str) -> None:
        """Note that a connection with ``peer`` succeeded, so that its next failure is logged."""
        with self._lock:
            self._logged_reasons.pop(peer, None)

    def _current(self) -> _Contexts:
        """Return the contexts. If the files have changed, read them again first."""
        with self._lock:
            if (files := _file_states(self._tls)) != self._used_files:
                try:
                    self._contexts = _Contexts.of(self._tls)
                except (ConfigError, OSError) as error:
                    # The next call reads the files again. Perhaps not all of them are renewed,
                    # valid or readable yet, and ``files`` may stay the same when they become so.
                    if files != self._unfit_files:
                        text = "ckpt: the files of tls have changed and are not used: %s"
                        _log.warning(text, error)
                    self._unfit_files = files
                else:
                    self._used_files = files
                    _log.info("ckpt: the files of tls have changed and were read again")
            return self._contexts


def _disable_nagle(connection: socket.socket) -> None:
    """Disable Nagle's algorithm on ``connection``.

    Otherwise the first request would wait about 40 ms, until the other end acknowledges the end of
    the handshake.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def encryption_of(tls: Tls | None) -> Encryption | None:
    """Return an `Encryption` with the files of ``tls``, or None if ``tls`` is None.

    Raises:
        ConfigError: A file cannot be read, or the files do not fit each other.
    """
    return None if tls is None else Encryption(tls)


def reason_of(error: OSError) -> str:
    """Return a phrase for the log that says why a connection failed with ``error``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {_reason_text(error)}"
    if not isinstance(error, ssl.SSLError) or not error.reason:
        return str(error)
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "it does not use TLS"
    if "_ALERT_" in error.reason:  # The other end has sent the reason
        return f"it refuses the connection: {_reason_text(error).partition('alert ')[2]}"
    return _reason_text(error)


def _reason_text(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason.replace("_", " ").lower() if error.reason else str(error)


def _context(side: int, paths: dict[str, str]) -> ssl.SSLContext:
    """Return the TLS context of a side, a server or a client, with the files at ``paths``.

    Raises:
        ConfigError: A file does not hold what its name in ``paths`` says.
    """
    certificate, key, authority = paths["certificate"], paths["key"], paths["authority"]
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nodes learn each other's addresses when the job starts, so certificates cannot name them.
    # The authority signs certificates for nodes only, and each request contains a secret token.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # The authority may be an intermediate one, whose own issuer need not be trusted.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not _holds_certificate(authority):
        raise ConfigError(f"tls: the authority {authority} holds no certificate in PEM form")
    context.load_verify_locations(authority)
    if not _holds_certificate(certificate):
        raise ConfigError(f"tls: the certificate {certificate} holds no certificate in PEM form")
    try:
        # Without this function, OpenSSL would wait for a passphrase at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = f"does not belong to the certificate {certificate}"
        elif (error.reason or "").endswith(("_TOO_SMALL", "_TOO_WEAK")):
            raise ConfigError(
                f"tls: the certificate {certificate} cannot be used: {_reason_text(error)}"
            ) from None
        else:
            reason = "holds no private key in PEM form without a passphrase"
        raise ConfigError(f"tls: the key {key} {reason}") from None
    return context


def _holds_certificate(path: str) -> bool:
    """Return True if the file at ``path`` holds a certificate in PEM form."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _file_states(tls: Tls) -> tuple[tuple[int, int, int], ...]:
    """Return the inode, the time of the last change and the size of each file that can be read.

    The result differs once a file was replaced or written to.
    """
    files: list[tuple[int, int, int]] = []
    for path in tls.paths.values():
        with suppress(OSError, ValueError):  # ValueError: a null byte
            status = os.stat(path)
            files.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(files)
