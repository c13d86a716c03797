# SPDX-License-Identifier: Apache-2.0
"""Errors of structured output."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar cannot be used; the message names the cause and a remedy."""


class CompilerUnavailable(RuntimeError):
    """No grammar can be compiled at the moment."""


class CompileTimeout(RuntimeError):
    """A compilation took longer than its time limit, and may be tried again with a higher limit."""
