# SPDX-License-Identifier: Apache-2.0
"""The playground's document over HTTP: its headers, and who may read it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mizzen.gateway.playground.playground_page import build_page

NO_ENGINE = "tcp://127.0.0.1:9"


def parse_policy(headers: Any) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


def hash_of(tag: str, document: str) -> str:
    (content,) = re.findall(rf"<{tag}[^>]*>(.+?)</{tag}>", document, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_the_content_policy_allows_only_the_documents_own_style_and_script() -> None:
    page = build_page()
    document = page.document.decode()
    policy = parse_policy(page.headers)
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "script-src": hash_of("script", document),
        "style-src": hash_of("style", document),
        "img-src": "data:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert not re.findall(r"""\s(?:on[a-z]+|style)=""", document.split("<style>")[0])
    assert "innerHTML" not in document


async def test_the_page_is_off_by_default(live: Callable[..., Any], keys: Path) -> None:
    keyless, keyed = (
        await live(NO_ENGINE, wait=False),
        await live(NO_ENGINE, wait=False, api_keys_file=(str(keys),)),
    )
    async with httpx.AsyncClient() as client:
        for path in ("/", "/playground"):
            assert (await client.get(f"{keyless.url}{path}")).status_code == 404
            assert (await client.get(f"{keyed.url}{path}")).status_code == 401


async def test_the_page_needs_no_key_but_the_api_does(live: Callable[..., Any], keys: Path) -> None:
    gateway = await live(
        NO_ENGINE, wait=False, api_keys_file=(str(keys),), playground=True, cors_origin=("https://a.example",)
    )
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        page = await client.get("/playground")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for name, value in build_page().headers.items():
            assert page.headers[name] == value
        assert page.content == (await client.get("/playground/")).content
        assert (await client.head("/playground")).status_code == 200
        redirect = await client.get("/")
        assert (redirect.status_code, redirect.headers["location"]) == (307, "playground")
        for method, path in (("GET", "/v1/models"), ("POST", "/playground"), ("GET", "/playgrounds")):
            assert (await client.request(method, path)).status_code == 401
        document = (await client.get("/playground")).text
        assert "alice" not in document
        metrics = (await client.get(f"{gateway.admin}/metrics")).text
    counts = [line.split()[-1] for line in metrics.splitlines() if 'path="/playground"' in line]
    assert counts[0] == "4.0"  # of requests


@pytest.mark.parametrize("path", ["/playground", "/"])
async def test_the_page_is_no_part_of_the_api_description(live: Callable[..., Any], path: str) -> None:
    gateway = await live(NO_ENGINE, wait=False, playground=True)
    async with httpx.AsyncClient() as client:
        assert path not in (await client.get(f"{gateway.url}/openapi.json")).json()["paths"]
