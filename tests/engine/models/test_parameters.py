# SPDX-License-Identifier: Apache-2.0
"""Parameters are counted as the engine and Transformers hold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from family_twins import SMALL, TWINS
from mizzen.layers.context import BuildContext
from mizzen.layers.sharding import Axis, Mesh, check_shardable, choose_expert_groups
from mizzen.models.base import DecoderModel
from mizzen.models.block import Activation, BlockConfig, NormKind, NormPlacement, QKNorm, TensorNames
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.parameters import count_parameters
from mizzen.models.registry import read_config, read_fields


def loaded_by_rank(config: ModelConfig, ranks: int) -> int:
    """Return the number of elements that rank 0 loads."""
    communicator: Any = SimpleNamespace(rank=0, size=ranks)
    build = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        mesh=Mesh(Axis(0, ranks), choose_expert_groups(config, ranks)),
        collectives=communicator,
    )
    return sum(target.destination.numel() for target in DecoderModel(build, config).targets())


@pytest.mark.parametrize(
    "options",
    [
        {"attention_sinks": True},
        {"norm": NormKind.LAYER, "norm_bias": True, "placement": NormPlacement.SANDWICH},
        {"qk_norm": QKNorm.FULL},
        {"qk_norm": QKNorm.HEADWISE, "placement": NormPlacement.PARALLEL},
        {"activation": Activation.XIELU, "names": TensorNames(gate_up=("up_proj",))},
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parameters_of_each_option_of_a_block_are_counted(options: dict[str, Any], ranks: int) -> None:
    fields = {**SMALL, "vocab_size": 161, "architectures": ["LlamaForCausalLM"], "attention_bias": True}
    config = replace(read_fields(Fields(fields)), mlp_bias=True, block=BlockConfig(**options))
    assert count_parameters(config, ranks) == loaded_by_rank(config, ranks)


@pytest.mark.parametrize("twin", TWINS)
def test_parameters_equal_those_of_each_rank(twin: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    model = kit.save_twin(tmp_path, twin)
    config = read_config(tmp_path)
    if twin != "apertus":  # Transformers counts two of the four parameters of its activation as buffers
        buffers = (weights for name, weights in model.named_buffers() if name.endswith("correction_bias"))
        saved = [*model.parameters(), *buffers]
        assert count_parameters(config) == sum(weights.numel() for weights in saved)
    for ranks in (1, 2, 3, 4):
        try:
            check_shardable(config, ranks)
        except ValueError:
            continue
        assert count_parameters(config, ranks) == loaded_by_rank(config, ranks)
