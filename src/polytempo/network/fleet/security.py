"""Addresses, certificates and credentials of a fleet."""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
import re
from typing import TYPE_CHECKING

from polytempo.core.errors import PolytempoError
from polytempo.network.session import Certificates

if TYPE_CHECKING:
    import grpc

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})")


def require_fleet() -> None:
    """Say what is missing before anything starts."""
    for module in ("grpc", "google.protobuf", "cryptography"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise PolytempoError(
                f'a fleet on a network needs {module}: pip install "polytempo[network]"'
            )


def check_address(option: str, address: str, secure: bool) -> tuple[str, int]:
    """Host and port. Without certificates only this machine can be meant."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[3]) > 65_535:
        raise PolytempoError(f"{option} {address}: expected HOST:PORT, such as 127.0.0.1:7448")
    host = found[1] or found[2]
    if not secure and not _is_local(host):
        raise PolytempoError(
            f"{option} {address}: without certificates a fleet stays on this machine (127.0.0.1); "
            "make some with `polytempo certs`, and give them with --certs"
        )
    return host, int(found[3])


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_certificates(files: Certificates) -> str:
    """The name that the certificate gives its owner; an error if it cannot be used now."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    for file in (files.ca, files.cert, files.key):
        if not file.is_file():
            raise PolytempoError(f"there is no file {file}; make certificates: `polytempo certs`")
    try:
        own = x509.load_pem_x509_certificate(files.cert.read_bytes())
        authorities = x509.load_pem_x509_certificates(files.ca.read_bytes())
    except (OSError, ValueError) as error:
        raise PolytempoError(f"{files.cert} or {files.ca} cannot be read: {error}") from error
    try:
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise PolytempoError(f"{files.key} cannot be read: {error}") from error
    if key.public_key() != own.public_key():
        raise PolytempoError(
            f"the key {files.key} does not belong to the certificate {files.cert}: give the two "
            "that were made together"
        )
    now = datetime.datetime.now(datetime.UTC)
    if not own.not_valid_before_utc <= now <= own.not_valid_after_utc:
        raise PolytempoError(
            f"the certificate {files.cert} is valid from {own.not_valid_before_utc:%Y-%m-%d %H:%M} "
            f"to {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and now it is {now:%Y-%m-%d %H:%M}: "
            "get a new one (or set the clock)"
        )
    names = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    for authority in authorities:
        try:
            own.verify_directly_issued_by(authority)
            break
        except (ValueError, TypeError, InvalidSignature):
            continue
    else:
        raise PolytempoError(
            f"the certificate {files.cert} was not issued by the authority {files.ca}: give the "
            "two that belong together"
        )
    if len(names) != 1:
        raise PolytempoError(f"the certificate {files.cert} must have exactly one common name")
    return str(names[0].value)


def server_credentials(files: Certificates) -> grpc.ServerCredentials:
    import grpc

    check_certificates(files)
    return grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.cert.read_bytes())],
        root_certificates=files.ca.read_bytes(),
        require_client_auth=True,
    )


def channel_credentials(files: Certificates) -> grpc.ChannelCredentials:
    import grpc

    return grpc.ssl_channel_credentials(
        files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
    )
