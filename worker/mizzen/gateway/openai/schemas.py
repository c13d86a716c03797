"""Requests and responses of the OpenAI API, as far as they are served."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Number = Annotated[float, Meta(description="a number")]


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream holds besides text."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = False


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints have. Those of type Any are known and not served, see `parse.HARMLESS`."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    n: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    service_tier: Any = None
    store: Any = None


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    suffix: Any = None
    echo: Any = None
    best_of: Any = None


class PromptTokensDetails(msgspec.Struct):
    """Of a prompt's tokens, those that came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """The one choice of a chunk."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None
    token_ids: list[int] | UnsetType = UNSET


class Chunk(msgspec.Struct):
    """An event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class AnswerMessage(msgspec.Struct):
    """The answer of a chat."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """The one choice of a chat response."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct):
    """Response of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class TextChoice(msgspec.Struct):
    """The one choice of a completion, or of an event of its stream."""

    text: str
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct):
    """Response of POST /v1/completions, and the events of its stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct):
    """A model that is served."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "mizzen"
    root: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """Response of GET /v1/models."""

    data: list[Model]
    object: str = "list"
