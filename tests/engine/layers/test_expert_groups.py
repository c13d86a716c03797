# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture are divided among ranks by width where possible, else as whole experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.validate import check_model
from mizzen.layers.sharding import Axis, Mesh, check_shardable, choose_expert_groups
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.registry import read_fields

FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def mixture(**sizes: int) -> ModelConfig:
    """Return a mixture whose `ExpertsConfig` has these sizes."""
    config = read_fields(Fields(FIELDS))
    assert config.experts is not None
    return replace(config, experts=replace(config.experts, **sizes))


@pytest.mark.parametrize(
    ("sizes", "ranks", "groups"),
    [
        ({}, 1, 1),
        ({}, 8, 1),
        ({"width": 12}, 4, 1),
        ({"width": 12}, 8, 2),
        ({"width": 6}, 8, 4),
        ({"width": 7}, 8, 8),
        ({"width": 12, "count": 6}, 8, 2),
    ],
)
def test_the_width_is_divided_as_far_as_possible(sizes: dict[str, int], ranks: int, groups: int) -> None:
    config = mixture(**sizes)
    check_shardable(config, ranks)
    assert choose_expert_groups(config, ranks) == groups


@pytest.mark.parametrize("wanted", [1, 2, 4, 8])
def test_the_wanted_number_of_groups_is_used(wanted: int) -> None:
    assert choose_expert_groups(mixture(), 8, wanted) == wanted


@pytest.mark.parametrize(
    ("sizes", "ranks", "wanted", "problem"),
    [
        (
            {"width": 6, "count": 6},
            8,
            None,
            r"moe_intermediate_size \(6\) must be a multiple of the tensor ranks \(8\), or num_experts \(6\) "
            r"must be a multiple of the expert groups \(8\): use --tensor 1 or 2 or 4$",
        ),
        (
            {"width": 12},
            8,
            1,
            r"--expert 1 is not possible, because moe_intermediate_size \(12\) must be a multiple of the "
            r"tensor ranks \(8\): use --expert 2 or 4 or 8$",
        ),
        (
            {"count": 6},
            4,
            4,
            r"--expert 4 is not possible, because num_experts \(6\) must be a multiple of the expert groups "
            r"\(4\): use --expert 1 or 2$",
        ),
        (
            {"width": 7},
            4,
            2,
            r"--expert 2 is not possible, because moe_intermediate_size \(7\) must be a multiple of the "
            r"ranks of an expert group \(2\): use --expert 4$",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    sizes: dict[str, int], ranks: int, wanted: int | None, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        check_shardable(mixture(**sizes), ranks, wanted)


def test_the_option_must_divide_the_ranks_and_needs_experts() -> None:
    with pytest.raises(ValueError, match="--expert 3 must divide --tensor 4"):
        EngineOptions(model="m", tensor=4, expert=3)
    dense = read_fields(Fields(FIELDS | {"architectures": ["Qwen3ForCausalLM"]}))
    options = EngineOptions(model="m", device="cpu", tensor=4, expert=2)
    with pytest.raises(ValueError, match="--expert 2 divides the experts of a native mixture"):
        check_model(options, dense)
    check_model(options, mixture())
    check_model(replace(options, quantization="fp8"), mixture())
    check_model(replace(options, expert=1), dense)


@given(
    count=st.integers(1, 64),
    width=st.integers(1, 96),
    ranks=st.integers(1, 16),
    wanted=st.none() | st.integers(1, 16),
)
def test_every_element_is_on_one_rank_or_the_split_is_refused(
    count: int, width: int, ranks: int, wanted: int | None
) -> None:
    config = mixture(count=count, width=width)
    possible = [e for e in range(1, ranks + 1) if not (ranks % e or count % e or width % (ranks // e))]
    try:
        groups = choose_expert_groups(config, ranks, wanted)
    except ValueError:
        assert wanted not in possible if wanted else not possible
        return
    assert groups == wanted if wanted else groups == possible[0]
    owners: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        mesh = Mesh(Axis(rank, ranks), groups)
        held, inner = mesh.expert.shard(count, "experts"), mesh.expert_width.shard(width, "width")
        owners.update((e, i) for e in range(held.start, held.stop) for i in range(inner.start, inner.stop))
    assert len(owners) == count * width
    assert set(owners.values()) == {1}
