# SPDX-License-Identifier: Apache-2.0
"""Addresses of pods and Services in URLs, with IPv4 and IPv6."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from mizzen_operator.api import labels
from mizzen_operator.api.addresses import join_address
from mizzen_operator.config import OperatorConfig
from mizzen_operator.metrics import Metrics
from mizzen_operator.model_cache.fetch import ModelFetcher


@pytest.mark.parametrize(
    ("host", "expected"),
    [("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80"), ("demo.llm.svc", "demo.llm.svc:80")],
)
def test_an_ipv6_address_is_put_in_brackets(host: str, expected: str) -> None:
    assert join_address(host, 80) == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_the_progress_of_a_fetch_is_read_from_both_families(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def progress(_: web.Request) -> web.Response:
        return web.json_response({"phase": "downloading"})

    app = web.Application()
    app.router.add_get("/progress", progress)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, 0).start()
        monkeypatch.setattr(labels, "FETCH_PORT", runner.addresses[0][1])
        config = OperatorConfig(engine_image="e", gateway_image="g", gateway_role="r")
        kube: Any = None
        fetcher = ModelFetcher(kube, config, Metrics())
        running = {"name": labels.FETCH, "state": {"running": {}}}
        pod = {"status": {"podIP": address, "containerStatuses": [running]}}
        assert await fetcher._request_progress(pod) == {"phase": "downloading"}
    finally:
        await runner.cleanup()
