# SPDX-License-Identifier: Apache-2.0
"""Kubernetes API client of the benchmark's own processes, with requests and watches."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class ApiError(Exception):
    """The API server answered with an error status, which is in `code`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Api:
    """Client of the API server, with administrator rights."""

    def __init__(self, server: str, folder: Path, agent: str) -> None:
        context = ssl.create_default_context(cafile=str(folder / "pki/ca.crt"))
        context.load_cert_chain(folder / "pki/admin.crt", folder / "pki/admin.key")
        self._server = server
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=64),
            headers={"User-Agent": agent},
            timeout=aiohttp.ClientTimeout(total=60),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **query: str
    ) -> Any:
        """Send a request; return the response, decoded if it is a JSON object, else as text.

        Raises:
            ApiError: the API server answered with a status of 400 or higher.
        """
        headers = {"Content-Type": content_type}
        data = None if body is None else json.dumps(body).encode()
        async with self._http.request(
            method, self._server + path, data=data, headers=headers, params=query
        ) as answer:
            text = await answer.read()
            if answer.status >= 400:
                raise ApiError(answer.status, text[:300].decode(errors="replace"))
            return json.loads(text) if text.startswith(b"{") else text.decode()

    async def quietly(self, method: str, path: str, body: Any = None, content_type: str = MERGE) -> None:
        """Send a request; ignore status 404 and 409, because the object may have been deleted or replaced."""
        try:
            await self.request(method, path, body, content_type if method == "PATCH" else "application/json")
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def watch(self, path: str, **query: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield each existing object as (ADDED, object), then each change as (type, object), without end.

        Raises:
            ApiError: the API server rejected a request, or ended the watch with an error.
        """
        listed = await self.request("GET", path, **query)
        for item in listed.get("items") or ():
            yield "ADDED", item
        version = listed["metadata"]["resourceVersion"]
        while True:
            parameters = {**query, "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
            timeout = aiohttp.ClientTimeout(total=None)
            async with self._http.get(self._server + path, params=parameters, timeout=timeout) as answer:
                rest = b""
                async for part in answer.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            raise ApiError(event["object"].get("code", 0), str(event["object"]))
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            yield event["type"], event["object"]
            await asyncio.sleep(0.05)
