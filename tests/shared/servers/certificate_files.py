# SPDX-License-Identifier: Apache-2.0
"""Files of self-signed certificates for TLS servers in tests."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tenant_kit import replace_file


def write_certificate(folder: Path, name: str, *hosts: x509.GeneralName) -> tuple[Path, Path]:
    """Create a self-signed certificate with the common name `name` for the hosts.

    Return the paths of the certificate and of its key; files that exist are replaced atomically.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    cert_path, key_path = folder / "tls.crt", folder / "tls.key"
    replace_file(cert_path, signed.public_bytes(serialization.Encoding.PEM).decode())
    replace_file(key_path, private.decode())
    return cert_path, key_path
