# SPDX-License-Identifier: Apache-2.0
"""Reads the quantization of a checkpoint from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mizzen.models.hf_fields import Fields
from mizzen.quantization.compressed_tensors import read_compressed_tensors
from mizzen.quantization.config_fields import USE_ORIGINAL
from mizzen.quantization.fp8 import read_fbgemm, read_fp8
from mizzen.quantization.modelopt import read_modelopt
from mizzen.quantization.mxfp4 import read_mxfp4
from mizzen.quantization.packed_integers import read_auto_round, read_awq, read_gptq
from mizzen.quantization.quantization import Quantization

MODELOPT_FILE = "hf_quant_config.json"
"""File in which ModelOpt describes the quantization, beside config.json or instead of its field."""
READERS: dict[str, Callable[[Fields], Quantization]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
"""Readers by `quant_method`."""
NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "fp_quant": "FP-Quant",
    "gguf": "GGUF",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "quip": "QuIP#",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Names of methods by `quant_method`, where these differ."""
FOUR_BIT_FLOATS = ("nvfp4", "modelopt_fp4", "modelopt_mxfp4")
NO_QUANTIZATION = Quantization(method="")


def load_fields(folder: Path) -> Fields:
    """Read config.json of a model folder; `hf_quant_config.json`, if there is one, becomes a field.

    Raises:
        ConfigError: config.json is missing, or one of the files cannot be read.
    """
    fields = Fields.load(folder)
    if not (folder / MODELOPT_FILE).is_file():
        return fields
    return add_modelopt_file(fields, Fields.load(folder, MODELOPT_FILE).values)


def add_modelopt_file(fields: Fields, values: dict[str, Any]) -> Fields:
    """Return the fields of config.json, with the content of `hf_quant_config.json` as one more field."""
    return Fields({**fields.values, MODELOPT_FILE: values}, fields.source)


def read_quantization(fields: Fields) -> Quantization:
    """Read the quantization of a checkpoint.

    Args:
        fields: Fields of config.json. The content of `hf_quant_config.json`, if there is such a file, is
            expected as the field of that name.

    Raises:
        ConfigError: A field is invalid, or the method is not supported; the message names the way out.
    """
    quantization = fields.child("quantization_config")
    if not quantization.values:
        quantization = Fields(fields.child(MODELOPT_FILE).values, MODELOPT_FILE)
        if not quantization.values:
            return NO_QUANTIZATION
        return read_modelopt(quantization)
    method = find_method(quantization)
    if method not in READERS:
        raise fields.unsupported("quantization_config", _refuse_method(quantization, method))
    return READERS[method](quantization)


def find_method(quantization: Fields) -> str:
    """Return `quant_method`, or the method that the other fields imply; empty if it is unknown."""
    values = quantization.values
    method = values.get("quant_method")
    if isinstance(method, str) and method:
        return method.lower().replace("compressed_tensors", "compressed-tensors")
    if "quant_algo" in values or "quantization" in values:
        return "modelopt"
    if "config_groups" in values or "kv_cache_scheme" in values:
        return "compressed-tensors"
    return "bitsandbytes" if "load_in_4bit" in values or "load_in_8bit" in values else ""


def _refuse_method(quantization: Fields, method: str) -> str:
    """Return why a method is not supported, and the way out."""
    if not method:
        return (
            "describes quantized weights in an unknown method (without quant_method), which are not "
            f"supported: {USE_ORIGINAL}"
        )
    name, way_out = NAMES.get(method, method), USE_ORIGINAL
    if method in FOUR_BIT_FLOATS:
        way_out = "Hopper GPUs have no FP4 tensor cores; use a checkpoint in bfloat16, FP8 or W4A16"
    if method == "bitsandbytes":
        bits = {"load_in_4bit": 4, "load_in_8bit": 8}
        found = [size for flag, size in bits.items() if quantization.values.get(flag) is True]
        name += f", {found[0]} bits" if found else ""
    return f"describes quantized weights ({name}), which are not supported: {way_out}"
