"""A small client of the Kubernetes API for the node: plain JSON objects, watches that mend themselves."""

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
SILENCE_SECONDS = 90.0  # bookmarks come about once a minute
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused a request.

    Attributes:
        status: HTTP status.
        reason: reason of the Status object, e.g. `NotFound`.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class Api:
    """The API server of one kubeconfig of ours; an asynchronous context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        self.server: str = config["clusters"][0]["cluster"]["server"]
        self._context = _tls(config)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
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
            RuntimeError: used outside of `async with`.
        """
        if self._session is None:
            raise RuntimeError("Api is used outside of `async with`")
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
        """Send one request and return the answered object.

        Raises:
            ApiError: the server answered with an error.
            aiohttp.ClientError, TimeoutError: it did not answer.
        """
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        async with self.session.request(method, path, data=data, params=params, headers=headers) as response:
            answer = await response.json(content_type=None)
            if response.status >= 400:
                raise _error(response.status, answer)
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
        """Yield what is there as ADDED, then SYNCED with an empty object, then every change, without end.

        After a lost connection it lists again: new and changed objects come as ADDED, those that went
        meanwhile as DELETED with what was last seen of them, and SYNCED once more.
        """
        known: dict[str, Object] = {}
        pause = 0.05
        while True:
            try:
                listed = await self.request("GET", path, params=params)
                pause = 0.05
                kind = {"kind": listed["kind"].removesuffix("List"), "apiVersion": listed["apiVersion"]}
                for change, item in _since(known, [{**kind, **item} for item in listed["items"]]):
                    yield change, item
                yield "SYNCED", {}
                async for change, item in self._follow(path, params, listed["metadata"]["resourceVersion"]):
                    uid = item["metadata"]["uid"]
                    if change == "DELETED":
                        known.pop(uid, None)
                    else:
                        known[uid] = item
                    yield change, item
            except (ApiError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                log.warning("watch of %s broke off, listing again: %s", path, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _follow(
        self, path: str, params: Mapping[str, str] | None, version: str
    ) -> AsyncIterator[tuple[Change, Object]]:
        """Changes after a resource version, over several connections, until one cannot be had."""
        while True:
            query = {
                **(params or {}),
                "watch": "1",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(WATCH_SECONDS),
            }
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
            async with self.session.get(path, params=query, timeout=timeout) as response:
                if response.status >= 400:
                    raise _error(response.status, await response.json(content_type=None))
                async for line in _lines(response.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _error(event["object"].get("code", 500), event["object"])
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event["type"], event["object"]


def _since(known: dict[str, Object], items: list[Object]) -> list[tuple[Change, Object]]:
    """Return the events by which a new list differs from `known`, and update `known`."""
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


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; `StreamReader.readline` refuses long ones."""
    parts: list[bytes] = []
    async for chunk in stream.iter_any():
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            parts.append(line)
            if whole := b"".join(parts):
                yield whole
            parts = []
        parts.append(rest)


def _error(status: int, answer: Any) -> ApiError:
    if not isinstance(answer, dict):
        return ApiError(status, "Unknown", str(answer))
    return ApiError(status, answer.get("reason", "Unknown"), answer.get("message", ""))


def _tls(config: Object) -> ssl.SSLContext:
    """A TLS context with the certificates that the kubeconfig holds."""
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    pem = base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"])
    with tempfile.NamedTemporaryFile() as file:  # load_cert_chain reads files alone; this one is 0600
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
