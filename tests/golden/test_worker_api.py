# SPDX-License-Identifier: Apache-2.0
"""Contracts of gateways and engines: HTTP APIs for clients, operator and probes, and files for gateways."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from golden_files import check
from worker_source import WORKER, calls, function_keys, literals

import mizzen.gateway
from mizzen.gateway import errors
from mizzen.gateway.app import create_admin_app, create_app
from mizzen.gateway.auth.middleware import EXPOSED_HEADERS
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines import verify
from mizzen.gateway.fields.typed_objects import ObjectType
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.openai.schemas import SamplingFields
from mizzen.gateway.requests.answer import AnswerPiece
from mizzen.gateway.requests.output import OutputDelta
from mizzen.gateway.responses.stored_input import ItemHead
from mizzen.gateway.telemetry.request_record import RECORD_KEY
from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig
from ports import free_ports

DEMO = Path(__file__).parents[2] / "models/demo"
SPAN_MEMBER = r"(gen_ai|mizzen|http|url|error|server)\.[a-z_.]+"
PROSE = ("description", "title", "summary", "operationId", "info")
"""Members of an OpenAPI document that may be reworded."""
TOKEN = {"Authorization": "Bearer s3cret"}


def without_prose(value: Any, names: bool = False) -> Any:
    """Return a part of an OpenAPI document without prose.

    If `names` is true, the keys of this part are names, and none of them is removed.
    """
    if isinstance(value, list):
        return [without_prose(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_prose(part, names=key in ("properties", "schemas", "paths"))
        for key, part in value.items()
        if names or key not in PROSE
    }


def routes(app: FastAPI) -> list[str]:
    """Return the methods and paths of an application, including the generated documentation pages."""
    return sorted(
        f"{method} {getattr(route, 'path', '')}"
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
    )


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    token = tmp_path / "token"
    token.write_text("s3cret")
    return Gateway(
        GatewayConfig(served_name="demo", engine=("tcp://127.0.0.1:9",), admin_token_file=str(token))
    )


def test_the_openapi_document_is_unchanged(gateway: Gateway) -> None:
    app, admin = create_app(gateway.config, gateway), create_admin_app(gateway)
    check(
        "worker_openapi",
        {
            "document": without_prose(app.openapi()),
            "routes": routes(app),
            "routes of the admin port": routes(admin),
        },
    )


def shape(value: Any) -> Any:
    """Return a JSON value with names of types instead of scalars, and only the first item of each list."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "null" if value is None else type(value).__name__


async def admin_answers(endpoint: str, tmp_path: Path) -> dict[str, Any]:
    """Return the shapes of all responses of the admin port, for a gateway with one engine."""
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "keys.yaml").write_text("keys: [{name: a, key: 0123456789abcdef0123456789abcdef}]\n")
    gateway = Gateway(
        GatewayConfig(
            served_name="demo",
            engine=(endpoint,),
            admin_token_file=str(tmp_path / "token"),
            api_keys_file=(str(tmp_path / "keys.yaml"),),
            access_log="off",
        )
    )
    await gateway.start()
    transport = httpx.ASGITransport(create_admin_app(gateway))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=TOKEN) as http:
            async with asyncio.timeout(60):
                while True:
                    table = (await http.get("/admin/engines")).json()
                    (engine,) = table["engines"] or [{"state": "", "stats": None}]
                    if engine["state"] == "serving" and engine["stats"]:
                        break
                    await asyncio.sleep(0.02)
            body = {"model": "demo", "prompt": "one two three"}
            route = (await http.post("/debug/route", json=body)).json()
            question = {"service": "demo", "uid": "x", "prompt": "a", "maxTokens": 1, "timeoutSeconds": 1}
            refused = await http.post("/admin/verify", json=question)
            return {
                "GET /admin/engines": shape(table),
                "POST /debug/route": shape(route),
                "POST /admin/verify, of an unknown engine": [refused.status_code, shape(refused.json())],
            }
    finally:
        await gateway.close()


def test_members_of_the_admin_api_are_unchanged(tmp_path: Path) -> None:
    config = SimulateConfig(
        model=str(DEMO), wire_bind="tcp://127.0.0.1:*", step_milliseconds=0.0, drain_timeout_seconds=0.2
    )
    with SimulatedEngine(config) as engine:
        shapes = asyncio.run(admin_answers(engine.endpoint, tmp_path))
    shapes["POST /admin/verify"] = function_keys(verify.verify_engine)
    check("worker_admin_api", shapes)


