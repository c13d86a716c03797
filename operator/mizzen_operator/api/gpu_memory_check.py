"""Checks from the declared sizes whether a model can fit into the GPUs of a group.

The check counts a lower bound per rank: its share of the weights, and a little for activations, CUDA graphs
and one KV page. A model that fails it can never start, so no pods are created. A model that passes may still
be too large; then the engine reports that at its start. Without both sizes nothing is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.api.types import InferenceService

PARAMETER_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
MEMORY_UNITS = {"Mi": 2**20, "Gi": 2**30}
BYTES_PER_PARAMETER = {"Auto": 2, "BFloat16": 2, "Float16": 2, "Float32": 4}
"""Bytes per parameter by dtype. For `Auto` it is a lower bound: the model may be stored in a wider type."""
RESERVED_BYTES = 256 * 2**20
"""Bytes beside the weights that every rank needs at least."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Result of the check.

    Attributes:
        fits: whether the model may fit; False if it certainly does not.
        message: the figures in words, with a remedy if the model does not fit.
    """

    fits: bool
    message: str


def check_gpu_memory(service: InferenceService) -> MemoryCheck | None:
    """Compare the memory that a rank needs with its GPU's memory; return None if a size is not declared."""
    if not (service.parameters and service.gpu_memory) or service.engine.device == "CPU":
        return None
    parameters = float(service.parameters[:-1]) * PARAMETER_UNITS[service.parameters[-1]]
    memory = int(service.gpu_memory[:-2]) * MEMORY_UNITS[service.gpu_memory[-2:]]
    weights = parameters * BYTES_PER_PARAMETER[service.model.dtype] / service.tensor
    room = memory * float(service.engine.memory_fraction)
    need = weights + RESERVED_BYTES
    words = (
        f"{service.parameters} parameters on {service.tensor} GPUs need {_format_gib(need)} of each at "
        f"least, and may take {_format_gib(room)}: {service.engine.memory_fraction} of {service.gpu_memory}"
    )
    if need <= room:
        return MemoryCheck(True, words)
    advice = "raise spec.parallelism.tensor, or correct spec.model.parameters or spec.accelerator.memory"
    return MemoryCheck(False, f"{words}; {advice}")


def _format_gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
