# SPDX-License-Identifier: Apache-2.0
"""Reading of Python source as syntax trees."""

from __future__ import annotations

import ast
import gc


def parse_source(source: str) -> ast.Module:
    """Return the syntax tree of a module, read with the cyclic garbage collector paused.

    Before Python 3.11.8, a finalizer that itself parses source while `ast.parse` builds its tree (as the
    formatting of a traceback does) makes `ast.parse` raise SystemError (python/cpython#106905).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if enabled:
            gc.enable()
