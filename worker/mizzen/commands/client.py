# SPDX-License-Identifier: Apache-2.0
"""Minimal client of the OpenAI API, used by `chat` and `complete`; it streams the text of answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

CONNECT_SECONDS = 10.0
KEY_VARIABLE = "MIZZEN_API_KEY"
"""Name of the environment variable with the API key, for services that require one."""
LOOPBACK = ("localhost", "127.", "::1")


class ServiceError(Exception):
    """Raised if the service rejects a request or fails during an answer; the message is the reason."""


class ServiceUnreachable(Exception):
    """Raised if no server answers at the URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Parameters with which an answer is generated; None means the service's default."""

    model: str
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    def request_fields(self) -> dict[str, Any]:
        """Return the options as fields of the body of a streamed request."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**{name: value for name, value in values.items() if value is not None}, "stream": True}


def base_url(text: str) -> str:
    """Return the base URL of the API for a URL from the user; the base URL ends in `/v1`."""
    url = text.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class ApiClient:
    """Client of one service's OpenAI API."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = base_url(url)
        host = urlsplit(self.url).hostname or ""
        key = os.environ.get(KEY_VARIABLE)
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else None,
            timeout=httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS),
            trust_env=not host.startswith(LOOPBACK),  # a proxy is not used for loopback addresses
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Return the names of the models that the service serves.

        Raises:
            ServiceError: the service rejected the request, or its answer is malformed.
            ServiceUnreachable: no server answers at the URL.
        """
        with self._translate_errors():
            response = self._http.get(f"{self.url}/models")
            _raise_for_status(response)
            try:
                return [entry["id"] for entry in response.json()["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ServiceError(f"{self.url}/models does not answer as the OpenAI API does") from error

    def chat(self, messages: Sequence[Mapping[str, Any]], generation: GenerationOptions) -> Iterator[str]:
        """Yield the pieces of the text that answers a conversation, as they arrive.

        Raises:
            ServiceError: the service rejected the request or failed during the answer.
            ServiceUnreachable: no server answers at the URL.
        """
        body = {**generation.request_fields(), "messages": messages}
        for choice in self._stream("chat/completions", body):
            yield choice.get("delta", {}).get("content") or ""

    def complete(self, prompt: str, generation: GenerationOptions) -> Iterator[str]:
        """Yield the pieces of the text that continues a prompt, as they arrive.

        Raises:
            ServiceError: the service rejected the request or failed during the answer.
            ServiceUnreachable: no server answers at the URL.
        """
        for choice in self._stream("completions", {**generation.request_fields(), "prompt": prompt}):
            yield choice.get("text") or ""

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post a request and yield the first choice of each event; closing the iterator aborts the
        request."""
        with self._translate_errors(), self._http.stream("POST", f"{self.url}/{path}", json=body) as response:
            _raise_for_status(response)
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise ServiceError(event["error"].get("message", data))
                yield from event.get("choices", ())[:1]
            raise ServiceError("the stream ended before the answer did")

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert errors of the HTTP client to `ServiceError` and `ServiceUnreachable`."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ServiceUnreachable(f"no server answers at {self.url}: {error}") from error
        except httpx.TimeoutException as error:
            raise ServiceError(f"{self.url} sent nothing in time; --timeout allows more") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError(f"{self.url}: {error}") from error
        except msgspec.DecodeError as error:
            raise ServiceError(f"{self.url} sent an event that is not JSON: {error}") from error


def _raise_for_status(response: httpx.Response) -> None:
    """Raise a ServiceError with the service's message if the response reports an error."""
    if response.is_success:
        return
    text = response.read().decode(errors="replace")
    try:
        message = msgspec.json.decode(text)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = text.strip()[:500] or response.reason_phrase
    retry = response.headers.get("retry-after")
    hint = f" (try again in {retry} s)" if retry else ""
    if response.status_code == 401:
        hint = f" (the key is taken from ${KEY_VARIABLE})"
    raise ServiceError(f"{response.status_code}: {message}{hint}")
