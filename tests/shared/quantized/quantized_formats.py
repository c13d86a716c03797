# SPDX-License-Identifier: Apache-2.0
"""The reference formats of quantized weights by short names, for tests of all of them."""

from __future__ import annotations

import torch

from fp8_formats import CompressedFp8, FbgemmFp8, HuggingFaceFp8, ModelOptFp8
from integer_formats import Awq, CompressedInt8, CompressedPacked, Gptq
from weight_format import WeightFormat

FP8: dict[str, WeightFormat] = {
    "fp8-blocks": HuggingFaceFp8(),
    "fp8-small-blocks": HuggingFaceFp8(block=(32, 64)),
    "fp8-ue8m0": HuggingFaceFp8(scale_dtype=torch.float8_e8m0fnu),
    "fp8-tensor": HuggingFaceFp8(block=None),
    "fp8-tensor-static": HuggingFaceFp8(block=None, static=True),
    "ct-fp8-channel": CompressedFp8(),
    "ct-fp8-channel-f32": CompressedFp8(scale_dtype=torch.float32),
    "ct-fp8-tensor": CompressedFp8(strategy="tensor"),
    "ct-fp8-tensor-static": CompressedFp8(strategy="tensor", static=True),
    "ct-fp8-blocks": CompressedFp8(strategy="block"),
    "fbgemm": FbgemmFp8(),
    "modelopt-fp8": ModelOptFp8(),
    "modelopt-fp8-channel": ModelOptFp8(algorithm="FP8_PER_CHANNEL_PER_TOKEN", quantizes_kv=False),
    "modelopt-fp8-blocks": ModelOptFp8(algorithm="FP8_PB_WO", quantizes_kv=False),
}
INT8: dict[str, WeightFormat] = {
    "ct-int8": CompressedInt8(),
    "ct-int8-static": CompressedInt8(inputs="static"),
    "ct-int8-asymmetric": CompressedInt8(inputs="static-asymmetric"),
}
PACKED: dict[str, WeightFormat] = {
    "awq": Awq(),
    "awq-32": Awq(group_size=32),
    "awq-64": Awq(group_size=64),
    "gptq": Gptq(),
    "gptq-32": Gptq(group_size=32),
    "gptq-row": Gptq(group_size=-1),
    "gptq-asymmetric": Gptq(group_size=64, symmetric=False),
    "gptq-v2-asymmetric": Gptq(group_size=64, symmetric=False, version=2),
    "gptq-act-order": Gptq(group_size=32, act_order=True),
    "gptq-act-order-asymmetric": Gptq(group_size=32, symmetric=False, act_order=True),
    "gptq-8": Gptq(bits=8),
    "gptq-8-act-order-asymmetric": Gptq(bits=8, group_size=32, symmetric=False, act_order=True),
    "ct-w4a16": CompressedPacked(),
    "ct-w4a16-32": CompressedPacked(group_size=32),
    "ct-w4a16-channel": CompressedPacked(group_size=-1),
    "ct-w4a16-asymmetric": CompressedPacked(group_size=32, symmetric=False),
    "ct-w4a16-act-order": CompressedPacked(group_size=32, act_order=True),
    "ct-w8a16-channel": CompressedPacked(bits=8, group_size=-1),
    "ct-w8a16": CompressedPacked(bits=8, group_size=64),
    "ct-w8a16-asymmetric": CompressedPacked(bits=8, group_size=32, symmetric=False),
}
FORMATS: dict[str, WeightFormat] = {**FP8, **INT8, **PACKED}
