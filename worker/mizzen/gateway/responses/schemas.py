"""Body of POST /v1/responses. What fields say of themselves is the documentation's text too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mizzen.gateway.openai.schemas import NOT_SERVED, Bias, Count, Penalty, Share, TokenId, doc
from mizzen.gateway.tools.tool_schemas import Function


class ResponseTool(Function, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A tool of a response: the fields of chat's function, without its envelope."""

    type: Annotated[str, doc("Only `function`: nothing is run here.")]


class NamedResponseTool(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    """The function that must be called."""

    name: str


class AllowedResponseTools(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    """The tools that may be called, of those that the model is told of."""

    mode: Literal["auto", "required"]
    tools: list[NamedResponseTool]


ResponseToolChoice = Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What form the text has."""

    type: Annotated[Literal["text", "json_object", "json_schema"], doc("Which form.")]
    name: Annotated[str | None, doc("With `json_schema`: any name.")] = None
    schema: Annotated[dict[str, Any] | None, doc("With `json_schema`: what the text conforms to.")] = None
    strict: Annotated[bool | None, doc("As in chat completions.")] = None
    description: Annotated[str | None, doc("Accepted, not used.")] = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How the text is written."""

    format: Annotated[TextFormat | None, doc("Text, a JSON object, or JSON that conforms to a schema.")] = (
        None
    )
    verbosity: Annotated[str | None, doc("Only `medium`.")] = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How the model reasons."""

    effort: Annotated[
        str | None,
        doc("A variable of the chat template; `none` also sets `enable_thinking: false`."),
    ] = None
    summary: Annotated[str | None, doc("Only `auto`: reasoning comes as it is, there are no summaries.")] = (
        None
    )
    generate_summary: Annotated[str | None, doc("The older name of `summary`.")] = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream holds besides."""

    include_obfuscation: Annotated[bool | None, doc("Ignored: no padding is sent.")] = False


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses."""

    model: Annotated[str, doc("A name of `/v1/models`; another is 404.")]
    input: Annotated[
        str | list[dict[str, Any]],
        doc(
            "A user's text, or the conversation as items: messages, `function_call`, `function_call_output`,"
            " `reasoning`. The items of an earlier answer's `output` can be sent as they came."
        ),
    ]
    instructions: Annotated[str | None, doc("Goes before the conversation as a system message.")] = None
    stream: Annotated[bool | None, doc("Server-sent events; the last is `response.completed`.")] = False
    stream_options: Annotated[ResponseStreamOptions | None, doc("Only with `stream`.")] = None
    max_output_tokens: Annotated[
        Count | None, doc("Output tokens at most, those of reasoning included; what the context holds.")
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("1 by default; 0 takes the most probable token.")
    ] = None
    top_p: Annotated[Share | None, doc("As in chat completions.")] = None
    tools: Annotated[list[ResponseTool] | None, doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ResponseToolChoice | None, doc("`none`, `auto`, `required`, a function, or `allowed_tools`.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether one answer may hold several calls (default).")
    ] = None
    text: Annotated[TextOptions | None, doc("The text's form.")] = None
    reasoning: Annotated[ReasoningOptions | None, doc("How the model reasons.")] = None
    metadata: Annotated[
        dict[str, str] | None, doc("Up to 16 texts by name, which come back with the response.")
    ] = None
    store: Annotated[bool | None, doc("Only `false`: nothing is stored, also where it is left out.")] = None
    previous_response_id: Annotated[Any, doc("Refused by name: send the earlier items in `input`.")] = None
    conversation: Annotated[Any, doc("Refused by name: send the earlier items in `input`.")] = None
    include: Annotated[
        list[str] | None,
        doc("Only `reasoning.encrypted_content`, which says nothing more: reasoning comes in the open."),
    ] = None
    truncation: Annotated[str | None, doc("Only `disabled`: a conversation that is too long is 400.")] = None
    background: Annotated[Any, doc("Only `false`.")] = None
    service_tier: Annotated[Any, doc("Only `auto` and `default`.")] = None
    top_logprobs: Annotated[Any, doc("Only 0; chat completions have log probabilities.")] = None
    max_tool_calls: Annotated[Any, doc(NOT_SERVED)] = None
    prompt: Annotated[Any, doc(NOT_SERVED)] = None
    image: Annotated[Any, doc(NOT_SERVED)] = None
    access_programs: Annotated[Any, doc(NOT_SERVED)] = None
    context_management: Annotated[Any, doc(NOT_SERVED)] = None
    moderation: Annotated[Any, doc(NOT_SERVED)] = None
    prompt_cache_options: Annotated[Any, doc(NOT_SERVED)] = None
    prompt_cache_retention: Annotated[Any, doc("Only `in_memory`.")] = None
    prompt_cache_key: Annotated[str | None, doc("Requests of one key go to one engine where they can.")] = (
        None
    )
    safety_identifier: Annotated[str | None, doc("Accepted, not used.")] = None
    user: Annotated[str | None, doc("The same, where there is no `prompt_cache_key`.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Variables for the chat template, `enable_thinking` for example.")
    ] = None
    top_k: Annotated[Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None, doc("As in chat completions.")] = None
    min_p: Annotated[Share | None, doc("As in chat completions.")] = None
    seed: Annotated[int | None, doc("As in chat completions.")] = None
    frequency_penalty: Annotated[Penalty | None, doc("As in chat completions.")] = None
    presence_penalty: Annotated[Penalty | None, doc("As in chat completions.")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=10)] | None, doc("As in chat completions.")
    ] = None
    logit_bias: Annotated[dict[str, Bias] | None, doc("As in chat completions.")] = None
    stop: Annotated[str | list[str] | None, doc("As in chat completions.")] = None
    stop_token_ids: Annotated[list[TokenId] | None, doc("As in chat completions.")] = None
    ignore_eos: Annotated[bool | None, doc("As in chat completions.")] = False
    timeout: Annotated[Annotated[float, Meta(gt=0)] | None, doc("As in chat completions.")] = None


SAMPLING_FIELDS = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "timeout",
    "chat_template_kwargs", "parallel_tool_calls", "user", "prompt_cache_key",
)  # fmt: skip
"""Fields that mean what they mean in chat completions."""
