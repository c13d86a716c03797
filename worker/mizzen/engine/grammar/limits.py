# SPDX-License-Identifier: Apache-2.0
"""Limits on the time and memory that the grammar of a request may use."""

from __future__ import annotations

from dataclasses import dataclass

SPARE_SECONDS = 5.0
"""Wall time that a compilation may take in addition to its limit, for the fork and the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Limits on compilation and matching of grammars."""

    text_bytes: int = 256 * 1024
    """Maximum size in bytes of a schema, regular expression, EBNF text or structural tag."""
    nesting: int = 64
    """Maximum depth of objects and lists in a schema or structural tag."""
    compile_seconds: float = 10.0
    """Maximum CPU time of a compilation, in seconds, summed over its threads."""
    wall_factor: float = 6.0
    """Wall time after which a compilation is given up for the moment, as a multiple of its CPU time limit.

    It is exceeded only on a busy machine, so the grammar may be tried again."""
    quick_seconds: float = 1.0
    """CPU time in seconds after which a compilation moves to the slow lane, so as not to delay others."""
    busy_quick_seconds: float = 0.25
    """Value that replaces `quick_seconds` while more than `busy_queue_length` grammars wait."""
    busy_queue_length: int = 8
    """Number of waiting grammars above which the quick lane counts as busy."""
    max_slow_waiting: int = 64
    """Maximum number of grammars in the slow lane; further ones are rejected."""
    compile_bytes: int = 1 << 30
    """Maximum memory of a compilation in bytes, not counting the vocabulary."""
    compiled_bytes: int = 128 << 20
    """Maximum memory of a compiled grammar, in bytes."""
    workers: int = 2
    """Number of concurrent compilations in the quick lane."""
    max_waiting: int = 256
    """Maximum number of grammars that wait or are being compiled, in both lanes together."""
    cache_bytes: int = 512 << 20
    """Maximum memory of all cached compiled grammars together, in bytes."""
    max_rejections: int = 1024
    """Maximum number of rejected grammars that are remembered with their errors."""
    start_seconds: float = 120.0
    """Maximum start-up time of the sandbox process, in seconds."""
    mask_seconds: float = 0.1
    """Maximum CPU seconds to fill a row's bitmask or to match a token; a request that takes longer fails."""
