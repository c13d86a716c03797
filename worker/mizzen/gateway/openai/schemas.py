"""Request bodies of chat and text completions.

The descriptions of the fields also appear in OpenAPI and docs/openai.md.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mizzen.gateway.openai.format_schemas import ResponseFormat, StructuredOutputs
from mizzen.gateway.openai.messages import Message
from mizzen.gateway.tools.tool_schemas import Tool, ToolChoice


def doc(text: str) -> Meta:
    """Return metadata with a field's description."""
    return Meta(description=text)


NOT_SUPPORTED = "Not supported."

MAX_INT32 = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
ChoiceCount = Annotated[int, Meta(ge=1, le=128)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Priority = Annotated[int, Meta(ge=-8, le=8)]
TopCount = Annotated[int, Meta(ge=0, le=20)]


TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPTS = [
    {"type": "string"},
    TOKEN_IDS,
    {"type": "array", "minItems": 1, "items": {"type": "string"}},
    {"type": "array", "minItems": 1, "items": TOKEN_IDS},
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Additional content of a stream."""

    include_usage: Annotated[
        bool | None,
        doc("Send a last event with the usage and no choices; all other events have `usage: null`."),
    ] = False
    continuous_usage_stats: Annotated[
        bool | None, doc("Send the usage so far in every event (with `include_usage`).")
    ] = False
    include_obfuscation: Annotated[bool | None, doc("Ignored: no padding is sent.")] = False


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of all generating requests; see `mizzen.core.sampling_params.PARAMETERS`."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        doc("1 by default; 0 always selects the most probable token."),
    ] = None
    top_p: Annotated[
        Probability | None,
        doc(
            "Sample from the smallest set of tokens whose total probability reaches this "
            "value; 0 keeps only the most probable one."
        ),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
        doc("Sample from the k most probable tokens; 0 and -1 mean all tokens."),
    ] = None
    min_p: Annotated[
        Probability | None, doc("Exclude tokens less probable than `min_p` times the most probable one.")
    ] = None
    seed: Annotated[
        int | None,
        doc(
            "64-bit seed; equal requests get equal answers, apart from rounding in "
            "different batches. Each choice i uses its own seed derived from it."
        ),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Subtracted from a token's logit for each occurrence in the answer.")
    ] = None
    presence_penalty: Annotated[
        Penalty | None, doc("Subtracted from the logits of tokens that occur in the answer.")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=10)] | None,
        doc(
            "Divides positive and multiplies negative logits of tokens that occur in the "
            "prompt or answer; 1 is off."
        ),
    ] = None
    logit_bias: Annotated[
        dict[str, Bias] | None,
        doc("Map of token ids (as strings) to values added to their logits; -100 bans a token."),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        doc(
            "Up to 16 strings of up to 1,024 characters; the answer ends before the first "
            "occurrence in its content. They have no effect in reasoning and tool calls."
        ),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, doc("Up to 1,024 tokens that end the answer.")] = None
    ignore_eos: Annotated[bool | None, doc("Continue after the model's own end tokens.")] = False


class CommonFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of both chat and completion requests."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    stream: Annotated[
        bool | None, doc("Stream server-sent events as tokens are generated; `[DONE]` ends the stream.")
    ] = False
    stream_options: Annotated[StreamOptions | None, doc("Only with `stream`.")] = None
    n: Annotated[ChoiceCount | None, doc("Number of choices per prompt.")] = None
    max_tokens: Annotated[
        Count | None,
        doc("Maximum number of output tokens; by default as many as fit into the context."),
    ] = None
    priority: Annotated[
        Priority | None,
        doc(
            "Each step doubles the request's share while requests wait. The API key's "
            "priority is the default and the maximum."
        ),
    ] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc(
            "Seconds after which the request ends with an error; can also be set by the "
            "header `x-request-timeout`."
        ),
    ] = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT32)] | None,
        doc("Minimum number of output tokens before an end token."),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, doc("Leave special tokens out of the text (default: true).")
    ] = True
    spaces_between_special_tokens: Annotated[bool | None, doc("Only `true`, the default.")] = True
    include_stop_str_in_output: Annotated[bool | None, doc("Only `false`, the default.")] = False
    return_token_ids: Annotated[
        bool | None, doc("Add `token_ids` to choices, and `prompt_token_ids` to non-streamed responses.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool | None, doc("Show tokens in `logprobs` as `token_id:<id>` instead of text.")
    ] = False
    response_format: Annotated[
        ResponseFormat | None,
        doc("Format of the answer: `text`, `json_object`, or `json_schema` with a schema."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, doc("vLLM's form of the constraints below; exactly one of them.")
    ] = None
    guided_json: Annotated[
        str | dict[str, Any] | bool | None, doc("JSON schema (object or text), as in vLLM.")
    ] = None
    guided_regex: Annotated[str | None, doc("Regular expression for the whole answer, as in vLLM.")] = None
    guided_choice: Annotated[list[str] | None, doc("The answer is one of these texts, as in vLLM.")] = None
    guided_grammar: Annotated[str | None, doc("EBNF grammar (GBNF syntax), as in vLLM.")] = None
    json_schema: Annotated[
        str | dict[str, Any] | bool | None, doc("JSON schema (text or object), as in SGLang.")
    ] = None
    regex: Annotated[str | None, doc("Regular expression for the whole answer, as in SGLang.")] = None
    ebnf: Annotated[str | None, doc("EBNF grammar (GBNF syntax), as in SGLang.")] = None
    user: Annotated[str | None, doc("Requests of the same user prefer the same engine.")] = None
    metadata: Annotated[dict[str, str] | None, doc("Accepted, not used.")] = None
    service_tier: Annotated[Any, doc("Only `auto` and `default`.")] = None
    store: Annotated[Any, doc("Only `false`: nothing is stored.")] = None
    logits_processors: Annotated[Any, doc(NOT_SUPPORTED)] = None
    truncate_prompt_tokens: Annotated[Any, doc(NOT_SUPPORTED)] = None
    use_beam_search: Annotated[Any, doc("Only `false`.")] = None


class ChatRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], doc("The chat; at least one message.")]
    max_completion_tokens: Annotated[Count | None, doc("Same as `max_tokens`; set only one of them.")] = None
    logprobs: Annotated[bool | None, doc("Return the log probability of each output token.")] = None
    top_logprobs: Annotated[
        TopCount | None,
        doc("Number of most probable tokens to return with their log probabilities; needs `logprobs`."),
    ] = None
    tools: Annotated[list[Tool] | None, doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | None,
        doc("`none`, `auto`, `required`, `allowed_tools`, or a function that must be called."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether an answer may contain several calls (default: true).")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Variables for the chat template, for example `enable_thinking`.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, doc("Whether the prompt opens the assistant's turn (default: true).")
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("Continue the last message instead; `add_generation_prompt` must be false.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc(
            "Add the tokenizer's special tokens, such as BOS, to the output of the template (default: false)."
        ),
    ] = None
    echo: Annotated[bool | None, doc("Only `false`; use completions for it.")] = None
    reasoning_effort: Annotated[
        str | None, doc("Passed to the chat template; `none` also sets `enable_thinking: false`.")
    ] = None
    safety_identifier: Annotated[str | None, doc("Accepted, not used.")] = None
    prompt_cache_key: Annotated[str | None, doc("Requests with the same key prefer the same engine.")] = None
    functions: Annotated[Any, doc("Not supported; use `tools`.")] = None
    function_call: Annotated[Any, doc("Only `none` and `auto`; use `tool_choice`.")] = None
    modalities: Annotated[Any, doc('Only `["text"]`.')] = None
    audio: Annotated[Any, doc(NOT_SUPPORTED)] = None
    prediction: Annotated[Any, doc(NOT_SUPPORTED)] = None
    verbosity: Annotated[Any, doc("Only `medium`.")] = None
    web_search_options: Annotated[Any, doc(NOT_SUPPORTED)] = None
    moderation: Annotated[Any, doc(NOT_SUPPORTED)] = None
    prompt_cache_options: Annotated[Any, doc(NOT_SUPPORTED)] = None
    prompt_cache_retention: Annotated[Any, doc("Only `in_memory`.")] = None


class CompletionRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[Any],
        Meta(
            description="Text, token ids, or a list of either. The choices of a prompt are "
            "consecutive in the response.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ]
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT32)] | None,
        doc(
            "Maximum number of output tokens, 16 by default; 0 only evaluates the prompt, for "
            "`echo` with `logprobs`."
        ),
    ] = None
    best_of: Annotated[
        ChoiceCount | None,
        doc(
            "Sequences sampled per prompt; the `n` with the highest mean log probability "
            "are returned. Cannot be streamed."
        ),
    ] = None
    logprobs: Annotated[
        TopCount | bool | None,
        doc(
            "Return the log probabilities of the tokens and of this number of most probable "
            "tokens; `false` turns them off."
        ),
    ] = None
    echo: Annotated[
        bool | None,
        doc("Return the prompt before the answer; with `logprobs`, its log probabilities are included."),
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Add the tokenizer's special tokens, such as BOS, to the prompt (default: true).")
    ] = None
    suffix: Annotated[Any, doc("Not supported: the served models cannot fill in the middle.")] = None
