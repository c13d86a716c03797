# SPDX-License-Identifier: Apache-2.0
"""An asynchronous client of the API server with administrator rights, through `kubectl proxy`."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

SERVICES = "/apis/mizzen.dev/v1alpha1/namespaces/{}/inferenceservices"
MERGE = "application/merge-patch+json"
GET_RETRIES = 3


class KubeError(AssertionError):
    """The API server refused a request with HTTP status `code`, or (code 0) `kubectl proxy` did not start."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Kube:
    """Client of an API server; an asynchronous context manager that runs `kubectl proxy`."""

    def __init__(self, kubectl: str = "kubectl", kubeconfig: Path | None = None) -> None:
        self._kubectl = kubectl
        self._environment = {**os.environ, **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})}

    async def __aenter__(self) -> Kube:
        self._proxy = await asyncio.create_subprocess_exec(
            self._kubectl, "proxy", "--port=0", env=self._environment, stdout=asyncio.subprocess.PIPE
        )
        assert self._proxy.stdout is not None
        line = (await self._proxy.stdout.readline()).decode()
        address = re.search(r"127\.0\.0\.1:\d+", line)
        if address is None:
            raise KubeError(0, f"kubectl proxy: {line}")
        timeout = aiohttp.ClientTimeout(total=60)
        self._http = aiohttp.ClientSession(f"http://{address[0]}", timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        self._proxy.terminate()
        await self._proxy.wait()

    async def call(self, method: str, path: str, body: Any = None, content_type: str = MERGE) -> Any:
        """Send a request and return the body of the response; repeat a GET that gets no response.

        Without the repetition, a test that runs for hours would fail if the machine was suspended meanwhile.

        Raises:
            KubeError: the API server refused the request.
            TimeoutError: no response came within 60 s.
        """
        for _ in range(GET_RETRIES if method == "GET" else 0):
            with suppress(TimeoutError, aiohttp.ClientError):
                return await self._call(method, path, body, content_type)
        return await self._call(method, path, body, content_type)

    async def _call(self, method: str, path: str, body: Any, content_type: str) -> Any:
        data = None if body is None else json.dumps(body)
        async with self._http.request(
            method, path, data=data, headers={"Content-Type": content_type}
        ) as answer:
            content = await answer.json(content_type=None)
            if answer.status >= 400:
                raise KubeError(answer.status, content.get("message", ""))
            return content

    async def find(self, path: str) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self.call("GET", path)
        except KubeError as error:
            if error.code == 404:
                return None
            raise

    async def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Return the pods of a namespace that match a label selector."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}"
        return (await self.call("GET", path))["items"]

    async def watch(self, path: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Watch a collection, and yield the type and object of each event until the server ends the watch.

        The events of all existing objects come first.
        """
        query = f"{path}{'&' if '?' in path else '?'}watch=1&timeoutSeconds=3000"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self._http.get(query, timeout=timeout) as answer:
            rest = b""
            async for part in answer.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]


def condition(obj: dict[str, Any], kind: str) -> bool | None:
    """Return whether a condition of an object is True, or None if the object does not have it."""
    conditions = obj.get("status", {}).get("conditions") or []
    return next((entry["status"] == "True" for entry in conditions if entry["type"] == kind), None)