@contextmanager
def simulated_process(tmp_path: Path, *options: str) -> Iterator[str]:
    """Run a simulated engine with its supervisor; yield the URL of its probes."""
    port = free_ports()
    words = ["--model", str(DEMO), "--wire-bind", f"ipc://{tmp_path}/wire", "--http-port", str(port)]
    words += ["--termination-message", str(tmp_path / "reason"), "--drain-timeout-seconds", "0.2", *options]
    command = [sys.executable, "-m", "mizzen.server.simulate", *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def answered(url: str, data: bytes | None = None) -> Any:
    """Send a request; return the status and body of the response, or None if nothing listens yet."""
    try:
        with urllib.request.urlopen(url, data, timeout=5) as reply:
            return [reply.status, json.loads(reply.read())]
    except urllib.error.HTTPError as error:
        return [error.code, json.loads(error.read())]
    except OSError:
        return None


def until(url: str, state: str) -> Any:
    deadline = time.monotonic() + 60
    while not ((response := answered(url)) and response[1]["state"] == state):
        assert time.monotonic() < deadline, response
        time.sleep(0.02)
    return [response[0], shape(response[1])]


def test_engine_probes_are_unchanged(tmp_path: Path) -> None:
    responses = {}
    with simulated_process(tmp_path, "--start-seconds", "1") as url:
        responses["GET /readyz, starting"] = until(f"{url}/readyz", "starting")
        responses["GET /readyz, serving"] = until(f"{url}/readyz", "serving")
        for name, path, data in (
            ("GET /healthz", "/healthz", None),
            ("GET /other", "/other", None),
            ("POST /drain", "/drain", b""),
            ("POST /other", "/other", b""),
        ):
            status, body = answered(url + path, data)
            responses[name] = [status, shape(body)]
    check("worker_engine_probes", responses)


def test_error_codes_and_types_are_unchanged() -> None:
    names = (errors.ApiError.__name__, errors.invalid.__name__, errors.unavailable.__name__)
    statuses, codes, params = set(), set(), set()
    usual = inspect.signature(errors.unavailable).parameters["code"].default
    for name, arguments, keywords in calls(*names):
        if name == names[0]:
            statuses.add(arguments[0] if arguments else None)
            codes.add(keywords.get("code"))
            params.add(keywords.get("param"))
        elif name == names[1]:
            codes |= {keywords.get("code"), *arguments[2:3]}
            params |= {keywords.get("param"), *arguments[1:2]}
        else:
            codes.add(keywords.get("code", arguments[2] if len(arguments) > 2 else usual))
    check(
        "worker_errors",
        {
            "statuses": sorted(status for status in statuses if status),
            "codes": sorted(code for code in codes if code),
            "params that are written out": sorted(param for param in params if param),
            "type and headers by status": {
                str(status): [
                    errors.ApiError(status, "text").error_type,
                    " ".join(name.decode() for name, _ in errors.ApiError(status, "text").headers()),
                ]
                for status in (400, 401, 403, 404, 408, 409, 413, 415, 429, 431, 500, 502, 503, 504)
            },
            "header of a time to wait": errors.unavailable("text").headers()[1][0].decode(),
            "body": shape(json.loads(errors.ApiError(400, "text").body())),
        },
    )


def test_names_of_headers_and_events_are_unchanged() -> None:
    names = "retry-after|www-authenticate|cache-control|authorization|traceparent|tracestate|allow|api-key"
    check(
        "worker_headers",
        {
            "headers": literals(rf"x-[a-z0-9]+(-[a-z0-9]+)*|{names}", WORKER / "gateway"),
            "headers that pages may read": sorted(EXPOSED_HEADERS),
            "events of responses": literals(r"response(\.[a-z_]+)+", WORKER / "gateway"),
            "members of spans": [
                name for name in literals(SPAN_MEMBER, WORKER / "gateway/telemetry") if name != RECORD_KEY
            ],
            "members of spans of engines": literals(SPAN_MEMBER, WORKER / "server/tracing"),
        },
    )


def test_finish_reasons_and_states_of_answers_are_unchanged() -> None:
    words = "stop|length|tool_calls|content_filter|abort|error|incomplete|completed|failed|in_progress"
    check("worker_finish_reasons", literals(words, WORKER / "gateway"))


INTERNAL = {AnswerPiece, ItemHead, OutputDelta, ObjectType, SamplingFields}
"""Structs that are not complete JSON bodies: internal ones, a base class, and one that decodes one member."""


def gateway_structs() -> Iterator[type[msgspec.Struct]]:
    for module in pkgutil.walk_packages(mizzen.gateway.__path__, "mizzen.gateway."):
        for kind in vars(importlib.import_module(module.name)).values():
            own = (
                isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.name
            )
            if own and kind not in INTERNAL:
                yield kind


def test_members_of_all_json_of_gateways_are_unchanged() -> None:
    """Covers bodies of requests and responses, services files, key files and Kubernetes objects."""
    descriptions = []
    for kind in gateway_structs():
        config, members = kind.__struct_config__, []
        for field in msgspec.structs.fields(kind):
            optional = "" if field.required else "?"
            members.append(f"{field.encode_name}{optional}")
        if members:
            tag = f"{config.tag_field}={config.tag}: " if config.tag else ""
            closed = " only" if config.forbid_unknown_fields else ""
            descriptions.append(tag + " ".join(sorted(members)) + closed)
    check("worker_json_members", sorted(descriptions))
