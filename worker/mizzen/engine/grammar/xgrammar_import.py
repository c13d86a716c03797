# SPDX-License-Identifier: Apache-2.0
"""Imports xgrammar without PyTorch and Transformers, for the sandbox process.

xgrammar imports them for types and for operations on logits, which the sandbox does not need. Without them
the process needs a fraction of the time to start and to fork, and a fraction of the memory.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

SKIPPED_PACKAGES = ("torch", "transformers")
"""Packages that are replaced by stubs during the import."""


class StubClass:
    """Stub for any class of a skipped package."""

    def __init__(self, *values: object, **named: object) -> None:
        pass


class StubModule(ModuleType):
    """Stub for a skipped package: every attribute is a stub class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (StubClass,), {})


def import_xgrammar_without_torch() -> None:
    """Import xgrammar without SKIPPED_PACKAGES.

    If that fails, because another version of xgrammar needs them, a later import loads everything.
    """
    if any(name in sys.modules for name in SKIPPED_PACKAGES):
        return
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the binding checks whether torch exists
        importlib.import_module("tvm_ffi")
        sys.modules.update({name: StubModule(name) for name in SKIPPED_PACKAGES})
        importlib.import_module("xgrammar")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("xgrammar", "tvm_ffi")]:
            del sys.modules[name]
    finally:
        for name in SKIPPED_PACKAGES:
            sys.modules.pop(name, None)
