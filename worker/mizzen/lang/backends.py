# SPDX-License-Identifier: Apache-2.0
"""Models on which programs run: an `LLM` of this process, or a service with Mizzen's HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from mizzen.core.sampling_params import PARAMETERS, GrammarKind, SamplingParams
from mizzen.gateway.text.common_beginning import encode_alike
from mizzen.gateway.text.template import ChatTemplate

if TYPE_CHECKING:
    from mizzen.offline import LLM, Completion

GRAMMAR_FIELDS = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.REGEX: "regex", GrammarKind.EBNF: "grammar"}
"""Names of grammars in the field `structured_outputs` of a request."""
TIMEOUT = httpx.Timeout(600.0, connect=10.0, pool=None)
"""Timeouts of requests to a service, in seconds."""
PASSING_STATUSES = (408, 429)
"""Statuses of requests that may succeed later: a timeout, and too many requests."""


@dataclass(frozen=True, slots=True)
class RoleText:
    """Text of a message, or text outside of messages, whose role is empty."""

    role: str
    text: str


class Backend(Protocol):
    """A model and its tokenizer."""

    async def encode(self, turns: Sequence[RoleText]) -> list[int]:
        """Return the token ids of a prompt that ends with the last turn's text."""
        ...

    async def encode_endings(self, turns: Sequence[RoleText], endings: Sequence[str]) -> list[list[int]]:
        """Return the token ids of a prompt for each of the texts that may follow the last turn's text."""
        ...

    async def generate(self, prompt: list[int], params: SamplingParams, session: str) -> str:
        """Return the text that the model generates after a prompt."""
        ...

    async def score(self, prompt: list[int], start: int, session: str) -> float:
        """Return the sum of the log probabilities of a prompt's tokens from the position `start` on."""
        ...

    async def close(self) -> None:
        """Free what the backend holds."""
        ...


def split_open_turn(turns: Sequence[RoleText]) -> tuple[list[dict[str, str]], bool]:
    """Return the messages of a prompt, and whether the model continues the text of the last one."""
    continues = bool(turns[-1].text)
    shown = turns if continues else turns[:-1]
    return [{"role": turn.role, "content": turn.text} for turn in shown], continues


def append_endings(turns: Sequence[RoleText], endings: Sequence[str]) -> list[tuple[RoleText, ...]]:
    """Return the turns with each of the endings appended to the text of the last one."""
    *before, last = turns
    return [(*before, RoleText(last.role, last.text + ending)) for ending in endings]


