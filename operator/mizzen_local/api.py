# SPDX-License-Identifier: Apache-2.0
"""A small Kubernetes API client for the node and `waits.py`.

Objects are plain JSON, and interrupted watches reconnect.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

import aiohttp

Object = dict[str, Any]
Change = Literal["ADDED", "MODIFIED", "DELETED", "SYNCED"]
log = logging.getLogger(__name__)

WATCH_SECONDS = 300
WATCH_IDLE_SECONDS = 90.0  # bookmarks come about once a minute
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """An error response of the API server.

    Attributes:
        status: HTTP status.
        reason: reason in the Status object, such as `NotFound`.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class ApiClient:
    """Client of the API server that a kubeconfig names; use it with `async with`.

    It supports only kubeconfigs that `pki.py` has written.
    """

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        self.server: str = config["clusters"][0]["cluster"]["server"]
        self._context = _tls_context(config)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        self._session = aiohttp.ClientSession(
            self.server, connector=connector, timeout=aiohttp.ClientTimeout(total=30)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session.

        Raises:
            RuntimeError: the client is used outside of `async with`.
        """
        if self._session is None:
            raise RuntimeError("ApiClient is used outside of `async with`")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send one request and return the object in the response.

        Raises:
            ApiError: the server returned an error status.
            aiohttp.ClientError, TimeoutError: the server did not respond.
        """
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        async with self.session.request(method, path, data=data, params=params, headers=headers) as response:
            answer = await response.json(content_type=None)
            if response.status >= 400:
                raise _api_error(response.status, answer)
            return answer

    async def get(self, path: str) -> Object:
        """Read one object."""
        return await self.request("GET", path)

    async def create(self, path: str, body: Object) -> Object:
        """Create an object in the collection at `path`."""
        return await self.request("POST", path, body)

    async def patch(self, path: str, body: Object, content_type: str = MERGE) -> Object:
        """Patch the object at `path`."""
        return await self.request("PATCH", path, body, content_type=content_type)

    async def delete(self, path: str, body: Object | None = None) -> Object:
        """Delete the object at `path`; `body` is a DeleteOptions."""
        return await self.request("DELETE", path, body)

    async def watch(
        self, path: str, params: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[Change, Object]]:
        """Yield the objects of a collection and their changes, without end.

        Existing objects come first, as ADDED, followed by SYNCED with an empty object; then come the changes.
        When the watch fails, the collection is listed again. New and changed objects then come as ADDED.
        Objects that were deleted in the meantime come as DELETED, with their last known content. Another
        SYNCED follows.
        """
        known: dict[str, Object] = {}
        pause = 0.05
        while True:
            try:
                listed = await self.request("GET", path, params=params)
                pause = 0.05
                kind = {"kind": listed["kind"].removesuffix("List"), "apiVersion": listed["apiVersion"]}
                for change, item in _diff_list(known, [{**kind, **item} for item in listed["items"]]):
                    yield change, item
                yield "SYNCED", {}
                async for change, item in self._watch_from(
                    path, params, listed["metadata"]["resourceVersion"]
                ):
                    uid = item["metadata"]["uid"]
                    if change == "DELETED":
                        known.pop(uid, None)
                    else:
                        known[uid] = item
                    yield change, item
            except (ApiError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                log.warning("watch of %s failed, listing again: %s", path, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _watch_from(
        self, path: str, params: Mapping[str, str] | None, version: str
    ) -> AsyncIterator[tuple[Change, Object]]:
        """Yield the changes after a resource version; raise an error when the watch cannot be resumed."""
        while True:
            query = {
                **(params or {}),
                "watch": "1",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(WATCH_SECONDS),
            }
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_IDLE_SECONDS)
            async with self.session.get(path, params=query, timeout=timeout) as response:
                if response.status >= 400:
                    raise _api_error(response.status, await response.json(content_type=None))
                async for line in _read_lines(response.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _api_error(event["object"].get("code", 500), event["object"])
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event["type"], event["object"]


def _diff_list(known: dict[str, Object], items: list[Object]) -> list[tuple[Change, Object]]:
    """Return events for the differences between `known` and a new list, and update `known`."""
    listed = {item["metadata"]["uid"]: item for item in items}
    changes: list[tuple[Change, Object]] = [
        ("DELETED", item) for uid, item in known.items() if uid not in listed
    ]
    for uid, item in listed.items():
        before = known.get(uid)
        if before is None or before["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            changes.append(("ADDED", item))
    known.clear()
    known.update(listed)
    return changes


async def _read_lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield a stream's lines; unlike `StreamReader.readline`, this has no limit on their length."""
    parts: list[bytes] = []
    async for chunk in stream.iter_any():
        *complete, remainder = chunk.split(b"\n")
        for line in complete:
            parts.append(line)
            if joined := b"".join(parts):
                yield joined
            parts = []
        parts.append(remainder)


def _api_error(status: int, answer: Any) -> ApiError:
    if not isinstance(answer, dict):
        return ApiError(status, "Unknown", str(answer))
    return ApiError(status, answer.get("reason", "Unknown"), answer.get("message", ""))


def _tls_context(config: Object) -> ssl.SSLContext:
    """Return a TLS context with the certificates embedded in a kubeconfig."""
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    pem = base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"])
    with tempfile.NamedTemporaryFile() as file:  # load_cert_chain only reads files; this one has mode 0600
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
