"""Bodies of generating requests. What fields say of themselves is OpenAPI's and docs/openai.md's text too."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mizzen.gateway.openai.messages import Message
from mizzen.gateway.openai.structured_output import ResponseFormat, StructuredOutputs
from mizzen.gateway.tools.tool_schemas import Tool, ToolChoice


def doc(text: str) -> Meta:
    """Return a field's description."""
    return Meta(description=text)


NOT_SERVED = "Refused by name."

MOST = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=MOST)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, le=MOST)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Priority = Annotated[int, Meta(ge=-8, le=8)]
Top = Annotated[int, Meta(ge=0, le=20)]


TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPTS = [
    {"type": "string"},
    TOKEN_IDS,
    {"type": "array", "minItems": 1, "items": {"type": "string"}},
    {"type": "array", "minItems": 1, "items": TOKEN_IDS},
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream holds besides text."""

    include_usage: Annotated[
        bool | None, doc("A last event with the usage and no choices; the events before have `usage: null`.")
    ] = False
    continuous_usage_stats: Annotated[
        bool | None, doc("The usage so far in every event (with `include_usage`).")
    ] = False
    include_obfuscation: Annotated[bool | None, doc("Ignored: no padding is sent.")] = False


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both generating endpoints have."""

    model: Annotated[str, doc("A name of `/v1/models`; another is 404.")]
    stream: Annotated[bool | None, doc("Server-sent events as tokens come, ended by `[DONE]`.")] = False
    stream_options: Annotated[StreamOptions | None, doc("Only with `stream`.")] = None
    n: Annotated[Choices | None, doc("Choices of each prompt.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("1 by default; 0 takes the most probable token.")
    ] = None
    top_p: Annotated[
        Share | None, doc("Draw from the smallest set whose probability reaches it; 0 is the first alone.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MOST)] | None,
        doc("Draw from the k most probable tokens; 0 and -1 from all."),
    ] = None
    min_p: Annotated[Share | None, doc("Drop tokens less probable than `min_p` times the most probable.")] = (
        None
    )
    seed: Annotated[
        int | None,
        doc(
            "64 bits; equal requests get equal answers, but for how other batches round. Choice i has a seed "
            "of its own that follows from it."
        ),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Taken off a token's logit for each time that the answer holds it.")
    ] = None
    presence_penalty: Annotated[
        Penalty | None, doc("Taken off the logits of tokens that the answer holds.")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=10)] | None,
        doc(
            "Divides positive and multiplies negative logits of tokens that prompt or answer hold; 1 is off."
        ),
    ] = None
    logit_bias: Annotated[
        dict[str, Bias] | None, doc("Token ids (as text) to what is added to their logits; -100 bans one.")
    ] = None
    max_tokens: Annotated[
        Count | None,
        doc("Output tokens at most; by default what the context holds."),
    ] = None
    priority: Annotated[
        Priority | None,
        doc("Each step doubles the share while requests wait; up to the API key's own, the default."),
    ] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("Seconds after which the request ends with an error; also the header `x-request-timeout`."),
    ] = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)] | None,
        doc("End tokens cannot come before so many output tokens."),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        doc(
            "Up to 16 strings of up to 1,024 characters; the answer ends before the first in its content. In"
            " reasoning and in tool calls they end nothing."
        ),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, doc("Up to 1,024 tokens that end the answer.")] = None
    ignore_eos: Annotated[bool | None, doc("Go on after the model's own end tokens.")] = False
    skip_special_tokens: Annotated[bool | None, doc("Leave special tokens out of the text (default).")] = True
    spaces_between_special_tokens: Annotated[bool | None, doc("Only `true`, the default.")] = True
    include_stop_str_in_output: Annotated[bool | None, doc("Only `false`, the default.")] = False
    return_token_ids: Annotated[
        bool | None, doc("Add `token_ids` to choices, and `prompt_token_ids` to whole responses.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool | None, doc("Tokens of `logprobs` as `token_id:<id>` in place of text.")
    ] = False
    response_format: Annotated[
        ResponseFormat | None,
        doc("`text`, `json_object`, or `json_schema` with a schema that the answer conforms to."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, doc("vLLM's form of the constraints below; one of them.")
    ] = None
    guided_json: Annotated[
        str | dict[str, Any] | bool | None, doc("A JSON schema (object or text), as vLLM's.")
    ] = None
    guided_regex: Annotated[str | None, doc("A regular expression for the whole answer, as vLLM's.")] = None
    guided_choice: Annotated[list[str] | None, doc("The answer is one of these texts, as vLLM's.")] = None
    guided_grammar: Annotated[str | None, doc("An EBNF grammar (GBNF's form), as vLLM's.")] = None
    json_schema: Annotated[
        str | dict[str, Any] | bool | None, doc("A JSON schema (text or object), as SGLang's.")
    ] = None
    regex: Annotated[str | None, doc("A regular expression for the whole answer, as SGLang's.")] = None
    ebnf: Annotated[str | None, doc("An EBNF grammar (GBNF's form), as SGLang's.")] = None
    user: Annotated[str | None, doc("Requests of one user prefer one engine.")] = None
    metadata: Annotated[dict[str, str] | None, doc("Accepted, not used.")] = None
    service_tier: Annotated[Any, doc("Only `auto` and `default`.")] = None
    store: Annotated[Any, doc("Only `false`: nothing is stored.")] = None
    logits_processors: Annotated[Any, doc(NOT_SERVED)] = None
    truncate_prompt_tokens: Annotated[Any, doc(NOT_SERVED)] = None
    use_beam_search: Annotated[Any, doc("Only `false`.")] = None


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], doc("The conversation; at least one message.")]
    max_completion_tokens: Annotated[Count | None, doc("The same as `max_tokens`; one of them.")] = None
    logprobs: Annotated[bool | None, doc("Report each output token's log probability.")] = None
    top_logprobs: Annotated[
        Top | None, doc("And those of so many most probable tokens; needs `logprobs`.")
    ] = None
    tools: Annotated[list[Tool] | None, doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | None, doc("`none`, `auto`, `required`, a function that must be called, `allowed_tools`.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether one answer may hold several calls (default).")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Variables for the chat template, `enable_thinking` for example.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, doc("Whether the prompt opens the assistant's turn (default).")
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("Continue the last message instead; `add_generation_prompt` must be false.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its BOS, say, to what the template gave (not by default).")
    ] = None
    echo: Annotated[bool | None, doc("Only `false`; completions have it.")] = None
    reasoning_effort: Annotated[
        str | None, doc("A variable of the chat template; `none` also sets `enable_thinking: false`.")
    ] = None
    safety_identifier: Annotated[str | None, doc("Accepted, not used.")] = None
    prompt_cache_key: Annotated[str | None, doc("Requests with one key prefer one engine.")] = None
    functions: Annotated[Any, doc("Refused by name; use `tools`.")] = None
    function_call: Annotated[Any, doc("Only `none` and `auto`; use `tool_choice`.")] = None
    modalities: Annotated[Any, doc('Only `["text"]`.')] = None
    audio: Annotated[Any, doc(NOT_SERVED)] = None
    prediction: Annotated[Any, doc(NOT_SERVED)] = None
    verbosity: Annotated[Any, doc("Only `medium`.")] = None
    web_search_options: Annotated[Any, doc(NOT_SERVED)] = None
    moderation: Annotated[Any, doc(NOT_SERVED)] = None
    prompt_cache_options: Annotated[Any, doc(NOT_SERVED)] = None
    prompt_cache_retention: Annotated[Any, doc("Only `in_memory`.")] = None


class CompletionRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[Any],
        Meta(
            description="Text, token ids, or a list of either. Choices of a prompt follow one another.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ]
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)] | None,
        doc("Output tokens at most, 16 by default; 0 only reads the prompt, for `echo` with `logprobs`."),
    ] = None
    best_of: Annotated[
        Choices | None,
        doc("Sequences of each prompt; the `n` with the highest mean log probability come back. No stream."),
    ] = None
    logprobs: Annotated[
        Top | bool | None,
        doc("Report log probabilities of tokens, and of so many most probable ones; `false` is none."),
    ] = None
    echo: Annotated[
        bool | None, doc("Begin with the prompt; with `logprobs`, the prompt's tokens have theirs too.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its BOS, say, to the prompt (default).")
    ] = None
    suffix: Annotated[Any, doc("Refused by name: the models served here do not fill in.")] = None
