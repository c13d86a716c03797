"""Limits of structured output: how much of the engine one request's grammar may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Limits of compiling and matching."""

    text_bytes: int = 256 * 1024
    """Maximum size of a schema, regular expression, EBNF text or structural tag."""
    nesting: int = 64
    """Maximum nesting of objects and lists in a schema or structural tag."""
    compile_seconds: float = 10.0
    """Maximum wall time of one compilation."""
    quick_seconds: float = 1.0
    """Wall time after which a compilation moves to the slow lane, so it delays no other."""
    busy_quick_seconds: float = 0.25
    """The same limit while more than `busy_queue_length` grammars wait, to find slow ones sooner."""
    busy_queue_length: int = 8
    max_slow_waiting: int = 64
    """Maximum number of waiting slow grammars; further ones are rejected."""
    compile_bytes: int = 1 << 30
    """Maximum memory of one compilation."""
    compiled_bytes: int = 128 << 20
    """Maximum memory of one compiled grammar."""
    workers: int = 2
    """Number of concurrent quick compilations."""
    max_waiting: int = 256
    """Maximum number of grammars that wait for a worker."""
    cache_bytes: int = 512 << 20
    """Maximum memory of cached compiled grammars."""
    max_rejections: int = 1024
    """Number of rejected grammars that are remembered with their reasons."""
    start_seconds: float = 120.0
    """Maximum start-up time of the sandbox process."""
    mask_seconds: float = 0.1
    """Maximum CPU time of one mask, or of matching one token; beyond it the request ends."""
