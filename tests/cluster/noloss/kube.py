"""The API server as an administrator of the tests reads and changes it, through `kubectl proxy`."""

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
ASKED_AGAIN = 3


class KubeFailed(AssertionError):
    """The API server refused something."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Kube:
    """An API server; use it as an asynchronous context manager."""

    def __init__(self, kubectl: str = "kubectl", kubeconfig: Path | None = None) -> None:
        self._kubectl = kubectl
        self._environment = {**os.environ, **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})}

    async def __aenter__(self) -> Kube:
        self._proxy = await asyncio.create_subprocess_exec(
            self._kubectl, "proxy", "--port=0", env=self._environment, stdout=asyncio.subprocess.PIPE
        )
        assert self._proxy.stdout is not None
        line = (await self._proxy.stdout.readline()).decode()
        found = re.search(r"127\.0\.0\.1:\d+", line)
        if found is None:
            raise KubeFailed(0, f"kubectl proxy: {line}")
        timeout = aiohttp.ClientTimeout(total=60)
        self._http = aiohttp.ClientSession(f"http://{found[0]}", timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        self._proxy.terminate()
        await self._proxy.wait()

    async def call(self, method: str, path: str, body: Any = None, content_type: str = MERGE) -> Any:
        """Send one request and return what came; what only reads is asked again where no answer comes.

        A machine that stands still for a while shall end no run of hours.

        Raises:
            KubeFailed: it was refused.
            TimeoutError: no answer came.
        """
        for _ in range(ASKED_AGAIN if method == "GET" else 0):
            with suppress(TimeoutError, aiohttp.ClientError):
                return await self._call(method, path, body, content_type)
        return await self._call(method, path, body, content_type)

    async def _call(self, method: str, path: str, body: Any, content_type: str) -> Any:
        data = None if body is None else json.dumps(body)
        async with self._http.request(
            method, path, data=data, headers={"Content-Type": content_type}
        ) as answer:
            got = await answer.json(content_type=None)
            if answer.status >= 400:
                raise KubeFailed(answer.status, got.get("message", ""))
            return got

    async def find(self, path: str) -> dict[str, Any] | None:
        """Return an object; None when there is none."""
        try:
            return await self.call("GET", path)
        except KubeFailed as error:
            if error.code == 404:
                return None
            raise

    async def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Return the pods of a namespace that have some labels."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}"
        return (await self.call("GET", path))["items"]

    async def watch(self, path: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the changes of a collection, all of what is there first, until the server ends it."""
        query = f"{path}{'&' if '?' in path else '?'}watch=1&timeoutSeconds=3000"
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self._http.get(query, timeout=timeout) as answer:
            rest = b""
            async for part in answer.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]


def condition(thing: dict[str, Any], kind: str) -> bool | None:
    """Whether a condition of an object is True; None when it has none."""
    conditions = thing.get("status", {}).get("conditions") or []
    return next((one["status"] == "True" for one in conditions if one["type"] == kind), None)
