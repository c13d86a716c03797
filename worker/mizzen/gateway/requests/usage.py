"""Token counts of a request, whatever API reports them.

Generating exchanges make them; each API writes them in its own JSON shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of one request, or of one of its sequences so far."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in a prefix cache."""
    reasoning_tokens: int = 0
    """Output tokens that are reasoning."""
