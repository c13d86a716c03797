"""What an engine is sent for a request, once the model's text side is known."""

from __future__ import annotations

import re
from array import array
from collections.abc import Awaitable
from functools import partial

import numpy as np

from mizzen.core.request import Int32, Pooling
from mizzen.core.sampling_params import sent_values
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.tool_arguments import clear_unparsed_arguments, find_unparsed_arguments
from mizzen.gateway.text.model import NoChatTemplate, TextModel, TooManyTokens
from mizzen.gateway.text.template import TemplateError
from mizzen.wire.messages import MAX_GRAMMAR_BYTES, Sampling

_KEYWORD = re.compile(r'"([^"]+)" at (/.{0,2000})', re.DOTALL)
"""A keyword of a schema that an engine does not enforce, and the way to it; what is wrong follows."""


async def tokenize_prompt(generation: GenerationRequest, text: TextModel, most: int = 0) -> Int32:
    """Return the token ids [n] of a request's prompt.

    Raises:
        ApiError: 400 when the chat template refuses the messages, or the prompt is empty.
        TooManyTokens: there are more than `most` (not 0), which was clear before they were made.
    """
    if generation.messages is not None:
        ids = await tokenize_chat(generation, text, most)
    elif isinstance(generation.prompt, str):
        ids = await text.text_prompt(generation.prompt, generation.add_special_tokens, most)
    else:
        ids = prompt_array(generation.prompt)
    if not len(ids):
        raise invalid("the prompt is empty", generation.prompt_field)
    return ids


def prompt_array(prompt: array[int] | None) -> Int32:
    """Return token ids [n] as they are, not copied."""
    return np.frombuffer(prompt, dtype=np.int32) if prompt else np.empty(0, np.int32)


async def tokenize_chat(generation: GenerationRequest, text: TextModel, most: int = 0) -> Int32:
    """Return the token ids [n] of a conversation.

    Raises:
        ApiError: 400 when the template refuses the messages, or there is none.
        TooManyTokens: as in `prompt_ids`.
    """
    arguments, messages = dict(generation.template_arguments), generation.messages or ()
    if generation.output_form is not None:
        arguments |= generation.output_form.template_arguments(text)
        messages = generation.output_form.messages(text, messages)
    prompt = partial(
        text.chat_prompt,
        arguments=arguments,
        add_generation_prompt=generation.add_generation_prompt,
        continue_final_message=generation.continue_final_message,
        add_special_tokens=generation.add_special_tokens,
        most=most,
    )
    try:
        return await prompt(messages)
    except (TemplateError, NoChatTemplate) as error:
        place = find_unparsed_arguments(messages)
        if place is not None and await template_accepts(prompt(clear_unparsed_arguments(messages))):
            reason = "must be the text of a JSON object: the model's chat template takes nothing else"
            raise invalid(f"{place} {reason}", place, "invalid_json") from error
        raise invalid(str(error), generation.prompt_field, "chat_template") from error


async def template_accepts(prompt: Awaitable[Int32]) -> bool:
    """Tell whether a chat template takes messages."""
    try:
        await prompt
    except TooManyTokens:
        return True  # it has been rendered
    except (TemplateError, NoChatTemplate):
        return False
    return True


def refusal_error(generation: GenerationRequest, text: str) -> ApiError:
    """Return the 400 of a request that every engine would refuse; `text` begins with the wire's field."""
    name, _, rest = text.partition(" ")
    name, colon = name.rstrip(":"), ":" if name.endswith(":") else ""
    fields = {
        "prompt": generation.prompt_field,
        "grammar": generation.grammar_field,
        "logprob_token_ids": "label_token_ids",
    }
    field = fields.get(name, name)
    if name == "grammar" and (error := tool_schema_error(generation, rest)):
        return error
    return invalid(f"{field}{colon} {rest}", field, "invalid_request")


def tool_schema_error(generation: GenerationRequest, reason: str) -> ApiError | None:
    """Return the 400 of a keyword in a strict tool's schema, where that is what an engine has named."""
    found = _KEYWORD.match(reason)
    if found is None or generation.output_form is None:
        return None
    words = found[2].split(" ")
    for end in range(1, len(words) + 1):  # names of properties may hold blanks
        place = generation.output_form.find_schema_field(found[1], " ".join(words[:end]))
        if place is not None:
            wrong = " ".join(words[end:])
            text = f"{place} {wrong}; without strict: true, the rest of the schema is enforced"
            return invalid(text, place, "invalid_request")
    return None


def choose_pooling(asked: str | None, text: TextModel | None) -> str:
    """Return the pooling that is asked for, or the model's own.

    Raises:
        ApiError: 400 when none is asked for, and the model's own is not served.
    """
    own = Pooling.LAST if text is None else text.pooling
    if asked is None and own is None:
        why = "pooling: the model was made for another than last and mean; name one of them"
        raise invalid(why, "pooling", "unsupported_parameter")
    return asked or str(own)


def engine_sampling(generation: GenerationRequest, text: TextModel, prompt: Int32) -> Sampling:
    """Return what the engine needs to know of a request's sampling; `prompt` holds its token ids [n].

    Raises:
        ApiError: 400 when the model cannot give the form that is asked for, or its grammar is too long.
    """
    given = generation.sampling
    grammar = given.grammar
    if generation.output_form is not None:
        try:
            grammar = generation.output_form.grammar(text, prompt, grammar)
        except (ValueError, RecursionError) as error:
            name = generation.grammar_field
            raise invalid(f"{name}: {error}", name, "unsupported_parameter") from None
    if grammar is not None and len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        name = generation.grammar_field  # what it asks for may be longer than the field itself
        reason = f"{name} makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes: make it smaller"
        raise invalid(reason, name, "grammar_too_large")
    values = sent_values(given)
    values["grammar"] = None if grammar is None else (str(grammar.kind), grammar.text)
    return Sampling(**values)
