"""Structured output: compilation of grammars outside the engine's loop, matchers, and token bitmasks."""
