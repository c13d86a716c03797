# SPDX-License-Identifier: Apache-2.0
"""Tool calls of earlier turns, in the form in which a chat template shows them.

Clients send a call's arguments as JSON text, or as an object, beside `content: null` or text. Templates
differ: most read arguments as an object, some join them to the prompt as text; some show a call only if
`content` is null; some show a single call per message, or none. `detect_call_form` renders a short
conversation in each form and returns the first form in which the template shows the call. `arrange_calls`
brings a conversation into that form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any

import msgspec

TemplateMessage = dict[str, Any]
Render = Callable[[list[TemplateMessage]], str | None]
"""Function that renders a conversation; it returns None if the template rejects the conversation."""

_NAME, _OTHER_NAME = "lookup_probe", "second_probe"
_ARGUMENTS, _OTHER_ARGUMENTS = {"first_key": "first value"}, {"other_key": "other value"}
_CONTENT, _RESULT = "text beside the call", "result of the call"
_QUESTION = {"role": "user", "content": "question"}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "other_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "A value."}}},
    },
}
"""Tool that the probe conversations offer if the request offers tools."""


class Empty(Enum):
    """Value of `content` in a message that has calls and no text."""

    TEXT = ""
    NULL = None
    ABSENT = "absent"


class Shown(IntEnum):
    """Quality with which a template shows a call, from worst to best."""

    NOT = 0
    """The template rejects the message, or does not show the call."""
    AS_PYTHON = 1
    """The arguments are shown in Python's syntax."""
    QUOTED = 2
    """The arguments are shown as a JSON string that contains JSON."""
    WELL = 3
    """The arguments are shown as JSON, or in the model's own syntax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Form of the messages in which a chat template shows calls and their results."""

    text_arguments: bool = False
    """True if arguments are JSON text, False if they are an object."""
    text_shown: bool = True
    """True if the template shows arguments that are text; only then are texts passed that are not JSON."""
    empty: Empty = Empty.TEXT
    """Content of messages that have calls and no text."""
    content_apart: bool = False
    """True if content and calls need a message each, because the template shows only the content."""
    calls_apart: bool = False
    """True if each call needs a separate message, followed by its result."""
    calls_as_metadata: bool = False
    """True if each call is a message with the tool's name as `metadata` and the arguments as content.

    Results then have the role `observation`. GLM-4's templates expect this form.
    """
    calls_as_content: bool = False
    """True if the template does not show calls: they become part of the content, as JSON."""
    results_as_user: bool = False
    """True if the template does not show the results of calls: they become the user's messages."""


def detect_call_form(render: Render) -> CallForm:
    """Return the form in which a template shows calls; `render` renders a conversation with it."""
    candidates = [CallForm(text_arguments=text, empty=empty) for empty in Empty for text in (False, True)]
    scores = [(_single_call(render, form), form) for form in candidates]
    best, form = max(scores, key=lambda scored: scored[0])  # the first of equals
    if best is Shown.NOT:
        return _form_without_calls(render)
    text_score = next(score for score, other in scores if other == replace(form, text_arguments=True))
    form = replace(form, text_shown=text_score is not Shown.NOT)
    if not _shows_call_with_content(render, form):
        apart = replace(form, content_apart=True)
        form = apart if _shows_call_with_content(render, apart) else form
    if not _shows_two_calls(render, form):
        apart = replace(form, calls_apart=True)
        form = apart if _shows_two_calls(render, apart) else form
    return form


def _form_without_calls(render: Render) -> CallForm:
    metadata = CallForm(text_arguments=True, calls_as_metadata=True)
    text = render(arrange_calls([_QUESTION, _message("", _call()), _result()], metadata))
    if text is not None and _RESULT in text and score_call(text, _NAME, _ARGUMENTS) is Shown.WELL:
        return metadata
    form = CallForm(text_arguments=True, calls_as_content=True)
    text = render(arrange_calls([_QUESTION, _message("", _call()), _result()], form))
    return form if text is not None and _RESULT in text else replace(form, results_as_user=True)


def _single_call(render: Render, form: CallForm) -> Shown:
    messages = [_QUESTION, _message("", _call())]
    shown = score_call(render(arrange_calls([*messages, _result()], form)), _NAME, _ARGUMENTS)
    if shown is Shown.NOT:  # a template may know calls, but not the role of their results
        shown = score_call(render(arrange_calls(messages, form)), _NAME, _ARGUMENTS)
    return shown


def _shows_call_with_content(render: Render, form: CallForm) -> bool:
    text = render(arrange_calls([_QUESTION, _message(_CONTENT, _call()), _result()], form))
    return score_call(text, _NAME, _ARGUMENTS) is not Shown.NOT


def _shows_two_calls(render: Render, form: CallForm) -> bool:
    other = _call(_OTHER_NAME, _OTHER_ARGUMENTS, "probe0002")
    results = [_result(), _result(_OTHER_NAME, "probe0002")]
    text = render(arrange_calls([_QUESTION, _message("", _call(), other), *results], form))
    shown = score_call(text, _NAME, _ARGUMENTS), score_call(text, _OTHER_NAME, _OTHER_ARGUMENTS)
    return Shown.NOT not in shown


