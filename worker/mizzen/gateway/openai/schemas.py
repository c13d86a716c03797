# SPDX-License-Identifier: Apache-2.0
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
    """Return msgspec metadata that holds a field's description."""
    return Meta(description=text)


NOT_SUPPORTED = "Not supported."
NOT_USED = "Accepted, not used."
ADVICE = "Ignored: it only advises."

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
        doc("Send a final event that has the usage and no choices; all other events have `usage: null`."),
    ] = False
    continuous_usage_stats: Annotated[
        bool | None, doc("Send the usage so far in every event; needs `include_usage`.")
    ] = False
    include_obfuscation: Annotated[bool | None, doc("Ignored: no padding is sent.")] = False


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling fields that chat completions, completions and the Responses API share.

    `mizzen.core.sampling_params.PARAMETERS` describes the parameters.
    """

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        doc("Sampling temperature (default: 1); 0 always selects the most probable token."),
    ] = None
    top_p: Annotated[
        Probability | None,
        doc(
            "Sample from the smallest set of tokens whose total probability reaches this "
            "value; 0 keeps only the most probable token."
        ),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None,
        doc("Sample from the k most probable tokens; 0 and -1 mean all tokens."),
    ] = None
    min_p: Annotated[
        Probability | None,
        doc("Exclude tokens whose probability is below `min_p` times that of the most probable token."),
    ] = None
    seed: Annotated[
        int | None,
        doc(
            "64-bit seed. A repeated request gets the same answer, apart from rounding differences "
            "between batches. Each further choice has its own seed, derived from this one."
        ),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None,
        doc("Value subtracted from a token's logit for each occurrence of the token in the answer."),
    ] = None
    presence_penalty: Annotated[
        Penalty | None, doc("Value subtracted from the logit of each token that occurs in the answer.")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=10)] | None,
        doc(
            "For tokens that occur in the prompt or answer: positive logits are divided by this "
            "value, and negative logits are multiplied by it; 1 turns the penalty off."
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
            "occurrence in its content. Stop strings have no effect in reasoning and tool calls."
        ),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, doc("Ids of up to 1,024 tokens that end the answer.")] = (
        None
    )
    ignore_eos: Annotated[bool | None, doc("Do not end the answer at the model's own end tokens.")] = False


class CommonFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of both chat and completion requests."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    stream: Annotated[
        bool | None, doc("Stream server-sent events as tokens are generated; `[DONE]` ends the stream.")
    ] = False
    stream_options: Annotated[StreamOptions | None, doc("Only with `stream`.")] = None
    n: Annotated[ChoiceCount | None, doc("Number of choices per prompt (default: 1).")] = None
    max_tokens: Annotated[
        Count | None,
        doc("Maximum number of output tokens; by default as many as fit into the context."),
    ] = None
    priority: Annotated[
        Priority | None,
        doc(
            "Each step up doubles the request's share of the engines while requests wait. The API "
            "key's priority is the default and the maximum. Ignored if the gateway has no API keys."
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
        doc("Minimum number of output tokens; end tokens are excluded until it is reached."),
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
        StructuredOutputs | None, doc("The constraints below in vLLM's newer form; set exactly one field.")
    ] = None
    guided_json: Annotated[
        str | dict[str, Any] | bool | None, doc("JSON schema (object or text), as in vLLM.")
    ] = None
    guided_regex: Annotated[str | None, doc("Regular expression for the whole answer, as in vLLM.")] = None
    guided_choice: Annotated[list[str] | None, doc("List of allowed answers, as in vLLM.")] = None
    guided_grammar: Annotated[str | None, doc("EBNF grammar (GBNF syntax), as in vLLM.")] = None
    json_schema: Annotated[
        str | dict[str, Any] | bool | None, doc("JSON schema (text or object), as in SGLang.")
    ] = None
    regex: Annotated[str | None, doc("Regular expression for the whole answer, as in SGLang.")] = None
    ebnf: Annotated[str | None, doc("EBNF grammar (GBNF syntax), as in SGLang.")] = None
    user: Annotated[str | None, doc("Requests of the same user prefer the same engine.")] = None
    metadata: Annotated[dict[str, str] | None, doc(NOT_USED)] = None
    service_tier: Annotated[str | None, doc(ADVICE)] = None
    store: Annotated[bool | None, doc("Ignored: nothing is stored.")] = None
    logits_processors: Annotated[Any, doc(NOT_SUPPORTED)] = None
    truncate_prompt_tokens: Annotated[Any, doc(NOT_SUPPORTED)] = None
    use_beam_search: Annotated[Any, doc("Only `false`.")] = None


class ProcessorOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Options for the images of a request, as in vLLM."""

    min_pixels: Annotated[
        Count | None,
        doc("Smallest number of pixels after resizing, within the bounds of the model (Qwen-VL only)."),
    ] = None
    max_pixels: Annotated[
        Count | None,
        doc("Largest number of pixels after resizing, within the bounds of the model (Qwen-VL only)."),
    ] = None


class ChatRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], doc("The conversation; at least one message.")]
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
    mm_processor_kwargs: Annotated[ProcessorOptions | None, doc("Options for the images, as in vLLM.")] = None
    add_generation_prompt: Annotated[
        bool | None, doc("Whether the prompt opens the assistant's turn (default: true).")
    ] = None
    continue_final_message: Annotated[
        bool | None,
        doc(
            "Continue the last message instead of opening a new turn; cannot be combined with "
            "`add_generation_prompt: true`."
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc(
            "Add the tokenizer's special tokens, such as BOS, to the output of the template (default: false)."
        ),
    ] = None
    echo: Annotated[bool | None, doc("Only `false`; completions can echo their prompt.")] = None
    reasoning_effort: Annotated[
        str | None, doc("Passed to the chat template; `none` also sets `enable_thinking: false`.")
    ] = None
    safety_identifier: Annotated[str | None, doc(NOT_USED)] = None
    prompt_cache_key: Annotated[str | None, doc("Requests with the same key prefer the same engine.")] = None
    functions: Annotated[Any, doc("Not supported; use `tools`.")] = None
    function_call: Annotated[Any, doc("Only `none` and `auto`; use `tool_choice`.")] = None
    modalities: Annotated[Any, doc('Only `["text"]`.')] = None
    audio: Annotated[Any, doc(NOT_SUPPORTED)] = None
    prediction: Annotated[dict[str, Any] | None, doc(ADVICE)] = None
    verbosity: Annotated[str | None, doc(ADVICE)] = None
    web_search_options: Annotated[Any, doc(NOT_SUPPORTED)] = None
    moderation: Annotated[Any, doc(NOT_SUPPORTED)] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, doc(ADVICE)] = None
    prompt_cache_retention: Annotated[str | None, doc(ADVICE)] = None


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
            "Maximum number of output tokens (default: 16). 0 generates nothing; with `echo` and "
            "`logprobs`, it returns the prompt's log probabilities."
        ),
    ] = None
    best_of: Annotated[
        ChoiceCount | None,
        doc(
            "Number of sequences sampled per prompt; the `n` sequences with the highest mean log "
            "probability are returned. Cannot be streamed."
        ),
    ] = None
    logprobs: Annotated[
        TopCount | bool | None,
        doc(
            "Number of most probable tokens whose log probabilities are returned at each position, "
            "besides that of the chosen token; `false` turns log probabilities off."
        ),
    ] = None
    echo: Annotated[
        bool | None,
        doc("Return the prompt before the answer; with `logprobs`, its log probabilities are included."),
    ] = None
    prompt_logprobs_from: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT32)] | None,
        doc(
            "Extension: index of the first prompt token with log probabilities, in each prompt; those of "
            "earlier tokens are null, and these tokens may come from the prefix cache. Needs `echo` and "
            "`logprobs`."
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("Add the tokenizer's special tokens, such as BOS, to the prompt (default: true).")
    ] = None
    suffix: Annotated[Any, doc("Not supported: the served models cannot fill in the middle.")] = None
