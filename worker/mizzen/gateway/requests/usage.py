# SPDX-License-Identifier: Apache-2.0
"""Token counts of a request, in a form that all APIs share.

`GenerationExchange` computes them; each API writes them in its own JSON shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a request, or of a single sequence so far."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Number of prompt tokens found in a prefix cache."""
    reasoning_tokens: int = 0
    """Number of output tokens that are reasoning."""
