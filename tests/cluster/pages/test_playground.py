# SPDX-License-Identifier: Apache-2.0
"""The playground of a service in a cluster, in a real browser; the processes are real."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from browser import PageLog, find_chromium, launch_chromium

ROOT = Path(__file__).parents[3]
SPACE = "parlour"
QUESTION = "What is Mizzen?"

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


@pytest.fixture
def url(cluster: Any) -> Iterator[str]:
    """The URL of a gateway with the playground."""
    find_chromium()
    cluster.make_namespace(SPACE)
    body = yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())
    body["metadata"]["namespace"] = SPACE
    body["spec"]["gateway"] |= {"playground": "Enabled", "replicas": 1}
    cluster.apply(body)
    cluster.kubectl("wait", "infsvc/demo", "-n", SPACE, "--for=condition=Ready", "--timeout=110s")
    yield cluster.url("demo", SPACE).removesuffix("/v1")
    cluster.kubectl("delete", "namespace", SPACE, "--wait=false")


def ask(url: str) -> str:
    """Return the API's answer to the question."""
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    deadline = time.monotonic() + 60
    while True:
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        if response.status_code == 200 or time.monotonic() > deadline:
            return response.json()["choices"][0]["message"]["content"]


async def test_a_chat_in_the_browser_gets_the_answer_of_the_service(url: str) -> None:
    async with launch_chromium() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 720})
        log = PageLog(page)
        await page.goto(f"{url}/")
        assert page.url == f"{url}/playground"
        await page.get_by_label("Model", exact=True).select_option("demo")
        await page.get_by_label("Temperature").fill("0")
        await page.get_by_label("Message", exact=True).fill(QUESTION)
        await page.keyboard.press("Enter")
        answer = page.locator("article.assistant[aria-busy=false] .answer")
        assert (await answer.inner_text()).strip() == ask(url).strip()
        assert log.problems == []
