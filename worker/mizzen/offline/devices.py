# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine, and the processes of a model's other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mizzen.engine.config import EngineOptions

if TYPE_CHECKING:
    from mizzen.server.ranks.in_process import LocalRanks


def has_gpu() -> bool:
    """Return whether PyTorch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def gpu_bytes() -> int:
    """Return the memory of the first GPU in bytes; 0 if PyTorch finds no GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if has_gpu() else 0


def start_ranks(options: EngineOptions) -> LocalRanks | None:
    """Start the other ranks of a model as processes; return None if the model has only one rank."""
    if options.tensor == 1:
        return None
    from mizzen.server.ranks.in_process import LocalRanks

    return LocalRanks(options)
