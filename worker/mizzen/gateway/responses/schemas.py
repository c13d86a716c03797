# SPDX-License-Identifier: Apache-2.0
"""Request body of POST /v1/responses. Field descriptions also appear in OpenAPI and docs/openai.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mizzen.gateway.openai.schemas import ADVICE, NOT_SUPPORTED, NOT_USED, Count, SamplingFields, doc
from mizzen.gateway.tools.tool_schemas import Function

Item = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
"""An item of the input as JSON."""
FunctionJson = Annotated[msgspec.Raw, Meta(extra_json_schema={"$ref": "#/components/schemas/ResponseTool"})]
"""A `ResponseTool` as JSON."""
ToolJson = Annotated[
    msgspec.Raw,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"$ref": "#/components/schemas/ResponseTool"},
                {"$ref": "#/components/schemas/NamespaceTool"},
                {"type": "object"},
            ]
        }
    ),
]
"""A `ResponseTool`, a `NamespaceTool` or a hosted tool as JSON."""


class ResponseTool(Function, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Function that the model may call, with the fields of `Function` next to `type`."""

    type: Annotated[Literal["function"], doc("Always `function`.")]


class NamespaceTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Functions that share a namespace; the model gets them like other functions."""

    type: Annotated[Literal["namespace"], doc("Always `namespace`.")]
    name: Annotated[str, doc("Name of the namespace; calls of its functions repeat it as `namespace`.")]
    description: Annotated[str | None, doc(NOT_USED)] = None
    tools: Annotated[
        list[FunctionJson],
        Meta(
            description="The functions. If another tool of the request has the same name, the model sees "
            "the name with the namespace in front.",
        ),
    ]


class NamedResponseTool(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    """Function referred to by name; as a tool choice, the function that must be called."""

    name: Annotated[str, doc("Name of the function.")]


class AllowedResponseTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Tool that a tool choice allows."""

    type: Annotated[str, doc("`function`; tools that OpenAI hosts are left out.")]
    name: Annotated[str | None, doc("With type `function`: name of the function.")] = None


class AllowedResponseTools(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    """Tool choice that allows only some of the tools."""

    mode: Annotated[
        Literal["auto", "required"], doc("`required`: the model must call one of the tools. `auto`: it may.")
    ]
    tools: Annotated[list[AllowedResponseTool], doc("The allowed tools.")]


ResponseToolChoice = Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Format of the output text: plain text, a JSON object, or JSON that conforms to a schema."""

    type: Annotated[Literal["text", "json_object", "json_schema"], doc("Format of the text.")]
    name: Annotated[str | None, doc("With `json_schema`: any name.")] = None
    schema: Annotated[
        dict[str, Any] | None, doc("With `json_schema`: the schema that the text must conform to.")
    ] = None
    strict: Annotated[bool | None, doc("As in chat completions.")] = None
    description: Annotated[str | None, doc(NOT_USED)] = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Settings for the output text."""

    format: Annotated[TextFormat | None, doc("Text, a JSON object, or JSON that conforms to a schema.")] = (
        None
    )
    verbosity: Annotated[str | None, doc(ADVICE)] = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Settings for the model's reasoning."""

    effort: Annotated[
        str | None,
        doc("Passed to the chat template; `none` also sets `enable_thinking: false`."),
    ] = None
    summary: Annotated[str | None, doc("Ignored: reasoning is returned as it is, without summaries.")] = None
    generate_summary: Annotated[str | None, doc("Older name of `summary`.")] = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Additional content of a stream."""

    include_obfuscation: Annotated[bool | None, doc("Ignored: no padding is sent.")] = False


class ResponsesRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    input: Annotated[
        str | list[Item],
        Meta(
            description="A user message as text, or the conversation as items: messages, "
            "`function_call`, `function_call_output`, `reasoning`. Items from the "
            "`output` of an earlier response can be sent back unchanged, or as `item_reference` if "
            "the gateway stores responses.",
        ),
    ]
    instructions: Annotated[str | None, doc("System message that precedes the conversation.")] = None
    stream: Annotated[
        bool | None, doc("Stream server-sent events; the last one holds the whole response.")
    ] = False
    stream_options: Annotated[ResponseStreamOptions | None, doc("Only with `stream`.")] = None
    max_output_tokens: Annotated[
        Count | None,
        doc(
            "Maximum number of output tokens, including reasoning; by default as many as fit "
            "into the context."
        ),
    ] = None
    tools: Annotated[
        list[ToolJson] | None,
        Meta(
            description="Functions that the model may call, and namespaces of functions. Tools that OpenAI "
            "hosts are left out.",
        ),
    ] = None
    tool_choice: Annotated[
        ResponseToolChoice | None,
        doc("`none`, `auto`, `required`, `allowed_tools`, or a function that must be called."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether an answer may contain several calls (default: true).")
    ] = None
    text: Annotated[TextOptions | None, doc("Format of the text.")] = None
    reasoning: Annotated[ReasoningOptions | None, doc("Settings for reasoning.")] = None
    metadata: Annotated[
        dict[str, str] | None, doc("Up to 16 keys with text values, returned with the response.")
    ] = None
    store: Annotated[
        bool | None,
        doc(
            "Whether to store the response (default: true) if the gateway stores responses; otherwise "
            "it is ignored."
        ),
    ] = None
    previous_response_id: Annotated[
        str | None,
        doc(
            "Response that this request continues: its conversation precedes `input`. Only if the gateway "
            "stores responses."
        ),
    ] = None
    conversation: Annotated[
        Any, doc("Not supported: send `previous_response_id`, or the earlier items in `input`.")
    ] = None
    include: Annotated[
        list[str] | None,
        doc(
            "`reasoning.encrypted_content`, which has no effect, because reasoning is returned "
            "unencrypted, and values that concern hosted tools."
        ),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        doc("`auto` is ignored: a conversation that is too long gets 400."),
    ] = None
    background: Annotated[Any, doc("Only `false`.")] = None
    service_tier: Annotated[str | None, doc(ADVICE)] = None
    top_logprobs: Annotated[Any, doc("Only 0; use chat completions for log probabilities.")] = None
    max_tool_calls: Annotated[int | None, doc("Ignored: it limits the calls of hosted tools.")] = None
    prompt: Annotated[Any, doc(NOT_SUPPORTED)] = None
    image: Annotated[dict[str, Any] | None, doc("Ignored: it concerns images only.")] = None
    access_programs: Annotated[Any, doc(NOT_SUPPORTED)] = None
    context_management: Annotated[
        list[Any] | None, doc("Ignored: a conversation that is too long gets 400.")
    ] = None
    moderation: Annotated[Any, doc(NOT_SUPPORTED)] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, doc(ADVICE)] = None
    prompt_cache_retention: Annotated[str | None, doc(ADVICE)] = None
    prompt_cache_key: Annotated[str | None, doc("Requests with the same key prefer the same engine.")] = None
    safety_identifier: Annotated[str | None, doc("Returned with the response, not used.")] = None
    user: Annotated[str | None, doc("Used like `prompt_cache_key` if that is not set.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Variables for the chat template, for example `enable_thinking`.")
    ] = None
    timeout: Annotated[Annotated[float, Meta(gt=0)] | None, doc("As in chat completions.")] = None


CHAT_FIELDS = (
    *SamplingFields.__struct_fields__,
    "model", "stream", "timeout", "chat_template_kwargs", "parallel_tool_calls", "user", "prompt_cache_key",
)  # fmt: skip
"""Names of the fields that have the same meaning in chat requests."""
