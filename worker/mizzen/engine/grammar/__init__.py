# SPDX-License-Identifier: Apache-2.0
"""Structured output: compilation of grammars outside the engine's loop, matchers, and token bitmasks."""
