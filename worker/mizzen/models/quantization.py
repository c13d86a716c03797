# SPDX-License-Identifier: Apache-2.0
"""Describes quantized weights by their `quantization_config`, for the errors that reject them."""

from __future__ import annotations

from mizzen.models.hf_fields import Fields

METHODS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "torchao": "torchao",
}
"""Quantization methods by their names in config.json."""


def quantizes_only_kv(quantization: Fields) -> bool:
    """Return whether `quantization_config` leaves the weights unquantized.

    The result is True if `quantization_config` is absent or empty, or if it describes only an 8-bit KV cache
    in the format of compressed-tensors.
    """
    values = quantization.values
    scheme = values.get("kv_cache_scheme")
    if not values:
        return True
    return values.get("config_groups") == {} and isinstance(scheme, dict) and scheme.get("num_bits") == 8


def describe_quantization(quantization: Fields) -> str:
    """Return a description of quantized weights, such as "AWQ, 4 bits"."""
    values = quantization.values
    method = values.get("quant_method")
    name = METHODS.get(method, method) if isinstance(method, str) and method else "an unknown method"
    for field in ("format", "quant_algo"):
        if isinstance(detail := values.get(field), str):
            name += f" ({detail})"
    bits = values.get("bits", values.get("w_bit"))
    if values.get("load_in_4bit") is True:
        bits = 4
    if values.get("load_in_8bit") is True:
        bits = 8
    return f"{name}, {bits} bits" if isinstance(bits, int) else name


def check_unquantized(fields: Fields) -> None:
    """Check that config.json does not describe quantized weights.

    Raises:
        ConfigError: the weights are quantized; the message names the method.
    """
    quantization = fields.child("quantization_config")
    if not quantizes_only_kv(quantization):
        raise fields.unsupported(
            "quantization_config",
            f"describes quantized weights ({describe_quantization(quantization)}), which are not supported: "
            "use the checkpoint in bfloat16 or float16 from which they were made",
        )
