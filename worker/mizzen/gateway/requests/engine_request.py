# SPDX-License-Identifier: Apache-2.0
"""Build an engine's request from a `GenerationRequest`, with the tokenizer and template of its model."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from functools import partial

import numpy as np

from mizzen.core.request import Int32, Pooling
from mizzen.core.sampling_params import sent_values
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.images.prompt import add_images, check_readable
from mizzen.gateway.requests.generation_request import EncodedPrompt, GenerationRequest
from mizzen.gateway.requests.text_batch import truncated_length
from mizzen.gateway.text.model import NoChatTemplate, TextModel
from mizzen.gateway.text.template import TemplateError
from mizzen.wire.messages import MAX_GRAMMAR_BYTES, Sampling

_KEYWORD = re.compile(r'"([^"]+)" at (/.{0,2000})', re.DOTALL)
"""Pattern of an engine's message about a schema keyword that it does not enforce.

Group 1 is the keyword. Group 2 is the path of the schema that contains it, followed by the problem.
"""


async def tokenize_prompt(
    generation: GenerationRequest, text: TextModel, max_tokens: int = 0
) -> EncodedPrompt:
    """Return the tokens of a request's prompt, and its images.

    Raises:
        ApiError: 400 if the chat template rejects the messages, the prompt is empty, or the model does not
            accept an image.
        TooManyTokens: the text is so long that it must have more than `max_tokens` tokens (0: no limit);
            raised before tokenization.
    """
    if generation.prompt_source is not None:
        prompt = await generation.prompt_source.encode(text, max_tokens)
    elif generation.images is not None:
        rules = check_readable(generation.images, text.image_rules, generation.model)
        ids = await tokenize_chat(generation, text, max_tokens)
        ids, images = await add_images(ids, generation.images, rules)
        prompt = EncodedPrompt(ids, images=images)
    elif generation.messages is not None:
        cut = truncated_length(generation.truncate, max_tokens)
        ids = await tokenize_chat(generation, text, 0 if cut else max_tokens)
        prompt = EncodedPrompt(ids[: cut or None])
    elif isinstance(generation.prompt, str):
        ids = await text.text_prompt(generation.prompt, generation.add_special_tokens, max_tokens)
        prompt = EncodedPrompt(ids)
    else:
        prompt = EncodedPrompt(prompt_array(generation.prompt))
    if not len(prompt.ids):
        raise invalid("the prompt is empty", generation.prompt_field)
    return prompt


def prompt_array(prompt: array[int] | None) -> Int32:
    """Return token ids as int32 [n], without a copy; empty for None."""
    return np.frombuffer(prompt, dtype=np.int32) if prompt else np.empty(0, np.int32)


async def tokenize_chat(generation: GenerationRequest, text: TextModel, max_tokens: int = 0) -> Int32:
    """Return the token ids of a conversation, int32 [n].

    Raises:
        ApiError: 400 if the chat template rejects the messages, or the model has no chat template.
        TooManyTokens: the text is so long that it must have more than `max_tokens` tokens (0: no limit);
            raised before tokenization.
    """
    arguments, messages = dict(generation.template_arguments), generation.messages or ()
    form, section = generation.output_form, ""
    finish: Callable[[str], str] | None = None
    if form is not None:
        arguments |= form.template_arguments(text)
        messages = form.messages(text, messages)
        if section := form.prompt_section(text):
            finish = partial(form.finish_prompt, section=section)
    try:
        return await text.chat_prompt(
            messages,
            arguments,
            add_generation_prompt=generation.add_generation_prompt,
            continue_final_message=generation.continue_final_message,
            add_special_tokens=generation.add_special_tokens,
            max_tokens=max_tokens,
            finish=finish,
            added_characters=len(section),
        )
    except (TemplateError, NoChatTemplate) as error:
        raise invalid(str(error), generation.prompt_field, "chat_template") from error


def refusal_error(generation: GenerationRequest, text: str) -> ApiError:
    """Return a 400 error for a request that every engine would refuse.

    `text` is the engine's reason. It begins with the name of a field of the wire protocol. The error names
    the field of the request body instead.
    """
    name, _, rest = text.partition(" ")
    name, colon = name.rstrip(":"), ":" if name.endswith(":") else ""
    fields = {
        "prompt": generation.prompt_field,
        "grammar": generation.grammar_field,
        "images": generation.prompt_field,
        "logprob_token_ids": "label_token_ids",
    }
    field = fields.get(name, name)
    if name == "grammar" and (error := tool_schema_error(generation, rest)):
        return error
    return invalid(f"{field}{colon} {rest}", field, "invalid_request")


def tool_schema_error(generation: GenerationRequest, reason: str) -> ApiError | None:
    """Return a 400 error for a strict tool's schema with a keyword that the engine does not enforce.

    The error names the keyword. Return None if the engine's `reason` does not name a keyword, or if no
    strict tool's schema contains that keyword.
    """
    match = _KEYWORD.match(reason)
    if match is None or generation.output_form is None:
        return None
    path_words = match[2].split(" ")
    for end in range(1, len(path_words) + 1):  # property names may contain spaces
        field_path = generation.output_form.find_schema_field(match[1], " ".join(path_words[:end]))
        if field_path is not None:
            problem = " ".join(path_words[end:])
            text = f"{field_path} {problem}; without strict: true, the rest of the schema is enforced"
            return invalid(text, field_path, "invalid_request")
    return None


def choose_pooling(requested: str | None, text: TextModel | None, own: str = "") -> str:
    """Return the requested pooling, or the model's own.

    Args:
        requested: Pooling that the request sets; None selects the model's own.
        text: The model's text model, whose files name the pooling if the engine does not.
        own: Pooling that the engine names; empty if it names none.

    Raises:
        ApiError: 400 if the request does not set a pooling, and the model's own is not supported.
    """
    if requested is not None:
        return requested
    pooling = own or str((Pooling.LAST if text is None else text.pooling) or "")
    if pooling not in list(Pooling):
        named = f" ({pooling})" if pooling else ""
        reason = f"pooling: the model's own{named} is not supported; set one of {', '.join(Pooling)}"
        raise invalid(reason, "pooling", "unsupported_parameter")
    return pooling


def engine_sampling(generation: GenerationRequest, text: TextModel, prompt: Int32) -> Sampling:
    """Return the sampling parameters for the engine; `prompt` is the prompt's token ids, int32 [n].

    Raises:
        ApiError: 400 if the requested output cannot be constrained for this model, or the grammar is too
            long.
    """
    sampling_params = generation.sampling
    grammar = sampling_params.grammar
    if generation.output_form is not None:
        try:
            grammar = generation.output_form.grammar(text, prompt, grammar)
        except (ValueError, RecursionError) as error:
            name = generation.grammar_field
            raise invalid(f"{name}: {error}", name, "unsupported_parameter") from None
    if grammar is not None and len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        name = generation.grammar_field  # the grammar may be longer than the field itself
        reason = f"{name} results in a grammar of more than {MAX_GRAMMAR_BYTES} bytes: make it smaller"
        raise invalid(reason, name, "grammar_too_large")
    values = sent_values(sampling_params)
    if generation.prompt_source is not None and (labels := generation.prompt_source.label_ids(text)):
        values["logprob_token_ids"] = labels
    values["grammar"] = None if grammar is None else (str(grammar.kind), grammar.text)
    return Sampling(**values)
