# SPDX-License-Identifier: Apache-2.0
"""Reference formats of weights in 4-bit and 8-bit integers: weight = (code - zero point) * scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from bit_packing import AWQ_ORDER, pack, unpack
from compressed_config import compressed_config, describe_args
from integer_codes import IntegerCodes, group_columns, round_to_integers, shuffle_groups
from weight_format import Tensors, WeightFormat, draw_input_scale, to_numpy


def to_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor of a dtype."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def round_weight(
    packed: Gptq | CompressedPacked, weight: np.ndarray, scale_dtype: torch.dtype, rng: np.random.Generator
) -> IntegerCodes:
    """Round a weight [rows, columns] to nearest; with `act_order`, columns belong to random groups."""
    columns = weight.shape[1]
    groups = group_columns(columns, packed.group_size)
    if packed.act_order:
        groups = shuffle_groups(columns, packed.group_size, rng)
    return round_to_integers(
        weight, groups, bits=packed.bits, symmetric=packed.symmetric, scale_dtype=scale_dtype
    )


@dataclass(frozen=True)
class Awq(WeightFormat):
    """`quant_method` "awq", version "gemm": 4 bits, packed along the output rows, with zero points."""

    group_size: int = 128

    scale_name = "scales"

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`."""
        return {
            "bits": 4,
            "group_size": self.group_size,
            "modules_to_not_convert": list(ignored) or None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        groups = group_columns(weight.shape[1], self.group_size)
        values = round_to_integers(weight, groups, bits=4, symmetric=False, scale_dtype=torch.float16)
        return {
            "qweight": torch.from_numpy(pack(values.codes.T, 4, 1, AWQ_ORDER)),
            "qzeros": torch.from_numpy(pack(values.zeros.T, 4, 1, AWQ_ORDER)),
            "scales": to_tensor(values.scales.T, torch.float16),
        }

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        codes, zeros = (
            unpack(tensors[name].numpy(), 4, 1, order=AWQ_ORDER).T for name in ("qweight", "qzeros")
        )
        groups = group_columns(codes.shape[1], self.group_size)
        return IntegerCodes(codes, zeros, to_numpy(tensors["scales"]).T, groups).dequantize()


@dataclass(frozen=True)
class Gptq(WeightFormat):
    """`quant_method` "gptq": packed along the input columns; `g_idx` names the group of each column.

    Version 1 stores the zero points minus one: the tools subtract one from each field of a word in a single
    subtraction, so that a zero point of 0 borrows from the field above. Version 2 stores them as they are.
    """

    bits: Literal[4, 8] = 4
    group_size: int = 128
    symmetric: bool = True
    act_order: bool = False
    version: Literal[1, 2] = 1

    scale_name = "scales"

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`. The head is quantized only if `lm_head` is true."""
        others = [name for name in ignored if name != "lm_head"]
        config = {
            "bits": self.bits,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "damp_percent": 0.01,
            "desc_act": self.act_order,
            "group_size": self.group_size,
            "lm_head": "lm_head" not in ignored,
            "quant_method": "gptq",
            "sym": self.symmetric,
            "true_sequential": True,
        }
        return config | ({"dynamic": {f"-:^{name}$": {} for name in others}} if others else {})

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        values = round_weight(self, weight, torch.float16, rng)
        zeros = pack(values.zeros.T, self.bits, 1)
        return {
            "qweight": torch.from_numpy(pack(values.codes.T, self.bits, 0)),
            "qzeros": torch.from_numpy(self._shift(zeros, -1) if self.version == 1 else zeros),
            "scales": to_tensor(values.scales.T, torch.float16),
            "g_idx": to_tensor(values.groups, torch.int32),
        }

    def _shift(self, words: np.ndarray, step: int) -> np.ndarray:
        """Add 1 or -1 to each field of packed words, as one addition modulo 2**32."""
        ones = sum(1 << place for place in range(0, 32, self.bits))
        shifted = (words.view(np.uint32).astype(np.int64) + step * ones) % 2**32
        return shifted.astype(np.uint32).view(np.int32)

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        zeros = tensors["qzeros"].numpy()
        codes = unpack(tensors["qweight"].numpy(), self.bits, 0).T
        zeros = unpack(self._shift(zeros, 1) if self.version == 1 else zeros, self.bits, 1).T
        groups = tensors["g_idx"].numpy()
        return IntegerCodes(codes, zeros, to_numpy(tensors["scales"]).T, groups).dequantize()


@dataclass(frozen=True)
class CompressedPacked(WeightFormat):
    """`quant_method` "compressed-tensors" with `format` "pack-quantized": weights only, 4 or 8 bits.

    Codes are packed along the input columns, zero points along the output rows. A group size of -1 stands for
    one scale for each output row. `act_order` adds `weight_g_idx`, as older versions of the format do for
    the `actorder` "group".
    """

    bits: Literal[4, 8] = 4
    group_size: int = 128
    symmetric: bool = True
    act_order: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`."""
        grouped = self.group_size > 0
        weights = describe_args(
            self.bits,
            "int",
            strategy="group" if grouped else "channel",
            group_size=self.group_size if grouped else None,
            symmetric=self.symmetric,
            actorder="group" if self.act_order else None,
        )
        return compressed_config("pack-quantized", weights, None, ignored)

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        values = round_weight(self, weight, self.scale_dtype, rng)
        tensors = {
            "weight_packed": torch.from_numpy(pack(values.codes, self.bits, 1)),
            "weight_scale": to_tensor(values.scales, self.scale_dtype),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(pack(values.zeros, self.bits, 0))
        if self.act_order:
            tensors["weight_g_idx"] = to_tensor(values.groups, torch.int32)
        return tensors

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        rows, columns = tensors["weight_shape"].tolist()
        codes = unpack(tensors["weight_packed"].numpy(), self.bits, 1, count=columns)
        scales = to_numpy(tensors["weight_scale"])
        if self.symmetric:
            zeros = np.full(scales.shape, 2 ** (self.bits - 1))
        else:
            zeros = unpack(tensors["weight_zero_point"].numpy(), self.bits, 0, count=rows)
        groups = group_columns(columns, self.group_size)
        groups = tensors["weight_g_idx"].numpy() if self.act_order else groups
        return IntegerCodes(codes, zeros, scales, groups).dequantize()


@dataclass(frozen=True)
class CompressedInt8(WeightFormat):
    """`quant_method` "compressed-tensors" with `format` "int-quantized": int8 weights and activations.

    `inputs` says how activations are quantized: with a scale for each token, or with one static scale, which
    may come with a static zero point.
    """

    inputs: Literal["token", "static", "static-asymmetric"] = "token"
    scale_dtype: torch.dtype = torch.bfloat16

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`."""
        if self.inputs == "token":
            inputs = describe_args(8, "int", strategy="token", dynamic=True)
        else:
            inputs = describe_args(8, "int", strategy="tensor", symmetric=self.inputs == "static")
        return compressed_config("int-quantized", describe_args(8, "int"), inputs, ignored)

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        values = round_to_integers(
            weight, group_columns(weight.shape[1], -1), bits=8, symmetric=True, scale_dtype=self.scale_dtype
        )
        tensors = {
            "weight": to_tensor(values.codes - 128, torch.int8),
            "weight_scale": to_tensor(values.scales, self.scale_dtype),
        }
        if self.inputs != "token":
            tensors["input_scale"] = draw_input_scale(rng, 127)[None]
        if self.inputs == "static-asymmetric":
            tensors["input_zero_point"] = torch.tensor([rng.integers(-20, 20)], dtype=torch.int8)
        return tensors

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        codes, scales = tensors["weight"].numpy().astype(np.float32), to_numpy(tensors["weight_scale"])
        return codes * scales
