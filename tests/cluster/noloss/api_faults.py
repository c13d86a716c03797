"""A proxy in front of an API server that does to its clients what API servers and networks do at times.

    python api_faults.py --upstream URL --ca CA.crt --cert TLS.crt --key TLS.key --host HOST --port PORT

It ends TLS and passes requests on with the clients' own tokens. `GET /-/faults` answers what it did, by
kind; `PUT /-/faults` with {"share": 0.2, "seed": 1} sets which share of requests meets a fault: 0 at first.
With {"refuse": [{"method": "PATCH", "path": "/status", "code": 409}]} the next request of that method whose
path has these words is refused so (or, with the code "500_after", once it was done); `refuse` of the answer
is what has not come yet.

A fault is one of: 409 (of what writes), 410 (of lists), 429 with Retry-After, 500 before anything was done,
500 after it *was* done, latency, a connection that is closed without an answer, a watch that is cut within
seconds, in the middle of a line, and a watch that ends with an ERROR event of code 410, as API servers do it.
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
class Asked:
    """A request as faults are chosen for it."""

    method: str
    watch: bool
    listing: bool


def faults_of(asked: Asked) -> tuple[str, ...]:
    """Kinds of faults that a request may meet."""
    if asked.watch:
        return ("429", "500", "latency", "cut", "cut", "error_event")
    if asked.method in WRITES:
        return ("409", "429", "500", "500_after", "latency", "closed")
    return (("410",) if asked.listing else ()) + ("429", "500", "latency", "closed")


def status(code: int) -> dict[str, object]:
    """The body of an API server's refusal."""
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
    """Passes requests on, but for a share of them."""

    def __init__(self, upstream: str, tls: ssl.SSLContext) -> None:
        self._upstream = upstream
        self._tls = tls
        self._random = random.Random(0)
        self._share = 0.0
        self._refuse: list[dict[str, Any]] = []
        self._done: Counter[str] = Counter()
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The server's application."""
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
            return await self._control(request)
        # Of a collection, the path has an odd number of parts behind the version: pods, namespaces/x/pods.
        parts = request.path.strip("/").split("/")
        behind = len(parts) - (2 if parts[0] == "api" else 3)
        watch = request.query.get("watch", "") in ("1", "true", "True")
        asked = Asked(request.method, watch, request.method == "GET" and behind % 2 == 1)
        fault = ""
        if parts[0] in ("api", "apis") and self._random.random() < self._share:
            fault = self._random.choice(faults_of(asked))
            self._done[fault] += 1
        self._done["requests"] += 1
        for one in self._refuse:
            if one["method"] == request.method and one["path"] in request.path:
                self._refuse.remove(one)
                fault = str(one["code"])
                break
        if fault == "closed":
            return self._close(request)
        if fault == "latency":
            await asyncio.sleep(self._random.uniform(*LATENCY_SECONDS))
        if fault in ("409", "410", "429", "500"):
            code = int(fault)
            headers = {"Retry-After": "1"} if code == 429 else {}
            return web.json_response(status(code), status=code, headers=headers)
        return await self._pass(request, fault)

    async def _control(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            given = await request.json()
            self._share = float(given.get("share", self._share))
            self._refuse += given.get("refuse", [])
            if "seed" in given:
                self._random.seed(given["seed"])
        return web.json_response({"share": self._share, "refuse": self._refuse, **self._done})

    def _close(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _pass(self, request: web.Request, fault: str) -> web.StreamResponse:
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
        given = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
        response = web.StreamResponse(status=answer.status, headers=given)
        await response.prepare(request)
        ends = fault in ("cut", "error_event")
        try:
            async with asyncio.timeout(self._random.uniform(*CUT_SECONDS) if ends else None):
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
    """Serve until a signal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("upstream", "ca", "cert", "key", "host"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    inside = ssl.create_default_context(cafile=options.ca)
    outside = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    outside.load_cert_chain(options.cert, options.key)
    app = FaultProxy(options.upstream, inside).app()
    where = {"host": options.host, "port": options.port, "ssl_context": outside}
    web.run_app(app, **where, access_log=None, shutdown_timeout=0.1)  # watches would last for minutes


if __name__ == "__main__":
    main()
