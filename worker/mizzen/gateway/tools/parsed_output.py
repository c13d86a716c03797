# SPDX-License-Identifier: Apache-2.0
"""Split output into reasoning, content and tool calls: run a reasoning parser, then a tool parser."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mizzen.gateway.reasoning.parser import ReasoningParser
from mizzen.gateway.requests.output import OutputDelta
from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.tools.parser_base import ToolParser


class ParsedOutput:
    """An `OutputParser` that first splits off reasoning and then parses tool calls in the rest."""

    __slots__ = ("_count", "_only_calls", "_reasoning", "_stop", "_tools", "shown")

    marks: Mapping[int, str] = MappingProxyType({})

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        shown: tuple[str, ...],
        stop: tuple[str, ...] = (),
        *,
        only_calls: bool = False,
    ) -> None:
        """Combine a reasoning parser and a tool parser.

        Args:
            reasoning: Parser of reasoning, if the output may contain any.
            tools: Parser of tool calls, if the request offers tools.
            shown: Special tokens that the parsers need to see in the text.
            stop: Stop strings; empty if `tools` is given, because a tool parser looks for them itself.
            only_calls: True if a grammar allows only calls. Text that is not a complete call is then part of
                a truncated call, and is dropped instead of becoming content.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._stop = StopStrings(stop) if stop else None
        self._only_calls = only_calls
        self._count = 0
        self.shown = shown
        """Special tokens that detokenization must leave in the text; they never become content."""

    @property
    def counts_tokens(self) -> bool:
        """True while the output may be reasoning; `feed` must then be called once per token."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, including the reasoning tags."""
        return self._count if self._reasoning is not None and self._reasoning.has_reasoning else 0

    @property
    def finish_reason(self) -> str | None:
        """`tool_calls` if the output has calls and the last call is complete; else None."""
        tools = self._tools
        return "tool_calls" if tools is not None and tools.call_count and not tools.call_open else None

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the answer; text after it does not belong to it."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """Stop string that has ended the answer; None if none has."""
        if self._tools is not None:
            return self._tools.stop_string
        return None if self._stop is None else self._stop.matched

    def feed(self, text: str) -> OutputDelta:
        """Parse more text; return the new reasoning, content and tool calls."""
        reasoning = ""
        if self._reasoning is not None:
            self._count += self._reasoning.in_reasoning
            reasoning, text = self._reasoning.feed(text)
        return self._delta(reasoning, text)

    def end(self, rest: str = "", *, cut_off: bool = False) -> OutputDelta:
        """Parse the last text, which does not count as a token; return all output that was held back."""
        reasoning, text = "", rest
        if self._reasoning is not None:
            (new_reasoning, new_content), (held_reasoning, held_content) = (
                self._reasoning.feed(rest),
                self._reasoning.end(),
            )
            reasoning, text = new_reasoning + held_reasoning, new_content + held_content
        delta = self._delta(reasoning, text)
        if self._tools is None:
            held_reasoning = "" if self._stop is None else self._stop.flush()
            return OutputDelta(delta.content + held_reasoning, delta.reasoning)
        last_delta = self._tools.end(cut_off=cut_off)
        content = "" if self._only_calls else delta.content + last_delta.content
        return OutputDelta(content, delta.reasoning, delta.tool_calls + last_delta.tool_calls)

    def _delta(self, reasoning: str, text: str) -> OutputDelta:
        if self._tools is None:
            return OutputDelta(text if self._stop is None else self._stop.add(text), reasoning)
        if not text:
            return OutputDelta(reasoning=reasoning)
        parsed = self._tools.feed(text)
        if reasoning or self._only_calls:
            return OutputDelta("" if self._only_calls else parsed.content, reasoning, parsed.tool_calls)
        return parsed
