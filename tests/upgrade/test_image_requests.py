# SPDX-License-Identifier: Apache-2.0
"""Images while only one of gateway and engine knows them: errors are clear, and text works."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from mixed_releases import until
from previous_release import CURRENT, Release
from release_programs import Engine, Gateway, Program

from image_noise import encode_noise, image_part
from vision_chat_model import save_vision_chat_model

SECONDS = 20.0
"""Time within which every request must be answered."""
WITH_IMAGES = ("--image-capacity", "256")


@pytest.mark.parametrize(
    ("gateway_is_new", "engines", "refusal"),
    [
        (True, ("previous",), "reads text only|no engine that accepts images"),
        (False, ("current",), "image"),
        (True, ("previous", "current"), ""),
    ],
    ids=["new gateway, old engine", "old gateway, new engine", "new gateway, both engines"],
)
async def test_images_are_answered_or_refused_at_once(
    previous: Release, tmp_path: Path, gateway_is_new: bool, engines: tuple[str, ...], refusal: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_vision_chat_model(model)
    releases = {"previous": previous, "current": CURRENT}
    endpoints = {name: f"ipc://{tmp_path}/{name}.socket" for name in engines}
    programs: list[Program] = []
    try:
        for name, endpoint in endpoints.items():
            more = WITH_IMAGES if name == "current" else ()
            programs.append(
                Engine(releases[name], tmp_path / name, endpoint, simulated=True, model=model, more=more)
            )
        release = CURRENT if gateway_is_new else previous
        gateway = Gateway(release, tmp_path / "gateway", [*endpoints.values()])
        programs.append(gateway)

        async def serve() -> bool:
            for program in programs:
                assert program.process.poll() is None, program.log.read_text()[-3000:]
            return (await gateway.engines()).keys() == set(endpoints.values())

        await until(serve, "all engines serve")
        question = [{"type": "text", "text": "What is this?"}, image_part(encode_noise(1, 56, 56))]
        async with openai.AsyncOpenAI(
            base_url=gateway.url, api_key="none", max_retries=0, timeout=SECONDS
        ) as client:
            for content, error in (("Hello", ""), (question, refusal), ("Hello", "")) * 3:
                await ask(client, content, error)
    finally:
        for program in programs:
            program.kill()


async def ask(client: openai.AsyncOpenAI, content: object, error: str) -> None:
    """Send a request; it gets an answer, or an error with a text that matches `error`."""
    messages = [{"role": "user", "content": content}]
    call = client.chat.completions.create(model="demo", messages=messages, max_tokens=4)  # type: ignore[arg-type]
    if not error:
        answer = await call
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        return
    with pytest.raises(openai.APIStatusError, match=error) as caught:
        await call
    assert caught.value.status_code in (400, 503)