def _message(content: str, *calls: TemplateMessage) -> TemplateMessage:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def _call(
    name: str = _NAME, arguments: Mapping[str, str] = _ARGUMENTS, call_id: str = "probe0001"
) -> TemplateMessage:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _result(name: str = _NAME, call_id: str = "probe0001") -> TemplateMessage:
    return {"role": "tool", "content": _RESULT, "name": name, "tool_call_id": call_id}


def score_call(text: str | None, name: str, arguments: Mapping[str, str]) -> Shown:
    """Return how a rendered text shows the call of `name` with one argument; None: it was rejected."""
    ((key, value),) = arguments.items()
    if text is None or not all(part in text for part in (name, key, value)):
        return Shown.NOT
    if f"'{key}': " in text:
        return Shown.AS_PYTHON
    if f'\\"{key}\\"' in text:
        return Shown.QUOTED
    return Shown.WELL


def arrange_calls(messages: Sequence[TemplateMessage], form: CallForm) -> list[TemplateMessage]:
    """Return a conversation whose calls and results of calls have a certain form.

    Messages without calls stay unchanged, except for results if the form makes them the user's.
    """
    arranged: list[TemplateMessage] = []
    index = 0
    while index < len(messages):
        end = index + 1
        if messages[index].get("tool_calls"):
            while end < len(messages) and messages[end].get("role") == "tool":
                end += 1
        arranged += _arrange_turn(messages[index:end], form)
        index = end
    if form.calls_as_metadata:
        return [
            {**message, "role": "observation"} if message.get("role") == "tool" else message
            for message in arranged
        ]
    return _results_as_user(arranged) if form.results_as_user else arranged


def _results_as_user(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Make results of calls the user's; join those in sequence, and the user's text after them.

    Templates that do not know results often demand that user and assistant alternate.
    """
    arranged: list[TemplateMessage] = []
    after_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        content = message.get("content", "")
        joins = after_result and (is_result or message.get("role") == "user") and isinstance(content, str)
        if joins and isinstance(arranged[-1]["content"], str):
            arranged[-1] = {**arranged[-1], "content": f"{arranged[-1]['content']}\n{content}"}
        else:
            arranged.append({"role": "user", "content": content} if is_result else message)
            after_result = is_result
    return arranged


def _arrange_turn(turn: Sequence[TemplateMessage], form: CallForm) -> Iterator[TemplateMessage]:
    """Yield the messages for an assistant message and the results of its calls."""
    message, results = turn[0], list(turn[1:])
    calls = message.get("tool_calls")
    if not calls:
        yield from turn
        return
    rest = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    content = message.get("content")
    if form.calls_as_content:
        yield {**rest, "content": "\n".join(filter(None, [content, calls_as_text(calls)]))}
        yield from results
        return
    if form.calls_as_metadata:
        if content:
            yield {**rest, "content": content}
        for function in (call.get("function") or {} for call in calls):
            arguments = arguments_text(function.get("arguments"))
            yield {"role": message["role"], "metadata": function.get("name"), "content": arguments}
        yield from results
        return
    calls = [_arrange_call(call, form) for call in calls]
    if content and form.content_apart:
        yield {**rest, "content": content}
        rest, content = {"role": message["role"]}, None
    groups = [[call] for call in calls] if form.calls_apart else [calls]
    for number, group in enumerate(groups):
        yield {**rest, **_content(content, form), "tool_calls": group}
        rest, content = {"role": message["role"]}, None
        if number < len(groups) - 1:
            yield from _take_results(results, group[0].get("id"))
    yield from results


def _content(content: Any, form: CallForm) -> TemplateMessage:
    if content:
        return {"content": content}
    return {} if form.empty is Empty.ABSENT else {"content": form.empty.value}


def _take_results(results: list[TemplateMessage], call_id: str | None) -> list[TemplateMessage]:
    """Remove and return the results of a call, or the next result if none names the call."""
    if not results:
        return []
    named = [result for result in results if call_id is not None and result.get("tool_call_id") == call_id]
    taken = named or ([results[0]] if results[0].get("tool_call_id") is None else [])
    results[:] = [result for result in results if not any(result is other for other in taken)]
    return taken


def _arrange_call(call: TemplateMessage, form: CallForm) -> TemplateMessage:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if form.text_arguments:
        arguments = arguments_text(arguments)
    else:
        parsed = arguments_object(arguments)
        wrapped = arguments if form.text_shown else {"arguments": arguments}
        arguments = wrapped if parsed is None else parsed
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_object(arguments: Any) -> dict[str, Any] | None:
    """Return a call's arguments as an object; None if they are not an object.

    Models may write invalid JSON or be cut off, and clients send such calls back with the conversation.
    """
    if not isinstance(arguments, str):
        return dict(arguments) if isinstance(arguments, Mapping) else {} if arguments is None else None
    try:
        parsed = msgspec.json.decode(arguments or "null")
    except (msgspec.DecodeError, RecursionError):
        return None
    return {} if parsed is None else parsed if isinstance(parsed, dict) else None


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments as JSON text; text stays as the model wrote it."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def calls_as_text(calls: Sequence[TemplateMessage]) -> str:
    """Return calls as a JSON list, as models whose syntax is unknown write forced calls."""
    functions: list[Mapping[str, Any]] = [call.get("function") or {} for call in calls]
    named = [
        (json.dumps(function.get("name")), arguments_text(function.get("arguments")))
        for function in functions
    ]
    written = [f'{{"name": {name}, "arguments": {arguments}}}' for name, arguments in named]
    return f"[{', '.join(written)}]"
