"""Checks regular expressions before compilation, and adapts them to xgrammar."""

from __future__ import annotations

from mizzen.common.regex_support import pattern_fault, split_pattern
from mizzen.engine.grammar.errors import GrammarError


def check_pattern(pattern: str, *, quoted: bool) -> None:
    """Reject a pattern that xgrammar would misread or does not support; see `pattern_fault`.

    Args:
        pattern: The regular expression.
        quoted: Whether it applies to the content of a JSON string.

    Raises:
        GrammarError: The pattern is rejected; the message names the construct and the reason.
    """
    fault = pattern_fault(pattern, quoted=quoted)
    if fault is not None:
        raise GrammarError(fault)


def exclude_line_ends(pattern: str) -> str:
    """Return a pattern with each dot replaced by a character class that excludes line ends (CR and LF)."""
    return "".join(
        r"[^\n\r]" if piece == "." and not inside else piece for piece, inside in split_pattern(pattern)
    )
