# SPDX-License-Identifier: Apache-2.0
"""Checks whether a model can fit into the GPUs of a group, based on declared sizes or on the fetched model.

The check computes a lower bound of the memory that each rank needs: the rank's share of the weights, and a
little for activations, CUDA graphs and one KV page. If a model fails the check, it can never start, so no
pods are created. A model that passes may still be too large; the engine then reports this when it starts.
A declared number of parameters does not say whether the weights are quantized, so until the model is fetched
only those are refused that would not fit in 4 bits either.
Nothing is checked unless the spec or its accelerator profile declares the GPU's memory, and the number of
parameters is declared or known from the fetched model. `mizzen inspect` says the same about a model before
it is deployed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.api.types import InferenceService

PARAMETER_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
MEMORY_UNITS = {"Mi": 2**20, "Gi": 2**30}
BYTES_PER_PARAMETER = {"Auto": 2, "BFloat16": 2, "Float16": 2, "Float32": 4}
"""Bytes per parameter, by dtype. The value for `Auto` is a lower bound: the model may have a wider type."""
BYTES_PER_DTYPE = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per parameter of a fetched model, if its dtype is not changed, by the data type of its weights."""
BYTES_WHEN_QUANTIZED = {"FP8": 1, "INT8": 1, "W4A16": 0.5}
"""Lower bound of the bytes per parameter, by the value of spec.engine.quantization: all weights quantized."""
BYTES_IN_4_BITS = 0.5
"""Lower bound of the bytes per parameter of a checkpoint that may be quantized: 4 bits is the least."""
ROUNDED_UP = 0.9995
"""Share of a unit from which a number with three digits is rounded up to the unit."""
RESERVED_BYTES = 256 * 2**20
"""Minimum number of bytes that every rank needs in addition to its weights."""
ONE_GPU = (
    "a mixture of experts that runs through Transformers needs spec.parallelism.tensor 1, hence a GPU with "
    "more memory"
)
"""The check does not know whether the model is such a mixture of experts."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Result of the memory check.

    Attributes:
        fits: whether the model may fit; False if it certainly does not fit.
        message: required and available memory per GPU, with a remedy if the model does not fit.
    """

    fits: bool
    message: str


def check_gpu_memory(
    service: InferenceService, parameters: int = 0, dtype: str = "", weight_bytes: int = 0
) -> MemoryCheck | None:
    """Compare the memory that a rank needs with the part of its GPU's memory that the engine may use.

    Args:
        service: the service.
        parameters: number of parameters of the fetched model, which takes precedence over the declared
            number; 0 if it is unknown.
        dtype: data type of the fetched weights; empty if it is unknown.
        weight_bytes: bytes of fetched quantized weights in memory; 0 if they are unquantized or unknown.

    Returns:
        The result; None if the number of parameters is unknown, the GPU's memory is not declared, or the
        engine runs on the CPU.
    """
    if not ((parameters or service.parameters) and service.gpu_memory) or service.engine.device == "CPU":
        return None
    declared = not parameters
    count = float(parameters) or (float(service.parameters[:-1]) * PARAMETER_UNITS[service.parameters[-1]])
    shown = service.parameters if declared else _format_count(parameters)
    memory = int(service.gpu_memory[:-2]) * MEMORY_UNITS[service.gpu_memory[-2:]]
    available = memory * float(service.engine.memory_fraction)
    weights = weight_bytes or count * _bytes_per_parameter(service, dtype)
    needed = weights / service.tensor + RESERVED_BYTES
    figures = (
        f"{shown} parameters on {service.tensor} {'GPU' if service.tensor == 1 else 'GPUs'} need at least "
        f"{_format_gib(needed)} of each, and may use {_format_gib(available)}: "
        f"{service.engine.memory_fraction} of {service.gpu_memory}{_origin(service)}"
    )
    if needed <= available:
        return MemoryCheck(True, figures)
    if declared and service.engine.quantization == "Auto":
        needed = count * BYTES_IN_4_BITS / service.tensor + RESERVED_BYTES
        if needed <= available:
            only = f"only a quantized checkpoint may fit: 4-bit weights need at least {_format_gib(needed)}"
            return MemoryCheck(True, f"{figures}; {only}")
        figures += f"; even 4-bit weights need at least {_format_gib(needed)}"
    wrong = f"{'spec.model.parameters or ' if declared else ''}{service.gpu_memory_field}"
    advice = f"raise spec.parallelism.tensor, or correct {wrong}"
    return MemoryCheck(False, f"{figures}; {advice}; {ONE_GPU}")


def _bytes_per_parameter(service: InferenceService, dtype: str) -> float:
    """Return a lower bound of the bytes per parameter in memory.

    Args:
        service: the service.
        dtype: data type of the fetched weights; empty if it is unknown.
    """
    if service.engine.quantization != "Auto":
        return BYTES_WHEN_QUANTIZED[service.engine.quantization]
    element = BYTES_PER_PARAMETER[service.model.dtype]
    return BYTES_PER_DTYPE.get(dtype, element) if service.model.dtype == "Auto" else element


def _origin(service: InferenceService) -> str:
    """Return where the memory is declared, in brackets; empty if it is the service's own field."""
    return "" if service.gpu_memory_field.startswith("spec.") else f" ({service.gpu_memory_field})"


def _format_gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _format_count(count: int) -> str:
    """Format a number of parameters, such as 8.19B, in the same way as `mizzen inspect`."""
    for unit, size in sorted(PARAMETER_UNITS.items(), key=lambda item: -item[1]):
        if count >= ROUNDED_UP * size:
            return f"{count / size:.3g}{unit}"
    return str(count)
