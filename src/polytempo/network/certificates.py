"""A test authority and the certificates of its peers, for mutual TLS.

Anyone with a certificate from the authority is admitted, so the folder is a secret: a peer needs
its own two files and `ca.pem`, and never `ca.key`. A public deployment uses its own authority;
its certificates need what these have: the address of the peer as a subject alternative name, and
both usages, server and client.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polytempo.core.errors import PolytempoError

LOCAL = ("127.0.0.1", "::1", "localhost")
DAYS = 365
_AUTHORITY = "polytempo test authority"


def make_certificates(
    folder: Path, peers: Mapping[str, Sequence[str]], *, days: int = DAYS
) -> list[Path]:
    """Write a certificate (`NAME.pem`, `NAME.key`) for each, valid for its addresses. One without
    addresses is for a client alone: its holder cannot pass for a server.

    The authority of the folder signs them; an empty folder gets a new one (`ca.pem`, `ca.key`).
    """
    for name in peers:
        if (folder / f"{name}.pem").exists():
            raise PolytempoError(
                f"{folder} already holds a certificate of {name!r}; delete {name}.pem and "
                f"{name}.key, or choose another name"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "ca.pem").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(_AUTHORITY)
        built = _builder(subject, subject, key, days).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        _write(folder, "ca", built.sign(key, hashes.SHA256()), key)
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise PolytempoError(
            f"the CA in {folder} cannot be read ({error}); give an empty folder"
        ) from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise PolytempoError(f"{folder}/ca.key is not from Polytempo; give an empty folder")
    written = []
    for name, addresses in peers.items():
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        built = _builder(_name(name), authority.subject, key, days).add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        if addresses:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            where = x509.SubjectAlternativeName(list(map(_address, addresses)))
            built = built.add_extension(where, False)
        built = built.add_extension(x509.ExtendedKeyUsage(usages), False)
        _write(folder, name, built.sign(signer, hashes.SHA256()), key)
        written.append(folder / f"{name}.pem")
    return written


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of peers differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """The key first, readable by its owner alone: a certificate never stands without its key."""
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file = os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(secret)
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
