# SPDX-License-Identifier: Apache-2.0
"""The admin API, and suspended services."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from chat_requests import text_of


async def test_suspended_service_answers_503(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(), suspended=True)
    with pytest.raises(openai.InternalServerError, match="suspended") as error:
        await text_of(gateway.client())
    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"]


async def test_admin_api_requires_its_token_and_reports_engines(
    live: Any, scripted: Any, tmp_path: Any, until: Any
) -> None:
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    gateway = await live(scripted(images=True), admin_token_file=str(token))
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{gateway.admin}/admin/engines"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            assert (await http.get(url, headers=headers)).status_code == 401
        table = (await http.get(url, headers={"authorization": "Bearer s3cret"})).json()
        assert table["synced"] is True
        assert table["engines"][0]["state"] == "serving"
        assert table["engines"][0]["revision"] == "r1"
        assert table["engines"][0]["quantization"] == ""
        assert table["engines"][0]["expertGroups"] == 0
        assert table["engines"][0]["images"] is True
        assert table["engines"][0]["requests"] == 0
        await text_of(gateway.client(), max_tokens=3)
        metrics = (await http.get(f"{gateway.admin}/metrics")).text
        assert (
            'mizzen_gateway_requests_total{code="200",model="demo",path="/v1/chat/completions"} 1.0'
            in metrics
        )
        assert 'mizzen_gateway_output_tokens_total{model="demo"} 3.0' in metrics
        assert 'mizzen_gateway_engines{state="serving"} 1.0' in metrics
        assert (await http.get(f"{gateway.admin}/healthz")).status_code == 200
        gateway.gateway.draining = True
        assert (await http.get(f"{gateway.admin}/readyz")).status_code == 503
