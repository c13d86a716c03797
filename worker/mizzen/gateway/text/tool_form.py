# SPDX-License-Identifier: Apache-2.0
"""Tools that a request offers, in the form in which a chat template shows them.

Most templates read the variable `tools`. SmolLM3's reads `xml_tools`; those of GLM-4 and Phi-4-mini read
`tools` of the system message, as a list or as text. `detect_tool_form` renders a short conversation in each
form, and returns the first form in which the template shows the tool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from mizzen.gateway.text.call_history import PROBE_TOOL, TemplateMessage

Tools = Sequence[Mapping[str, Any]]
RenderTools = Callable[[list[TemplateMessage], dict[str, Any]], str | None]
"""Function that renders a conversation with variables; it returns None if the template rejects them."""

_PROBE = ({"role": "system", "content": "instructions"}, {"role": "user", "content": "question"})


class ToolForm(Enum):
    """Place in which a chat template expects the tools."""

    VARIABLE = 0
    XML_VARIABLE = 1
    """The variable `xml_tools`."""
    SYSTEM_LIST = 2
    """The key `tools` of the system message, as a list."""
    SYSTEM_TEXT = 3
    """The key `tools` of the system message, as JSON text of a list of functions."""


def detect_tool_form(render: RenderTools) -> ToolForm:
    """Return the form in which a template shows tools; `VARIABLE` if it shows them in no form."""
    name = PROBE_TOOL["function"]["name"]
    for form in ToolForm:
        text = render(*arrange_tools(_PROBE, [PROBE_TOOL], form))
        if text is not None and name in text:
            return form
    return ToolForm.VARIABLE


def arrange_tools(
    messages: Sequence[TemplateMessage], tools: Tools, form: ToolForm
) -> tuple[list[TemplateMessage], dict[str, Any]]:
    """Return a conversation and the variables of the template, with the tools in a certain form."""
    variables: dict[str, Any] = {"tools": tools}
    if form is ToolForm.XML_VARIABLE:
        variables["xml_tools"] = tools
    if form not in (ToolForm.SYSTEM_LIST, ToolForm.SYSTEM_TEXT):
        return list(messages), variables
    functions = [tool.get("function", tool) for tool in tools]
    shown = tools if form is ToolForm.SYSTEM_LIST else json.dumps(functions, ensure_ascii=False)
    has_system = bool(messages) and messages[0].get("role") == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    return [{**first, "tools": shown}, *(messages[1:] if has_system else messages)], variables
