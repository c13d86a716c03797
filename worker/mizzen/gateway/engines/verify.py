"""Golden prompts: has one engine that no request may reach yet continue a text, and says what came.

Only an engine that waits to be verified is asked, so nothing here takes a place from requests. Whether an
answer is right is for the operator to judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mizzen.core.request import FinishReason
from mizzen.gateway.engines.verify_request import VerifyRequest
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.text.stream import TextStream
from mizzen.wire.client.stream import EngineOverloaded, EngineRefused, EngineStream, StreamLost
from mizzen.wire.messages import Finish, RefusalCode, Sampling

if TYPE_CHECKING:
    from mizzen.gateway.engines.engine_client import EngineClient
    from mizzen.gateway.services import Service

RETRY_AFTER_SECONDS = 1.0
MAX_CONCURRENT_PROMPTS = 4
"""Golden prompts that an engine is asked at once, of all who ask."""


async def verify_engine(services: Iterable[Service], question: VerifyRequest) -> dict[str, Any]:
    """Return the greedy continuation of a golden prompt by one engine.

    Returns:
        `text`; `finish` ("stop" or "length"); `promptTokens`; `outputTokens`; `seconds`.

    Raises:
        ApiError: 404, there is no such engine; 409, it does not wait to be verified; 400, no engine would
            take the prompt; 503, it could not answer; 504, not in time.
    """
    engine = next((e for one in services for e in one.table if e.discovered.uid == question.uid), None)
    if engine is None:
        raise ApiError(404, f"{question.service} has no engine with the uid {question.uid!r} here")
    text = engine.text_model
    if not engine.verifying or text is None:
        raise ApiError(409, f"{engine.name} is {engine.state}: golden prompts are for one that is verifying")
    if engine.open_verifications >= MAX_CONCURRENT_PROMPTS:
        raise unavailable(
            f"{engine.name} is asked {engine.open_verifications} golden prompts already", RETRY_AFTER_SECONDS
        )
    began = time.monotonic()
    engine.open_verifications += 1
    try:
        async with asyncio.timeout(question.timeout_seconds):
            prompt, said, tokens, finish = await _generate(engine, text, question)
    except TimeoutError:
        raise ApiError(
            504, f"{engine.name} gave no whole answer in {question.timeout_seconds:g} s", code="timeout"
        ) from None
    except EngineRefused as refusal:
        if refusal.code == RefusalCode.INVALID:
            raise invalid(f"prompt: {refusal}", "prompt") from None
        raise unavailable(f"{engine.name}: {refusal}", RETRY_AFTER_SECONDS) from None
    except (EngineOverloaded, StreamLost) as error:
        raise unavailable(f"{engine.name}: {error}", RETRY_AFTER_SECONDS) from None
    finally:
        engine.open_verifications -= 1
    if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise unavailable(f"{engine.name}: {finish.message or 'it gave the prompt up'}", RETRY_AFTER_SECONDS)
    return {
        "text": said,
        "finish": "stop" if finish.reason == FinishReason.STOP else "length",
        "promptTokens": prompt,
        "outputTokens": tokens,
        "seconds": round(time.monotonic() - began, 3),
    }


async def _generate(
    engine: EngineClient, text: TextModel, question: VerifyRequest
) -> tuple[int, str, int, Finish]:
    """Tokens of the prompt, the text that came, its tokens, and its end."""
    ids = await text.text_prompt(question.prompt)
    if not len(ids):
        raise invalid("the prompt is empty", "prompt")
    sampling = Sampling(temperature=0.0, max_tokens=question.max_tokens, seed=0)
    stream = engine.link.generate(
        ids.astype("<i4", copy=False).tobytes(), sampling, queue_seconds=question.timeout_seconds
    )
    try:
        said, tokens, finish = await _collect(stream, text)
    finally:
        stream.abort()
    return len(ids), said, tokens, finish


async def _collect(stream: EngineStream, text: TextModel) -> tuple[str, int, Finish]:
    shown, parts, count = TextStream(text.tokenizer), list[str](), 0
    while True:
        tokens, finish = await stream.next()
        count += len(tokens)
        if finish is not None and finish.stop_token is not None and tokens[-1:] == [finish.stop_token]:
            tokens = tokens[:-1]
        parts.append(shown.add(tokens)[0])
        if finish is not None:
            return "".join([*parts, shown.flush()]), count, finish
