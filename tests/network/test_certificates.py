"""Who holds a certificate of the authority is admitted; nobody else is."""

import datetime
import ipaddress
import json
import socket

import pytest
import zenoh
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from nearby import free_ports, wait_until

from polytempo.core.errors import PolytempoError
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.session import Address, Certificates, open_session, settings


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    make_certificates(folder, {"ann": LOCAL, "bob": LOCAL})
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    make_certificates(folder, {"eve": LOCAL})
    return folder


def files(folder, name, ca=None):
    return Certificates((ca or folder) / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def test_a_certificate_has_the_addresses_both_usages_and_the_authoritys_signature(ours):
    certificate = x509.load_pem_x509_certificate((ours / "ann.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("127.0.0.1"),
        ipaddress.ip_address("::1"),
    ]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {*usages} == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    authority = x509.load_pem_x509_certificate((ours / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(authority)  # raises if it is not
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 363 <= left.days <= 365


def test_keys_are_for_their_owner_only(ours):
    for name in ("ca", "ann", "bob"):
        assert (ours / f"{name}.key").stat().st_mode & 0o077 == 0


def test_a_folder_keeps_its_authority_and_its_certificates(tmp_path):
    make_certificates(tmp_path, {"ann": LOCAL})
    before = (tmp_path / "ca.pem").read_bytes()
    make_certificates(tmp_path, {"bob": ["10.0.0.2"]})
    assert (tmp_path / "ca.pem").read_bytes() == before
    bob = x509.load_pem_x509_certificate((tmp_path / "bob.pem").read_bytes())
    bob.verify_directly_issued_by(x509.load_pem_x509_certificate(before))
    with pytest.raises(PolytempoError, match=r"already holds a certificate of 'ann'"):
        make_certificates(tmp_path, {"carl": LOCAL, "ann": LOCAL})
    assert not (tmp_path / "carl.pem").exists()


def test_a_foreign_authority_in_the_folder_is_said(tmp_path):
    (tmp_path / "ca.pem").write_text("nonsense")
    (tmp_path / "ca.key").write_text("nonsense")
    with pytest.raises(PolytempoError, match=r"CA in .* cannot be read"):
        make_certificates(tmp_path, {"ann": LOCAL})


def test_strangers_are_never_admitted(ours, others):
    """Of four that call, only the two with a certificate of our authority come in."""
    here, foreign, bare, *friends = (f"tls/127.0.0.1:{port}" for port in free_ports(5))
    sessions = [open_session(Address([here], [], files(ours, "ann")))]
    try:
        # A stranger that trusts us, with a certificate of another authority; one with none.
        stranger = Address([foreign], [here], files(others, "eve", ca=ours))
        sessions.append(open_session(stranger))
        nameless = settings(stranger) | {"listen/endpoints": [bare]}
        config = zenoh.Config()
        for key, value in nameless.items():
            if "connect_" not in key and "mtls" not in key:
                config.insert_json5(key, json.dumps(value))
        sessions.append(zenoh.open(config))
        # They called first, and had all the time in which two friends come in, one by one.
        for count, friend in enumerate(friends, 1):
            sessions.append(open_session(Address([friend], [here], files(ours, "bob"))))
            wait_until(lambda count=count: len(sessions[0].info.peers_zid()) >= count)
        admitted = {*map(str, sessions[0].info.peers_zid())}
        assert admitted == {str(session.zid()) for session in sessions[3:]}
        assert sessions[1].info.peers_zid() == sessions[2].info.peers_zid() == []
    finally:
        for session in sessions:
            session.close()


def test_certificates_and_addresses_must_fit(ours):
    with pytest.raises(PolytempoError, match=r"tls/HOST:PORT"):
        settings(Address(["tcp/127.0.0.1:7447"], [], files(ours, "ann")))
    with pytest.raises(PolytempoError, match=r"tcp/HOST:PORT"):
        settings(Address(["tcp/127.0.0.1:7447"], ["tls/127.0.0.1:7448"]))
    with pytest.raises(PolytempoError, match=r"there is no file .*nobody.pem"):
        settings(Address(["tls/127.0.0.1:7447"], [], files(ours, "nobody")))
    with pytest.raises(PolytempoError, match="needs an address"):
        settings(Address([]))


def test_a_port_in_use_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"tcp/127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PolytempoError, match=r"cannot listen on .*in use.*--listen"):
            open_session(Address([where]))


def test_a_client_cannot_pass_for_a_server(tmp_path):
    make_certificates(tmp_path, {"server": LOCAL, "client": []})
    certificate = x509.load_pem_x509_certificate((tmp_path / "client.pem").read_bytes())
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [*usage] == [ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
