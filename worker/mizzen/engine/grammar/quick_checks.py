"""xgrammar without PyTorch and Transformers, for a process that compiles and nothing else.

The package imports both for its types and for what it does to logits. Without them a process is up in a
fraction of the time and of the memory, and forks as fast.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

HEAVY = ("torch", "transformers")


class Anything:
    """Stands for a class of a module that is left out."""

    def __init__(self, *values: object, **named: object) -> None:
        pass


class LeftOut(ModuleType):
    """A module that has every name, as a class of nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {})


def import_light() -> None:
    """Import xgrammar without what it does not need here; as it is, where another version needs more."""
    if any(name in sys.modules for name in HEAVY):
        return
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the binding looks whether there is one
        importlib.import_module("tvm_ffi")
        sys.modules.update({name: LeftOut(name) for name in HEAVY})
        importlib.import_module("xgrammar")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("xgrammar", "tvm_ffi")]:
            del sys.modules[name]
    finally:
        for name in HEAVY:
            sys.modules.pop(name, None)
