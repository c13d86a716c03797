# SPDX-License-Identifier: Apache-2.0
"""Reference formats of weights in 8-bit floats (e4m3): weight = value of the code * scale.

A scale covers a block of the weight, an output row ("channel"), or the whole weight ("tensor").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

import e4m3
from compressed_config import compressed_config, describe_args
from integer_codes import round_to_dtype
from weight_format import Tensors, WeightFormat, draw_input_scale, to_numpy

Strategy = Literal["tensor", "channel", "block"]
TINY = 1e-30
"""Least scale of a weight, far below those of real weights."""


def expand_scales(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Repeat one scale for each block of a weight, given the size of the blocks as `shape`."""
    return np.repeat(np.repeat(scales, shape[0], axis=0), shape[1], axis=1)


def round_to_e4m3(
    weight: np.ndarray, block: tuple[int, int], scale_dtype: torch.dtype
) -> tuple[torch.Tensor, np.ndarray]:
    """Round a weight to e4m3 with a scale for each block; the last blocks may be partial.

    Args:
        weight: float32 [rows, columns].
        block: Rows and columns of a block.
        scale_dtype: Type in which the scales will be stored. For float8_e8m0fnu, they are powers of two that
            are large enough for no weight to saturate.

    Returns:
        Codes, float8_e4m3fn [rows, columns], and scales, float32 [blocks of rows, blocks of columns].
    """
    rows, columns = weight.shape
    padded = np.pad(weight, ((0, -rows % block[0]), (0, -columns % block[1])))
    tiles = padded.reshape(len(padded) // block[0], block[0], -1, block[1])
    scales = np.maximum(np.abs(tiles).max(axis=(1, 3)) / e4m3.MAX, TINY)
    if scale_dtype == torch.float8_e8m0fnu:
        scales = 2.0 ** np.ceil(np.log2(scales))
    scales = round_to_dtype(scales, scale_dtype)
    codes = e4m3.encode(weight / expand_scales(scales, block)[:rows, :columns])
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), scales


