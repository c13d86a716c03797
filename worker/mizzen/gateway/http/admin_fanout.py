# SPDX-License-Identifier: Apache-2.0
"""Common admin port of several gateway processes: forwards requests to all processes, and merges the answers.

`processes` serves it in the parent process. Routing tables, metrics and health are merged; requests for other
paths go to the first process only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mizzen.gateway.auth.limit_sharing import LOAN_PATH
from mizzen.gateway.engines.verify_request import verify_timeout
from mizzen.gateway.errors import ApiError
from mizzen.gateway.http.request_bodies import BodyBudget, ClientGone, RequestBody
from mizzen.gateway.routing.session import SESSION_HEADERS
from mizzen.gateway.telemetry.table_watch import MAX_WAITERS, parse_wait

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROCESS_TIMEOUT_SECONDS = 5.0
"""Time after which a process that does not answer on its admin port counts as failed."""
FORWARDED_HEADERS = ("authorization", "content-type", *(header.decode() for header in SESSION_HEADERS))
"""Request headers that are forwarded to the processes."""
RETURNED_HEADERS = ("content-type", "retry-after", "x-should-retry")
"""Response headers of a process that are returned to the client."""
SAMPLE_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? ", re.DOTALL)


class AdminFanout:
    """Forwards requests of the common admin port to the admin ports of the processes, on loopback.

    Only the processes check the bearer token, so this class does not trust its clients. It limits the body of
    each request to `largest` bytes, and all bodies together to the budget `bodies`.
    """

    def __init__(self, ports: Sequence[int], bodies: BodyBudget, largest: int) -> None:
        self._ports = tuple(ports)
        self._bodies = bodies
        self._largest = largest
        limits = httpx.Limits(max_connections=MAX_WAITERS + 4 * len(self._ports))
        self._http = httpx.AsyncClient(timeout=PROCESS_TIMEOUT_SECONDS, limits=limits, trust_env=False)

    def app(self) -> Starlette:
        """Return the ASGI application of the common admin port."""
        return Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/admin/engines", self._engines),
                Route("/admin/verify", self._verify, methods=["POST"]),
                Route(LOAN_PATH, self._loan, methods=["POST"]),
                Route("/healthz", self._worst_answer),
                Route("/readyz", self._worst_answer),
                Route("/{rest:path}", self._first_process, methods=["GET", "POST"]),
            ]
        )

    async def close(self) -> None:
        """Close the connections to the processes."""
        await self._http.aclose()

    async def _forward(
        self,
        request: Request,
        port: int,
        query: Mapping[str, str] | None = None,
        wait: float = 0.0,
        body: bytes = b"",
    ) -> httpx.Response:
        url = f"http://127.0.0.1:{port}{request.url.path}"
        headers = {name: value for name, value in request.headers.items() if name in FORWARDED_HEADERS}
        try:
            return await self._http.request(
                request.method,
                url,
                params=request.url.query if query is None else query,
                headers=headers,
                content=body,
                timeout=PROCESS_TIMEOUT_SECONDS + wait,
            )
        except httpx.HTTPError as error:
            text = f"a process of the gateway does not answer: {type(error).__name__}\n"
            return httpx.Response(503, text=text)

    async def _forward_to_all(self, request: Request) -> list[httpx.Response]:
        return await asyncio.gather(*(self._forward(request, port) for port in self._ports))

    async def _worst_answer(self, request: Request) -> Response:
        """Return the first answer with a status other than 200, or the first answer if all are 200."""
        answers = await self._forward_to_all(request)
        return to_response(next((answer for answer in answers if answer.status_code != 200), answers[0]))

    async def _first_process(self, request: Request) -> Response:
        if request.method != "POST":
            return to_response(await self._forward(request, self._ports[0]))
        return await self._forward_body(request)

    async def _verify(self, request: Request) -> Response:
        """Forward a verify request to the first process; add the timeout in its body to the usual timeout."""
        return await self._forward_body(request, verify_timeout)

    async def _loan(self, request: Request) -> Response:
        """Forward a question about a limit to the process with the number in the query."""
        number = request.query_params.get("process", "")
        if not number.isdecimal() or int(number) >= len(self._ports):
            return to_error_response(ApiError(404, f"there is no process {number[:20]}"))
        return await self._forward_body(request, process=int(number))

    async def _forward_body(
        self, request: Request, timeout_of: Callable[[bytes], float] = lambda _: 0.0, process: int = 0
    ) -> Response:
        """Forward a POST request to a process.

        `timeout_of` returns, for a body, the number of seconds to add to the usual timeout.
        """
        with RequestBody(self._bodies, self._largest) as body:
            try:
                content = await body.read(request.scope, request.receive)
            except ClientGone as error:
                return to_error_response(ApiError(400, str(error)))
            except ApiError as error:
                return to_error_response(error)
            port = self._ports[process]
            answer = await self._forward(request, port, wait=timeout_of(content), body=content)
        return to_response(answer)

    async def _metrics(self, request: Request) -> Response:
        answers = await self._forward_to_all(request)
        texts = {number: answer.text for number, answer in enumerate(answers) if answer.status_code == 200}
        return Response(merge_metrics(texts), media_type=METRICS_CONTENT_TYPE)

    async def _engines(self, request: Request) -> Response:
        versions = request.query_params.get("version", "").split(",")
        seconds = parse_wait(request.query_params.get("wait"))
        waits = seconds > 0 and len(versions) == len(self._ports)
        if waits and not await self._wait_for_change(request, versions, seconds):
            return Response(status_code=304)
        service = request.query_params.get("service")
        query = {} if service is None else {"service": service}
        answers = [await self._forward(request, port, query) for port in self._ports]
        failed = next((answer for answer in answers if answer.status_code != 200), None)
        if failed is not None:
            return to_response(failed)
        tables = [msgspec.json.decode(answer.content) for answer in answers]
        return Response(msgspec.json.encode(merge_tables(tables)), media_type="application/json")

    async def _wait_for_change(self, request: Request, versions: Sequence[str], seconds: float) -> bool:
        """Wait up to `seconds` until the routing table of any process changes.

        `versions` holds, for each process, the version of its table that the client knows.

        Returns:
            True if a process has a table of another version, or has failed to answer.
        """
        polls = [
            asyncio.create_task(
                self._forward(request, port, {**request.query_params, "version": version}, seconds)
            )
            for port, version in zip(self._ports, versions, strict=True)
        ]
        try:
            for finished in asyncio.as_completed(polls):
                if (await finished).status_code != 304:
                    return True
            return False
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)


def to_response(answer: httpx.Response) -> Response:
    """Return the answer of a process as a response of the common admin port."""
    headers = {name: answer.headers[name] for name in RETURNED_HEADERS if name in answer.headers}
    return Response(answer.content, answer.status_code, headers)


def to_error_response(error: ApiError) -> Response:
    """Return the response for an error, in OpenAI's shape."""
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers)


