# SPDX-License-Identifier: Apache-2.0
"""Certificates and kubeconfigs of one cluster.

Each cluster has its own certificate authority. Keys are ECDSA P-256; certificates are valid for a year.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=365)
KUBELET_CLIENT = "kube-apiserver-kubelet-client"
"""Common name of the certificate with which the API server connects to nodes."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Paths of a certificate and its private key, both PEM."""

    certificate: Path
    key: Path


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def encode_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as unencrypted PKCS#8 PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class CertificateAuthority:
    """A new certificate authority; its own certificate and all certificates it issues are in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mizzen-local")])
        certificate = (
            self._builder(self.name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        self.pair = self._write("ca", certificate, self.key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + LIFETIME)
        )

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
        pair = KeyPair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_private(pair.key, encode_private_key(key))
        return pair

    def issue(self, name: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> KeyPair:
        """Issue a client certificate; with `hosts`, it is a server certificate too.

        Args:
            name: name of the files, without suffix.
            user: common name, which Kubernetes uses as the user name.
            groups: organisations, which Kubernetes uses as the user's groups.
            hosts: DNS names and IP addresses of the server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject.append(x509.NameAttribute(NameOID.COMMON_NAME, user))
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])
        builder = (
            self._builder(x509.Name(subject), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(map(_general_name, hosts)), critical=False
            )
        return self._write(name, builder.sign(self.key, hashes.SHA256()), key)

    def signing_pair(self, name: str) -> KeyPair:
        """Create a key pair for signing service account tokens; its public half is not a certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = KeyPair(self.folder / f"{name}.pub", self.folder / f"{name}.key")
        pair.certificate.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        write_private(pair.key, encode_private_key(key))
        return pair


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def write_kubeconfig(path: Path, *, server: str, authority: Path, user: str, pair: KeyPair) -> Path:
    """Write a kubeconfig with embedded certificates, as JSON (which is also YAML); return its path."""

    def encoded(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    return _write_config(
        path,
        {"server": server, "certificate-authority-data": encoded(authority)},
        user,
        {
            "client-certificate-data": encoded(pair.certificate),
            "client-key-data": encoded(pair.key),
        },
    )


def write_token_kubeconfig(
    path: Path, *, server: str, authority: Path, namespace: str, token_file: Path
) -> Path:
    """Write a kubeconfig for a service account whose token is in a file; return the kubeconfig's path."""
    cluster = {"server": server, "certificate-authority": str(authority)}
    return _write_config(path, cluster, "pod", {"tokenFile": str(token_file)}, namespace)


def _write_config(
    path: Path, cluster: dict[str, str], user: str, identity: dict[str, str], namespace: str = "default"
) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "mizzen-local", "cluster": cluster}],
        "users": [{"name": user, "user": identity}],
        "contexts": [
            {
                "name": "mizzen-local",
                "context": {"cluster": "mizzen-local", "user": user, "namespace": namespace},
            }
        ],
        "current-context": "mizzen-local",
    }
    write_private(path, json.dumps(config, indent=1).encode())
    return path
