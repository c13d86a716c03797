# SPDX-License-Identifier: Apache-2.0
"""A small language for programs that call a model several times: generate, select, fork and join."""

from mizzen.lang.program import Expression, Runtime, SelectMethod, State, assistant, gen, select, system, user

__all__ = ["Expression", "Runtime", "SelectMethod", "State", "assistant", "gen", "select", "system", "user"]
