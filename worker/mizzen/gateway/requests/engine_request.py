"""What an engine is sent for a request, once the model's text side is known."""

from __future__ import annotations

import re
from array import array
from collections.abc import Awaitable
from functools import partial

import numpy as np

from mizzen.core.request import Int32, Pooling
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.messages import unread_arguments, with_empty_arguments
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.text.model import NoChatTemplate, TextModel, TooManyTokens
from mizzen.gateway.text.template import TemplateError
from mizzen.wire.messages import MAX_GRAMMAR_BYTES, Sampling

_KEYWORD = re.compile(r'"([^"]+)" at (/.{0,2000})', re.DOTALL)
"""A keyword of a schema that an engine does not enforce, and the way to it; what is wrong follows."""


async def prompt_ids(wish: Wish, text: TextModel, most: int = 0) -> Int32:
    """Return the token ids [n] of a request's prompt.

    Raises:
        ApiError: 400 when the chat template refuses the messages, or the prompt is empty.
        TooManyTokens: there are more than `most` (not 0), which was clear before they were made.
    """
    if wish.messages is not None:
        ids = await chat_ids(wish, text, most)
    elif isinstance(wish.prompt, str):
        ids = await text.text_prompt(wish.prompt, wish.add_special_tokens, most)
    else:
        ids = given_ids(wish.prompt)
    if not len(ids):
        raise invalid("the prompt is empty", wish.prompt_field)
    return ids


def given_ids(prompt: array[int] | None) -> Int32:
    """Return token ids [n] as they are, not copied."""
    return np.frombuffer(prompt, dtype=np.int32) if prompt else np.empty(0, np.int32)


async def chat_ids(wish: Wish, text: TextModel, most: int = 0) -> Int32:
    """Return the token ids [n] of a conversation.

    Raises:
        ApiError: 400 when the template refuses the messages, or there is none.
        TooManyTokens: as in `prompt_ids`.
    """
    arguments, messages = dict(wish.template_arguments), wish.messages or ()
    if wish.form is not None:
        arguments |= wish.form.template_arguments(text)
        messages = wish.form.messages(text, messages)
    prompt = partial(
        text.chat_prompt,
        arguments=arguments,
        add_generation_prompt=wish.add_generation_prompt,
        continue_final_message=wish.continue_final_message,
        add_special_tokens=wish.add_special_tokens,
        most=most,
    )
    try:
        return await prompt(messages)
    except (TemplateError, NoChatTemplate) as error:
        place = unread_arguments(messages)
        if place is not None and await renders(prompt(with_empty_arguments(messages))):
            reason = "must be the text of a JSON object: the model's chat template takes nothing else"
            raise invalid(f"{place} {reason}", place, "invalid_json") from error
        raise invalid(str(error), wish.prompt_field, "chat_template") from error


async def renders(prompt: Awaitable[Int32]) -> bool:
    """Tell whether a chat template takes messages."""
    try:
        await prompt
    except TooManyTokens:
        return True  # it has been rendered
    except (TemplateError, NoChatTemplate):
        return False
    return True


def refused(wish: Wish, text: str) -> ApiError:
    """Return the 400 of a request that every engine would refuse; `text` begins with the wire's field."""
    name, _, rest = text.partition(" ")
    name, colon = name.rstrip(":"), ":" if name.endswith(":") else ""
    fields = {
        "prompt": wish.prompt_field,
        "grammar": wish.grammar_field,
        "logprob_token_ids": "label_token_ids",
    }
    field = fields.get(name, name)
    if name == "grammar" and (error := tool_fault(wish, rest)):
        return error
    return invalid(f"{field}{colon} {rest}", field, "invalid_request")


def tool_fault(wish: Wish, reason: str) -> ApiError | None:
    """Return the 400 of a keyword in a strict tool's schema, where that is what an engine has named."""
    found = _KEYWORD.match(reason)
    if found is None or wish.form is None:
        return None
    words = found[2].split(" ")
    for end in range(1, len(words) + 1):  # names of properties may hold blanks
        place = wish.form.fault(found[1], " ".join(words[:end]))
        if place is not None:
            wrong = " ".join(words[end:])
            text = f"{place} {wrong}; without strict: true, the rest of the schema is enforced"
            return invalid(text, place, "invalid_request")
    return None


def wire_pooling(asked: str | None, text: TextModel | None) -> str:
    """Return the pooling that is asked for, or the model's own.

    Raises:
        ApiError: 400 when none is asked for, and the model's own is not served.
    """
    own = Pooling.LAST if text is None else text.pooling
    if asked is None and own is None:
        why = "pooling: the model was made for another than last and mean; name one of them"
        raise invalid(why, "pooling", "unsupported_parameter")
    return asked or str(own)


def wire_sampling(wish: Wish, text: TextModel, prompt: Int32) -> Sampling:
    """Return what the engine needs to know of a request's sampling; `prompt` holds its token ids [n].

    Raises:
        ApiError: 400 when the model cannot give the form that is asked for, or its grammar is too long.
    """
    given = wish.sampling
    grammar = given.grammar
    if wish.form is not None:
        try:
            grammar = wish.form.grammar(text, prompt, grammar)
        except (ValueError, RecursionError) as error:
            name = wish.grammar_field
            raise invalid(f"{name}: {error}", name, "unsupported_parameter") from None
    if grammar is not None and len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        name = wish.grammar_field  # what it asks for may be longer than the field itself
        reason = f"{name} makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes: make it smaller"
        raise invalid(reason, name, "grammar_too_large")
    return Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=given.seed,
        max_tokens=given.max_tokens,
        ignore_eos=given.ignore_eos,
        stop_token_ids=given.stop_token_ids,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        min_tokens=given.min_tokens,
        logit_bias=given.logit_bias,
        logprobs=given.logprobs,
        prompt_logprobs=given.prompt_logprobs,
        logprob_token_ids=given.logprob_token_ids,
        grammar=None if grammar is None else (str(grammar.kind), grammar.text),
    )
