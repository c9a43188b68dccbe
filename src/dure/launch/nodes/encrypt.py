"""Encryption of the agents' connections: TLS 1.3 with one certificate, which both sides make from the team's key.

Whoever has the key makes the same certificate, and trusts no other; nothing is written to a file. It comes after the
handshake that proves the key (`comm/handshake.py`), which keeps strangers away before any of this costs anything.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from dataclasses import dataclass

from dure.base.errors import UsageError
from dure.base.team_key import TeamKey

_SECONDS = 10.0
"""For the caller's part of the handshake."""
_FROM, _UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31)


@dataclass(frozen=True)
class Encryption:
    """What a team's agents encrypt with."""

    calls: ssl.SSLContext
    answers: ssl.SSLContext

    def call(self, connection: socket.socket) -> ssl.SSLSocket:
        """The caller's side, at once. Raises OSError."""
        connection.settimeout(_SECONDS)
        return self.calls.wrap_socket(connection)

    def answer(self, connection: socket.socket) -> ssl.SSLSocket:
        """The listener's side of a socket that does not block: goes on whenever something has come."""
        return self.answers.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def encryption_of(key: TeamKey) -> Encryption:
    """From the team's key; UsageError where the package for it is missing."""
    pem = _certificate(key.derived("agents tls"))
    return Encryption(_context(ssl.PROTOCOL_TLS_CLIENT, *pem), _context(ssl.PROTOCOL_TLS_SERVER, *pem))


def _context(protocol: int, certificate: bytes, private: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the one certificate says who it is: the team
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    # OpenSSL wants a path: memory without a name has one, for as long as it is open.
    memory = os.memfd_create("dure-tls", os.MFD_CLOEXEC)
    try:
        os.write(memory, private + certificate)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def _certificate(seed: bytes) -> tuple[bytes, bytes]:
    """A certificate and its private key, in PEM: Ed25519 signs the same bytes the same way, on whichever node."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise UsageError(
            "cluster.tls needs the package cryptography: pip install 'dure[tls]' on all nodes"
        ) from None
    private = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dure team")])
    own = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(own, critical=False)
        .sign(private, None)
    )
    return (
        made.public_bytes(Encoding.PEM),
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
