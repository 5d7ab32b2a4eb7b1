"""Certificates for tests, as PEM files: an authority, and the certificates that it signs."""

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Writes NAME.pem and NAME.key, and returns their paths."""
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        paths[0].write_bytes(self.certificate)
        paths[1].write_bytes(self.key)
        return paths


class Authority:
    """A certificate authority with a root certificate of its own.

    Attributes:
        root: the root certificate, in PEM.
    """

    def __init__(self, name: str = "test root") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = datetime.now(UTC)
        builder = _builder(self._name, self._name, self._key, now - DAY, now + 365 * DAY)
        basic = x509.BasicConstraints(ca=True, path_length=0)
        usage = x509.KeyUsage(
            **dict.fromkeys(
                (
                    "digital_signature",
                    "content_commitment",
                    "key_encipherment",
                    "data_encipherment",
                    "key_agreement",
                ),
                False,
            ),
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(basic, True).add_extension(usage, True)
        builder = builder.add_extension(self._identifier(), False)
        self.root = builder.sign(self._key, hashes.SHA256()).public_bytes(PEM)

    def _identifier(self) -> x509.SubjectKeyIdentifier:
        return x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())

    def sign(
        self,
        name: str,
        days: tuple[float, float] = (-1, 30),
        uris: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> Pair:
        """Signs a certificate for localhost, 127.0.0.1 and ``hosts``.

        Args:
            days: start and end of its validity, in days from now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        first, last = (now + day * DAY for day in days)
        names: list[x509.GeneralName] = [
            *map(x509.DNSName, ("localhost", *hosts)),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            *map(x509.UniformResourceIdentifier, uris),
        ]
        builder = _builder(_name(name), self._name, key, first, last)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
            self._identifier()
        )
        builder = builder.add_extension(authority, False)
        signed = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(signed.public_bytes(PEM), private)

    def revoke(self, *certificates: bytes) -> bytes:
        """Returns a revocation list of these certificates, in PEM."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now - DAY).next_update(now + 30 * DAY)
        for certificate in certificates:
            number = x509.load_pem_x509_certificate(certificate).serial_number
            revoked = x509.RevokedCertificateBuilder().serial_number(number)
            builder = builder.add_revoked_certificate(revoked.revocation_date(now - DAY).build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(PEM)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    first: datetime,
    last: datetime,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    return builder.not_valid_before(first).not_valid_after(last)


def client_context(root: bytes, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """Returns the TLS context of a client that trusts ``root``.

    The client presents ``pair`` if the server requests a client certificate.
    """
    context = ssl.create_default_context(cadata=root.decode())
    if pair is not None:
        context.load_cert_chain(*pair)
    return context
