# SPDX-License-Identifier: Apache-2.0
"""Encoders on a GPU: their embeddings equal those on the CPU, in float32, and in bfloat16 with graphs.

Their attention and their feed-forward blocks in bfloat16 are compared with exact results, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from encoders.twins import FAMILIES, random_prompts, save_encoder, save_gte
from mizzen import LLM
from mizzen.attention import whole_prompts
from mizzen.attention.whole_prompts import PromptKernel, attend_by_flash2, attend_by_flash3
from mizzen.core.request import Pooling
from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, name_rows
from mizzen.models.block import Activation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (1, 5, 300, 17, 140, 3, 64)


class Encoder(NamedTuple):
    """A saved encoder, and its embeddings on the CPU in float32 [poolings, prompts, hidden]."""

    folder: Path
    embeddings: np.ndarray


def embed_on(device: str, folder: Path, **options: Any) -> tuple[np.ndarray, bool]:
    """Return the embeddings of all poolings [poolings, prompts, hidden], and whether graphs computed them."""
    with LLM(folder, device=device, skip_tokenizer=True, **options) as llm:
        graphs = llm.engine._loop._runner.step.prefill_graphs  # type: ignore[attr-defined]
        prompts = random_prompts(LENGTHS)
        return np.array(
            [llm.embed(prompts, pooling=pooling.value) for pooling in Pooling]
        ), graphs is not None


@pytest.fixture(scope="module", params=FAMILIES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """An encoder of each family, with its embeddings on the CPU, which several tests compare."""
    folder = tmp_path_factory.mktemp(request.param)
    if hasattr(transformers, f"{request.param}Config"):
        save_encoder(folder, request.param, std=0.05)
    else:
        save_gte(folder, std=0.05)
    return Encoder(folder, embed_on("cpu", folder, dtype="float32")[0])


@pytest.mark.parametrize(
    ("dtype", "graph", "cosine"),
    [("float32", "auto", 0.9999), ("bfloat16", "off", 0.998), ("bfloat16", "auto", 0.998)],
)
def test_embeddings_equal_those_on_the_cpu(encoder: Encoder, dtype: str, graph: str, cosine: float) -> None:
    embeddings, captured = embed_on("cuda", encoder.folder, dtype=dtype, cuda_graph=graph)
    assert captured == (dtype == "bfloat16" and graph == "auto")
    assert (embeddings * encoder.embeddings).sum(-1).min() > cosine


@pytest.mark.parametrize("reach", [-1, 20])
@pytest.mark.parametrize("kernel", [attend_by_flash2, attend_by_flash3])
def test_attention_kernels_equal_attention_in_float32(kernel: PromptKernel, reach: int) -> None:
    device = torch.device("cuda")
    if kernel is attend_by_flash3 and not whole_prompts.runs_flash_attention3(device, 64):
        pytest.skip("needs FlashAttention 3")
    torch.manual_seed(0)
    lengths = (*LENGTHS, 0, 0)
    begins = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    q, k, v = torch.randn(sum(lengths), 3 * 8 * 64, device=device).bfloat16().view(-1, 3, 8, 64).unbind(1)
    out = kernel(q, k, v, begins, max(lengths), reach)
    assert out.shape == q.shape
    end = 0
    for length in LENGTHS:
        begin, end = end, end + length
        distance = (torch.arange(length)[:, None] - torch.arange(length)).abs().to(device)
        mask = None if reach < 0 else distance <= reach
        rows = [part[begin:end].float() for part in (q, k, v)]
        expected = whole_prompts.attend(rows[0], rows[1], rows[2], mask)
        torch.testing.assert_close(out[begin:end].float(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", [Activation.GELU, Activation.GELU_TANH])
@pytest.mark.parametrize("tokens", [1, 7, 512])
def test_gelu_in_the_gemm_is_at_least_as_accurate_as_after_it(kind: Activation, tokens: int) -> None:
    device, size = torch.device("cuda"), 1024
    build = BuildContext(device=device, dtype=torch.bfloat16, fused=True)
    linear = MergedColumnParallelLinear(build, name_rows(["up"], [size], [slice(0, size)]), size, True)
    torch.manual_seed(0)
    method: Any = linear.method
    method.weight.normal_(0, 1.5 * size**-0.5)
    method.bias.normal_()
    x = torch.randn(tokens, size, device=device).bfloat16()
    activation = ActivationFunction(build, kind)
    products = x.double() @ method.weight.double().t() + method.bias.double()
    approximate = "tanh" if kind is Activation.GELU_TANH else "none"
    exact = torch.nn.functional.gelu(products, approximate=approximate)
    fused = linear.apply_activation(x, activation).double() - exact
    separate = activation(linear(x)).double() - exact
    assert fused.square().mean() < 1.05 * separate.square().mean()
    # Half a unit in the last place of the result, and the error of the approximation by tanh.
    assert (fused.abs() - exact.abs() * 2**-8).max() < 7e-4
