# SPDX-License-Identifier: Apache-2.0
"""Mizzen's worker: the engine, the gateway and offline inference.

Public names are imported on first use, so that importing a package that does not need torch (gateway, core)
does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Grammar", "GrammarKind", "ImagePrompt", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams
    from mizzen.offline import LLM, Completion, ImagePrompt


def __getattr__(name: str) -> Any:
    if name in ("SamplingParams", "Grammar", "GrammarKind"):
        from mizzen.core import sampling_params

        return getattr(sampling_params, name)
    if name in ("LLM", "Completion", "ImagePrompt"):
        from mizzen.common.extras import describe_missing_module, require_modules

        try:
            require_modules("torch")
            from mizzen import offline
        except ModuleNotFoundError as error:
            raise ImportError(describe_missing_module(error, f"mizzen.{name}", "worker")) from None

        return getattr(offline, name)
    raise AttributeError(f"module 'mizzen' has no attribute {name!r}")
