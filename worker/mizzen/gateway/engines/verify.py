# SPDX-License-Identifier: Apache-2.0
"""Golden prompts: runs a prompt on an engine that awaits verification, and returns the output.

Such an engine serves no requests yet, so golden prompts take no capacity from requests. `POST /admin/verify`
calls this; the operator judges the output.
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
"""Maximum number of golden prompts in progress in one engine, from all callers together."""


async def verify_engine(services: Iterable[Service], request: VerifyRequest) -> dict[str, Any]:
    """Run a golden prompt on one engine with greedy sampling, and return the result.

    Returns:
        `text`; `finish` ("stop" or "length"); `promptTokens`; `outputTokens`; `seconds`.

    Raises:
        ApiError: 404 if the engine does not exist, 409 if it does not await verification, 400 if the prompt
            is invalid, 503 if the engine is busy or failed, 504 if it did not answer in time.
    """
    engines = (engine for service in services for engine in service.table)
    engine = next((engine for engine in engines if engine.discovered.uid == request.uid), None)
    if engine is None:
        raise ApiError(404, f"{request.service} has no engine with the uid {request.uid!r} here")
    text = engine.text_model
    if not engine.verifying or text is None:
        problem = f"{engine.name} is {engine.state}; golden prompts are only for engines that are verifying"
        raise ApiError(409, problem)
    if engine.open_verifications >= MAX_CONCURRENT_PROMPTS:
        raise unavailable(
            f"{engine.name} has {engine.open_verifications} golden prompts in progress already",
            RETRY_AFTER_SECONDS,
        )
    began = time.monotonic()
    engine.open_verifications += 1
    try:
        async with asyncio.timeout(request.timeout_seconds):
            prompt_tokens, answer, tokens, finish = await _generate(engine, text, request)
    except TimeoutError:
        raise ApiError(
            504, f"{engine.name} did not complete its answer in {request.timeout_seconds:g} s", code="timeout"
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
        raise unavailable(
            f"{engine.name}: {finish.message or 'it abandoned the prompt'}", RETRY_AFTER_SECONDS
        )
    return {
        "text": answer,
        "finish": "stop" if finish.reason == FinishReason.STOP else "length",
        "promptTokens": prompt_tokens,
        "outputTokens": tokens,
        "seconds": round(time.monotonic() - began, 3),
    }


async def _generate(
    engine: EngineClient, text: TextModel, request: VerifyRequest
) -> tuple[int, str, int, Finish]:
    """Run a golden prompt, and return the result.

    Returns:
        The number of prompt tokens; the text of the output; its number of tokens; and its `Finish`.
    """
    ids = await text.text_prompt(request.prompt)
    if not len(ids):
        raise invalid("the prompt is empty", "prompt")
    sampling = Sampling(temperature=0.0, max_tokens=request.max_tokens, seed=0)
    stream = engine.link.generate(
        ids.astype("<i4", copy=False).tobytes(), sampling, queue_seconds=request.timeout_seconds
    )
    try:
        answer, tokens, finish = await _collect(stream, text)
    finally:
        stream.abort()
    return len(ids), answer, tokens, finish


async def _collect(stream: EngineStream, text: TextModel) -> tuple[str, int, Finish]:
    text_stream, pieces, count = TextStream(text.tokenizer), list[str](), 0
    while True:
        tokens, finish = await stream.next()
        count += len(tokens)
        if finish is not None and finish.stop_token is not None and tokens[-1:] == [finish.stop_token]:
            tokens = tokens[:-1]
        pieces.append(text_stream.add(tokens)[0])
        if finish is not None:
            return "".join([*pieces, text_stream.flush()]), count, finish