class LlmBackend:
    """Runs all requests that wait together as one batch of an `LLM`."""

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise ValueError("programs need the tokenizer: make the LLM without skip_tokenizer")
        self._llm, self._tokenizer = llm, llm.tokenizer
        self._template = ChatTemplate.load(llm.options.model)
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[tuple[list[int], SamplingParams, asyncio.Future[Completion]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def encode(self, turns: Sequence[RoleText]) -> list[int]:
        """Return the token ids of a prompt; see `Backend`."""
        return self._tokenizer.encode(self._render(turns), add_special_tokens=not turns[0].role)

    async def encode_endings(self, turns: Sequence[RoleText], endings: Sequence[str]) -> list[list[int]]:
        """Return the token ids of a prompt for each of several endings; see `Backend`."""
        texts = [self._render(extended) for extended in append_endings(turns, endings)]
        return encode_alike(self._tokenizer, texts, add_special_tokens=not turns[0].role)

    def _render(self, turns: Sequence[RoleText]) -> str:
        """Return the text of a prompt that ends with the last turn's text."""
        if not turns[0].role:
            return turns[0].text
        if self._template is None:
            raise ValueError("the model has no chat template: use text instead of messages")
        messages, continues = split_open_turn(turns)
        return self._template.render(
            messages, add_generation_prompt=not continues, continue_final_message=continues
        )

    async def generate(self, prompt: list[int], params: SamplingParams, session: str) -> str:
        """Return generated text; see `Backend`."""
        return (await self._run(prompt, params)).text

    async def score(self, prompt: list[int], start: int, session: str) -> float:
        """Return a sum of log probabilities; see `Backend`."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=start)
        logprobs = (await self._run(prompt, params)).prompt_logprobs or []
        return sum(token.logprob for token in logprobs[len(logprobs) + start - len(prompt) :])

    async def _run(self, prompt: list[int], params: SamplingParams) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, params, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run_waiting())
        return await future

    async def _run_waiting(self) -> None:
        """Run batches until no request waits."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            prompts, params = [entry[0] for entry in batch], [entry[1] for entry in batch]
            for entry, result in zip(batch, await self._run_batch(prompts, params), strict=True):
                if entry[2].done():
                    continue
                if isinstance(result, Exception):
                    entry[2].set_exception(result)
                else:
                    entry[2].set_result(result)

    async def _run_batch(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> Sequence[Completion | Exception]:
        """Run a batch; if it is rejected, run each of its requests alone, so that only the cause fails."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return await run(self._thread, self._llm.generate, prompts, params)
        except Exception as error:
            if len(prompts) == 1:
                return [error]
        return [
            (await self._run_batch([prompt], [one]))[0] for prompt, one in zip(prompts, params, strict=True)
        ]

    async def close(self) -> None:
        """Wait for the running batch."""
        self._thread.shutdown()


class HttpBackend:
    """Sends each request to a service; the service batches them."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._url, self._model, self._headers = url.rstrip("/").removesuffix("/v1"), model, headers
        self._client: httpx.AsyncClient | None = None

    async def encode(self, turns: Sequence[RoleText]) -> list[int]:
        """Return the token ids of a prompt; see `Backend`."""
        body: dict[str, Any] = {"prompt": turns[0].text}
        if turns[0].role:
            messages, continues = split_open_turn(turns)
            body = {"messages": messages, "add_generation_prompt": not continues}
            body["continue_final_message"] = continues
        return (await self._post("/tokenize", body))["tokens"]

    async def encode_endings(self, turns: Sequence[RoleText], endings: Sequence[str]) -> list[list[int]]:
        """Return the token ids of a prompt for each of several endings; see `Backend`."""
        return await asyncio.gather(*map(self.encode, append_endings(turns, endings)))

    async def generate(self, prompt: list[int], params: SamplingParams, session: str) -> str:
        """Return generated text; see `Backend`."""
        body = {"prompt": prompt, **to_fields(params)}
        return (await self._post("/v1/completions", body, session))["choices"][0]["text"]

    async def score(self, prompt: list[int], start: int, session: str) -> float:
        """Return a sum of log probabilities; see `Backend`."""
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs_from": start}
        answer = await self._post("/v1/completions", body, session)
        return sum(answer["choices"][0]["logprobs"]["token_logprobs"][start:])

    async def _post(self, path: str, body: dict[str, Any], session: str = "") -> dict[str, Any]:
        """Return the response to a request.

        Raises:
            ValueError: the service rejected the request.
            RuntimeError: the service failed, has too many requests, or cannot be reached.
        """
        if self._model is None:
            models = (await self._send("GET", "/v1/models"))["data"]
            if not models:
                raise RuntimeError("/v1/models: the service has no models")
            self._model = models[0]["id"]
        headers = {"x-mizzen-session": session} if session else None
        return await self._send("POST", path, json={"model": self._model, **body}, headers=headers)

    async def _send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request with httpx's options, and return the response; errors are those of `_post`."""
        if self._client is None:
            self._client = httpx.AsyncClient(headers=self._headers, timeout=TIMEOUT)
        try:
            response = await self._client.request(method, self._url + path, **options)
        except httpx.HTTPError as error:
            raise RuntimeError(f"{path}: {error or type(error).__name__}") from error
        if response.is_success:
            return response.json()
        rejected = response.is_client_error and response.status_code not in PASSING_STATUSES
        raise (ValueError if rejected else RuntimeError)(f"{path}: {response.text}")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()


def to_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request to `/v1/completions` for parameters that differ from their defaults."""
    values = asdict(params)
    fields = {
        entry.name: values[entry.name]
        for entry in PARAMETERS
        if (entry.request_field or entry.name == "max_tokens") and values[entry.name] != entry.default
    }
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.grammar is not None:
        fields["structured_outputs"] = {GRAMMAR_FIELDS[params.grammar.kind]: params.grammar.text}
    return fields
