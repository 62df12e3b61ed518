"""Authorities and the certificates that they issue, for one test."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ckpt.config import Tls

DAY = dt.timedelta(days=1)


class Authority:
    """A certificate authority, in a file of ``folder``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder, self.name, self.path = folder, name, folder / f"{name}.pem"
        self._key, self._subject, self._chain = _new_key(), _name(name), b""
        self.path.write_bytes(self._signed(self._subject, self._key.public_key()))

    def between(self, name: str) -> Authority:
        """Return an authority that this one has signed, and whose nodes know this one."""
        found = Authority(self.folder, name)
        found._chain = self._signed(found._subject, found._key.public_key())
        found.path = self.path
        return found

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> bytes:
        certificate = (
            _builder(subject, self._subject, key, days=2)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str,
        *,
        days: int = 1,
        passphrase: str = "",
        usages: tuple[x509.ObjectIdentifier, ...] = (),
        rsa_bits: int = 0,
        begins_in: dt.timedelta = -10 * DAY,
    ) -> Tls:
        """Return the files of a new node. With ``days`` below 0 its certificate has expired."""
        key = rsa.generate_private_key(65537, rsa_bits) if rsa_bits else _new_key()
        builder = _builder(
            _name(name), self._subject, key.public_key(), days=days, begins_in=begins_in
        )
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("192.0.2.1"))]),
            critical=False,
        )
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        tls = Tls(
            certificate=str(self.folder / f"{self.name}-{name}.pem"),
            key=str(self.folder / f"{self.name}-{name}.key"),
            authority=str(self.path),
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        Path(tls.certificate).write_bytes(pem + self._chain)
        Path(tls.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(passphrase.encode())
                if passphrase
                else serialization.NoEncryption(),
            )
        )
        return tls


SERVER_ONLY = (ExtendedKeyUsageOID.SERVER_AUTH,)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    *,
    days: int,
    begins_in: dt.timedelta = -10 * DAY,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins_in)
        .not_valid_after(now + days * DAY)
    )
