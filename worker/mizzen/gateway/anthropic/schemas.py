# SPDX-License-Identifier: Apache-2.0
"""Request bodies of POST /v1/messages and /v1/messages/count_tokens.

The descriptions of the fields also appear in OpenAPI and docs/openai.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mizzen.gateway.openai.schemas import ADVICE, MAX_INT32, NOT_SUPPORTED, Count, Probability, doc

NOT_NEEDED = "Accepted, not needed: the prefix cache is automatic."
BLOCK_TYPES = (
    "TextBlock",
    "ImageBlock",
    "ThinkingBlock",
    "RedactedThinkingBlock",
    "ToolUseBlock",
    "ToolResultBlock",
)
BlockJson = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in BLOCK_TYPES]}),
]
"""A content block as JSON."""
ResultBlockJson = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in BLOCK_TYPES[:2]]}),
]
"""A content block of a tool's result as JSON."""
TextBlockJson = Annotated[msgspec.Raw, Meta(extra_json_schema={"$ref": "#/components/schemas/TextBlock"})]
"""A `TextBlock` as JSON."""
CustomToolJson = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"anyOf": [{"$ref": "#/components/schemas/CustomTool"}, {"type": "object"}]}),
]
"""A `CustomTool`, or a tool that Anthropic runs, as JSON."""


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text in a message, in the system prompt or in a tool's result."""

    type: Annotated[Literal["text"], doc("Always `text`.")]
    text: Annotated[str, doc("The text.")]
    cache_control: Annotated[Any, doc(NOT_NEEDED)] = None
    citations: Annotated[Any, doc("Ignored: it describes an earlier answer.")] = None


class ImageData(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Source of an image."""

    type: Annotated[
        Literal["base64", "url"], doc("`base64` or `url`; files of Anthropic's API are rejected.")
    ]
    media_type: Annotated[str | None, doc("Not used: the content of the file tells its format.")] = None
    data: Annotated[str | None, doc("With type `base64`: a JPEG, PNG, WebP or GIF file in Base64.")] = None
    url: Annotated[
        str | None, doc("With type `url`: an `https:` URL if the gateway allows it, or a `data:` URL.")
    ] = None


class ImageBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Image in a message of the user or in a tool's result, for models that read images."""

    type: Annotated[Literal["image"], doc("Always `image`.")]
    source: Annotated[ImageData, doc("The image.")]
    cache_control: Annotated[Any, doc(NOT_NEEDED)] = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Reasoning of the assistant."""

    type: Annotated[Literal["thinking"], doc("Always `thinking`.")]
    thinking: Annotated[str, doc("The reasoning, passed to the chat template.")]
    signature: Annotated[str | None, doc("Not checked.")] = None


class RedactedThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Encrypted reasoning of another server's assistant, which the model cannot read; it is left out."""

    type: Annotated[Literal["redacted_thinking"], doc("Always `redacted_thinking`.")]
    data: Annotated[str, doc("Not used.")] = ""


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Tool call by the assistant."""

    type: Annotated[Literal["tool_use"], doc("Always `tool_use`.")]
    id: Annotated[str, doc("Id of the call.")]
    name: Annotated[str, doc("Name of the tool.")]
    input: Annotated[dict[str, Any], doc("Arguments of the call.")]
    cache_control: Annotated[Any, doc(NOT_NEEDED)] = None
    caller: Annotated[Any, doc("Ignored: it describes an earlier answer.")] = None
    toolset_name: Annotated[Any, doc("Ignored: it describes an earlier answer.")] = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Result of a tool call, in a user message."""

    type: Annotated[Literal["tool_result"], doc("Always `tool_result`.")]
    tool_use_id: Annotated[str, doc("Id of the call, which must precede the result.")]
    content: Annotated[
        str | list[ResultBlockJson] | None,
        Meta(
            description="The result as text, or as blocks of text and images. Texts without images are "
            "joined by line breaks."
        ),
    ] = None
    is_error: Annotated[
        bool | None,
        doc("`true`: the model sees the result as an error, as text that begins with `Error: `."),
    ] = None
    cache_control: Annotated[Any, doc(NOT_NEEDED)] = None


class TurnMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Message of a conversation."""

    role: Annotated[Literal["user", "assistant", "system"], doc("Author of the message.")]
    content: Annotated[
        str | list[BlockJson],
        Meta(
            description="Text or content blocks. Blocks of documents and search results, and those of tools "
            "that Anthropic runs, are rejected."
        ),
    ]


class CustomTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Tool that the model may call and the client runs."""

    type: Annotated[Literal["custom"] | None, doc("`custom`, the default.")] = None
    name: Annotated[str, doc("Name of the tool.")]
    description: Annotated[str | None, doc("Description of the tool, passed to the chat template.")] = None
    input_schema: Annotated[dict[str, Any], doc("JSON schema of the arguments.")]
    strict: Annotated[
        bool | None,
        doc(
            "`true`: the arguments of every call conform to `input_schema`, and a schema that cannot be "
            "enforced completely is rejected."
        ),
    ] = None
    cache_control: Annotated[Any, doc(NOT_NEEDED)] = None
    allowed_callers: Annotated[Any, doc(ADVICE)] = None
    defer_loading: Annotated[Any, doc("Ignored: the model sees all tools.")] = None
    eager_input_streaming: Annotated[Any, doc("Ignored: arguments are always streamed as they arrive.")] = (
        None
    )
    input_examples: Annotated[Any, doc("Ignored: chat templates have no place for examples.")] = None


class ToolChoiceOption(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Choice of the tools that the model may or must call."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        doc(
            "`auto`: the model may call tools. `any`: it must call one. `tool`: it must call `name`. "
            "`none`: it sees no tools."
        ),
    ]
    name: Annotated[str | None, doc("With type `tool`: the tool that must be called.")] = None
    disable_parallel_tool_use: Annotated[bool | None, doc("`true`: an answer has at most one call.")] = None


class ThinkingOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Settings for the model's reasoning."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"],
        doc(
            "`enabled` and `disabled` set the variables `enable_thinking` and `thinking` of the chat "
            "template, which many templates of reasoning models read. Other types leave the choice to the "
            "model."
        ),
    ]
    budget_tokens: Annotated[int | None, doc("Ignored: reasoning is limited by `max_tokens` only.")] = None
    display: Annotated[str | None, doc("Ignored: reasoning is returned as it is.")] = None


class OutputJsonFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Format of the answer: JSON that conforms to a schema."""

    type: Annotated[Literal["json_schema"], doc("Always `json_schema`.")]
    schema: Annotated[dict[str, Any], doc("The JSON schema, enforced as far as possible.")]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Settings for the answer."""

    effort: Annotated[str | None, doc("Passed to the chat template as `reasoning_effort`.")] = None
    format: Annotated[OutputJsonFormat | None, doc("Schema that the answer must conform to.")] = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Information about the request."""

    user_id: Annotated[str | None, doc("Requests of the same user prefer the same engine.")] = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens; fields that do not change the prompt are ignored."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    messages: Annotated[
        list[TurnMessage],
        doc(
            "The conversation; at least one message. Consecutive messages of one role become one. The answer "
            "continues the text of a last message of the assistant."
        ),
    ]
    system: Annotated[
        str | list[TextBlockJson] | None,
        Meta(description="System prompt as text or text blocks, which are joined by line breaks."),
    ] = None
    tools: Annotated[
        list[CustomToolJson] | None,
        Meta(
            description="Tools that the model may call. Tools that Anthropic runs are left out; other typed "
            "tools (`bash`, `text_editor`, `computer`, `memory`) are rejected."
        ),
    ] = None
    tool_choice: Annotated[ToolChoiceOption | None, doc("Which tools the model may or must call.")] = None
    thinking: Annotated[ThinkingOptions | None, doc("Settings for reasoning.")] = None
    output_config: Annotated[OutputConfig | None, doc("Settings for the answer.")] = None
    cache_control: Annotated[Any, doc(NOT_NEEDED)] = None
    context_management: Annotated[
        Any, doc("Ignored: a conversation that is too long is rejected with 400.")
    ] = None
    mcp_servers: Annotated[Any, doc("Only `[]`; connect your client to MCP servers instead.")] = None
    speed: Annotated[str | None, doc(ADVICE)] = None
    user_profile_id: Annotated[str | None, doc(ADVICE)] = None
    workspace_id: Annotated[str | None, doc(ADVICE)] = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[
        Count,
        doc(
            "Maximum number of output tokens, including reasoning. If the context ends earlier, so does the "
            "answer, with the stop reason `model_context_window_exceeded`."
        ),
    ]
    stream: Annotated[bool | None, doc("Stream server-sent events as tokens are generated.")] = False
    stop_sequences: Annotated[list[str] | None, doc("As `stop` in chat completions.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("As in chat completions (default: 1).")
    ] = None
    top_p: Annotated[Probability | None, doc("As in chat completions.")] = None
    top_k: Annotated[Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None, doc("As in chat completions.")] = None
    metadata: Annotated[RequestMetadata | None, doc("Information about the request.")] = None
    container: Annotated[Any, doc(NOT_SUPPORTED)] = None
    diagnostics: Annotated[Any, doc(ADVICE)] = None
    inference_geo: Annotated[str | None, doc(ADVICE)] = None
    service_tier: Annotated[str | None, doc(ADVICE)] = None
