# SPDX-License-Identifier: Apache-2.0
"""A model on several GPUs gives the same tokens and logprobs as on one GPU, with every all-reduce method."""

from __future__ import annotations

from pathlib import Path

import allreduce
import numpy as np
import pytest
import tensor_kit
from logits_gather_kit import on_ranks
from small_models import FAMILIES, make_model
from tensor_kit import RANKS, generated, generated_twice, log_probabilities, run_in_process, with_nccl

pytestmark = tensor_kit.several_gpus
HEADS = 4
"""Number of attention heads in the small models; a group cannot have more ranks than this."""


class SingleRank:
    """Output tokens that a single GPU generates, by model family; each family is computed only once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens: dict[str, list[list[int]]] = {}

    def model(self, family: str) -> Path:
        """Return the folder of the family's model; the model is created on the first call."""
        folder = self.folder / family
        if not folder.exists():
            folder.mkdir()
            make_model(family).save_pretrained(folder)
        return folder

    def __getitem__(self, family: str) -> list[list[int]]:
        """Return the output tokens of each request."""
        if family not in self.tokens:
            self.tokens[family] = run_in_process(generated, self.model(family), {})
        return self.tokens[family]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SingleRank:
    """Output tokens of a single GPU, for comparison with the output tokens of several GPUs."""
    return SingleRank(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("size", [size for size in RANKS if size <= HEADS])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_ranks_sample_the_tokens_of_one_rank(family: str, size: int, alone: SingleRank) -> None:
    assert run_in_process(generated, alone.model(family), {"tensor": size}) == alone[family]


@pytest.mark.parametrize("way", [pytest.param("nccl", marks=with_nccl), "one-shot", "two-shot"])
@pytest.mark.parametrize("size", RANKS[:2])
def test_every_float32_all_reduce_gives_the_same_tokens(size: int, way: str, alone: SingleRank) -> None:
    """All-reduces that are fused with the norm are not tested here, because they support only bfloat16."""
    options = {"tensor": size, "all_reduce": way}
    assert run_in_process(generated, alone.model("qwen3"), options) == alone["qwen3"]


@with_nccl
def test_a_process_can_join_one_group_after_another(alone: SingleRank) -> None:
    results = run_in_process(generated_twice, alone.model("qwen3"), {"tensor": 2})
    assert results == [alone["qwen3"]] * 2


@pytest.mark.parametrize("size", RANKS)
def test_fused_all_reduce_equals_plain_operations(size: int, tmp_path: Path) -> None:
    on_ranks(size, tmp_path, allreduce.check)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A model with real shapes, and its log probabilities on one GPU.

    They are computed in a separate process, so that this process keeps no GPU memory that groups need.
    """
    folder = tensor_kit.wide_model(tmp_path_factory.mktemp("wide"))
    return folder, run_in_process(log_probabilities, folder, {})


@pytest.mark.parametrize(
    "way", ["auto", "push", "fused", "fused-two-shot", pytest.param("nccl", marks=with_nccl)]
)
@pytest.mark.parametrize("size", RANKS)
def test_log_probabilities_on_real_shapes_equal_those_of_one_rank(
    size: int, way: str, wide: tuple[Path, list[np.ndarray]]
) -> None:
    folder, alone = wide
    results = run_in_process(log_probabilities, folder, {"tensor": size, "all_reduce": way})
    for several_ranks, one_rank in zip(results, alone, strict=True):
        assert one_rank.std() > 0.5 or len(one_rank) < 10
        # Sums are computed in another order, and rounded to bfloat16 four times per layer.
        np.testing.assert_allclose(several_ranks, one_rank, atol=0.15)
