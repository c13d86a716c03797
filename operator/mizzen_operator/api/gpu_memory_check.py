"""Checks whether a model can fit into the GPUs of a group, based on the declared sizes.

The check computes a lower bound of the memory that each rank needs: the rank's share of the weights, and a
little for activations, CUDA graphs and one KV page. If a model fails the check, it can never start, so no
pods are created. A model that passes may still be too large; the engine then reports this when it starts.
Nothing is checked unless the spec declares both the number of parameters and the GPU's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.api.types import InferenceService

PARAMETER_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
MEMORY_UNITS = {"Mi": 2**20, "Gi": 2**30}
BYTES_PER_PARAMETER = {"Auto": 2, "BFloat16": 2, "Float16": 2, "Float32": 4}
"""Bytes per parameter, by dtype. The value for `Auto` is a lower bound: the model may have a wider type."""
RESERVED_BYTES = 256 * 2**20
"""Minimum number of bytes that every rank needs in addition to its weights."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Result of the memory check.

    Attributes:
        fits: whether the model may fit; False if it certainly does not fit.
        message: required and available memory per GPU, with a remedy if the model does not fit.
    """

    fits: bool
    message: str


def check_gpu_memory(service: InferenceService) -> MemoryCheck | None:
    """Compare the memory that a rank needs with the part of its GPU's memory that the engine may use.

    Returns:
        The result; None if the spec lacks the number of parameters or the GPU's memory, or the engine runs on
        the CPU.
    """
    if not (service.parameters and service.gpu_memory) or service.engine.device == "CPU":
        return None
    parameters = float(service.parameters[:-1]) * PARAMETER_UNITS[service.parameters[-1]]
    memory = int(service.gpu_memory[:-2]) * MEMORY_UNITS[service.gpu_memory[-2:]]
    weights = parameters * BYTES_PER_PARAMETER[service.model.dtype] / service.tensor
    available = memory * float(service.engine.memory_fraction)
    needed = weights + RESERVED_BYTES
    figures = (
        f"{service.parameters} parameters on {service.tensor} GPUs need at least {_format_gib(needed)} of "
        f"each, and may use {_format_gib(available)}: "
        f"{service.engine.memory_fraction} of {service.gpu_memory}"
    )
    if needed <= available:
        return MemoryCheck(True, figures)
    advice = "raise spec.parallelism.tensor, or correct spec.model.parameters or spec.accelerator.memory"
    return MemoryCheck(False, f"{figures}; {advice}")


def _format_gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
