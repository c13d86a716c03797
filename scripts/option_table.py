# SPDX-License-Identifier: Apache-2.0
"""Generate the tables of docs/coming-from.md: options and metrics of vLLM and SGLang, and those of Mizzen.

    python scripts/option_table.py

A test checks that the page is up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from generated_pages import read_page, replace_part, write_pages
from reference import engine_metrics, metric_name

from mizzen.common.foreign_options import FOREIGN_OPTIONS, SAME_OPTIONS, ForeignOption

PAGE = "docs/coming-from.md"
END = "<!-- end of the generated table -->"
OPTIONS_BEGIN = "<!-- scripts/option_table.py generates the table of options below -->"
METRICS_BEGIN = "<!-- scripts/option_table.py generates the table of metrics below -->"
CODE = re.compile(
    r"--[a-z-]+( N\b| NAME\b| none\b| off\b)?|(?<!`)mizzen serve \S+|\bspec\.[a-zA-Z.]+[a-zA-Z]"
)
"""Options with their values, commands and fields, in sentences of the table."""
FOREIGN_PREFIXES = ("vllm:", "sglang:")


def codes(names: Iterable[str]) -> str:
    """Return names as code in a cell of a Markdown table, or "–" for an empty list."""
    return ", ".join(f"`{name}`" for name in names) or "–"


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop, and with options as code."""
    marked = CODE.sub(r"`\g<0>`", text)
    marked = marked.replace("docs/tenants.md", "[Tenants](tenants.md#api-keys)")
    marked = marked.replace("docs/models.md", "[Models](models.md)")
    marked = marked[:1].upper() + marked[1:]
    return marked if not marked or marked.endswith(".") else f"{marked}."


def option_row(entry: ForeignOption) -> str:
    """Return the row of an option."""
    shown = "" if entry.options and entry.advice.startswith("--") else entry.advice
    remark = " ".join(filter(None, (sentence(shown), entry.remark)))
    cells = (codes(entry.vllm), codes(entry.sglang), codes(entry.options), codes(entry.fields), remark)
    return f"| {' | '.join(cells)} |"


def option_table() -> list[str]:
    """Return the table of options, as lines."""
    head = ("vLLM", "SGLang", "`mizzen serve`", "InferenceService", "remark")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [option_row(entry) for entry in (*FOREIGN_OPTIONS, *SAME_OPTIONS)]


def metric_table() -> list[str]:
    """Return the table of metrics of the engine that have names of other engines, as lines."""
    meanings: dict[str, list[str]] = {}
    for family in engine_metrics().collect():
        meanings.setdefault(family.documentation, []).append(metric_name(family))
    lines = ["| vLLM | SGLang | Mizzen | meaning |", "|---|---|---|---|"]
    for meaning, names in meanings.items():
        vllm, sglang = ([name for name in names if name.startswith(prefix)] for prefix in FOREIGN_PREFIXES)
        own = [name for name in names if not name.startswith(FOREIGN_PREFIXES)]
        if vllm or sglang:
            lines.append(f"| {codes(vllm)} | {codes(sglang)} | {codes(own)} | {meaning} |")
    return lines


def page() -> str:
    """Return the text of docs/coming-from.md with its tables generated."""
    text = replace_part(read_page(PAGE), OPTIONS_BEGIN, option_table(), END)
    return replace_part(text, METRICS_BEGIN, metric_table(), END)


PAGES = {PAGE: page}

if __name__ == "__main__":
    write_pages(PAGES)
