# SPDX-License-Identifier: Apache-2.0
"""Models on which programs run: an `LLM` of this process, or a service with Mizzen's HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.openai.sampling_fields import completion_fields
from mizzen.gateway.text.common_beginning import PrefixEncoder, TokenIds
from mizzen.gateway.text.template import ChatTemplate

if TYPE_CHECKING:
    from mizzen.offline import LLM, Completion

Prompt = list[dict[str, str]]
"""Turns with `role` and `content`: messages of the chat API, or one of plain text, whose role is empty."""
TIMEOUT = httpx.Timeout(600.0, connect=10.0, pool=None)
PASSING_STATUSES = (408, 429)  # of requests that may succeed later: a timeout, and too many requests


def template_arguments(turns: Prompt) -> dict[str, Any]:
    """Return the arguments of a chat template for a prompt that ends with the text of the last message."""
    continues = bool(turns[-1]["content"])
    shown = turns if continues else turns[:-1]
    return {"messages": shown, "add_generation_prompt": not continues, "continue_final_message": continues}


class LlmBackend:
    """Runs all requests that wait together as one batch of an `LLM`."""

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise ValueError("programs need the tokenizer: make the LLM without skip_tokenizer")
        self._llm, self._encoder = llm, PrefixEncoder(llm.tokenizer)
        self._template = ChatTemplate.load(llm.options.model)
        self._thread, self._running = ThreadPoolExecutor(1), asyncio.Lock()
        self._waiting: list[tuple[TokenIds, SamplingParams]] = []
        self._next_batch: asyncio.Task[Sequence[Completion | Exception]]

    async def encode(self, prompts: Sequence[Prompt]) -> Sequence[TokenIds]:
        """Return the token ids of prompts; each ends with the text of its last turn."""
        if not prompts[0][0]["role"]:
            return self._encoder.encode([turns[0]["content"] for turns in prompts])
        if self._template is None:
            raise ValueError("the model has no chat template: use text instead of messages")
        texts = [self._template.render(**template_arguments(turns)) for turns in prompts]
        return self._encoder.encode(texts, add_special_tokens=False)

    async def generate(self, prompt: TokenIds, params: SamplingParams, session: str) -> str:
        """Return the text that the model generates after a prompt."""
        return (await self._run(prompt, params)).text

    async def score(self, prompt: TokenIds, start: int, session: str) -> float:
        """Return the sum of the log probabilities of a prompt's tokens from position `start` > 0 on."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=start)
        return sum(token.logprob for token in (await self._run(prompt, params)).prompt_logprobs or ())

    async def _run(self, prompt: TokenIds, params: SamplingParams) -> Completion:
        if not self._waiting:
            self._next_batch = asyncio.create_task(self._run_waiting())
        batch, index = self._next_batch, len(self._waiting)
        self._waiting.append((prompt, params))
        result = (await asyncio.shield(batch))[index]  # a caller that is cancelled leaves the batch to others
        if isinstance(result, Exception):
            raise result
        return result

    async def _run_waiting(self) -> Sequence[Completion | Exception]:
        """Wait for the batch before, and run the requests that wait by then."""
        async with self._running:
            batch, self._waiting = self._waiting, []
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._run_batch, batch)

    def _run_batch(self, batch: list[tuple[TokenIds, SamplingParams]]) -> Sequence[Completion | Exception]:
        """Run a batch; if it is rejected, run each of its requests alone, so that only the cause fails."""
        try:
            return self._llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [result for request in batch for result in self._run_batch([request])]

    async def close(self) -> None:
        """Wait for the running batch."""
        self._thread.shutdown()


class HttpBackend:
    """Sends each request to a service; raises ValueError if it is rejected, RuntimeError if it fails."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._model, base = model, url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT)

    async def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return token ids; see `LlmBackend`."""
        texts = ({"prompt": turns[0]["content"]} for turns in prompts)
        bodies = map(template_arguments, prompts) if prompts[0][0]["role"] else texts
        answers = await asyncio.gather(*(self._post("/tokenize", body) for body in bodies))
        return [answer["tokens"] for answer in answers]

    async def generate(self, prompt: TokenIds, params: SamplingParams, session: str) -> str:
        """Return generated text; see `LlmBackend`."""
        body = {"prompt": prompt, **completion_fields(params)}
        return (await self._post("/v1/completions", body, session))["choices"][0]["text"]

    async def score(self, prompt: TokenIds, start: int, session: str) -> float:
        """Return a sum of log probabilities; see `LlmBackend`."""
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs_from": start}
        answer = await self._post("/v1/completions", body, session)
        return sum(answer["choices"][0]["logprobs"]["token_logprobs"][start:])

    async def _post(self, path: str, body: dict[str, Any], session: str = "") -> dict[str, Any]:
        if self._model is None:
            models = (await self._send("GET", "/v1/models"))["data"]
            if not models:
                raise RuntimeError("/v1/models: the service has no models")
            self._model = models[0]["id"]
        options = {"json": {"model": self._model, **body}, "headers": {"x-mizzen-session": session}}
        return await self._send("POST", path, **options)

    async def _send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise RuntimeError(f"{path}: {error or type(error).__name__}") from error
        if response.is_success:
            return response.json()
        rejected = response.is_client_error and response.status_code not in PASSING_STATUSES
        raise (ValueError if rejected else RuntimeError)(f"{path}: {response.text}")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
