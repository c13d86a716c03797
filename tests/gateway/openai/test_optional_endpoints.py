# SPDX-License-Identifier: Apache-2.0
"""Endpoints that only exist with an option of the gateway: /tokenizer_info and /metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mizzen.gateway.config import GatewayConfig
from tenant_kit import ALICE


async def test_endpoints_are_off_by_default(live: Any, scripted: Any) -> None:
    gateway = await live(scripted())
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
        assert (await client.get("/metrics")).status_code == 404


async def test_tokenizer_info_has_template_and_special_tokens(
    live: Any, scripted: Any, tokenizer_files: Any
) -> None:
    config = json.loads(tokenizer_files["tokenizer_config.json"])
    config |= {"name_or_path": "some/folder", "added_tokens_decoder": {}}
    engine = scripted({**tokenizer_files, "tokenizer_config.json": json.dumps(config).encode()})
    gateway = await live(engine, tokenizer_info=True)
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        answer = (await client.get("/tokenizer_info")).json()
        assert (await client.get("/tokenizer_info?model=other")).status_code == 404
    assert answer["chat_template"] == config["chat_template"]
    assert (answer["bos_token"], answer["eos_token"]) == ("<s>", "</s>")
    assert answer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "name_or_path" not in answer


async def test_metrics_on_the_port_of_the_api_need_a_key(live: Any, scripted: Any, keys: Path) -> None:
    gateway = await live(scripted(), api_metrics=True, api_keys_file=(str(keys),))
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/metrics")).status_code == 401
        answer = await client.get("/metrics", headers={"authorization": f"Bearer {ALICE}"})
    assert answer.status_code == 200
    assert "mizzen_gateway_engines" in answer.text


def test_metrics_on_the_port_of_the_api_need_a_single_process() -> None:
    with pytest.raises(ValueError, match=r"^--api-metrics needs --processes 1"):
        GatewayConfig(served_name="demo", api_metrics=True, processes=2)
