# SPDX-License-Identifier: Apache-2.0
"""Generate the reference part of docs/python.md from the docstrings of the Python API.

    python scripts/python_reference.py

A test checks that the page is up to date.
"""

from __future__ import annotations

from typing import Any

import griffe
from generated_pages import ROOT, read_page, replace_part, write_pages

from mizzen.core.sampling_params import PARAMETERS

PAGE = "docs/python.md"
MARK = "<!-- scripts/python_reference.py generates the rest of this page from the docstrings. -->"
METHODS = ("__init__", "generate", "chat", "embed", "classify", "close")
DATA_CLASSES = (
    ("mizzen.core.sampling_params", "SamplingParams"),
    ("mizzen.core.sampling_params", "Grammar"),
    ("mizzen.core.sampling_params", "GrammarKind"),
    ("mizzen.offline.completion", "Completion"),
    ("mizzen.wire.client.stream", "TokenLogprobs"),
)
"""Modules and names of the classes whose attributes are listed."""


def cell(text: str) -> str:
    """Return a text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return a text as code in a cell of a Markdown table; an empty text stays empty."""
    return f"`{cell(text)}`".replace("'", '"') if text else ""


def type_code(annotation: object) -> str:
    """Return a type as code in a cell of a Markdown table, with the alias `Prompts` written out."""
    shown = str(annotation)
    return code("Sequence[str] | Sequence[Sequence[int]]" if shown == "Prompts" else shown)


def method_lines(method: griffe.Function) -> list[str]:
    """Return the section of a method: its description, arguments, result and errors."""
    name = "LLM" if method.name == "__init__" else f"LLM.{method.name}"
    positional = [
        entry.name
        for entry in method.parameters
        if entry.name != "self" and entry.kind is griffe.ParameterKind.positional_or_keyword
    ]
    keywords = any(entry.kind is griffe.ParameterKind.keyword_only for entry in method.parameters)
    call = ", ".join([*positional, *(["*", "…"] if keywords else [])])
    lines = [f"### {name}({call})", ""]
    defaults = {entry.name: entry.default for entry in method.parameters}
    sections = method.docstring.parse("google") if method.docstring else []
    for section in sections:
        if section.kind is griffe.DocstringSectionKind.text:
            lines += [*section.value.splitlines(), ""]
        elif section.kind is griffe.DocstringSectionKind.parameters:
            lines += ["| argument | type | default | meaning |", "|---|---|---|---|"]
            for entry in section.value:
                default = defaults[entry.name]
                cells = (code(entry.name), type_code(entry.annotation), code(str(default or "")))
                lines.append(f"| {' | '.join(cells)} | {cell(entry.description)} |")
            lines.append("")
        elif section.kind is griffe.DocstringSectionKind.returns:
            lines += [f"Returns {type_code(method.returns)}: {cell(section.value[0].description)}", ""]
        elif section.kind is griffe.DocstringSectionKind.raises:
            lines += ["| raises | if |", "|---|---|"]
            lines += [
                f"| {code(str(entry.annotation))} | {cell(entry.description)} |" for entry in section.value
            ]
            lines.append("")
    return lines


def default_values(name: str) -> dict[str, Any]:
    """Return the default of each sampling parameter, as Python code; empty for other classes."""
    return {entry.name: repr(entry.default) for entry in PARAMETERS} if name == "SamplingParams" else {}


def class_lines(module: str, name: str) -> list[str]:
    """Return the section of a class whose attributes are its interface."""
    described = griffe.load(module, search_paths=[ROOT / "worker"])[name]
    text = described.docstring.value if described.docstring else ""
    attributes = [entry for entry in described.attributes.values() if not entry.name.startswith("_")]
    defaults = default_values(name)
    enumeration = any(str(base) == "enum.StrEnum" for base in described.bases)
    head = ("member", "value", "meaning") if enumeration else ("attribute", "type", "default", "meaning")
    lines = [f"### {name}", "", *text.splitlines(), "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for entry in attributes:
        meaning = cell(entry.docstring.value) if entry.docstring else ""
        value = defaults.get(entry.name, str(entry.value or ""))
        cells = (code(value),) if enumeration else (type_code(entry.annotation), code(value))
        lines.append(f"| {code(entry.name)} | {' | '.join(cells)} | {meaning} |")
    return [*lines, ""]


def python_page() -> str:
    """Return the text of docs/python.md: its handwritten part, then the generated reference."""
    llm = griffe.load("mizzen.offline.llm", search_paths=[ROOT / "worker"])["LLM"]
    lines = ["## LLM", ""]
    for name in METHODS:
        lines += method_lines(llm[name])
    lines += ["## Other classes", ""]
    for module, name in DATA_CLASSES:
        lines += class_lines(module, name)
    return replace_part(read_page(PAGE), MARK, lines)


PAGES = {PAGE: python_page}

if __name__ == "__main__":
    write_pages(PAGES)