def merge_tables(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the routing tables of all processes into one.

    An engine counts as serving only if it is serving in all tables.
    """
    engines: dict[tuple[str, str, str], dict[str, Any]] = {}
    seen: dict[tuple[str, str, str], int] = {}
    for engine in (engine for table in tables for engine in table["engines"]):
        key = (engine["service"], engine["uid"], engine["name"])
        seen[key] = seen.get(key, 0) + 1
        merged = engines.setdefault(key, {**engine, "requests": 0, "keys": []})
        merged["keys"] = sorted({*merged["keys"], *engine["keys"]})
        merged["requests"] += engine["requests"]
        if merged["state"] == "serving" != engine["state"]:
            merged.update(state=engine["state"], problem=engine["problem"])
        merged["protocol"] = max(merged["protocol"], engine["protocol"])
        merged["otherProtocol"] &= engine["otherProtocol"]
    for key, merged in engines.items():
        if seen[key] < len(tables):
            merged["otherProtocol"] = False
            merged["state"] = "connecting" if merged["state"] == "serving" else merged["state"]
    return {
        "synced": all(table["synced"] for table in tables),
        "version": ",".join(table["version"] for table in tables),
        "apiKeys": merge_api_keys([table["apiKeys"] for table in tables]),
        "keys": sorted(set.intersection(*(set(table["keys"]) for table in tables))),
        **{name: sum(table[name] for table in tables) for name in ("waiting", "queued", "inFlight")},
        "idleSeconds": min(table["idleSeconds"] for table in tables),
        "engines": list(engines.values()),
    }


def merge_api_keys(statuses: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the API key statuses of all processes into one; None if no process has a status.

    The merged status has the first problem and the smallest number of keys in force.
    """
    present = [status for status in statuses if status is not None]
    if not present:
        return None
    problem = next((status["problem"] for status in present if status["problem"]), "")
    return {"inForce": min(status["inForce"] for status in present), "problem": problem}


def merge_metrics(texts: Mapping[int, str]) -> str:
    """Merge the metrics of all processes.

    `texts` maps the number of each process to its metrics as Prometheus text. In the result, the label
    `process` of each sample is the number of its process.
    """
    families: dict[str, list[str]] = {}
    for number, text in texts.items():
        family, first = "", False
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                first = family not in families
                families.setdefault(family, [])
            if line.startswith("#"):
                if first:
                    families[family].append(line)
                continue
            families[family].append(add_process_label(line, number))
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def add_process_label(sample: str, number: int) -> str:
    """Return a sample line with a process's number as the additional label `process`."""
    match = SAMPLE_LINE.match(sample)
    if match is None:
        return sample
    name, labels = match.groups()
    labels = f'{labels},process="{number}"' if labels else f'process="{number}"'
    return f"{name}{{{labels}}} {sample[match.end() :]}"
