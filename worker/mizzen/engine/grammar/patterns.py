"""What of regular expressions is matched as written."""

from __future__ import annotations

from mizzen.common.regex_support import pattern_fault, pieces
from mizzen.engine.grammar.errors import GrammarError


def check_pattern(pattern: str, *, quoted: bool) -> None:
    """Refuse what the compiler would read otherwise than a person; see `pattern_fault`.

    Raises:
        GrammarError: says what and why.
    """
    fault = pattern_fault(pattern, quoted=quoted)
    if fault is not None:
        raise GrammarError(fault)


def one_line(pattern: str) -> str:
    """Return the pattern with a dot that is any character but the end of a line."""
    return "".join(r"[^\n\r]" if piece == "." and not inside else piece for piece, inside in pieces(pattern))
