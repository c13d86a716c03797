"""Split output text into content, reasoning and tool calls by running both parsers in sequence."""

from __future__ import annotations

from mizzen.gateway.reasoning.parser import ReasoningParser
from mizzen.gateway.requests.output import OutputDelta
from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.tools.parser_base import ToolParser


class ParsedOutput:
    """An `OutputParser` that first splits off reasoning and then parses tool calls in the rest."""

    __slots__ = ("_count", "_only_calls", "_reasoning", "_stop", "_tools", "shown")

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        shown: tuple[str, ...],
        stop: tuple[str, ...] = (),
        *,
        only_calls: bool = False,
    ) -> None:
        """Combine both parsers; `stop` is only for output without tools: tool parsers find stop strings.

        With `only_calls`, a grammar allows only calls: a call that is cut off before its name is not content.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._stop = StopStrings(stop) if stop else None
        self._only_calls = only_calls
        self._count = 0
        self.shown = shown
        """See `OutputParser`."""

    @property
    def counts_tokens(self) -> bool:
        """See `OutputParser`."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    @property
    def reasoning_tokens(self) -> int:
        """See `OutputParser`. The tags count too."""
        return self._count if self._reasoning is not None and self._reasoning.has_reasoning else 0

    @property
    def finish_reason(self) -> str | None:
        """See `OutputParser`. It is not `tool_calls` if the last call is incomplete."""
        tools = self._tools
        return "tool_calls" if tools is not None and tools.call_count and not tools.call_open else None

    @property
    def stopped(self) -> bool:
        """See `OutputParser`."""
        if self._tools is not None:
            return self._tools.stopped
        return self._stop is not None and self._stop.matched is not None

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        reasoning = ""
        if self._reasoning is not None:
            self._count += self._reasoning.in_reasoning
            reasoning, text = self._reasoning.feed(text)
        return self._delta(reasoning, text)

    def end(self, rest: str = "") -> OutputDelta:
        """See `OutputParser`."""
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
        last_delta = self._tools.end()
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
