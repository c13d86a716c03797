"""Checks and adapts regular expressions before they are compiled."""

from __future__ import annotations

from mizzen.common.regex_support import pattern_fault, pieces
from mizzen.engine.grammar.errors import GrammarError


def check_pattern(pattern: str, *, quoted: bool) -> None:
    """Reject a pattern that the compiler would read differently from a person; see `pattern_fault`.

    Raises:
        GrammarError: Names the construct and the reason.
    """
    fault = pattern_fault(pattern, quoted=quoted)
    if fault is not None:
        raise GrammarError(fault)


def exclude_line_ends(pattern: str) -> str:
    """Return the pattern with dots that match any character except line ends."""
    return "".join(r"[^\n\r]" if piece == "." and not inside else piece for piece, inside in pieces(pattern))
