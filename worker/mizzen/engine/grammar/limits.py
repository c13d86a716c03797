"""Bounds of structured output: what one request's grammar may cost the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Bounds of compiling and matching."""

    text_bytes: int = 256 * 1024
    """Of a schema, regular expression, EBNF text or structural tag."""
    nesting: int = 64
    """Levels of objects and lists in a schema or structural tag."""
    compile_seconds: float = 10.0
    """Of one compilation, by the clock."""
    quick_seconds: float = 1.0
    """What takes longer is compiled one at a time, so that it holds up no other."""
    hurried_seconds: float = 0.25
    """The same while more than `patience` grammars wait: those that are slow are to be found out sooner."""
    patience: int = 8
    slow_waiting: int = 64
    """Slow grammars that may wait; others are turned away, so that there is room for quick ones."""
    compile_bytes: int = 1 << 30
    """Memory that a compilation may take."""
    compiled_bytes: int = 128 << 20
    """Memory that one compiled grammar may keep."""
    workers: int = 2
    """Quick compilations at a time."""
    waiting: int = 256
    """Grammars that may wait for a worker."""
    cache_bytes: int = 512 << 20
    """Of compiled grammars that are kept for the next request."""
    refusals: int = 1024
    """Refused grammars that are remembered with their reasons."""
    start_seconds: float = 120.0
    """For the process that tries grammars to begin its work."""
    mask_seconds: float = 0.1
    """Processor time of one mask, or of one token's match; beyond it the request ends."""
