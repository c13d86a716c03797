# SPDX-License-Identifier: Apache-2.0
"""Schemes read from the configurations of the reference formats, compared with the tensors they write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mizzen.models.hf_fields import Fields
from mizzen.quantization.reader import MODELOPT_FILE, read_quantization
from mizzen.quantization.schemes import UNQUANTIZED
from mizzen.quantization.stored_tensors import list_tensors
from quantized_formats import FORMATS

ROWS, COLUMNS = 256, 512
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_scheme_describes_the_tensors_that_an_exporter_writes(name: str) -> None:
    reference = FORMATS[name]
    field = "quantization_config" if reference.config_file == "config.json" else MODELOPT_FILE
    found = read_quantization(Fields({field: reference.config(["lm_head"])}))
    assert found.find_scheme("lm_head") == UNQUANTIZED
    scheme = found.find_scheme("model.layers.0.mlp.up_proj")
    assert scheme != UNQUANTIZED
    rng = np.random.default_rng(0)
    written = reference.quantize(rng.standard_normal((ROWS, COLUMNS), dtype=np.float32), rng)
    known = {suffix: tensor for tensor in list_tensors(scheme) for suffix in tensor.suffixes}
    assert written.keys() <= known.keys()
    for suffix, tensor in written.items():
        assert tuple(tensor.shape) in known[suffix].shapes(ROWS, COLUMNS), suffix
        assert DTYPES[tensor.dtype] in known[suffix].dtypes, suffix
    for tensor in list_tensors(scheme):
        assert tensor.optional or any(suffix in written for suffix in tensor.suffixes), tensor.suffixes
