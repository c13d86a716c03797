# SPDX-License-Identifier: Apache-2.0
"""A chat with the demo model on a real engine; its picture is in the documentation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("demo-engine")
QUESTION = "What is Mizzen?"


async def test_the_browser_shows_the_answer_of_the_api(live_demo: Any, open_playground: Any) -> None:
    gateway = await live_demo(playground=True)
    user = await open_playground(f"{gateway.url}/playground", viewport={"width": 1280, "height": 640})
    await user.choose_model()
    await user.page.get_by_label("Temperature").fill("0")
    await user.send(QUESTION)
    answer = await gateway.client().chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert (await user.answer_text()).strip() == answer.choices[0].message.content.strip()
    if folder := os.environ.get("PLOTS"):
        await user.page.screenshot(path=Path(folder) / "playground.png")
