"""Imports xgrammar without PyTorch and Transformers, for the sandbox, which only compiles.

The package imports both for its types and for its logits operations. Without them a process starts in a
fraction of the time and memory, and forks as fast.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

SKIPPED_PACKAGES = ("torch", "transformers")


class StubClass:
    """Stands for a class of a skipped package."""

    def __init__(self, *values: object, **named: object) -> None:
        pass


class StubModule(ModuleType):
    """A module whose every attribute is a stub class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (StubClass,), {})


def import_xgrammar_without_torch() -> None:
    """Import xgrammar without the packages it does not need here; normally if a version needs more."""
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
