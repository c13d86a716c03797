# SPDX-License-Identifier: Apache-2.0
"""A fake OCI registry that injects faults of real registries, for tests of fetches; see model_servers.py."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from model_servers import LOOPBACK, TITLE, Address, Handler, Server


class Registry:
    """Fake OCI registry; a second server issues access tokens to clients that send user name and password."""

    USER, PASSWORD = "robot", "pass:word"

    @classmethod
    def login(cls, host: str) -> str:
        """Return a Docker config.json with the credentials for a registry at `host`."""
        auth = base64.b64encode(f"{cls.USER}:{cls.PASSWORD}".encode()).decode()
        return json.dumps({"auths": {host: {"auth": auth}}})

    def __init__(self, at: Address = LOOPBACK) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.private = True
        self.realm = ""
        self.basic_seen: list[str] = []
        self.server = Server(self._answer, at)

    def blob(self, data: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"digest": digest, "size": len(data)}

    def artifact(self, files: dict[str, bytes], key: str = TITLE) -> list[dict[str, Any]]:
        """Return the layers of an artifact that contains files, as ORAS creates them."""
        return [
            {"mediaType": "application/octet-stream", **self.blob(data), "annotations": {key: name}}
            for name, data in files.items()
        ]

    def push(self, tag: str, layers: list[dict[str, Any]]) -> str:
        """Push a manifest that lists layers; return the manifest's digest."""
        kind = "application/vnd.oci.image.manifest.v1+json"
        config = {"mediaType": "application/vnd.oci.empty.v1+json", **self.blob(b"{}")}
        return self.tag(tag, {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers})

    def tag(self, tag: str, body: dict[str, Any]) -> str:
        data = json.dumps(body).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.manifests[tag] = self.manifests[digest] = data
        return digest

    def _answer(self, handler: Handler) -> None:
        parts = urlsplit(handler.path)
        shown = handler.headers.get("Authorization", "")
        if parts.path == "/token":
            self.basic_seen.append(shown)
            right = base64.b64encode(f"{self.USER}:{self.PASSWORD}".encode()).decode()
            query = parse_qs(parts.query)
            if shown == f"Basic {right}" and query == {
                "service": ["reg"],
                "scope": ["repository:org/tiny:pull"],
            }:
                handler.reply(200, b'{"token": "t0ken"}')
            else:
                handler.reply(401, b"")
            return
        if self.private and shown != "Bearer t0ken":
            realm = self.realm or f"{self.server.url}/token"
            challenge = f'Bearer realm="{realm}",service="reg",scope="repository:org/tiny:pull"'
            handler.reply(401, b"", {"WWW-Authenticate": challenge})
            return
        kind, _, name = parts.path.removeprefix("/v2/org/tiny/").partition("/")
        if kind == "manifests" and name in self.manifests:
            handler.reply(200, self.manifests[name])
        elif kind == "blobs" and name in self.blobs:
            handler.file(self.blobs[name])
        else:
            handler.reply(404, b"")

    def close(self) -> None:
        self.server.close()
