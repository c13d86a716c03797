# SPDX-License-Identifier: Apache-2.0
"""A small language for programs that call a model several times: generate, select, fork and join."""

from mizzen.lang.expressions import Expression, SelectMethod, assistant, gen, select, system, user
from mizzen.lang.program import Runtime, State

__all__ = ["Expression", "Runtime", "SelectMethod", "State", "assistant", "gen", "select", "system", "user"]