def multiply_blocks(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    """Return codes times scales [blocks of rows, blocks of columns], float32; partial last blocks are cut."""
    rows, columns = codes.shape
    return e4m3.decode(to_numpy(codes)) * expand_scales(to_numpy(scales), block)[:rows, :columns]


def block_shape(strategy: Strategy, block: tuple[int, int], shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns that share a scale in a weight of a shape."""
    rows, columns = shape
    return {"tensor": (rows, columns), "channel": (1, columns), "block": block}[strategy]


@dataclass(frozen=True)
class HuggingFaceFp8(WeightFormat):
    """`quant_method` "fp8": `weight_scale_inv` for each block, else one `weight_scale`.

    Despite its name, `weight_scale_inv` is multiplied by the codes.
    """

    block: tuple[int, int] | None = (128, 128)
    static: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def scale_name(self) -> str:  # type: ignore[override]
        """Name of the tensor with the scales of the weights."""
        return "weight_scale_inv" if self.block else "weight_scale"

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`."""
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if self.static else "dynamic",
        }
        if self.block:
            config["weight_block_size"] = list(self.block)
        if self.scale_dtype == torch.float8_e8m0fnu:
            config["scale_fmt"] = "ue8m0"
        return config | {"modules_to_not_convert": list(ignored)}

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        block = self.block or (weight.shape[0], weight.shape[1])
        codes, scales = round_to_e4m3(weight, block, self.scale_dtype)
        stored = torch.from_numpy(scales).to(self.scale_dtype)
        tensors = {"weight": codes, self.scale_name: stored if self.block else stored.reshape(())}
        return tensors | ({"input_scale": draw_input_scale(rng, e4m3.MAX)} if self.static else {})

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        codes, scales = tensors["weight"], tensors[self.scale_name]
        if self.block:
            return multiply_blocks(codes, scales, self.block)
        return multiply_blocks(codes, scales.reshape(1, 1), (codes.shape[0], codes.shape[1]))


@dataclass(frozen=True)
class CompressedFp8(WeightFormat):
    """`quant_method` "compressed-tensors" with `format` "float-quantized"."""

    strategy: Strategy = "channel"
    block: tuple[int, int] = (128, 128)
    static: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`."""
        block = {"block_structure": list(self.block)} if self.strategy == "block" else {}
        weights = describe_args(8, "float", strategy=self.strategy, **block)
        if self.static:
            inputs = describe_args(8, "float", strategy="tensor")
        elif self.strategy == "block":
            inputs = describe_args(8, "float", strategy="group", group_size=self.block[1], dynamic=True)
        else:
            inputs = describe_args(8, "float", strategy="token", dynamic=True)
        return compressed_config("float-quantized", weights, inputs, ignored)

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        codes, scales = round_to_e4m3(
            weight, block_shape(self.strategy, self.block, weight.shape), self.scale_dtype
        )
        stored = torch.from_numpy(scales).to(self.scale_dtype)
        tensors = {"weight": codes, "weight_scale": stored[0] if self.strategy == "tensor" else stored}
        return tensors | ({"input_scale": draw_input_scale(rng, e4m3.MAX)[None]} if self.static else {})

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        codes, scales = tensors["weight"], tensors["weight_scale"]
        scales = scales.reshape(1, 1) if self.strategy == "tensor" else scales
        return multiply_blocks(codes, scales, block_shape(self.strategy, self.block, codes.shape))


@dataclass(frozen=True)
class FbgemmFp8(WeightFormat):
    """`quant_method` "fbgemm_fp8": a float32 scale for each output row; inputs get a scale for each token."""

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return `quantization_config`."""
        return {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": list(ignored),
        }

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        codes, scales = round_to_e4m3(weight, (1, weight.shape[1]), torch.float32)
        return {"weight": codes, "weight_scale": torch.from_numpy(scales)}

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        codes = tensors["weight"]
        return multiply_blocks(codes, tensors["weight_scale"], (1, codes.shape[1]))


@dataclass(frozen=True)
class ModelOptFp8(WeightFormat):
    """ModelOpt's FP8 with a file hf_quant_config.json; `algorithm` is its `quant_algo`.

    `FP8` has one scale for a weight and one for its activations, `FP8_PER_CHANNEL_PER_TOKEN` a scale for each
    output row, [rows], and `FP8_PB_WO` one for each block, [blocks of rows, 1, blocks of columns, 1].
    """

    algorithm: Literal["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"] = "FP8"
    quantizes_kv: bool = True

    config_file = "hf_quant_config.json"

    @property
    def kv_scales(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the scales of the KV cache that the format stores beside the layers k_proj and v_proj."""
        return ("k_scale", "v_scale") if self.quantizes_kv else ()

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the content of hf_quant_config.json."""
        return {
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "quantization": {
                "quant_algo": self.algorithm,
                "kv_cache_quant_algo": "FP8" if self.quantizes_kv else None,
                "exclude_modules": list(ignored),
            },
        }

    def _block(self, shape: Sequence[int]) -> tuple[int, int]:
        strategies: dict[str, Strategy] = {"FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block"}
        return block_shape(strategies.get(self.algorithm, "tensor"), (128, 128), shape)

    def quantize(self, weight: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Round a weight to nearest; return the tensors of the layer."""
        codes, scales = round_to_e4m3(weight, self._block(weight.shape), torch.float32)
        stored = torch.from_numpy(scales)
        if self.algorithm == "FP8_PB_WO":
            return {"weight": codes, "weight_scale": stored[:, None, :, None].contiguous()}
        if self.algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return {"weight": codes, "weight_scale": stored[:, 0].contiguous()}
        input_scale = draw_input_scale(rng, e4m3.MAX)
        return {"weight": codes, "weight_scale": stored.reshape(()), "input_scale": input_scale}

    def dequantize(self, tensors: Tensors) -> np.ndarray:
        """Return the float32 weight that a layer's tensors stand for."""
        codes, scales = tensors["weight"], tensors["weight_scale"]
        if self.algorithm == "FP8_PB_WO":
            scales = scales[:, 0, :, 0]
        elif scales.ndim < 2:
            scales = scales.reshape(-1, 1)
        return multiply_blocks(codes, scales, self._block(codes.shape))
