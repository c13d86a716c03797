# SPDX-License-Identifier: Apache-2.0
"""Chat templates show every call of earlier turns, whatever arguments a client sends back."""

from __future__ import annotations

from typing import Any

import pytest

from mizzen.gateway.text import call_history
from mizzen.gateway.text.call_history import CallForm, detect_call_form
from mizzen.gateway.text.template import ChatTemplate, TemplateError

AS_JSON = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\
[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
BY_KEY = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\
[{{ c.function.name }}{% for key, value in c.function.arguments | items %} {{ key }}={{ value }}{% endfor %}]\
{% endfor %}{% endfor %}"
JOINED = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\
{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}{% endfor %}"
PRINTED = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\
[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def conversation(arguments: Any, content: str | None = None) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("source", "arguments", "shown"),
    [
        (AS_JSON, '{"a": [1, true, null]}', '?[f {"a": [1, true, null]}]'),
        (AS_JSON, {"a": None}, '?[f {"a": null}]'),
        (AS_JSON, '{"a": "cut of', '?[f "{\\"a\\": \\"cut of"]'),
        (AS_JSON, None, "?[f {}]"),
        (BY_KEY, '{"a": 1, "b": "c"}', "?[f a=1 b=c]"),
        (BY_KEY, '{"a": "cut of', '?[f arguments={"a": "cut of]'),
        (BY_KEY, "[1]", "?[f arguments=[1]]"),
        (JOINED, {"a": [True, None, "ö"]}, '?[f {"a": [true, null, "ö"]}]'),
        (JOINED, '{"a":1}', '?[f {"a":1}]'),
        (JOINED, "", "?[f {}]"),
        (PRINTED, {"x": True, "n": None}, '?[f {"x": true, "n": null}]'),
        (PLAIN, {"x": True}, 'user:?;assistant:[{"name": "f", "arguments": {"x": true}}];'),
    ],
)
def test_arguments_are_shown_as_json(source: str, arguments: Any, shown: str) -> None:
    assert ChatTemplate(source).render(conversation(arguments)) == shown


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[CallForm] = []

    def detect(render: Any) -> CallForm:
        probes.append(detect_call_form(render))
        return probes[-1]

    monkeypatch.setattr("mizzen.gateway.text.template.detect_call_form", detect)
    template = ChatTemplate(JOINED)
    for _ in range(3):
        template.render(conversation("{}"))
    template.render([{"role": "user", "content": "no call"}])
    assert probes == [CallForm(text_arguments=True)]
    template.render(conversation("{}"), tools=[call_history.PROBE_TOOL])
    assert len(probes) == 2


def test_the_form_of_a_slow_template_is_not_remembered() -> None:
    slow = "{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(JOINED + "{% if messages | length > 1 %}" + slow + "{% endif %}", seconds=0.1)
    with pytest.raises(TemplateError, match="too long"):
        template.render(conversation("{}"))
    assert not template._call_forms
