"""Configuration of a simulated engine, read by its command line and by its rank process."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.common.options import option
from mizzen.server.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig(EngineConfig):
    """Options of a simulated engine, in addition to those of a real one."""

    step_milliseconds: float = option(5.0, "How long a step takes", low=0, high=60_000)
    prefill_token_microseconds: float = option(0.0, "How much a prompt token adds to its step", low=0)
    start_seconds: float = option(0.0, "How long the start takes", low=0)
    reply: str = option(
        "", "Text that answers every request; by default tokens follow from the prompt, without an end"
    )
    die_after_tokens: int = option(0, "Kill the rank after this many tokens; 0 is never", low=0)
    fail_after_tokens: int = option(0, "Fail a step after this many tokens; 0 is never", low=0)
    hang_after_tokens: int = option(0, "Hang in a step after this many tokens; 0 is never", low=0)
    fail_start: str = option("", "Fail the start with this reason")
