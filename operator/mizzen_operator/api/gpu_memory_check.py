"""Whether a model surely does not fit into the GPUs of a group: arithmetic over what the spec declares.

It counts the least that a rank needs: its share of the weights, and a little for activations, graphs and one
page of KV. What passes may still be too large, and the engine says so when it starts; what does not pass
could never start, so no pod is made of it. Without both numbers nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.api.types import InferenceService

PARAMETER_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
MEMORY_UNITS = {"Mi": 2**20, "Gi": 2**30}
BYTES_PER_PARAMETER = {"Auto": 2, "BFloat16": 2, "Float16": 2, "Float32": 4}
"""Of a parameter; a model whose own precision is higher needs more than is counted."""
RESERVED_BYTES = 256 * 2**20
"""Bytes beside the weights without which no rank runs."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """What is known of the memory that a rank needs.

    Attributes:
        fits: False when it surely does not.
        words: the numbers.
    """

    fits: bool
    message: str


def check_gpu_memory(service: InferenceService) -> MemoryCheck | None:
    """Compare what a rank needs at least with what it may take; None where a number is not given."""
    if not (service.parameters and service.gpu_memory) or service.engine.device == "CPU":
        return None
    parameters = float(service.parameters[:-1]) * PARAMETER_UNITS[service.parameters[-1]]
    memory = int(service.gpu_memory[:-2]) * MEMORY_UNITS[service.gpu_memory[-2:]]
    weights = parameters * BYTES_PER_PARAMETER[service.model.dtype] / service.tensor
    room = memory * float(service.engine.memory_fraction)
    need = weights + RESERVED_BYTES
    words = (
        f"{service.parameters} parameters on {service.tensor} GPUs need {_format_gib(need)} of each at least, and "
        f"may take {_format_gib(room)}: {service.engine.memory_fraction} of {service.gpu_memory}"
    )
    if need <= room:
        return MemoryCheck(True, words)
    advice = "raise spec.parallelism.tensor, or correct spec.model.parameters or spec.accelerator.memory"
    return MemoryCheck(False, f"{words}; {advice}")


def _format_gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
