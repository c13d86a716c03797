"""Structured output: grammars compiled off the engine's loop, matchers, and masks of allowed tokens."""
