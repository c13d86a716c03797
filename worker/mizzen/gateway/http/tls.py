# SPDX-License-Identifier: Apache-2.0
"""TLS for the OpenAI API; the certificate is reloaded when its files change, without a restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificate

log = logging.getLogger(__name__)

RELOAD_SECONDS = 2.0
"""Interval at which the certificate and key files are checked for changes."""


class InvalidCertificate(ValueError):
    """The certificate or its private key cannot be read, or they do not belong together."""


class ServerTls:
    """TLS context of a server; new connections use the newest certificate."""

    def __init__(self, cert: str, key: str, reload_seconds: float = RELOAD_SECONDS) -> None:
        """Read the certificate and its key.

        Raises:
            InvalidCertificate: a file cannot be read or used; the message names the file and the problem.
        """
        self._cert, self._key = Path(cert), Path(key)
        self._seconds = reload_seconds
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._loaded = self._load()

    @property
    def expires_at(self) -> float:
        """Unix time at which the server's own certificate, the first in the chain, expires."""
        return load_pem_x509_certificate(self._loaded[0]).not_valid_after_utc.timestamp()

    async def watch(self) -> None:
        """Reload the files whenever they change, until cancelled.

        If the changed files are invalid, the previous certificate stays in use.
        """
        problem = ""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                if self._read() != self._loaded:
                    self._loaded = self._load()
                    log.info("certificate reloaded", extra={"fields": {"file": str(self._cert)}})
                problem = ""
            except InvalidCertificate as error:
                if str(error) != problem:  # logged once, not at every check
                    log.error("cannot read the certificate", extra={"fields": {"reason": str(error)}})
                problem = str(error)

    def _load(self) -> tuple[bytes, bytes]:
        content = self._read()
        # A failed load can leave a context with a mismatched pair, so a scratch context tries the files
        # first.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            try:
                context.load_cert_chain(self._cert, self._key, password=_no_password)
            except (OSError, ValueError) as error:  # SSLError, or a file that was removed since `_read`
                reason = getattr(error, "reason", None) or str(error)
                text = f"--tls-cert {self._cert} and --tls-key {self._key} cannot be used: {reason}"
                raise InvalidCertificate(text) from None
        return content

    def _read(self) -> tuple[bytes, bytes]:
        contents: list[bytes] = []
        for name, path in (("--tls-cert", self._cert), ("--tls-key", self._key)):
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise InvalidCertificate(f"{name} {path} cannot be read: {error.strerror}") from error
        return contents[0], contents[1]


def _no_password() -> str:
    raise ValueError("the key is encrypted; give a key without a password")
