"""Structured output: grammars compiled outside the engine's loop, matchers, and masks of allowed tokens."""
