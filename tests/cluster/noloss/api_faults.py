# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of an API server that injects the faults of real API servers and networks.

    python api_faults.py --upstream URL --ca CA.crt --cert TLS.crt --key TLS.key --host HOST --port PORT

The proxy terminates TLS and forwards requests with the clients' own tokens. `GET /-/faults` returns the
number of injected faults by kind. `PUT /-/faults` with {"share": 0.2, "seed": 1} sets the share of requests
that get a fault, initially 0. With {"refuse": [{"method": "PATCH", "path": "/status", "code": 409}]}, the
next request with this method and with this text in its path is refused with this code; with the code
"500_after", the request is executed first. The field `refuse` of the response lists the refusals for which no
request has come yet.

The faults are: 409 (writes only), 410 (lists only), 429 with Retry-After, 500 before the request is executed,
500 after it *was* executed, latency, a connection that is closed without a response, a watch that is cut
within seconds and in the middle of a line, and a watch that ends with an ERROR event of code 410, as API
servers send it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import ssl
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

CONTROL = "/-/faults"
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade"})
STATUSES = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
LATENCY_SECONDS = (0.05, 1.0)
CUT_SECONDS = (0.2, 6.0)


@dataclass(frozen=True)
class RequestKind:
    """The properties of a request that determine its possible faults."""

    method: str
    watch: bool
    listing: bool


def possible_faults(kind: RequestKind) -> tuple[str, ...]:
    """Return the kinds of faults that may be injected into a request."""
    if kind.watch:
        return ("429", "500", "latency", "cut", "cut", "error_event")
    if kind.method in WRITES:
        return ("409", "429", "500", "500_after", "latency", "closed")
    return (("410",) if kind.listing else ()) + ("429", "500", "latency", "closed")


def status(code: int) -> dict[str, object]:
    """Return the `Status` object with which an API server refuses a request."""
    reason = STATUSES[code]
    details = {"retryAfterSeconds": 1} if code == 429 else {}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"{reason}: injected",
        "reason": reason,
        "details": details,
        "code": code,
    }


class FaultProxy:
    """Forwards requests to the API server, and injects faults into a share of them."""

    def __init__(self, upstream: str, tls: ssl.SSLContext) -> None:
        self._upstream = upstream
        self._tls = tls
        self._random = random.Random(0)
        self._share = 0.0
        self._refusals: list[dict[str, Any]] = []
        self._done: Counter[str] = Counter()
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """Return the proxy as an aiohttp application."""
        app = web.Application(client_max_size=16 << 20)
        app.cleanup_ctx.append(self._connected)
        app.router.add_route("*", "/{path:.*}", self._serve)
        return app

    async def _connected(self, _: web.Application):
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        yield
        await self._session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == CONTROL:
            return await self._serve_control(request)
        # The path of a collection has an odd number of parts after the version: pods, namespaces/x/pods.
        parts = request.path.strip("/").split("/")
        parts_after_version = len(parts) - (2 if parts[0] == "api" else 3)
        watch = request.query.get("watch", "") in ("1", "true", "True")
        kind = RequestKind(request.method, watch, request.method == "GET" and parts_after_version % 2 == 1)
        fault = ""
        if parts[0] in ("api", "apis") and self._random.random() < self._share:
            fault = self._random.choice(possible_faults(kind))
            self._done[fault] += 1
        self._done["requests"] += 1
        for refusal in self._refusals:
            if refusal["method"] == request.method and refusal["path"] in request.path:
                self._refusals.remove(refusal)
                fault = str(refusal["code"])
                break
        if fault == "closed":
            return self._close(request)
        if fault == "latency":
            await asyncio.sleep(self._random.uniform(*LATENCY_SECONDS))
        if fault in ("409", "410", "429", "500"):
            code = int(fault)
            headers = {"Retry-After": "1"} if code == 429 else {}
            return web.json_response(status(code), status=code, headers=headers)
        return await self._forward(request, fault)

    async def _serve_control(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            settings = await request.json()
            self._share = float(settings.get("share", self._share))
            self._refusals += settings.get("refuse", [])
            if "seed" in settings:
                self._random.seed(settings["seed"])
        return web.json_response({"share": self._share, "refuse": self._refusals, **self._done})

    def _close(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _forward(self, request: web.Request, fault: str) -> web.StreamResponse:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        call = self._session.request(
            request.method,
            self._upstream + request.raw_path,
            data=await request.read() or None,
            headers=headers,
            skip_auto_headers=("Content-Type", "Accept", "User-Agent"),
            allow_redirects=False,
        )
        try:
            async with call as answer:
                if fault == "500_after":
                    await answer.read()
                    return web.json_response(status(500), status=500)
                return await self._answer(request, answer, fault)
        except (aiohttp.ClientConnectionError, ConnectionError):
            return self._close(request)

    async def _answer(
        self, request: web.Request, answer: aiohttp.ClientResponse, fault: str
    ) -> web.StreamResponse:
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        interrupted = fault in ("cut", "error_event")
        try:
            async with asyncio.timeout(self._random.uniform(*CUT_SECONDS) if interrupted else None):
                async for part in answer.content.iter_any():
                    await response.write(part)
        except TimeoutError:
            if fault == "error_event":
                event = {"type": "ERROR", "object": status(410)}
                await response.write(json.dumps(event).encode() + b"\n")
            else:
                await response.write(b'{"type":"MODIFIED","obj')
                return self._close(request)
        await response.write_eof()
        return response


def main() -> None:
    """Serve until a signal arrives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("upstream", "ca", "cert", "key", "host"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    upstream_tls = ssl.create_default_context(cafile=options.ca)
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(options.cert, options.key)
    app = FaultProxy(options.upstream, upstream_tls).app()
    listen = {"host": options.host, "port": options.port, "ssl_context": server_tls}
    web.run_app(app, **listen, access_log=None, shutdown_timeout=0.1)  # open watches last for minutes


if __name__ == "__main__":
    main()
