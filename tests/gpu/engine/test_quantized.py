# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints on a GPU: log probabilities equal those of Transformers with the dequantized weights.

Where the engine quantizes the inputs of a layer, so does the model in Transformers, by the reference's rules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hopper import on_hopper
from logprob_check import SIZES, measure_errors

from family_twins import save_random_model
from quantized_formats import FORMATS, FP8, INT8
from quantized_twins import QuantizedTwin, quantize_twin
from rounded_activations import Kind, round_activations, round_static

pytestmark = on_hopper("sgl_kernel", "sglang-kernel")
EAGER = ("fp8-blocks", "ct-fp8-channel", "ct-int8", "awq", "gptq-act-order", "ct-w8a16")
"""Formats that are served without graphs, too."""
UNQUANTIZED_INPUTS = ("fp8-small-blocks", "ct-int8-asymmetric")
"""Formats of quantized inputs that the engine serves with unquantized ones."""
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers with the same input, for which the largest of their static scales holds."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Qwen3 whose sizes suit all formats."""
    folder = tmp_path_factory.mktemp("source")
    config = transformers.Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=64, tie_word_embeddings=False)
    save_random_model(folder, transformers.Qwen3ForCausalLM, config, torch.bfloat16, plus_one=False)
    return folder


def find_static_scale(twin: QuantizedTwin, layer: str) -> float:
    """Return the static scale of a layer's input, the largest of the layers that share it; 0 for none."""
    before, _, name = layer.rpartition(".")
    names = next((group for group in MERGED if name in group), (name,))
    scales = [twin.tensors(f"{before}.{other}").get("input_scale") for other in names]
    return max((float(scale) for scale in scales if scale is not None), default=0.0)


def round_inputs(twin: QuantizedTwin, name: str, model: Any) -> None:
    """Make a model of Transformers round the inputs of quantized layers as the format asks for."""
    if name not in {**FP8, **INT8} or name in UNQUANTIZED_INPUTS:
        return
    kind: Kind = "int8" if name in INT8 else "e4m3"
    group = 128 if "blocks" in name or name == "fp8-ue8m0" else None

    def make_hook(scale: float) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], tuple[torch.Tensor]]:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            x = inputs[0]
            values = x.flatten(0, -2).float().cpu().numpy()
            rounded = (
                round_static(values, kind, scale) if scale else round_activations(values, kind, group=group)
            )
            return (torch.from_numpy(rounded).to(x).view_as(x),)

        return hook

    for layer in twin.layers:
        model.get_submodule(layer).register_forward_pre_hook(make_hook(find_static_scale(twin, layer)))


CASES = [*((name, "auto") for name in FORMATS), *((name, "off") for name in EAGER)]


@pytest.mark.parametrize(("name", "graphs"), CASES)
def test_log_probabilities_equal_the_dequantized_model(
    name: str, graphs: str, source: Path, tmp_path: Path
) -> None:
    """Prompts of several lengths run together, then alone and with their prefixes cached."""
    twin = quantize_twin(source, tmp_path / "twin", FORMATS[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    twin.dequantize_into(model)
    round_inputs(twin, name, model)
    errors = measure_errors(model.cuda().eval(), twin.folder, cuda_graph=graphs)
    errors.check_means()
    errors.check_maxima()
