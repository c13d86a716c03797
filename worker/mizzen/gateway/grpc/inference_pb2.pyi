# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "priority", "prompt_token_ids", "request_id", "return_text", "sampling")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RETURN_TEXT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    request_id: str
    return_text: bool
    priority: int
    def __init__(
        self,
        model: str | None = ...,
        prompt_token_ids: _Iterable[int] | None = ...,
        sampling: SamplingParams | _Mapping | None = ...,
        request_id: str | None = ...,
        return_text: bool = ...,
        priority: int | None = ...,
    ) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = (
        "frequency_penalty",
        "grammar",
        "ignore_eos",
        "json_schema",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "regex",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    )
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    logprobs: int
    json_schema: str
    regex: str
    grammar: str
    def __init__(
        self,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        seed: int | None = ...,
        frequency_penalty: float | None = ...,
        presence_penalty: float | None = ...,
        repetition_penalty: float | None = ...,
        min_tokens: int | None = ...,
        ignore_eos: bool = ...,
        stop_token_ids: _Iterable[int] | None = ...,
        stop: _Iterable[str] | None = ...,
        logprobs: int | None = ...,
        json_schema: str | None = ...,
        regex: str | None = ...,
        grammar: str | None = ...,
    ) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("finish_reason", "logprobs", "text", "token_ids", "usage")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    text: str
    finish_reason: str
    usage: Usage
    def __init__(
        self,
        token_ids: _Iterable[int] | None = ...,
        logprobs: _Iterable[TokenLogprobs | _Mapping] | None = ...,
        text: str | None = ...,
        finish_reason: str | None = ...,
        usage: Usage | _Mapping | None = ...,
    ) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_logprobs", "top_token_ids")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(
        self,
        logprob: float | None = ...,
        top_token_ids: _Iterable[int] | None = ...,
        top_logprobs: _Iterable[float] | None = ...,
    ) -> None: ...

class Usage(_message.Message):
    __slots__ = ("cached_tokens", "completion_tokens", "prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(
        self,
        prompt_tokens: int | None = ...,
        completion_tokens: int | None = ...,
        cached_tokens: int | None = ...,
    ) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("dimensions", "inputs", "model", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[TokenIds]
    dimensions: int
    request_id: str
    def __init__(
        self,
        model: str | None = ...,
        inputs: _Iterable[TokenIds | _Mapping] | None = ...,
        dimensions: int | None = ...,
        request_id: str | None = ...,
    ) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Iterable[int] | None = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "usage")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    usage: Usage
    def __init__(
        self,
        embeddings: _Iterable[Embedding | _Mapping] | None = ...,
        usage: Usage | _Mapping | None = ...,
    ) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: bytes | None = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: str | None = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: bool = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: str | None = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("context_length", "end_token_ids", "model", "task", "vocab_size")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    model: str
    context_length: int
    vocab_size: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    task: str
    def __init__(
        self,
        model: str | None = ...,
        context_length: int | None = ...,
        vocab_size: int | None = ...,
        end_token_ids: _Iterable[int] | None = ...,
        task: str | None = ...,
    ) -> None: ...
